"""Reading through the cache: a sample comes from the cache, or from the store and is then kept in the cache.

look_up ─▶ in the cache? ── yes ─▶ read_now
                └── no ─▶ reserve ── yes ─▶ read ─▶ store ─▶ prepare ─▶ cache
                              └── no: another run is reading it ─▶ found_meanwhile, later

A sample is a hit or a miss once, by where it came from in the end: looks that come before are not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastload.cache import Cache
from fastload.errors import ObjectChangedError
from fastload.fetch.ranged_read import RangedRead, RangedReads
from fastload.fetch.source import Source
from fastload.metrics.counters import Counters

__all__ = ["CachedRead", "CachedReads"]


@dataclass(slots=True, eq=False)
class CachedRead(RangedRead):
    """One sample on its way, as the cache sees it."""

    key: bytes | None = None
    entry: Any = None  # where the cache has it
    missed: bool = False  # it was counted as a miss
    locked: bool = False  # we hold its in-flight lock
    deferred: float = 0.0  # since when another run is reading it
    overdue: bool = False  # that run had its time: it is read without the lock


class CachedReads:
    """Reads samples of one source, through a cache where there is one. Threads may share it.

    Args:
        store: reads what the cache does not have.
        source: knows the cache keys.
        cache: where to look first and what to fill, or None.
        prepare: (bytes from the store, index of the sample) -> what is cached and handed out (None: the
            bytes themselves).
        counters: get.* and cache.* are added here.
    """

    def __init__(
        self,
        store: RangedReads,
        source: Source,
        cache: Cache | None,
        *,
        prepare: Callable[[Any, int], Any] | None,
        counters: Counters,
    ) -> None:
        self._store = store
        self._source = source
        self._cache = cache
        self._prepare = prepare
        self._counters = counters
        self._reserving = threading.Lock()

    def look_up(self, reads: Sequence[CachedRead]) -> None:
        """Find out where the cache has these samples. The kernel begins to read them from the disk."""
        if self._cache is None or not reads:
            return
        keys = [self._source.cache_key(read.index) for read in reads]
        for read, key, entry in zip(reads, keys, self._cache.find_all(keys), strict=True):
            read.key, read.entry = key, entry
            if entry is not None:
                self._cache.will_need(entry)

    def plan(self, read: CachedRead) -> list[tuple[int, int]]:
        """The (start, stop) of each request that reads the sample from the store."""
        return self._store.plan(read)

    def read_now(self, read: CachedRead) -> Any:
        """The sample, in this thread: from the cache where that has a good copy, else from the store."""
        if self._cache is not None and read.key is not None and read.entry is not None:
            with self._counters.timed("cache"):
                payload = self._cache.read(read.key, read.entry)
            if payload is not None:
                return payload
            read.missed = True  # the cache has counted it
        with self._counters.timed("get"):
            return self.read(read, 0, read.size)

    def read(self, read: CachedRead, start: int, stop: int) -> Any:
        """One request to the store; the sample once all of it was read, None while ranges are missing."""
        self._count_miss(read)
        try:
            body = self._store.read(read, start, stop)
        except ObjectChangedError as error:
            return self._read_changed(read, error)
        return None if body is None else self._keep(read, body)

    def reserve(self, read: CachedRead) -> bool:
        """Take the in-flight lock of a sample. False: another run is reading it into the same cache."""
        if self._cache is None or read.key is None or read.locked or read.overdue:
            return True
        with self._reserving:  # the threads that read its ranges take it once
            read.locked = read.locked or self._cache.lock_inflight(read.key)
        return read.locked

    def release(self, read: CachedRead) -> None:
        """Give the in-flight lock back of a sample that will not be written."""
        if self._cache is not None and read.key is not None and read.locked:
            read.locked = False
            self._cache.unlock_inflight(read.key)

    def found_meanwhile(self, reads: Sequence[CachedRead]) -> list[Any]:
        """The samples as another run has written them, None for each that it has not yet."""
        assert self._cache is not None
        keys = [read.key or b"" for read in reads]
        payloads = []
        for read, key, entry in zip(reads, keys, self._cache.find_all(keys), strict=True):
            payloads.append(None if entry is None else self._cache.read(key, entry))
            read.missed = read.missed or (entry is not None and payloads[-1] is None)  # it was counted
        return payloads

    def drain_counters(self) -> None:
        """Add the cache's counters to these."""
        if self._cache is not None:
            self._counters.merge(self._cache.counters.drain())

    def close(self) -> None:
        """Write out the cache and close it."""
        if self._cache is not None:
            self._cache.close()

    def _read_changed(self, read: CachedRead, error: ObjectChangedError) -> Any:
        """Read the new version of an object; `error` says that the listed one is gone."""
        while True:
            self._store.refresh(read, error)
            if self._cache is not None:
                self.release(read)
                read.key = self._source.cache_key(read.index)
                (payload,) = self.found_meanwhile([read])
                if payload is not None:
                    return payload
            try:
                read.ranged = False
                body = self._store.read_whole(read)
            except ObjectChangedError as another:
                error = another
            else:
                return self._keep(read, body)

    def _count_miss(self, read: CachedRead) -> None:
        if self._cache is not None and read.key is not None and not read.missed:
            read.missed = True
            self._counters.add("cache.misses")

    def _keep(self, read: CachedRead, body: Any) -> Any:
        """The bytes of a sample -> the result of `get`, which is also the payload in the cache."""
        self._counters.add("get.samples")
        self._counters.add("get.bytes", len(body))
        payload = body if self._prepare is None else self._prepare(body, read.index)
        if self._cache is not None and read.key is not None:
            self._cache.write(read.key, payload)
        return payload
