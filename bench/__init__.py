"""Benchmarks: `measure` runs them, `peers` are the other loaders, `show` makes tables and charts of a result.

A room imports itself and the rooms before it: data, peers, show, measure. `python -m bench NAME` runs a
command of any room, and so does `python -m bench.NAME`, by the folders below.
"""

from __future__ import annotations

__path__ += [f"{__path__[0]}/{room}" for room in ("measure", "show")]
