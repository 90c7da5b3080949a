"""Filling a cache before training, with the same reads and the same keys.

    indices ─▶ in the cache? ── no ─▶ locked by another run? ── no ─▶ prefetcher ─▶ store ─▶ prepare ─▶ cache
                    └ yes: present          └ yes: looked at again at the end

Training drops a record if the disk is too slow; this waits for the disk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from fastload.cache import Cache
from fastload.errors import (
    CacheError,
    DecodeError,
    FastloadError,
    NotFoundError,
    ObjectChangedError,
    ShortReadError,
)
from fastload.fetch.prefetcher import Prefetcher
from fastload.fetch.reads import Source
from fastload.images.decode import Unindexed, with_rows

_AHEAD = 256  # samples that the prefetcher knows of; it decides how many are in flight
_TOGETHER = 64  # that it gets to know at once: neighbours in one object come by one request
_DISK_SECONDS = 120.0  # a disk that writes nothing for so long is broken
_LOCKED_SECONDS = 5.0  # without a result of any other run, until we read its samples
_LOCKED_POLL = 0.02
# Errors of one object. Others say that the store is down or refuses us.
_BAD = (DecodeError, NotFoundError, ObjectChangedError, ShortReadError)


Outcome = Literal["stored", "present", "failed", "too large", "full"]


class Warmed(NamedTuple):
    """The outcome of one sample.

    Attributes:
        sample: its index.
        outcome: "stored" now; "present" already; "failed": a bad object, `error` says why; "too large" for a
            record (1 GiB) or for the rest of the size limit, so that training reads it from the store;
            "full": the cache takes no more, and the samples that follow were not read.
        size: bytes of the object that were read from the store.
        error: what failed, in words, or "".
        key: of a record that failed in a shard: its name. Else the dataset's `key(sample)` names it.
        passed: of a record in a shard: its bytes, read or not.
    """

    sample: int
    outcome: Outcome
    size: int = 0
    error: str = ""
    key: str = ""
    passed: int = 0


class Filling:
    """Puts samples into a cache, once.

    Args:
        prefetcher: reads and prepares samples; has no cache of its own.
        source: of the prefetcher.
    """

    def __init__(self, cache: Cache, prefetcher: Prefetcher, source: Source) -> None:
        self._cache = cache
        self._prefetcher = prefetcher
        self._source = source
        self._requested: deque[tuple[int, bytes]] = deque()  # with the key that is locked
        self._new: list[int] = []  # of these, that the prefetcher does not know yet
        self._elsewhere: list[int] = []  # samples that another run is reading

    def run(self, indices: Iterable[int]) -> Iterator[Warmed]:
        """Put samples into the cache, in this order; when the iterator ends, everything is written.

        Raises:
            StoreError: the store is down, or refuses us. CacheError: the cache cannot be written.
        """
        try:
            for warmed in self._outcomes(indices):
                yield warmed
                if warmed.outcome == "full":
                    return
        finally:
            for _, key in self._requested:
                self._cache._unlock_inflight(key)
            self._prefetcher.close()
            self._cache.flush()

    def _outcomes(self, indices: Iterable[int]) -> Iterator[Warmed]:
        yield from self._read(indices)
        progress = time.monotonic()
        while self._elsewhere:
            waiting, self._elsewhere = self._elsewhere, []
            patient = time.monotonic() - progress < _LOCKED_SECONDS
            yield from self._read(waiting, unlocked=not patient)
            if len(self._elsewhere) < len(waiting):
                progress = time.monotonic()
            else:
                time.sleep(_LOCKED_POLL)

    def _read(self, indices: Iterable[int], unlocked: bool = False) -> Iterator[Warmed]:
        """Read once. Samples that another run is reading are left for the next pass, unless `unlocked`."""
        for index in indices:
            key = self._source.cache_key(index)
            if self._cache.lookup(key) is not None:
                yield Warmed(index, "present")
            elif self._cache._codec.lossless and self._cache._fits(self._source.size(index)) == "too large":
                yield Warmed(index, "too large")  # known without reading it
            elif self._cache._lock_inflight(key) or unlocked:
                self._requested.append((index, key))
                self._new.append(index)
                if len(self._new) >= _TOGETHER:
                    self._announce()
            else:
                self._elsewhere.append(index)
            while len(self._requested) > _AHEAD:
                yield self._store(*self._requested.popleft())
        self._announce()
        while self._requested:
            yield self._store(*self._requested.popleft())

    def _announce(self) -> None:
        self._prefetcher.request(self._new)
        self._new = []

    def _store(self, index: int, locked: bytes) -> Warmed:
        try:
            payload = self._prefetcher.get(index)
        except BaseException as error:
            self._cache._unlock_inflight(locked)
            return Warmed(index, "failed", self._source.size(index), why_bad(error))
        if isinstance(payload, Unindexed):
            payload = with_rows(payload.data)
        key = self._source.cache_key(index)  # of the version that was read: another, where the object changed
        if key != locked:
            self._cache._unlock_inflight(locked)
        return Warmed(index, put(self._cache, key, payload), self._source.size(index))


def why_bad(error: BaseException) -> str:
    """Return what is wrong with an object that cannot be read or decoded. Raises any other error again."""
    if isinstance(error, _BAD):
        return f"{type(error).__name__}: {error.message}"
    if isinstance(error, FastloadError | MemoryError) or not isinstance(error, Exception):
        raise error
    return f"{type(error).__name__}: {error}"  # of the user's `decode`


class ToRead(NamedTuple):
    """What is left to read from the store, without repeats. A cache that becomes full takes less.

    Args:
        objects: samples; or shards.
    """

    objects: int = 0
    requests: int = 0
    read_bytes: int = 0


def find_missing(records: Iterable[int], cache: Cache, source: Source) -> ToRead:
    """Return what the cache lacks of these records."""
    objects = requests = read_bytes = 0
    for record in records:
        if not cache.has(source.cache_key(record)):
            objects += 1
            requests += max(1, len(source.ranges(record)))
            read_bytes += source.size(record)
    return ToRead(objects, requests, read_bytes)


def put(cache: Cache, key: bytes, payload: Any) -> Outcome:
    """Hand a payload to the cache's writer, and wait for the disk: "stored", "too large" or "full".

    A cache that is nearly full may still drop what is "stored" here, once the writer comes to it.

    Raises:
        CacheError: the cache cannot be written.
    """
    if cache.write(key, payload, wait=_DISK_SECONDS):
        return "stored"
    cache.flush()  # records in the queue may be counted twice; now it is known what is left
    fit = cache._fits(memoryview(payload).nbytes)
    if fit == "yes" and cache.write(key, payload, wait=_DISK_SECONDS):
        return "stored"
    if fit == "yes" or cache.counters["cache.failures"]:
        raise CacheError(
            f"cache {cache.path} takes no more records (see the warning above); its present records stay"
        )
    return fit
