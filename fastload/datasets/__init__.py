"""Datasets over object stores: `decode` (deterministic, cacheable), then `transform` (random)."""
