"""Records at random, by ranged reads: what the window asks where places are known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from fastload.errors import DecodeError, FastloadError, ObjectChangedError
from fastload.fetch.source import plan_ranges
from fastload.formats.compression import HEAD, is_compressed
from fastload.formats.inflate import Inflater
from fastload.formats.pieces import Record, Splitter
from fastload.formats.shard_index import Places
from fastload.shards.catalog import ShardList
from fastload.shards.index import ShardIndex
from fastload.store.base import Buffer
from fastload.store.retry import Wait

__all__ = ["RecordSource", "ShardFormat", "record_name"]

_log = logging.getLogger("fastload")

_PIECE = 8 << 20
_LOOK = 1 << 20  # asked for at once, of a record whose length is not to be trusted


class ShardFormat(Protocol):
    """How shards of one kind are read. `name` names it and its version: part of the cache's keys."""

    name: str

    def splitter(self, offset: int, end: int | None) -> Splitter:
        """See `Splitter`."""

    def unwrap(self, record: memoryview) -> memoryview:
        """The payload of one whole record; DecodeError where it is not one."""

    def parse_index(self, body: bytes, shard_size: int) -> Places:
        """The places in an index file; DecodeError where it is not one of this shard."""


class _Where(NamedTuple):
    shard: int
    offset: int
    size: int


class RecordSource:
    """A sample is a record, asked for as shard << 32 | ordinal.

    Args:
        shards: see `ShardList`.
        book: knows the places of what is asked for.
        form: of the shards.
        key: (shard, offset) -> cache key.
    """

    def __init__(
        self, shards: ShardList, book: ShardIndex, form: ShardFormat, key: Callable[[int, int], bytes]
    ) -> None:
        self.store = shards.store
        self._shards = shards
        self._book = book
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
        fault = self._book.fault(index)
        try:
            if fault is None:
                return self._form.unwrap(self._record(self._where(index), wait))
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
        raise error  # the places are those of the version that is gone

    def _where(self, index: int) -> _Where:
        return _Where(index >> 32, *self._book.place(index))

    def _read_again(self, index: int, wait: Wait) -> memoryview | None:
        """A record that was damaged when its shard was read, maybe only on the way; None: it still is.

        Once per process: what it finds then holds for the run. So it does where the store gives nothing.
        """
        where, shard = self._where(index), self._shards[index >> 32]
        compressed = self._book.compressed(where.shard)
        splitter = self._form.splitter(where.offset, None if compressed else shard.size)
        other = False  # whether the damage was in the bytes that say how to read the shard
        try:
            if not where.offset and shard.compressed is None:
                head = self.store.read_range(shard.key, 0, min(HEAD, shard.size), shard.version, wait=wait)
                other = is_compressed(head) != compressed
            record = None if other else _first(splitter, self._bytes_from(where, _LOOK, wait))
        except FastloadError as error:
            self._book.settle(index, shard=not isinstance(error, DecodeError))
            return None
        if record is not None and record.payload is not None and record.size == where.size:
            return record.payload
        self._book.settle(index)
        if record is None or record.error is None:
            _log.warning(
                "shard %r was damaged when it was read, and is not: the next run reads it anew", shard.key
            )
            self._book.doubt(where.shard)
        return None

    def _bytes_from(self, where: _Where, piece: int, wait: Wait) -> Callable[[], Any]:
        """Gives the shard's bytes from a record on, inflated if need be: a piece a call, None at the end."""
        shard = self._shards[where.shard]
        compressed = self._book.compressed(where.shard)
        start = 0 if compressed else where.offset
        ranges = iter(plan_ranges(shard.size - start, piece) if start < shard.size else [])

        def more() -> Any:
            for first, stop in ranges:
                return self.store.read_range(shard.key, start + first, start + stop, shard.version, wait=wait)
            return None

        # Nothing leads into the middle of a compressed shard. The cache is there to make this rare.
        return Inflater(more, skip=where.offset) if compressed else more

    def _record(self, where: _Where, wait: Wait) -> memoryview:
        if not self._book.compressed(where.shard):
            shard, stop = self._shards[where.shard], where.offset + where.size
            body = self.store.read_range(shard.key, where.offset, stop, shard.version, wait=wait)
            return memoryview(body)
        inflate = self._bytes_from(where, _PIECE, wait)
        parts, missing = [], where.size
        while missing and (part := inflate()) is not None:
            parts.append(part[:missing])
            missing -= len(parts[-1])
        if missing:
            raise DecodeError("the compressed shard ends before this record")
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))


def _first(splitter: Splitter, more: Callable[[], Any]) -> Record | None:
    """The first record of what `more` gives, piece by piece; None where there is none."""
    record = None
    while record is None and not splitter.over and (piece := more()) is not None:
        splitter.feed(memoryview(piece))
        record = splitter.next()
    if record is None and not splitter.over:
        splitter.close()
        record = splitter.next()
    return record


def record_name(key: str, offset: int) -> str:
    """A record in error messages."""
    return f"{key} @ {offset}"
