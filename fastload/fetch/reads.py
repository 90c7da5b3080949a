"""One read: what a sample is in the store, and how it comes through the cache.

look_up ─▶ in the cache? ── yes ─▶ read_now
                └── no ─▶ reserve ── yes ─▶ read ─▶ store, whole or in ranges ─▶ prepare ─▶ cache
                              └── no: another run is reading it ─▶ found_meanwhile, or deferred

A sample is a hit or a miss once, by where it came from in the end: looks that come before are not counted.

Several threads read the ranges of one large object side by side, into one buffer. If one of them finds that
the object has changed, that thread alone reads the new version. Another read of that object may be under way,
with the size and the cache key of the version before: its bytes may be of either, so it is made again.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from fastload.cache import Cache
from fastload.errors import AccessDeniedError, ObjectChangedError
from fastload.fetch import threads
from fastload.fetch.queues import Read, Request
from fastload.fetch.threads import ReadSettings
from fastload.images.decode import Unindexed
from fastload.metrics.counters import Counters
from fastload.store import ObjectInfo, Store
from fastload.store.base import Buffer
from fastload.store.failures import Wait
from fastload.store.manifest import Manifest

_REFUSED_SECONDS = 5.0  # without requests after the store refused our credentials
_CHANGES = 3  # of one object while it is being read, under on_change="refresh"
# Bytes between two ranges that are read and dropped, so that both come by one request.
_GAP = 16 << 10
# Bytes of one request for several samples. Longer ones would only hold back the first of them: what is
# transferred side by side is faster.
_GROUP = 1 << 20
_MARK = " @ "  # in the name of a record, between its object and its offset


class Source(Protocol):
    """Where samples come from, and how each is read. Called by several threads."""

    store: Store

    def name(self, index: int) -> str:
        """Return the sample in error messages."""

    def size(self, index: int) -> int:
        """Return the bytes that are read for the sample."""

    def cache_key(self, index: int) -> bytes:
        """Return the key under which the cache has it."""

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """Return the ranges to read side by side; empty where the sample is read by one request."""
        return []

    def read(self, index: int, wait: Wait) -> Buffer:
        """Return the sample's bytes, by one request. `wait` as in `Store.read`."""

    def read_part(self, index: int, start: int, stop: int, wait: Wait) -> Buffer:
        """Return the bytes of one of its ranges."""
        raise RuntimeError("the sample has no ranges")

    def groups(self, indices: list[int]) -> list[list[int]]:
        """Return the samples in groups, each of which is read by one request; in the order of the first."""
        return [[index] for index in indices]

    def read_group(self, indices: list[int], wait: Wait) -> list[Buffer]:
        """Return the bytes of each sample of a group, by one request."""
        raise RuntimeError("the samples have no groups")

    def fresh(self, index: int) -> ObjectInfo | None:
        """Return the version that is read since `refresh` has found it; None: the listed one."""
        return None

    def refresh(self, index: int, error: ObjectChangedError, wait: Wait) -> None:
        """Use the new version of an object from now on, or raise `error`: the listed one is gone."""
        raise error


