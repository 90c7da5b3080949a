"""Records at random, by ranged reads: what the window asks where places are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from fastload.datasets.shards.listing import ShardList
from fastload.datasets.shards.places import PlaceBook
from fastload.errors import DecodeError, FastloadError, ObjectChangedError
from fastload.fetch.inflate import Inflater
from fastload.fetch.ranges import plan_ranges
from fastload.formats.index import Places
from fastload.formats.pieces import Splitter
from fastload.store.base import Buffer
from fastload.store.retry import Wait

__all__ = ["RecordSource", "ShardFormat", "record_name"]

_PIECE = 8 << 20


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
        self, shards: ShardList, book: PlaceBook, form: ShardFormat, key: Callable[[int, int], bytes]
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
            if fault is not None:
                raise DecodeError(fault)
            return self._form.unwrap(self._record(self._where(index), wait))
        except FastloadError as error:
            error.key = self.name(index)
            raise

    def read_part(self, index: int, start: int, stop: int, wait: Wait) -> Buffer:
        raise NotImplementedError  # `ranges` offers none

    def refresh(self, index: int, error: ObjectChangedError, wait: Wait) -> None:
        raise error  # the places are those of the version that is gone

    def _where(self, index: int) -> _Where:
        return _Where(index >> 32, *self._book.place(index))

    def _record(self, where: _Where, wait: Wait) -> memoryview:
        shard = self._shards[where.shard]

        def read(start: int, stop: int) -> Any:
            return self.store.read_range(shard.key, start, stop, shard.version, wait=wait)

        stop = where.offset + where.size
        if not shard.compressed:
            return memoryview(read(where.offset, stop))
        # Nothing leads into the middle of a compressed shard. The cache is there to make this rare.
        inflate = Inflater(plan_ranges(shard.size, _PIECE), read, skip=where.offset)
        parts, missing = [], where.size
        while missing and (part := inflate()) is not None:
            parts.append(part[:missing])
            missing -= len(parts[-1])
        if missing:
            raise DecodeError("the compressed shard ends before this record")
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))


def record_name(key: str, offset: int) -> str:
    """A record in error messages."""
    return f"{key} @ {offset}"
