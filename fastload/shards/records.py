"""Records of a dataset in one process: read at random by ranges, or taken from a stream and not used yet.

`PendingRecords` wait to be decoded: their payloads, or the futures of these. They do not wait in the
prefetcher with the records that are read at random, for three reasons. A record of a shard that is not
indexed yet has an offset that only the stream knows, and errors name it. Its payload was counted by the
stream's own budget. And it is prepared by as many threads as there are cores, where the prefetcher has as
many as there are requests in flight.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch.utils.data import get_worker_info

from fastload.errors import DecodeError, FastloadError
from fastload.fetch.reads import Source, plan_ranges, record_name
from fastload.fetch.threads import ReadPool
from fastload.formats.pieces import HEAD, Inflater, Record, Splitter, is_compressed
from fastload.metrics.counters import Counters
from fastload.shards.catalog import ShardList
from fastload.shards.formats import ShardFormat
from fastload.shards.index import RecordId, ShardIndex
from fastload.shards.reader import PIECES, ReadAhead, ShardReader, read_in_turn
from fastload.shards.stream import Reader, Span, StreamedRecord
from fastload.store.base import Buffer
from fastload.store.failures import Wait

_log = logging.getLogger("fastload")

_OFFSETS_KEPT = 4096  # more than a batch has
_LOOK = 1 << 20  # bytes of a request for a record whose length cannot be trusted


class _Where(NamedTuple):
    shard: int
    offset: int
    size: int


class RecordBlocks(Protocol):
    """Records that can only be read in blocks, each as a whole, such as the row groups of Parquet files.

    `key` differs where other records are in the blocks.
    """

    key: str

    def spans(self) -> list[Span]:
        """Return all blocks, as the records of their shards."""

    def size(self, span: Span) -> int:
        """Return the bytes to read of a block: at most, about its part of the shard."""

    def most_open(self, most_bytes: int) -> int:
        """Return how many blocks a process may open so that they and those read ahead take so many bytes."""

    def open_reader(self, span: Span, ordinal: int, offset: int, pool: ReadPool) -> Reader:
        """Return a reader of a block, or of a part of one, from a record on. It begins to read at once."""


@dataclass(frozen=True)
class IndexedShards:
    """The shards of a dataset, how they are read, and where their records lie.

    Attributes:
        listed: the shards.
        form: of them.
        index: as far as there is one.
        key: (shard, offset) -> cache key.
        encode: payload -> what the cache keeps; None: the payload.
        counters: get.* are added here.
        blocks: that the records are read in; None: each record can be cut out of its shard.
    """

    listed: ShardList
    form: ShardFormat
    index: ShardIndex
    key: Callable[[int, int], bytes]
    encode: Callable[[Any], Any] | None
    counters: Counters
    blocks: RecordBlocks | None = None

    def open_reader(
        self, span: Span, ordinal: int, offset: int | None, ahead: ReadAhead, pool: ReadPool
    ) -> Reader:
        """Return a reader of a span out of the store, from a record on.

        It indexes a shard that it reads as a whole.

        Args:
            offset: of the record; None: as the index says, or 0.
            ahead, pool: see `ShardReader`.
        """
        shard, records, stop = self.listed[span.shard], self.index.get(span.shard), None
        if records is not None:
            offset = records.offset_of(ordinal) if offset is None else offset
            if self.blocks is not None:
                return self.blocks.open_reader(span, ordinal, offset, pool)
            shard = shard._replace(compressed=records.compressed)
            if span.stop is not None:
                stop = span.stop, int(records.offsets[span.stop - 1].sum())
        build = records is None and ordinal == 0 and self.index.kept
        return ShardReader(
            self.listed.store,
            shard,
            functools.partial(self.form.splitter, offsets=None if records is None else records.offsets),
            ahead=ahead,
            pool=pool,
            ordinal=ordinal,
            offset=offset or 0,
            stop=stop,
            on_end=functools.partial(self.index.add_and_keep, span.shard) if build else None,
        )


class RecordSource(Source):
    """A sample is a record, asked for by its `RecordId`, packed.

    Args:
        shards: those whose records are asked for are indexed.
    """

    def __init__(self, shards: IndexedShards) -> None:
        self._shards, self._form, self._index = shards.listed, shards.form, shards.index
        self.store = self._shards.store
        self._key = shards.key

    def name(self, index: int) -> str:
        where = self._where(index)
        return record_name(self._shards[where.shard].key, where.offset)

    def size(self, index: int) -> int:
        return self._where(index).size

    def cache_key(self, index: int) -> bytes:
        where = self._where(index)
        return self._key(where.shard, where.offset)

    def read(self, index: int, wait: Wait) -> Buffer:
        fault = self._index.fault(index)
        try:
            if fault is None:
                record, head = self._record(self._where(index), wait), self._index.head(index)
                return self._form.unwrap(record if head is None else memoryview(b"".join((head, record))))
            payload = None if fault.lasting else self._read_again(index, wait)
            if payload is None:
                raise DecodeError(fault.why)
            return payload
        except FastloadError as error:
            error.key = self.name(index)
            raise

    def _where(self, index: int) -> _Where:
        return _Where(RecordId.unpack(index).shard, *self._index.locate(index))

    def _read_again(self, index: int, wait: Wait) -> memoryview | None:
        """Look again at a record that was damaged when its shard was read; None: it still is.

        The damage may have happened on the way. Each process looks once. What it finds holds for the run,
        also if the store gives nothing.
        """
        where, shard = self._where(index), self._shards[RecordId.unpack(index).shard]
        compressed = self._index.compressed(where.shard)
        end, records = None if compressed else shard.size, self._index.get(where.shard)
        splitter = self._form.splitter(where.offset, end, None if records is None else records.offsets)
        splitter.max_inflated = self.store.reading.max_inflated
        other = False  # whether the damage was in the first bytes, which say whether it is compressed
        try:
            if not where.offset and shard.compressed is None:
                head = self.store.read_range(shard.key, 0, min(HEAD, shard.size), shard.version, wait=wait)
                other = is_compressed(head) != compressed
            record = None if other else _first(splitter, self._bytes_from(where, _LOOK, wait))
        except FastloadError as error:
            self._index.settle(index, shard=not isinstance(error, DecodeError))
            return None
        if record is not None and record.payload is not None and record.size == where.size:
            return record.payload
        self._index.settle(index)
        if record is None or record.error is None:
            _log.warning(
                "the transfer of shard %r was damaged, but the shard is intact: the next run reads it again",
                shard.key,
            )
            self._index.doubt(where.shard)
        return None

    def _bytes_from(self, where: _Where, piece: int, wait: Wait) -> Callable[[], Any]:
        """Return a function that gives the bytes from a record on, inflated if need be; None at the end."""
        shard = self._shards[where.shard]
        compressed = self._index.compressed(where.shard)
        start = 0 if compressed else where.offset
        planned = plan_ranges(shard.size - start, piece) if start < shard.size else []
        ranges = ((start + first, start + stop) for first, stop in planned)
        more = read_in_turn(self.store, shard, ranges, wait)
        # A compressed shard can only be read from its start. The cache makes this rare.
        return Inflater(more, skip=where.offset) if compressed else more

    def _record(self, where: _Where, wait: Wait) -> memoryview:
        if not self._index.compressed(where.shard):
            shard, stop = self._shards[where.shard], where.offset + where.size
            body = self.store.read_range(shard.key, where.offset, stop, shard.version, wait=wait)
            return memoryview(body)
        inflate = self._bytes_from(where, PIECES.usual, wait)
        parts, missing = [], where.size
        while missing and (part := inflate()) is not None:
            parts.append(part[:missing])
            missing -= len(parts[-1])
        if missing:
            raise DecodeError("the compressed shard ends before this record")
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))


def _first(splitter: Splitter, more: Callable[[], Any]) -> Record | None:
    """Return the first record in the pieces that `more` gives; None: there is none."""
    record = None
    while record is None and not splitter.over and (piece := more()) is not None:
        splitter.feed(memoryview(piece))
        record = splitter.next()
    if record is None and not splitter.over:
        splitter.close()
        record = splitter.next()
    return record


class PendingRecords:
    """The pending records of one dataset in one process.

    Args:
        prepare: payload -> what is cached and used; None: the payload itself. Runs in threads, while other
            records are decoded.
        keep: writes a record's prepared payload to the cache.
        counters: get.* are added here.
    """

    def __init__(
        self,
        prepare: Callable[[Any], Any] | None,
        keep: Callable[[StreamedRecord, Any], None],
        counters: Counters,
    ) -> None:
        self._prepare = prepare
        self._keep = keep
        self._counters = counters
        self._values: dict[int, Any] = {}
        self._offsets: dict[int, int] = {}  # also of those that were used last, for errors about them
        self._more: dict[int, int] = {}  # record -> how often it is pending, beyond once
        self._pool: ReadPool | None = None

    def __contains__(self, record: int) -> bool:
        return record in self._values

    def __len__(self) -> int:
        return len(self._values)

    def add(self, record: int, found: StreamedRecord) -> None:
        """Keep a record until `get` and `drop` were called as often as this."""
        if record in self._values:
            self._more[record] = self._more.get(record, 0) + 1
            return
        payload: Any = found.record.payload
        if found.record.error is not None:
            payload = found.record.error
            self._counters.add("bad.bytes", found.record.size)
        elif not found.ready:
            self._counters.add("get.samples")
            if self._prepare is not None:
                payload = self._threads().submit(functools.partial(self._ready, found))
            else:
                self._keep(found, payload)
        if len(self._offsets) > len(self._values) + _OFFSETS_KEPT:
            self._offsets = {each: self._offsets[each] for each in self._values}
        self._values[record] = payload
        self._offsets[record] = found.record.offset

    def offset(self, record: int) -> int | None:
        """Return the offset in its shard of a record that is pending, or that was used lately; else None."""
        return self._offsets.get(record)

    def get(self, record: int) -> Any:
        """Return the payload of a record, which is then pending once less.

        Raises:
            DecodeError: the record is damaged, or cannot be prepared.
        """
        value = self.drop(record)
        if isinstance(value, Future):
            value = self._threads().wait(value)
        if isinstance(value, Exception):
            raise value
        return value

    def drop(self, record: int) -> Any:
        """Let go of a record, once; returns its payload, the future of that, or its error."""
        if record not in self._more:
            return self._values.pop(record)
        self._more[record] -= 1
        if not self._more[record]:
            del self._more[record]
        return self._values[record]

    def settle(self) -> None:
        """Wait until all payloads were prepared and written to the cache."""
        for value in list(self._values.values()):
            if isinstance(value, Future):
                value.exception()

    def close(self) -> None:
        """Let go of all records, and end the threads."""
        self._values.clear()
        self._offsets.clear()
        self._more.clear()
        if self._pool is not None:
            self._pool.close()

    def _ready(self, found: StreamedRecord) -> Any:
        assert self._prepare is not None
        payload = self._prepare(found.record.payload)
        self._keep(found, payload)
        return payload

    def _threads(self) -> ReadPool:
        if self._pool is None:
            worker = get_worker_info()
            processes = 1 if worker is None else worker.num_workers
            self._pool = ReadPool(max(1, (os.cpu_count() or 1) // processes), self._counters)
        return self._pool
