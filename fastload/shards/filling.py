"""Filling a cache with the records of shards before training: each shard is read once, as a stream.

    shards ─▶ which records are missing? ─▶ ShardReader, the next one ahead ─▶ prepare ─▶ cache
                                                         └ at the end of a shard: its index

Of a shard with an index, only the missing records are read. One without an index, or compressed, is read
whole. Training drops a record if the disk is too slow; this waits for the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from fastload.cache import Cache
from fastload.datasets.warm import Outcome, ToRead, Warmed, put
from fastload.errors import CacheError, DecodeError
from fastload.fetch.limits import process_share
from fastload.fetch.threads import ReadPool
from fastload.metrics.counters import Counters
from fastload.shards.catalog import ShardList
from fastload.shards.epoch_streams import RecordBlocks, open_shard_reader
from fastload.shards.formats import ShardFormat
from fastload.shards.index import RecordId, RecordOffsets, ShardIndex
from fastload.shards.reader import ReadAhead
from fastload.shards.record_source import record_name
from fastload.shards.stream import Interleave, Reader, Span, StreamedRecord

_READERS = 2  # the one that is read, and the next
_AHEAD_BYTES = 128 << 20
_UNCONFIRMED = 256  # records that were written and not looked up yet


class _Written(NamedTuple):
    """A record that was handed to the cache's writer: what becomes of it, its key, what was written."""

    warmed: Warmed
    key: bytes
    payload: Any


