"""Benchmarks: `measure` runs them, `peers` are the other loaders, `show` makes tables and charts of a result.

A room imports itself and the rooms before it: data, peers, show, measure. `python -m bench NAME` runs a
command of any room, by the folders below.
"""
