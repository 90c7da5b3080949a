"""The streams of an epoch over shards: planned in the trainer, opened in the process that reads them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from fastload.cache import Cache
from fastload.errors import ArgumentError
from fastload.fetch.concurrency import process_share
from fastload.fetch.threads import ReadPool
from fastload.metrics.counters import Counters
from fastload.shards.assignment import StreamPlan
from fastload.shards.catalog import ShardList
from fastload.shards.index import ShardIndex
from fastload.shards.interleave import AnyLane, Blocks, Interleave, Span, StreamedRecord
from fastload.shards.reader import Lane, Reach
from fastload.shards.readers import CachedLane, LearningLane
from fastload.shards.record_source import ShardFormat

__all__ = ["NO_NUMBERS", "ShardStream", "StreamOpener", "StreamOptions"]

_log = logging.getLogger("fastload")

_SHARD_BITS = 32
_UNORDERED_BLOCK = 64  # records of a block that is not shuffled: only the state's grain
NO_NUMBERS = (
    "its records have no numbers yet. Read it with fastload.DataLoader, which streams it; give index files "
    "(index=); or give it a cache, which learns the places in the first epoch"
)


class StreamOptions(NamedTuple):
    """cycle_length, block_length: as of TFRecordDataset. most_records, most_bytes: of a shuffled block."""

    cycle_length: int
    block_length: int
    most_records: int
    most_bytes: int


class ShardStream:
    """See `SampleStream`.

    Args:
        plan: JSON that names the stream; goes into the state as it is.
        blocks: opened where the state says.
        pool: the lanes' threads, which end with the stream.
        hold: keeps a record's payload until it is asked for; returns its id.
    """

    def __init__(
        self, plan: dict[str, Any], blocks: Blocks, pool: ReadPool, hold: Callable[[StreamedRecord], int]
    ) -> None:
        self._plan = plan
        self._blocks = blocks
        self._pool = pool
        self._hold = hold
        self.closed = False

    def take(self, n: int) -> list[int]:
        found = [] if self.closed else self._blocks.take(n)
        return [self._hold(one) for one in found]

    def state(self) -> dict[str, Any]:
        return {"plan": self._plan, "at": self._blocks.state()}

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._blocks.close()
            self._pool.close()


class StreamOpener:
    """Plans and opens the streams of one dataset.

    Args:
        shards, book, form: what to read, what is known of it, and how.
        cache: whose shards are not read again, once it has all of their records; or None.
        key: (shard, offset) -> cache key.
        read_again: id -> payload, of a record that turns out to be damaged in the cache.
        options: of all streams.
        counters: get.* are added here.
    """

    def __init__(
        self,
        shards: ShardList,
        book: ShardIndex,
        form: ShardFormat,
        cache: Cache | None,
        *,
        key: Callable[[int, int], bytes],
        read_again: Callable[[int], Any],
        options: StreamOptions,
        counters: Counters,
    ) -> None:
        self._shards = shards
        self._book = book
        self._form = form
        self._cache = cache
        self._key = key
        self._read_again = read_again
        self._options = options
        self._counters = counters

    def plan(
        self, count: int, *, seed: int, epoch: int, shuffle: bool, rank: int, ranks: int
    ) -> list[dict[str, Any]]:
        """See `StreamDataset.plan_streams`."""
        shards, streams = self._shards, count * ranks
        compressed = self._book.compressed()
        split = self._book.complete() and not compressed
        if streams > len(shards) and not split and rank == 0:
            _log.warning(
                "%d shards for %d readers: %d of these have nothing to read, for %s",
                len(shards),
                streams,
                streams - len(shards),
                "a compressed shard cannot be shared" if compressed else NO_NUMBERS,
            )
        plans = [
            StreamPlan(seed, epoch, shuffle, stream, streams, count, split, shards.digest)
            for stream in range(rank * count, (rank + 1) * count)
        ]
        return [{"plan": plan.to_json(), "at": None} for plan in plans]

    def open(self, state: dict[str, Any], hold: Callable[[StreamedRecord], int]) -> ShardStream:
        """The stream from `state` on.

        Raises:
            ArgumentError: the state is of other shards, or needs places that are not known here.
        """
        plan, at = StreamPlan(**state["plan"]), state["at"]
        if plan.listing != self._shards.digest:
            raise ArgumentError("the saved state is of other shards, or of other versions of these")
        if plan.split and not self._book.complete():
            raise ArgumentError(
                "the saved state shares out records by their places, which are not known here: give the "
                "index files or the cache that the run had"
            )
        options = self._options
        lanes = max(1, options.cycle_length // plan.per_rank)
        limit, most_bytes = process_share(self._shards.store)
        reach = Reach.of(most_bytes, lanes)
        pool = ReadPool(max(1, min(lanes * reach.ahead, limit.most)), self._counters)
        interleave = Interleave(
            plan.spans(self._book.counts() if plan.split else self._shards.weights()),
            functools.partial(self._open_lane, pool, reach),
            cycle_length=lanes,
            block_length=options.block_length,
            position=None if at is None else at["position"],
        )
        blocks = Blocks(
            interleave,
            seed=(plan.seed, plan.epoch, plan.stream) if plan.shuffle else None,
            most_records=options.most_records if plan.shuffle else _UNORDERED_BLOCK,
            most_bytes=options.most_bytes,
            state=at,
        )
        return ShardStream(plan.to_json(), blocks, pool, hold)

    def _open_lane(
        self, pool: ReadPool, reach: Reach, span: Span, ordinal: int, offset: int | None
    ) -> AnyLane:
        """A lane over a span from a record on: from the cache if that has all of it, else from the store."""
        shard, table, stop = self._shards[span.shard], self._book.get(span.shard), None
        if table is not None:
            count = len(table.places)
            if self._cache is not None:
                cached = CachedLane(
                    table,
                    ordinal,
                    count if span.stop is None else span.stop,
                    self._cache,
                    functools.partial(self._key, span.shard),
                    lambda ordinal: self._read_again(span.shard << _SHARD_BITS | ordinal),
                )
                if cached.complete():
                    return cached
            shard = shard._replace(compressed=table.compressed)
            if ordinal < count and offset is None:
                offset = int(table.places[ordinal, 0])
            if span.stop is not None:
                stop = int(table.places[span.stop - 1].sum())
        lane = Lane(
            self._shards.store,
            shard,
            offset or 0,
            stop,
            self._form.splitter,
            reach=reach,
            pool=pool,
            counters=self._counters,
        )
        if table is None and ordinal == 0 and self._book.learning:
            return LearningLane(lane, span.shard, self._book)
        return lane
