"""The lanes of a dataset's streams: from the store, learning places on the way, or from the cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from fastload.cache import Cache
from fastload.errors import DecodeError
from fastload.formats.pieces import Record
from fastload.shards.index import Fault, ShardIndex, Table
from fastload.shards.interleave import AnyLane

__all__ = ["CachedLane", "LearningLane"]


class CachedLane:
    """Records that the cache has, all of them: their shard is not read again.

    Args:
        table: of the shard.
        first, stop: which of its records.
        cache, key: offset -> cache key.
        read: ordinal -> payload, for a record that the cache lost, or that was damaged in its shard.
    """

    ready = True
    compressed = False
    requested = True

    def __init__(
        self,
        table: Table,
        first: int,
        stop: int,
        cache: Cache,
        key: Callable[[int], bytes],
        read: Callable[[int], memoryview],
    ) -> None:
        self._table = table
        self._at = first
        self._stop = stop
        self._cache = cache
        self._key = key
        self._read = read

    def complete(self) -> bool:
        """Whether the cache has them all."""
        for ordinal in range(self._at, self._stop):
            if ordinal not in self._table.bad and self._cache.lookup(self._key_of(ordinal)) is None:
                self._cache.counters.add("cache.misses", -1)  # nobody wanted this one
                return False
        return True

    def next(self) -> Record | None:
        if self._at >= self._stop:
            return None
        ordinal = self._at
        self._at += 1
        offset, size = self._table.places[ordinal].tolist()
        bad = ordinal in self._table.bad
        payload = None if bad else self._cache.read(self._key_of(ordinal))
        if payload is None:
            try:
                payload = self._read(ordinal)
            except DecodeError as error:
                return Record(offset, size, None, error)
        return Record(offset, size, payload)

    def close(self) -> None:
        self._at = self._stop

    def _key_of(self, ordinal: int) -> bytes:
        return self._key(int(self._table.places[ordinal, 0]))


class LearningLane:
    """A lane over a whole shard; at its end the shard's table is known.

    Args:
        lane: from the shard's first record on.
        shard, book: where to write down what it finds.
    """

    ready = False

    def __init__(self, lane: AnyLane, shard: int, book: ShardIndex) -> None:
        self._lane = lane
        self._shard = shard
        self._book = book
        self._places = array("Q")
        self._bad: dict[int, Fault] = {}
        self._learned = False

    @property
    def compressed(self) -> bool:
        return self._lane.compressed

    @property
    def requested(self) -> bool:
        return self._lane.requested

    def next(self) -> Record | None:
        record = self._lane.next()
        if record is not None:
            if record.error is not None:
                self._bad[len(self._places) // 2] = Fault(record.error.message, record.lasting)
            self._places.append(record.offset)
            self._places.append(record.size)
        elif not self._learned:
            self._learned = True
            places = np.frombuffer(self._places, np.uint64) if self._places else np.empty(0, np.uint64)
            self._book.learn(self._shard, Table(places.reshape(-1, 2), self._bad, self._lane.compressed))
        return record

    def close(self) -> None:
        self._learned = True  # what it has found is not all
        self._lane.close()
