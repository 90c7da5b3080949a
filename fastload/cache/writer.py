"""The writer: a thread that takes payloads from a bounded queue and appends them to this process's segment.

    put ──▶ queue (bounded in bytes; full: drop) ──▶ claim room ──▶ append bytes ──▶ publish entries

Filling must never slow training, so `put` does not wait for anything. Records go out in batches: one claim,
one pwritev and one publish each, because every call that lets go of the GIL may wait 5 ms to get it back from
a busy trainer. An error ends the writer and stays in `error`; the cache then passes through.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from fastload.cache.index import Index, SegmentGoneError
from fastload.cache.inflight import InflightLocks
from fastload.cache.record import Entry, record_size
from fastload.cache.segment import SegmentWriter, new_segment_name
from fastload.metrics.counters import Counters

__all__ = ["Item", "Writer"]

QUEUE_BYTES = 128 << 20
BATCH_BYTES = 16 << 20
BATCH_RECORDS = 256  # three buffers each; one pwritev takes 1,024
LINGER = 0.05  # seconds that a batch waits for company
SEGMENT_BYTES = 1 << 30
# Left free on the disk, for the LMDB file and for everybody else: 1 % of it, at most this.
RESERVE_BYTES = 256 << 20


class Item(NamedTuple):
    """A record to write. `limit` is the cache's size_limit in bytes, `counters` are its counters."""

    key: bytes
    payload: memoryview
    checksum: int
    limit: int | None
    counters: Counters