class ShardFilling:
    """Puts the records of shards into a cache.

    Args:
        shards, index, form: what to read.
        cache: filled.
        prepare: payload -> what the cache keeps; None: the payload.
        key: (shard, offset) -> cache key.
        counters: get.* are added here.
        blocks: that the records are read in; None: each record can be cut out of its shard.
    """

    def __init__(
        self,
        shards: ShardList,
        index: ShardIndex,
        form: ShardFormat,
        cache: Cache,
        *,
        prepare: Callable[[Any], Any] | None,
        key: Callable[[int, int], bytes],
        counters: Counters,
        blocks: RecordBlocks | None = None,
    ) -> None:
        self._shards = shards
        self._index = index
        self._form = form
        self._cache = cache
        self._prepare = prepare
        self._key = key
        self._counters = counters
        limit, most_bytes = process_share(shards.store)
        self._ahead = ReadAhead.of(min(most_bytes, _AHEAD_BYTES), _READERS)
        self._pool = ReadPool(max(1, min(_READERS * self._ahead.pieces, limit.most)), counters)
        self._written: list[_Written] = []
        self._blocks = blocks
        self._blocks_of: dict[int, list[Span]] = {}  # by shard
        for block in [] if blocks is None else blocks.spans():
            self._blocks_of.setdefault(block.shard, []).append(block)

    def run(self, shards: Iterable[int]) -> Iterator[Warmed]:
        """The outcome of each record; its `sample` is a packed `RecordId`. Nothing follows "full".

        Raises:
            StoreError: the store is down, or refuses us. CacheError: the cache cannot be written.
        """
        spans: list[Span] = []
        for shard in shards:
            yield from self._look(shard, spans)
        records = Interleave(spans, self._open_reader, cycle_length=1, block_length=1)
        try:
            found = records.next()
            while found is not None or self._written:
                outcomes = self._confirm() if found is None else self._take(found)
                for warmed in outcomes:
                    yield warmed
                    if warmed.outcome == "full":
                        return
                found = None if found is None else records.next()
        finally:
            records.close()
            self._pool.close()
            self._cache.flush()

    def left(self, shards: Iterable[int]) -> ToRead:
        """What `run` has to read for these shards."""
        spans: list[Span] = []
        for shard in shards:
            for _ in self._look(shard, spans):
                pass
        ranges = [found for span in spans for found in self._ahead.ranges(*self._bytes_of(span))]
        return ToRead(len({span.shard for span in spans}), len(ranges), sum(b - a for a, b in ranges))

    def _bytes_of(self, span: Span) -> tuple[int, int]:
        """Where a span begins and ends in its shard."""
        if self._blocks is not None:
            return 0, self._blocks.size(span)
        records, size = self._index.get(span.shard), self._shards[span.shard].size
        if records is None or records.compressed:
            return 0, size
        stop = size if span.stop is None else int(records.offsets[span.stop - 1].sum())
        return int(records.offsets[span.first, 0]), stop

    def _look(self, shard: int, spans: list[Span]) -> Iterator[Warmed]:
        """The records of a shard that need not be read; what has to be read is added to `spans`."""
        records = self._index.get(shard)
        if records is None:
            spans.append(Span(shard))
            return
        if self._blocks is not None:
            yield from self._look_into_blocks(shard, records, spans)
            return
        present, runs = [], list[tuple[int, int]]()
        for ordinal, (offset, size) in enumerate(records.offsets.tolist()):
            if self._cache.has(self._key(shard, offset)):
                present.append(Warmed(RecordId(shard, ordinal).pack(), "present", passed=size))
            elif runs and runs[-1][1] == ordinal:
                runs[-1] = runs[-1][0], ordinal + 1
            else:
                runs.append((ordinal, ordinal + 1))
        if runs and records.compressed:
            spans.append(Span(shard))
            return
        count = len(records.offsets)
        spans += [Span(shard, first, None if stop == count else stop) for first, stop in runs]
        yield from present

    def _look_into_blocks(self, shard: int, records: RecordOffsets, spans: list[Span]) -> Iterator[Warmed]:
        """As `_look`: a block of which a record is missing is read whole."""
        for block in self._blocks_of.get(shard, []):
            found = list(enumerate(records.offsets[block.first : block.stop].tolist(), block.first))
            if all(self._cache.has(self._key(shard, offset)) for _, (offset, _) in found):
                for ordinal, (_, size) in found:
                    yield Warmed(RecordId(shard, ordinal).pack(), "present", passed=size)
            else:
                spans.append(block)

    def _open_reader(self, span: Span, ordinal: int, offset: int | None) -> Reader:
        if self._blocks is not None:
            return self._blocks.open_reader(span, ordinal, offset or 0, self._pool)
        return open_shard_reader(
            self._shards,
            self._index,
            self._form,
            span,
            ordinal,
            offset,
            ahead=self._ahead,
            pool=self._pool,
            counters=self._counters,
        )

    def _take(self, found: StreamedRecord) -> Iterator[Warmed]:
        """Hand a record to the cache's writer. Its outcome comes now, or with those of `_confirm`."""
        record, size = found.record, found.record.size
        warmed = Warmed(RecordId(found.shard, found.ordinal).pack(), "stored", size, passed=size)
        key = self._key(found.shard, record.offset)
        if record.error is None and self._cache.has(key):
            yield warmed._replace(outcome="present")
            return
        try:
            if record.error is not None:
                raise record.error
            payload = record.payload if self._prepare is None else self._prepare(record.payload)
        except DecodeError as error:
            name = record_name(self._shards[found.shard].key, record.offset)
            why = f"{type(error).__name__}: {error.message}"
            yield warmed._replace(outcome="failed", error=why, key=name)
            return
        outcome = put(self._cache, key, payload)
        if outcome != "stored":
            yield from self._confirm()
            yield warmed._replace(outcome=outcome)
            return
        self._written.append(_Written(warmed, key, payload))
        if len(self._written) >= _UNCONFIRMED:
            yield from self._confirm()

    def _confirm(self) -> Iterator[Warmed]:
        """Wait for the cache's writer, and say of each record whether it is kept: a full cache drops some."""
        written, self._written = self._written, []
        if not written:
            return
        self._cache.flush()
        for warmed, key, payload in written:
            outcome: Outcome = "stored"
            if not self._cache.has(key):
                outcome = put(self._cache, key, payload)
                self._cache.flush()
                if outcome == "stored" and not self._cache.has(key):
                    raise CacheError(f"cache {self._cache.path} does not keep what is written to it")
            yield warmed._replace(outcome=outcome)
