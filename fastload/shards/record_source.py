"""Records at random, by ranged reads: the prefetcher's source of shards that are indexed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from fastload.errors import DecodeError, FastloadError, ObjectChangedError
from fastload.fetch.reads import plan_ranges
from fastload.formats.compression import HEAD, Inflater, is_compressed
from fastload.formats.pieces import Record, Splitter
from fastload.shards.catalog import ShardList
from fastload.shards.formats import ShardFormat
from fastload.shards.index import RecordId, ShardIndex
from fastload.shards.reader import PIECES, read_in_turn
from fastload.store.base import Buffer
from fastload.store.failures import Wait

_log = logging.getLogger("fastload")

RECORD_MARK = " @ "  # in the name of a record, between its shard and its offset
_LOOK = 1 << 20  # bytes of a request for a record whose length cannot be trusted


class _Where(NamedTuple):
    shard: int
    offset: int
    size: int


class RecordSource:
    """A sample is a record, asked for by its `RecordId`, packed.

    Args:
        shards: see `ShardList`.
        index: of the shards whose records are asked for.
        form: of the shards.
        key: (shard, offset) -> cache key.
    """

    def __init__(
        self, shards: ShardList, index: ShardIndex, form: ShardFormat, key: Callable[[int, int], bytes]
    ) -> None:
        self.store = shards.store
        self._shards = shards
        self._index = index
        self._form = form
        self._key = key

    def name(self, index: int) -> str:
        where = self._where(index)
        return record_name(self._shards[where.shard].key, where.offset)

    def size(self, index: int) -> int:
        return self._where(index).size

    def cache_key(self, index: int) -> bytes:
        where = self._where(index)
        return self._key(where.shard, where.offset)

    def ranges(self, index: int) -> list[tuple[int, int]]:
        return []

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

    def read_part(self, index: int, start: int, stop: int, wait: Wait) -> Buffer:
        raise NotImplementedError  # `ranges` offers none

    def refresh(self, index: int, error: ObjectChangedError, wait: Wait) -> None:
        raise error  # the index is of the version that is gone

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
        """Gives the bytes from a record on, one piece a call, inflated if need be; None at the end."""
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
    """The first record in the pieces that `more` gives; None: there is none."""
    record = None
    while record is None and not splitter.over and (piece := more()) is not None:
        splitter.feed(memoryview(piece))
        record = splitter.next()
    if record is None and not splitter.over:
        splitter.close()
        record = splitter.next()
    return record


def record_name(key: str, offset: int) -> str:
    """The name of a record in error messages."""
    return f"{key}{RECORD_MARK}{offset}"
