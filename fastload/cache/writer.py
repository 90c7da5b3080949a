"""The writer: a thread that takes payloads from a bounded queue and appends them to this process's segment.

    put ──▶ queue (bounded in bytes; full: drop) ──▶ reserve room ──▶ append bytes ──▶ publish entries

Records go out in batches: one reservation, one pwritev and one publish each, because every call that lets
go of the GIL may wait 5 ms to get it back from a busy trainer. A full disk costs some seconds of batches: by
then, the file of another program may be gone. Any other error ends the writer and stays in `error`; the cache
then passes through.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable

import lmdb

from fastload.cache.index import Index, SegmentGoneError
from fastload.cache.inflight import InflightLocks
from fastload.cache.segment import Entry, SegmentWriter, new_segment_name, record_size
from fastload.cache.write_queue import Batch, Item, WriteQueue

__all__ = ["Writer"]

SEGMENT_BYTES = 1 << 30
# Left free on the disk, for the LMDB file and for other users: 1 % of it, at most this.
RESERVE_BYTES = 256 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_SECONDS = 10.0  # that a full disk is left alone


class Writer:
    """Owns the segment that this process writes, and ends the in-flight lock of each object that it settles.

    `first_job` runs in the thread before any record is written.
    """

    def __init__(
        self,
        index: Index,
        inflight: InflightLocks,
        segments_fd: int,
        first_job: Callable[[threading.Event], None] | None = None,
    ) -> None:
        self._index = index
        self._inflight = inflight
        self._segments_fd = segments_fd
        self._first_job = first_job
        self._queue = WriteQueue()
        self._segment: SegmentWriter | None = None
        self._number = -1
        self._full: BaseException | None = None
        self._full_since = 0.0
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        if first_job is not None:
            self._queue.add_job()
            self._start()

    # -- called by any thread

    @property
    def error(self) -> BaseException | None:
        """The failure that ended the writer, or None."""
        return self._queue.error

    @property
    def full(self) -> BaseException | None:
        """The words of a disk that was full some seconds ago, or None."""
        return self._full if time.monotonic() - self._full_since < FULL_SECONDS else None

    @property
    def queued_bytes(self) -> int:
        """Bytes on disk of the records that are not yet written."""
        return self._queue.nbytes

    def put(self, item: Item, wait: float = 0.0) -> bool:
        """Queue a record. False when it was dropped: full for `wait` seconds, failed or closed."""
        if self.full is not None:
            return False
        self._start()
        return self._queue.put(item, wait)

    def drop(self, key: bytes, entry: Entry) -> None:
        """Queue the removal of a bad entry."""
        self._start()
        self._queue.drop(key, entry)

    def _start(self) -> None:
        """Before anything is queued: `close` then finds the thread that has to write it."""
        if self._thread is not None or self._queue.has_ended:
            return
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="fastload-cache-writer", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # this process may not have more threads
                    self._fail(error, [])
                else:
                    self._thread = thread

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued before is written and indexed, or was dropped by a failure."""
        return self._queue.flush(timeout)

    def close(self, timeout: float) -> bool:
        """Write out what is queued and end the thread. False if it did not end in time."""
        deadline = time.monotonic() + timeout
        self.flush(timeout)
        self._stopping.set()
        self._queue.close()
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
        batch: Batch | None = None
        try:
            if self._first_job is not None:
                self._first_job(self._stopping)
                self._queue.finish([], 1)
            while (batch := self._queue.take()) is not None:
                try:
                    self._store(batch.items, batch.drops)
                except (OSError, lmdb.DiskError) as error:
                    if isinstance(error, OSError) and error.errno not in FULL:
                        raise
                    self._full_since, self._full = time.monotonic(), error
                    self._lose(batch.items)
                else:
                    self._unlock(batch.items)
                self._queue.finish(batch.items, len(batch.items) + len(batch.drops))
        except BaseException as error:  # reported by the cache at its next call
            self._fail(error, batch.items if batch is not None else [])
        finally:
            if self._segment is not None:
                self._segment.close()

    def _unlock(self, items: list[Item]) -> None:
        for item in items:
            self._inflight.unlock(item.key)

    def _fail(self, error: BaseException, items: list[Item]) -> None:
        self._queue.fail(error, items, self._lose)

    def _lose(self, items: list[Item]) -> None:
        for item in items:
            item.counters.add("cache.dropped")
        self._unlock(items)

    def _store(self, items: list[Item], drops: list[tuple[bytes, Entry]]) -> None:
        if drops:
            self._index.drop([(key, entry.pack()) for key, entry in drops])
        if not items:
            return
        try:
            accepted = self._reserve(items)
            if accepted:
                self._append(accepted)
        except SegmentGoneError:  # cleared during the write: these records went with the rest
            self._leave_segment()

    def _reserve(self, items: list[Item]) -> list[Item]:
        self._check_disk(sum(record_size(len(item.payload)) for item in items))
        if self._segment is None or self._segment.size >= SEGMENT_BYTES:
            self._open_segment()
        wanted = [(item.key, record_size(len(item.payload)), item.limit) for item in items]
        try:
            answers = self._index.reserve(self._number, wanted)
        except SegmentGoneError:
            self._open_segment()
            answers = self._index.reserve(self._number, wanted)
        for item, answer in zip(items, answers, strict=True):
            if answer == "full":
                item.counters.add("cache.dropped")
        return [item for item, answer in zip(items, answers, strict=True) if answer == "reserved"]

    def _append(self, items: list[Item]) -> None:
        assert self._segment is not None
        records = [(item.key, item.payload, item.checksum) for item in items]
        try:
            entries = self._segment.append(self._number, records)
        except OSError:  # the segment ends where it ended before
            self._index.unreserve(sum(record_size(len(item.payload)) for item in items))
            raise
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
                f"the disk is full: {free / 1e6:.1f} MB are free, and {reserve / 1e6:.1f} MB are kept free"
            )
            raise OSError(errno.ENOSPC, words)

    def _open_segment(self) -> None:
        self._leave_segment()
        name = new_segment_name()
        # Registered first: `clear` takes a file without a number for a dead process's.
        self._number = self._index.add_segment(name)
        self._segment = SegmentWriter(self._segments_fd, name)

    def _leave_segment(self) -> None:
        if self._segment is not None:
            with contextlib.suppress(OSError):
                self._segment.close()
            self._segment = None
