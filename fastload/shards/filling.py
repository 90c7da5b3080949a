"""Whole shards, each read once from its beginning to its end: to fill a cache, and to index them.

    shards ─▶ which records are missing? ─▶ ShardReader, the next one ahead ─▶ prepare ─▶ cache
                                                         └ at the end of a shard: its index

Of a shard with an index, `ShardFilling` reads only the missing records. One without an index, or compressed,
is read whole. Training drops a record if the disk is too slow; this waits for the disk.

`Indexing` reads all bytes of a shard. To read only the headers of a tar was rejected: that is a request for
each member, one after the other. At 20 ms and 8 shards at a time it is slower than 100 MB/s where members are
smaller than 250 KB, and for TFRecord files it would leave the CRCs unchecked.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any, Literal, NamedTuple

from fastload.cache import Cache
from fastload.datasets.warm import Outcome, ToRead, Warmed, put, why_bad
from fastload.errors import CacheError, DecodeError, NotFoundError, ObjectChangedError, ShortReadError
from fastload.fetch.reads import record_name
from fastload.fetch.threads import ReadPool, process_share
from fastload.metrics.counters import Counters
from fastload.shards.formats import ShardFormat
from fastload.shards.index import RecordId, RecordOffsets
from fastload.shards.reader import ReadAhead, Shard, ShardReader
from fastload.shards.records import IndexedShards
from fastload.shards.stream import Interleave, Reader, Span, StreamedRecord
from fastload.store import Store

_READERS = 2  # the one that is read, and the next
_AHEAD_BYTES = 128 << 20  # of all shards; and of what is not looked up yet
_UNCONFIRMED = 256  # records that were written and not looked up yet
_SHARDS = 8  # that are indexed at a time
_READS = 32  # of them at a time
_LOOK_SECONDS = 0.1
_BAD = (NotFoundError, ObjectChangedError, ShortReadError)  # of one shard; others say that the store is down


class _Written(NamedTuple):
    """A record that was handed to the cache's writer: what becomes of it, its key, what was written."""

    warmed: Warmed
    key: bytes
    payload: Any


class ShardFilling:
    """Puts the records of shards into a cache.

    Args:
        shards: what to read.
        cache: filled.
    """

    def __init__(self, shards: IndexedShards, cache: Cache) -> None:
        self._indexed, self._cache = shards, cache
        self._shards, self._index, self._blocks = shards.listed, shards.index, shards.blocks
        self._key, self._encode = shards.key, shards.encode
        limit, most_bytes = process_share(self._shards.store)
        self._ahead = ReadAhead.of(min(most_bytes, _AHEAD_BYTES), _READERS)
        self._pool = ReadPool(max(1, min(_READERS * self._ahead.pieces, limit.most)), shards.counters)
        self._written: list[_Written] = []
        self._held = 0  # bytes of these
        self._blocks_of: dict[int, list[Span]] = {}  # by shard
        for block in [] if self._blocks is None else self._blocks.spans():
            self._blocks_of.setdefault(block.shard, []).append(block)

    def run(self, shards: Iterable[int]) -> Iterator[Warmed]:
        """Return the outcome of each record; its `sample` is a packed `RecordId`. Nothing follows "full".

        Raises:
            StoreError: the store is down, or refuses us. CacheError: the cache cannot be written.
        """
        spans: list[Span] = []
        for shard in shards:
            yield from self._look(shard, spans)
        records = Interleave(spans, self._open_reader, cycle_length=1)
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
        """Return what `run` has to read for these shards."""
        spans: list[Span] = []
        for shard in shards:
            for _ in self._look(shard, spans):
                pass
        ranges = [found for span in spans for found in self._ahead.ranges(*self._bytes_of(span))]
        return ToRead(len({span.shard for span in spans}), len(ranges), sum(b - a for a, b in ranges))

    def _bytes_of(self, span: Span) -> tuple[int, int]:
        """Return where a span begins and ends in its shard."""
        if self._blocks is not None:
            return 0, self._blocks.size(span)
        records, size = self._index.get(span.shard), self._shards[span.shard].size
        if records is None or records.compressed:
            return 0, size
        stop = size if span.stop is None else int(records.offsets[span.stop - 1].sum())
        return int(records.offsets[span.first, 0]), stop

    def _look(self, shard: int, spans: list[Span]) -> Iterator[Warmed]:
        """Return the records of a shard that need not be read; add what has to be read to `spans`."""
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
        return self._indexed.open_reader(span, ordinal, offset, self._ahead, self._pool)

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
            payload: Any = record.payload if self._encode is None else self._encode(record.payload)
        except Exception as error:
            name = record_name(self._shards[found.shard].key, record.offset)
            yield warmed._replace(outcome="failed", error=why_bad(error), key=name)
            return
        outcome = put(self._cache, key, payload)
        if outcome != "stored":
            yield from self._confirm()
            yield warmed._replace(outcome=outcome)
            return
        self._written.append(_Written(warmed, key, payload))
        self._held += memoryview(payload).nbytes
        if len(self._written) >= _UNCONFIRMED or self._held >= _AHEAD_BYTES:
            yield from self._confirm()

    def _confirm(self) -> Iterator[Warmed]:
        """Wait for the cache's writer, and say of each record whether it is kept: a full cache drops some."""
        written, self._written, self._held = self._written, [], 0
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