class ObjectSource(Source):
    """A sample is an object.

    Args:
        store, manifest: what to read.
        key: (index, version or None for the listed one) -> cache key.
        on_change: what to do with an object that is no longer the listed one: "error", or "refresh", to ask
            for its new version and size and read that.
        settings: the size from which on an object is read in ranges. Default: `SETTINGS`.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        key: Callable[[int, str | None], bytes],
        on_change: str = "error",
        settings: ReadSettings | None = None,
    ) -> None:
        self.store = store
        self._manifest = manifest
        self._key = key
        self._on_change = on_change
        self._settings = settings or threads.SETTINGS
        self._fresh: dict[int, ObjectInfo] = {}  # objects that changed since they were listed

    def name(self, index: int) -> str:
        return self._manifest.key(index)

    def size(self, index: int) -> int:
        fresh = self._fresh.get(index)
        return self._manifest.size(index) if fresh is None else fresh.size

    def cache_key(self, index: int) -> bytes:
        return self._key(index, self._version(index))

    def ranges(self, index: int) -> list[tuple[int, int]]:
        size = self.size(index)
        if size < self._settings.large_object or not (self.store.native and self.store.has_ranges):
            return []
        if not self._version(index):  # ranges of two versions could not be told apart
            return []
        return plan_ranges(size, self._settings.range_size)

    def read(self, index: int, wait: Wait) -> Buffer:
        return self.store.read(self.name(index), self._version(index), self.size(index), wait=wait)

    def read_part(self, index: int, start: int, stop: int, wait: Wait) -> Buffer:
        return self.store.read_range(self.name(index), start, stop, self._version(index), wait=wait)

    def fresh(self, index: int) -> ObjectInfo | None:
        return self._fresh.get(index)

    def refresh(self, index: int, error: ObjectChangedError, wait: Wait) -> None:
        if self._on_change != "refresh":
            raise error
        fresh = self.store.head(self.name(index), wait=wait)
        if not fresh.version:  # it could be cached under no name of its own
            raise error
        self._fresh[index] = fresh
        self._manifest.read_anew(index, fresh.version)

    def _version(self, index: int) -> str:
        fresh = self._fresh.get(index)
        return self._manifest.version(index) if fresh is None else fresh.version


class RangeSource(ObjectSource):
    """A sample is an object, or a range of one. Neighbours are read by one request.

        a.bin  [0, 64K) [64K, 128K) [130K, 194K)   ...   [9M, 9M + 64K)
               └───────── one request ─────────┘         another one

    Args:
        store, manifest, key: as of `ObjectSource`.
        range_of: index -> (start, stop), or None for a whole object.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        key: Callable[[int, str | None], bytes],
        range_of: Callable[[int], tuple[int, int] | None],
    ) -> None:
        super().__init__(store, manifest, key=key)
        self._range_of = range_of

    def size(self, index: int) -> int:
        part = self._range_of(index)
        return super().size(index) if part is None else part[1] - part[0]

    def read(self, index: int, wait: Wait) -> Buffer:
        part = self._range_of(index)
        return super().read(index, wait) if part is None else self._read(index, *part, wait)

    def read_part(self, index: int, start: int, stop: int, wait: Wait) -> Buffer:
        part = self._range_of(index)
        first = 0 if part is None else part[0]
        return self._read(index, first + start, first + stop, wait)

    def groups(self, indices: list[int]) -> list[list[int]]:
        """Return the samples in groups of ranges that lie together in their object."""
        groups = [[index] for index in indices if self._range_of(index) is None]
        parts = [(self.name(index), *part, index) for index in indices if (part := self._range_of(index))]
        key, first, last = "", 0, -1  # of the group that is being made
        for name, start, stop, index in sorted(parts):
            end = max(last, stop)
            if last >= 0 and name == key and start - last <= _GAP and end - first <= _GROUP:
                groups[-1].append(index)
                last = end
            else:
                groups.append([index])
                key, first, last = name, start, stop
        place = {index: number for number, index in enumerate(indices)}
        for group in groups:
            group.sort(key=place.__getitem__)
        return sorted(groups, key=lambda group: place[group[0]])

    def read_group(self, indices: list[int], wait: Wait) -> list[Buffer]:
        parts: list[Any] = [self._range_of(index) for index in indices]
        first, last = min(start for start, _ in parts), max(stop for _, stop in parts)
        body = memoryview(self._read(indices[0], first, last, wait)).toreadonly()
        return [body[start - first : stop - first] for start, stop in parts]

    def _read(self, index: int, start: int, stop: int, wait: Wait) -> Buffer:
        return self.store.read_range(self.name(index), start, stop, self._version(index), wait=wait)


def record_name(key: str, offset: int | None) -> str:
    """Return the name of a record that lies in an object from `offset` on; None: it is the whole object."""
    return key if offset is None else f"{key}{_MARK}{offset}"


def split_name(name: str) -> tuple[str, int | None]:
    """Return (key, offset) of what `record_name` gave; the key alone, where it is not of that form."""
    key, mark, offset = name.rpartition(_MARK)
    return (key, int(offset)) if mark and offset.isdecimal() else (name, None)


