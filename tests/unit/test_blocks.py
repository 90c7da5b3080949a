"""The order of samples that are read in blocks: each sample once, near its block, and readers with blocks
of their own."""

from __future__ import annotations

import random

import pytest

from fastload.order.permutations import Blocks, block_order


def block_of(counts: tuple[int, ...]) -> list[int]:
    return [block for block, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("seed", range(10))
def test_order_of_random_blocks(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        counts = tuple(draw.choice([0, 1, 2, 5, 40]) for _ in range(draw.randrange(1, 30)))
        window, parts = draw.randrange(1, 9), draw.randrange(1, 5)
        order = block_order(Blocks(counts, window), parts, seed).tolist()
        assert sorted(order) == list(range(sum(counts)))
        assert order == block_order(Blocks(counts, window), parts, seed).tolist()
        blocks = block_of(counts)
        for part in range(parts):
            share = [blocks[row] for row in order[part::parts]]
            first = {block: place for place, block in reversed(list(enumerate(share)))}
            last = {block: place for place, block in enumerate(share)}
            for place in range(len(share)):
                # A block is opened at a step, and the one that was opened `window` steps before is over then.
                assert sum(first[block] <= place <= last[block] for block in first) <= 2 * window


def test_readers_share_only_the_blocks_at_their_seams() -> None:
    blocks = block_of((50,) * 20)
    order = block_order(Blocks((50,) * 20, 4), 3, 0).tolist()
    readers = [{blocks[row] for row in order[part::3]} for part in range(3)]
    assert sum(len(reader) for reader in readers) <= 20 + 2


def test_rows_of_a_block_are_spread_over_the_window() -> None:
    blocks = block_of((1000,) * 50)
    share = [blocks[row] for row in block_order(Blocks((1000,) * 50, 8), 1, 0).tolist()]
    middle = share[20_000:30_000]
    for start in range(0, len(middle), 1000):
        assert len(set(middle[start : start + 1000])) >= 8
    places = [place for place, block in enumerate(share) if block == share[25_000]]
    assert 6_000 < places[-1] - places[0] < 10_000