class IndexedShard(NamedTuple):
    """What became of a shard.

    number: of the shard.
    outcome: "present": it had an index; "compressed": an index file cannot point into it; "failed": it is
        damaged or cannot be read, and has no index; "indexed".
    records: of a shard that was read to its end.
    file: the bytes of its index file, where one is wanted.
    fault: what is wrong with it, or "".
    """

    number: int
    outcome: Literal["present", "compressed", "failed", "indexed"]
    records: RecordOffsets | None = None
    file: bytes = b""
    fault: str = ""


class Indexing:
    """Indexes shards in threads.

    Args:
        store, form: of the shards.
        present: whether a shard has an index already. It may raise `DecodeError`: the shard has failed then.
        files: whether index files are wanted. A damaged record fails its shard then, for such a file cannot
            name it.

    Attributes:
        read: bytes of shards so far, of compressed ones what they inflate to.
    """

    def __init__(
        self, store: Store, form: ShardFormat, present: Callable[[int], bool], *, files: bool
    ) -> None:
        self._store = store
        self._form = form
        self._present = present
        self._files = files
        self._shards = ReadPool(_SHARDS, Counters())
        self._reads = ReadPool(_READS, Counters())
        self._ahead = ReadAhead.of(_AHEAD_BYTES, _SHARDS)
        self._lock = threading.Lock()
        self.read = 0

    def run(self, shards: Sequence[Shard], progress: Callable[[], None]) -> Iterator[IndexedShard]:
        """Return what became of each shard, in the order in which they end.

        Args:
            progress: called some times a second.

        Raises:
            StoreError: the store is down, or refuses us.
        """
        pending = {
            self._shards.submit(functools.partial(self._index, number, shard))
            for number, shard in enumerate(shards)
        }
        while pending:
            done, pending = wait(pending, _LOOK_SECONDS, FIRST_COMPLETED)
            progress()
            for future in done:
                yield future.result()

    def close(self) -> None:
        """Stop reading."""
        self._reads.close()
        self._shards.close()

    def _index(self, number: int, shard: Shard) -> IndexedShard:
        try:
            if self._present(number):
                return IndexedShard(number, "present")
            return self._read(number, shard)
        except (DecodeError, *_BAD) as error:
            return IndexedShard(number, "failed", fault=error.message)

    def _read(self, number: int, shard: Shard) -> IndexedShard:
        found: list[RecordOffsets] = []
        entries, fault = list[Any](), ""
        index_files = self._form.index_files if self._files else None
        reader = ShardReader(
            self._store,
            shard,
            self._form.splitter,
            ahead=self._ahead,
            pool=self._reads,
            on_end=found.append,
        )
        try:
            while (record := reader.next()) is not None:
                if reader.compressed and index_files is not None:
                    return IndexedShard(number, "compressed")
                with self._lock:
                    self.read += record.size
                if record.error is not None:
                    fault = fault or f"at byte {record.offset:,}: {record.error.message}"
                elif index_files is not None:
                    entries.append(index_files.entry(record))
        finally:
            reader.close()
        if fault and index_files is not None:
            return IndexedShard(number, "failed", fault=fault)
        file = b"" if index_files is None else index_files.write(entries)
        return IndexedShard(number, "indexed", found[0], file, fault)
