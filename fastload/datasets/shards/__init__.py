"""Shards as a dataset: streams while the places of records are unknown, random access once they are known."""
