"""Reading from the store: a sample by one request, or a large object range by range.

Several threads read the ranges of one object side by side, into one buffer. If one of them finds that the
object has changed, that thread alone reads the new version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastload.errors import AccessDeniedError, ObjectChangedError
from fastload.fetch.source import Source
from fastload.metrics.counters import Counters
from fastload.store.retry import Wait

__all__ = ["RangedRead", "RangedReads"]

_REFUSED_SECONDS = 5.0  # without requests after the store refused our credentials
_CHANGES = 3  # of one object while it is being read, under on_change="refresh"


@dataclass(slots=True, eq=False)
class RangedRead:
    """One sample on its way, as the store sees it."""

    index: int
    size: int
    ranged: bool = False  # it is read by several requests
    missing: int = 0  # ranges that were not read yet
    body: bytearray | None = None  # made when the first range is requested
    changes: int = 0  # how often the object was found changed


class RangedReads:
    """Makes the requests of one process for one source. Threads may share it.

    Args:
        source: how a sample is read.
        counters: get.requests and get.refreshed are added here.
        wait: called before a request is made again; see `Store.read`.
    """

    def __init__(self, source: Source, counters: Counters, wait: Wait) -> None:
        self._source = source
        self._counters = counters
        self._wait = wait
        self._refused: tuple[float, AccessDeniedError] | None = None
        self._lock = threading.Lock()  # of the buffers of all reads

    def plan(self, read: RangedRead) -> list[tuple[int, int]]:
        """The (start, stop) of each request that reads the sample."""
        ranges = self._source.ranges(read.index)
        read.ranged, read.missing = bool(ranges), len(ranges)
        return ranges or [(0, read.size)]

    def read(self, read: RangedRead, start: int, stop: int) -> Any:
        """Make one of the requests that were planned.

        Returns:
            The body once all of it was read; None while ranges are missing, or where the read has failed or
            started again in another range.

        Raises:
            ObjectChangedError, StoreError: of ranges, in the first one that fails.
        """
        if stop - start == read.size:
            return self.read_whole(read)
        with self._lock:
            if not read.missing:
                return None
            if read.body is None:
                read.body = bytearray(read.size)
            body = read.body
        try:
            piece = self._request(read, lambda: self._source.read_part(read.index, start, stop, self._wait))
        except BaseException:
            with self._lock:
                if read.body is not body:
                    return None
                read.body, read.missing = None, 0
            raise
        memoryview(body)[start:stop] = memoryview(piece)
        with self._lock:
            if read.body is not body:
                return None
            read.missing -= 1
            if read.missing:
                return None
            read.body = None
        return memoryview(body).toreadonly()

    def read_whole(self, read: RangedRead) -> Any:
        """Read the sample by one request."""
        return self._request(read, lambda: self._source.read(read.index, self._wait))

    def refresh(self, read: RangedRead, error: ObjectChangedError) -> None:
        """Use the new version of an object from now on; `error` says that the listed one is gone.

        Raises:
            ObjectChangedError: the dataset does not want new versions, or the object changes again and again.
        """
        read.changes += 1
        if read.changes > _CHANGES:
            raise error
        self._source.refresh(read.index, error, self._wait)
        self._counters.add("get.refreshed")

    def _request(self, read: RangedRead, request: Callable[[], Any]) -> Any:
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