def plan_ranges(size: int, piece: int) -> list[tuple[int, int]]:
    """Cover [0, size) with equal ranges [start, stop) of at most `piece` bytes, in order.

    Equal within a byte: a short last piece would leave its connection idle while the others still read. One
    range for an empty object.
    """
    count = max(1, -(-size // piece))
    edges = [size * number // count for number in range(count + 1)]
    return list(itertools.pairwise(edges))


class SampleReads:
    """Reads samples of one source, through a cache where there is one. Threads may share it.

    Args:
        source: how a sample is read, and its cache key.
        cache: where to look first and what to fill, or None.
        prepare: (bytes from the store, index of the sample) -> what is cached and delivered (None: the
            bytes themselves).
        counters: get.* and cache.* are added here.
        wait: called before a request is repeated; see `Store.read`.
    """

    def __init__(
        self,
        source: Source,
        cache: Cache | None,
        *,
        prepare: Callable[[Any, int], Any] | None,
        counters: Counters,
        wait: Wait,
    ) -> None:
        self._source = source
        self._cache = cache
        self._closed = False
        self._prepare = prepare
        self._counters = counters
        self._wait = wait
        self._refused: tuple[float, AccessDeniedError] | None = None
        self._bodies = threading.Lock()  # of the buffers of all reads
        self._reserving = threading.Lock()

    def look_up(self, reads: Sequence[Read]) -> None:
        """Find out where the cache has these samples. The kernel begins to read them from the disk."""
        if self._cache is None or not reads:
            return
        keys = [self._source.cache_key(read.index) for read in reads]
        for read, key, entry in zip(reads, keys, self._cache._find_all(keys), strict=True):
            read.key, read.entry = key, entry
            if entry is not None:
                self._cache._will_need(entry)

    def plan(self, reads: Sequence[Read]) -> list[Request]:
        """Return the requests that read these samples from the store."""
        known = {read.index: read for read in reads}
        groups = self._source.groups(list(known))
        return [request for group in groups for request in self._plan([known[index] for index in group])]

    def _plan(self, group: list[Read]) -> list[Request]:
        if len(group) > 1:
            return [Request.of_group(group)]
        (read,) = group
        ranges = self._source.ranges(read.index)
        read.ranged, read.missing = bool(ranges), len(ranges)
        return [Request(read, start, stop) for start, stop in ranges or [(0, read.size)]]

    def read_now(self, read: Read) -> Any:
        """Return the sample, by this thread: from the cache where that has a good copy, else the store."""
        if self._cache is not None and read.key is not None and read.entry is not None:
            with self._counters.timed("cache"):
                payload = self._cache.read(read.key, read.entry)
            if payload is not None:
                return payload
            read.missed = True  # the cache has counted it
        with self._counters.timed("get"):
            return self.read(read, 0, read.size)

    def read(self, read: Read, start: int, stop: int) -> Any:
        """Make one request to the store. Returns the sample once all of it was read, None before."""
        self._count_miss(read)
        key = read.key
        error: ObjectChangedError | None = None
        try:
            body = self._ask(read, start, stop)
        except ObjectChangedError as caught:
            error = caught
        else:
            if body is None:
                return None
            if self._source.fresh(read.index) is read.fresh:
                return self._keep(read, body, key)
        return self._read_changed(read, error)

    def read_group(self, reads: list[Read]) -> list[Any]:
        """Read a group of samples by one request. Returns each sample, or the error of making it."""
        for read in reads:
            self._count_miss(read)
        indices = [read.index for read in reads]
        bodies = self._request(reads[0], lambda: self._source.read_group(indices, self._wait))
        return [self._kept_or_error(read, body) for read, body in zip(reads, bodies, strict=True)]

    def _kept_or_error(self, read: Read, body: Any) -> Any:
        try:
            return self._keep(read, body, read.key)
        except Exception as error:
            return error

    def reserve(self, read: Read) -> bool:
        """Take the in-flight lock of a sample. False: another run is reading it into the same cache."""
        if self._cache is None or read.key is None or read.locked or read.overdue:
            return True
        with self._reserving:  # the threads that read its ranges take it once
            read.locked = read.locked or self._cache._lock_inflight(read.key)
        return read.locked

    def release(self, read: Read) -> None:
        """Give the in-flight lock back of a sample that will not be written."""
        if self._cache is not None and read.key is not None and read.locked:
            read.locked = False
            self._cache._unlock_inflight(read.key)

    def found_meanwhile(self, reads: Sequence[Read]) -> list[Any]:
        """Return the samples as another run has written them, None for each that it has not yet."""
        assert self._cache is not None
        keys = [read.key or b"" for read in reads]
        payloads = []
        for read, key, entry in zip(reads, keys, self._cache._find_all(keys), strict=True):
            payloads.append(None if entry is None else self._cache.read(key, entry))
            read.missed = read.missed or (entry is not None and payloads[-1] is None)  # it was counted
        return payloads

    def drain_counters(self) -> None:
        """Add the cache's counters to these."""
        if self._cache is not None:
            self._counters.merge(self._cache.counters.drain())

    def close(self) -> None:
        """Write out the cache and close it. A request that ends later writes nothing: that would open it."""
        self._closed = True
        if self._cache is not None:
            self._cache.close()

    def _read_changed(self, read: Read, error: ObjectChangedError | None) -> Any:
        """Read the new version of an object.

        Args:
            error: says that the version that was asked for is gone; None: another read has found that, after
                this one was planned.
        """
        while True:
            if error is not None:
                self._refresh(read, error)
            fresh = self._source.fresh(read.index)
            key = None
            if self._cache is not None:
                self.release(read)
                key = read.key = self._source.cache_key(read.index)
                (payload,) = self.found_meanwhile([read])
                if payload is not None:
                    return payload
            error = None
            try:
                read.ranged = False
                body = self._ask_whole(read)
            except ObjectChangedError as another:
                error = another
            else:
                if self._source.fresh(read.index) is fresh:
                    return self._keep(read, body, key)

    def _count_miss(self, read: Read) -> None:
        if self._cache is not None and read.key is not None and not read.missed:
            read.missed = True
            self._counters.add("cache.misses")

    def _keep(self, read: Read, body: Any, key: bytes | None) -> Any:
        """Return the result of `get` for the bytes of a sample; the cache keeps the same payload.

        Args:
            key: of the version that these bytes are of. `read.key` may be that of a newer one by now.
        """
        self._counters.add("get.samples")
        self._counters.add("get.bytes", len(body))
        payload = body if self._prepare is None else self._prepare(body, read.index)
        if self._closed and self._cache is not None:
            self._cache.close()  # a mode that chooses has just asked it for room, which opened it again
        elif self._cache is not None and key is not None:
            if isinstance(payload, Unindexed):
                # Not with `read`, which holds the payload: that would be a circle.
                payload.bind(partial(self._write, key), partial(self._cache._unlock_inflight, key))
            else:
                self._cache.write(key, payload)
        return payload

    def _write(self, key: bytes, file: Unindexed) -> None:
        assert self._cache is not None
        if self._closed:
            return
        self._cache.write(key, file.data, head=file.index() if self._cache._keeps(file.nbytes) else b"")

    # --- the requests to the store

    def _ask(self, read: Read, start: int, stop: int) -> Any:
        """Make one of the requests that were planned.

        Returns:
            The body once all of it was read; None while ranges are missing, or where the read has failed or
            started again in another range.

        Raises:
            ObjectChangedError, StoreError: of ranges, in the first one that fails.
        """
        if stop - start == read.size:
            return self._ask_whole(read)
        with self._bodies:
            if not read.missing:
                return None
            if read.body is None:
                read.body = bytearray(read.size)
            body = read.body
        try:
            piece = self._request(read, lambda: self._source.read_part(read.index, start, stop, self._wait))
        except BaseException:
            with self._bodies:
                if read.body is not body:
                    return None
                read.body, read.missing = None, 0
            raise
        memoryview(body)[start:stop] = memoryview(piece)
        with self._bodies:
            if read.body is not body:
                return None
            read.missing -= 1
            if read.missing:
                return None
            read.body = None
        return memoryview(body).toreadonly()

    def _ask_whole(self, read: Read) -> Any:
        """Read the sample by one request."""
        return self._request(read, lambda: self._source.read(read.index, self._wait))

    def _refresh(self, read: Read, error: ObjectChangedError) -> None:
        """Use the new version of an object from now on; `error` says that the listed one is gone.

        Raises:
            ObjectChangedError: the dataset does not want new versions, or the object changes again and again.
        """
        read.changes += 1
        if read.changes > _CHANGES:
            raise error
        self._source.refresh(read.index, error, self._wait)
        self._counters.add("get.refreshed")

    def _request(self, read: Read, request: Callable[[], Any]) -> Any:
        """Make a request, unless the store has just refused our credentials, which it would do again."""
        refused = self._refused
        if refused is not None and time.monotonic() - refused[0] < _REFUSED_SECONDS:
            raise AccessDeniedError(refused[1].message, stage="get", key=self._source.name(read.index))
        self._counters.add("get.requests")
        try:
            return request()
        except AccessDeniedError as error:
            if error.retry == "renewed":
                self._refused = time.monotonic(), error
            raise
