"""How a large object is cut into ranges that are read side by side. Pure arithmetic."""

from __future__ import annotations

import itertools

__all__ = ["plan_ranges"]


def plan_ranges(size: int, piece: int) -> list[tuple[int, int]]:
    """Cover [0, size) with equal ranges [start, stop) of at most `piece` bytes, in order.

    Equal within a byte: a short last piece would leave its connection idle while the others still read. One
    range for an empty object.
    """
    count = max(1, -(-size // piece))
    edges = [size * number // count for number in range(count + 1)]
    return list(itertools.pairwise(edges))
