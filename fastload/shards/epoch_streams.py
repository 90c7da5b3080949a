"""The streams of an epoch over shards: planned in the trainer, opened in the process that reads them.

A plan is pure arithmetic, the same in every process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import heapq
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastload.cache import Cache
from fastload.checks import parse_size, whole_number
from fastload.errors import ArgumentError
from fastload.fetch.threads import ReadPool, process_share
from fastload.metrics.machine import payload_limit
from fastload.shards.index import RecordId
from fastload.shards.reader import CachedReader, ReadAhead
from fastload.shards.records import IndexedShards
from fastload.shards.stream import BlockSize, Interleave, Reader, ShuffledStream, Span, StreamedRecord

_log = logging.getLogger("fastload")

_UNORDERED_BLOCK = 64  # records of a block that is not shuffled: only the state's grain
_UNORDERED_AHEAD = 3  # small shards that are opened ahead where they are read one after the other
NOT_INDEXED = (
    "its shards are not indexed yet. Read it with fastload.DataLoader, which streams it; give index files "
    "(index=), which `fastload index` writes; or give it a cache, with which the first epoch builds the index"
)


class StreamPlan(NamedTuple):
    """One of the `streams` of an epoch, over all ranks; those of a rank are `per_rank` in a row.

    seed, epoch, shuffle: make the order of the shards, and within blocks that of the records.
    split: whether ranges of records are dealt, which needs an index, or whole shards.
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

    def spans(self, units: Sequence[Span], weights: Sequence[int]) -> list[Span]:
        """Return what this stream reads, in order.

        Args:
            units: what is shuffled: the shards, or the blocks of records that they consist of.
            weights: of the units: their numbers of records with `split`, else what they are balanced by.
        """
        order = list(range(len(units)))
        if self.shuffle:
            digest = hashlib.blake2b(repr((self.seed, self.epoch)).encode(), digest_size=16).digest()
            random.Random(int.from_bytes(digest, "little")).shuffle(order)
        chosen = self._ranges(order, weights) if self.split else self._whole(order, weights)
        return [_part(units[unit], first, stop) for unit, first, stop in chosen]

    def _ranges(self, order: list[int], counts: Sequence[int]) -> list[Span]:
        """Return equal parts, within one, of all records laid end to end."""
        total = sum(counts)
        start, stop = (total * number // self.streams for number in (self.stream, self.stream + 1))
        spans, at = [], 0
        for unit in order:
            first, last = max(start - at, 0), min(stop - at, counts[unit])
            if first < last:
                spans.append(Span(unit, first, None if last == counts[unit] else last))
            at += counts[unit]
        return spans

    def _whole(self, order: list[int], weights: Sequence[int]) -> list[Span]:
        """Deal each unit to the stream that has least so far: they end at about the same time."""
        loads = [(0, stream) for stream in range(self.streams)]
        spans = []
        for unit in order:
            load, stream = heapq.heappop(loads)
            heapq.heappush(loads, (load + max(1, weights[unit]), stream))
            if stream == self.stream:
                spans.append(Span(unit))
        return spans


def _part(unit: Span, first: int, stop: int | None) -> Span:
    """Return records [first, stop) of a unit; None: to its end."""
    return Span(unit.shard, unit.first + first, unit.stop if stop is None else unit.first + stop)


class StreamOptions(NamedTuple):
    """cycle_length: as of TFRecordDataset. most_records, most_bytes: of a shuffled block."""

    cycle_length: int = 32
    most_records: int = 1 << 30
    most_bytes: int = 64_000_000

    @classmethod
    def of(cls, cycle_length: Any, shuffle_buffer: Any) -> StreamOptions:
        """Return the arguments of a dataset.

        Raises:
            ArgumentError: one of them is not what it must be.
        """
        cycle_length = whole_number("cycle_length", cycle_length)
        if isinstance(shuffle_buffer, int) and shuffle_buffer >= 1:
            return cls(cycle_length, shuffle_buffer, 1 << 62)
        with contextlib.suppress(ArgumentError):
            if isinstance(shuffle_buffer, str):
                return cls(cycle_length, most_bytes=parse_size(shuffle_buffer))
        raise ArgumentError(
            "shuffle_buffer must be a number of records >= 1 or a size such as '64MB', "
            f"found {shuffle_buffer!r:.100}"
        )


STREAMED = StreamOptions()


class EpochStreams:
    """Plans and opens the streams of one dataset.

    Args:
        shards: what to read.
        cache: a shard of which it has all records is not read again; or None.
        options: of all streams.
        read_again: packed `RecordId` -> payload, of a record that turns out to be damaged in the cache.
    """

    def __init__(
        self,
        shards: IndexedShards,
        cache: Cache | None,
        options: StreamOptions,
        read_again: Callable[[int], Any],
    ) -> None:
        self._indexed = shards
        self._shards, self._index, self._blocks = shards.listed, shards.index, shards.blocks
        self._cache = cache
        self._options = options
        self._read_again = read_again
        self._listing = self._shards.digest
        if self._blocks is not None:
            self._listing += f" {self._blocks.key}"

    def plan(
        self, count: int, *, seed: int, epoch: int, shuffle: bool, rank: int, ranks: int
    ) -> list[dict[str, Any]]:
        """See `StreamDataset.plan_streams`."""
        shards, streams = self._shards, count * ranks
        compressed = self._index.compressed()
        split = self._index.complete() and (self._blocks is not None or not compressed)
        if streams > len(shards) and not split and rank == 0:
            _log.warning(
                "%d shards for %d readers: %d readers have nothing to read, because %s",
                len(shards),
                streams,
                streams - len(shards),
                "compressed shards cannot be split" if compressed else NOT_INDEXED,
            )
        plans = [
            StreamPlan(seed, epoch, shuffle, stream, streams, count, split, self._listing)
            for stream in range(rank * count, (rank + 1) * count)
        ]
        return [{"plan": plan._asdict(), "at": None} for plan in plans]

    def open(self, state: dict[str, Any], hold: Callable[[StreamedRecord], int]) -> ShuffledStream:
        """Return the stream from `state` on.

        Args:
            hold: keeps a record's payload until it is asked for; returns its packed `RecordId`.

        Raises:
            ArgumentError: the state is of other shards, or needs an index that is not here.
        """
        plan, at = StreamPlan(**state["plan"]), state["at"]
        if plan.listing != self._listing:
            raise ArgumentError(
                "the saved state is of other shards, of other versions of these shards, or of other rows of "
                "theirs (filters=)"
            )
        if plan.split and not self._index.complete():
            raise ArgumentError(
                "the saved state splits shards by their index, and they are not indexed here: give the index "
                "files or the cache that the run had"
            )
        options = self._options
        # Without a shuffle the records come in the order of the shards, and the next shards are read ahead.
        readers = max(1, options.cycle_length // plan.per_rank) if plan.shuffle else 1
        spare = readers if plan.shuffle or self._blocks is not None else _UNORDERED_AHEAD
        limit, most_bytes = process_share(self._shards.store)
        if self._blocks is not None:
            readers = min(readers, self._blocks.most_open(most_bytes))
        most_bytes = min(most_bytes, payload_limit())  # after `most_open`, which is part of the order
        reading = readers if plan.shuffle else readers + spare
        ahead = ReadAhead.of(most_bytes, reading)
        requests = reading * ahead.pieces if self._blocks is None else most_bytes // ahead.piece
        pool = ReadPool(max(1, min(requests, limit.most)), self._indexed.counters)
        interleave = Interleave(
            self._spans(plan),
            functools.partial(self._open_reader, pool, ahead),
            cycle_length=readers,
            spare=spare,
            position=None if at is None else at["position"],
        )
        return ShuffledStream(
            plan._asdict(),
            interleave,
            pool,
            hold,
            size=BlockSize(options.most_records if plan.shuffle else _UNORDERED_BLOCK, options.most_bytes),
            seed=(plan.seed, plan.epoch, plan.stream) if plan.shuffle else None,
            at=at,
        )

    def _spans(self, plan: StreamPlan) -> list[Span]:
        if self._blocks is not None:
            blocks = self._blocks.spans()
            return plan.spans(blocks, [(block.stop or 0) - block.first for block in blocks])
        weights = self._index.counts() if plan.split else self._shards.weights()
        return plan.spans([Span(shard) for shard in range(len(self._shards))], weights)

    def _open_reader(
        self, pool: ReadPool, ahead: ReadAhead, span: Span, ordinal: int, offset: int | None
    ) -> Reader:
        """Return a reader of a span from a record on: of the cache if it has all of it, else of the store."""
        records = self._index.get(span.shard)
        if records is not None and self._cache is not None:
            cached = CachedReader(
                records,
                ordinal,
                records.offset_of(ordinal) if offset is None else offset,
                len(records.offsets) if span.stop is None else span.stop,
                self._cache,
                functools.partial(self._indexed.key, span.shard),
                lambda ordinal: self._read_again(RecordId(span.shard, ordinal).pack()),
            )
            if cached.complete():
                return cached
        return self._indexed.open_reader(span, ordinal, offset, ahead, pool)
