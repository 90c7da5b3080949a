"""The permutations of an epoch: of all samples, of each node's share, or in blocks.

Samples that are read in blocks, such as row groups: each block once, and rows well mixed. Blocks come in
random order; each is shuffled, and cut into as many parts as the window has blocks:

    block 3   part 0 │ part 1 │ part 2
    block 0            part 0 │ part 1 │ part 2
    block 7                     part 0 │ part 1 │ part 2
    step         0   │    1   │    2   │    3   │    4        the rows of a step are shuffled

One block is opened at each step, and one is closed. To take as many blocks at a time as the window has was
rejected: all of them would be read at once, and none meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray


def permutation(length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(length, generator=generator, device="cpu")


def small_permutation(count: int, generator: torch.Generator | None) -> NDArray[Any]:
    """Return a permutation as an array, of 32-bit numbers where these suffice; None: the numbers in order."""
    dtype = torch.int32 if count < 1 << 31 else torch.int64
    if generator is None:
        return torch.arange(count, dtype=dtype, device="cpu").numpy()
    return torch.randperm(count, generator=generator, dtype=dtype, device="cpu").numpy()


# --- shares of nodes


def node_shares(length: int, nodes: int) -> torch.Tensor:
    """Return the samples (int64, shape (length,)); those at positions k, k + nodes, ... are node k's.

    Each `nodes` neighbours of the listing go to different nodes, in random order. So every node gets its part
    of each class in a sorted listing, and of both kinds in one that alternates (left image, right image).
    """
    if nodes == 1:
        return torch.arange(length, device="cpu")
    generator = torch.Generator().manual_seed(0)
    rows, tail = divmod(length, nodes)
    # All with dtype and device: the defaults are the training script's, and may differ between runs.
    shares = torch.arange(length, device="cpu")
    if rows:  # `nodes` may come from a hostile state: even an empty array of so many columns takes memory
        within = torch.rand((rows, nodes), generator=generator, dtype=torch.float32, device="cpu")
        first = torch.arange(0, rows * nodes, nodes, device="cpu")[:, None]
        shares[: rows * nodes] = (within.argsort(dim=1, stable=True) + first).flatten()
    shares[rows * nodes :] = rows * nodes + permutation(tail, generator)
    return shares


def node_order(length: int, nodes: int, exchange: float, seed: int) -> torch.Tensor:
    """Return the order of an epoch: position p is read by node p mod `nodes`.

    For one node this is `torch.randperm` with that seed.

    Args:
        exchange: the fraction of each node's samples that another node reads in this epoch. Each of them is
            swapped along a random ring, so every node gives and gets equally many.
    """
    generator = torch.Generator().manual_seed(seed)
    if nodes == 1:
        return permutation(length, generator)
    order = node_shares(length, nodes)
    for node in range(min(nodes, length)):
        share = order[node::nodes]
        order[node::nodes] = share[permutation(len(share), generator)]
    rows = length // nodes
    moving = permutation(rows, generator)[: round(exchange * rows)]
    if len(moving):
        table = order[: rows * nodes].view(rows, nodes)
        shift = torch.randint(1, nodes, (len(moving), 1), generator=generator, device="cpu")
        table[moving] = table[moving].gather(1, (torch.arange(nodes, device="cpu") + shift) % nodes)
    return order


# --- blocks


class Blocks(NamedTuple):
    """Samples that are read in blocks, which lie one after the other.

    Attributes:
        counts: the samples of each.
        window: blocks that are open at once.
    """

    counts: tuple[int, ...]
    window: int


def blocks_of(dataset: Any) -> Blocks | None:
    """Return the blocks that a dataset is best shuffled by; None where each sample can be read alone.

    They are the result of the dataset's `_shuffle_blocks`, if it has this method.
    """
    tell = getattr(dataset, "_shuffle_blocks", None)
    blocks: Blocks | None = None if tell is None else tell()
    return blocks


def block_order(blocks: Blocks, parts: int, seed: int) -> torch.Tensor:
    """Return the order of an epoch: int64, shape (samples,).

    Args:
        parts: readers that have blocks of their own, but for those at the seams. Position p is of the reader
            p mod `parts`.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(blocks.counts, dtype=torch.int64, device="cpu")
    firsts = (counts.cumsum(0) - counts).tolist()
    length = int(counts.sum())
    spans = [(firsts[block], blocks.counts[block]) for block in permutation(len(counts), generator).tolist()]
    order = torch.empty(length, dtype=torch.int64, device="cpu")
    for part in range(min(parts, length)):
        share = order[part::parts]
        share.copy_(_mixed(_take(spans, len(share)), blocks.window, generator))
    return order


def _take(spans: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Remove the spans (first, count) of the next `count` samples, and return them."""
    taken: list[tuple[int, int]] = []
    used = 0
    while count:
        first, size = spans[used]
        part = min(size, count)
        taken.append((first, part))
        count -= part
        if part < size:
            spans[used] = first + part, size - part
            break
        used += 1
    del spans[:used]
    return taken


def _mixed(spans: list[tuple[int, int]], window: int, generator: torch.Generator) -> torch.Tensor:
    steps: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64, device="cpu")]
    opened: deque[torch.Tensor] = deque(maxlen=window)  # the newest first
    for step in range(len(spans) + window - 1):
        if step < len(spans):
            first, count = spans[step]
            opened.appendleft(first + permutation(count, generator))
        else:
            opened.appendleft(steps[0])  # nothing is opened any more
        rows = torch.cat([_cut(block, part, window) for part, block in enumerate(opened)])
        steps.append(rows[permutation(len(rows), generator)])
    return torch.cat(steps)


def _cut(block: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    return block[len(block) * part // parts : len(block) * (part + 1) // parts]
