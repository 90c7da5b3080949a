"""Which stream reads which records of an epoch. Pure arithmetic, the same in every process."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastload.shards.interleave import Span

__all__ = ["StreamPlan"]


class StreamPlan(NamedTuple):
    """One of the `streams` of an epoch, over all ranks; those of a rank are `per_rank` in a row.

    seed, epoch, shuffle: make the order of the shards, and within blocks that of the records.
    split: whether ranges of records are dealt, which takes their places, or whole shards.
    listing: names the shards and their versions, so that a state is not taken up with others.
    """

    seed: int
    epoch: int
    shuffle: bool
    stream: int
    streams: int
    per_rank: int
    split: bool
    listing: str

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    def spans(self, weights: Sequence[int]) -> list[Span]:
        """What this stream reads, in order.

        Args:
            weights: of the shards: their numbers of records with `split`, else what they are balanced by.
        """
        order = list(range(len(weights)))
        if self.shuffle:
            digest = hashlib.blake2b(repr((self.seed, self.epoch)).encode(), digest_size=16).digest()
            random.Random(int.from_bytes(digest, "little")).shuffle(order)
        return self._ranges(order, weights) if self.split else self._whole(order, weights)

    def _ranges(self, order: list[int], counts: Sequence[int]) -> list[Span]:
        """Equal parts, within one, of all records laid end to end."""
        total = sum(counts)
        start, stop = (total * number // self.streams for number in (self.stream, self.stream + 1))
        spans, at = [], 0
        for shard in order:
            first, last = max(start - at, 0), min(stop - at, counts[shard])
            if first < last:
                spans.append(Span(shard, first, None if last == counts[shard] else last))
            at += counts[shard]
        return spans

    def _whole(self, order: list[int], weights: Sequence[int]) -> list[Span]:
        """Each shard to the stream that has least so far: they end at about the same time."""
        loads = [(0, stream) for stream in range(self.streams)]
        spans = []
        for shard in order:
            load, stream = heapq.heappop(loads)
            heapq.heappush(loads, (load + max(1, weights[shard]), stream))
            if stream == self.stream:
                spans.append(Span(shard))
        return spans