class Writer:
    """Owns the segment that this process writes, and drops the claim on each object once that is settled.

    `first_job` runs in the thread before any record.
    """

    def __init__(
        self,
        index: Index,
        claims: InflightLocks,
        segments_fd: int,
        first_job: Callable[[threading.Event], None] | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._index = index
        self._claims = claims
        self._segments_fd = segments_fd
        self._first_job = first_job
        self._segment: SegmentWriter | None = None
        self._number = -1
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._drops: list[tuple[bytes, Entry]] = []
        self._keys: set[bytes] = set()
        self._bytes = 0
        self._submitted = 0
        self._finished = 0
        self._flushers = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if first_job is not None:
            with self._changed:
                self._submitted += 1
                self._start()

    # -- called by any thread

    @property
    def queued_bytes(self) -> int:
        return self._bytes

    def put(self, item: Item, wait: float = 0.0) -> bool:
        """Queue a record. False when dropped: queue full for `wait` seconds, writer failed or closed."""
        size = record_size(len(item.payload))
        with self._changed:
            if wait > 0:
                self._changed.wait_for(lambda: self._has_room(size) or self._has_ended(), wait)
            if self._has_ended():
                return False
            if item.key in self._keys:
                return True
            if not self._has_room(size):
                return False
            wake = not self._queue or self._bytes + size >= BATCH_BYTES
            self._queue.append(item)
            self._keys.add(item.key)
            self._bytes += size
            self._submit(wake)
        return True

    def _has_room(self, size: int) -> bool:
        return not self._bytes or self._bytes + size <= QUEUE_BYTES

    def _has_ended(self) -> bool:
        return self.error is not None or self._stopping.is_set()

    def drop(self, key: bytes, entry: Entry) -> None:
        """Queue the removal of a bad entry."""
        with self._changed:
            if not self._has_ended():
                self._drops.append((key, entry))
                self._submit(wake=True)

    def _submit(self, wake: bool) -> None:
        self._submitted += 1
        self._start()
        if wake:
            self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fastload-cache-writer", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # this process may not have more threads
                self._thread = None
                self._fail(error, [])

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued before is written and indexed, or dropped by a failure."""
        with self._changed:
            target = self._submitted
            self._flushers += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: self._finished >= target, timeout)
            finally:
                self._flushers -= 1

    def close(self, timeout: float) -> bool:
        """Write out what is queued and end the thread. False if it did not end in time."""
        deadline = time.monotonic() + timeout
        self.flush(timeout)
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            return not self._thread.is_alive()
        return True

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def forget(self) -> None:
        """After a fork, in the child, where the thread does not exist: close the inherited segment."""
        if self._segment is not None:
            self._segment.close()

    # -- the thread

    def _run(self) -> None:
        items: list[Item] = []
        try:
            if self._first_job is not None:
                self._first_job(self._stopping)
                self._finish([], 1)
            while True:
                items, drops = self._take()
                if not items and not drops:
                    return
                self._store(items, drops)
                self._finish(items, len(items) + len(drops))
        except BaseException as error:  # reported by the cache at its next call
            self._fail(error, items)
        finally:
            if self._segment is not None:
                self._segment.close()

    def _take(self) -> tuple[list[Item], list[tuple[bytes, Entry]]]:
        """The next batch; empty when stopping."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._drops or self._stopping.is_set())
            self._changed.wait_for(
                lambda: self._bytes >= BATCH_BYTES or self._flushers or self._stopping.is_set(), LINGER
            )
            items: list[Item] = []
            size = 0
            while self._queue and len(items) < BATCH_RECORDS and size < BATCH_BYTES:
                items.append(self._queue.popleft())
                size += record_size(len(items[-1].payload))
            drops, self._drops = self._drops, []
        return items, drops

    def _finish(self, items: list[Item], count: int) -> None:
        for item in items:
            self._claims.drop(item.key)
        with self._changed:
            self._bytes -= sum(record_size(len(item.payload)) for item in items)
            self._keys.difference_update(item.key for item in items)
            self._finished += count
            self._changed.notify_all()

    def _fail(self, error: BaseException, items: list[Item]) -> None:
        with self._changed:
            self.error = error
            for item in (*items, *self._queue):
                item.counters.add("cache.dropped")
                self._claims.drop(item.key)
            self._queue.clear()
            self._drops.clear()
            self._keys.clear()
            self._bytes = 0
            self._finished = self._submitted
            self._changed.notify_all()

    def _store(self, items: list[Item], drops: list[tuple[bytes, Entry]]) -> None:
        if drops:
            self._index.drop([(key, entry.pack()) for key, entry in drops])
        if not items:
            return
        try:
            accepted = self._claim(items)
            if accepted:
                self._append(accepted)
        except SegmentGoneError:  # cleared by somebody while we wrote: these records went with the rest
            self._leave_segment()

    def _claim(self, items: list[Item]) -> list[Item]:
        self._check_disk(sum(record_size(len(item.payload)) for item in items))
        if self._segment is None or self._segment.size >= SEGMENT_BYTES:
            self._open_segment()
        wanted = [(item.key, record_size(len(item.payload)), item.limit) for item in items]
        try:
            claims = self._index.claim(self._number, wanted)
        except SegmentGoneError:
            self._open_segment()
            claims = self._index.claim(self._number, wanted)
        for item, claim in zip(items, claims, strict=True):
            if claim == "full":
                item.counters.add("cache.dropped")
        return [item for item, claim in zip(items, claims, strict=True) if claim == "new"]

    def _append(self, items: list[Item]) -> None:
        assert self._segment is not None
        records = [(item.key, item.payload, item.checksum) for item in items]
        entries = self._segment.append(self._number, records)
        # Bytes first, index after: an entry never promises what a kill could have prevented.
        self._index.publish(self._number, [(i.key, e) for i, e in zip(items, entries, strict=True)])
        if self._segment.is_unlinked() and self._index.has_segment(self._number):
            raise FileNotFoundError(errno.ENOENT, "the cache directory was removed while in use")
        for item in items:
            item.counters.add("cache.writes")
            item.counters.add("cache.write_bytes", len(item.payload))

    def _check_disk(self, size: int) -> None:
        disk = os.fstatvfs(self._segments_fd)
        reserve = min(RESERVE_BYTES, disk.f_blocks * disk.f_frsize // 100)
        free = disk.f_bavail * disk.f_frsize
        if free < size + reserve:
            words = (
                f"the disk is full: {free / 1e6:.1f} MB are free, of which {reserve / 1e6:.1f} MB stay free"
            )
            raise OSError(errno.ENOSPC, words)

    def _open_segment(self) -> None:
        self._leave_segment()
        name = new_segment_name()
        # Registered first: who clears the cache meanwhile takes a file without a number for a dead process's.
        self._number = self._index.add_segment(name)
        self._segment = SegmentWriter(self._segments_fd, name)

    def _leave_segment(self) -> None:
        if self._segment is not None:
            with contextlib.suppress(OSError):
                self._segment.close()
            self._segment = None
