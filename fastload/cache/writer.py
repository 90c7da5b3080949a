"""The writer: a thread that takes payloads from a bounded queue and appends them to this process's segment.

    put ──▶ queue (bounded in bytes; full: drop) ──▶ reserve room ──▶ append bytes ──▶ publish entries

Records go out in batches: one reservation, one pwritev and one publish each, because every call that lets
go of the GIL may wait 5 ms to get it back from a busy trainer. A full disk costs some seconds of batches: by
then, the file of another program may be gone. Any other error ends the writer and stays in `error`; the cache
then passes through.

Filling must never slow training, so `put` waits for nothing unless it is told to, and a full queue drops.

Of the processes that share a cache directory, one at a time reads an object: the one with its in-flight lock,
which the writer ends. A lock is on one byte of a file `claims*` in the cache directory: the byte that the
object's key names. The kernel keeps it (a file of 0 bytes can be locked anywhere), and frees it when the
process ends, however it ends: nothing expires, is refreshed or cleaned up. The locks belong to the open file
(`F_OFD_SETLK`), not to the process: `lockf`'s would all be gone once any copy of the file is closed. A lock
is advice: a process that does not get it waits a little for the other's result, then reads by itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import lmdb

from fastload.cache.index import Index, SegmentGoneError
from fastload.cache.segment import Entry, SegmentFiles, SegmentWriter, new_segment_name, record_size
from fastload.metrics.counters import Counters
from fastload.metrics.machine import payload_limit

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
        files: SegmentFiles,
        inflight: InflightLocks,
        segments_fd: int,
        first_job: Callable[[threading.Event], None] | None = None,
    ) -> None:
        self._index = index
        self._files = files
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
        """Bytes on disk of the records for which the index has not been asked to reserve room."""
        return self._queue.waiting_bytes

    @property
    def has_first_job(self) -> bool:
        """Whether the first job is not done yet, and may be: nothing is written before."""
        return self._first_job is not None and self.error is None

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
        """Start the thread before anything is queued: `close` then finds who has to write it."""
        if self._runs() or self._queue.has_ended:
            return
        with self._starting:
            if not self._runs():
                thread = threading.Thread(target=self._run, name="fastload-cache-writer", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # this process may not have more threads
                    self._fail(error, [])
                else:
                    self._thread = thread

    def _runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued before is written and indexed, or was dropped by a failure."""
        return self._queue.flush(timeout)

    def close(self, timeout: float) -> bool:
        """Write out what is queued and end the thread. False if it did not end in time: it goes on then.

        A first job that is not done is told to stop.
        """
        deadline = time.monotonic() + timeout
        self._stopping.set()
        self.flush(0.8 * timeout)
        self._queue.close()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._runs():
            self._queue.reopen()
            return False
        return True

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def forget(self) -> None:
        """Close the inherited segment, in a forked child, where the thread does not exist."""
        if self._segment is not None:
            self._segment.close()

    # -- the thread

    def _run(self) -> None:
        batch: Batch | None = None
        try:
            if self._first_job is not None:
                self._first_job(self._stopping)
                self._first_job = None
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
                batch = None  # an idle thread holds no payloads
        except BaseException as error:  # reported by the cache at its next call
            self._fail(error, batch.items if batch is not None else [])
        finally:
            self._leave_segment()

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
        self._check_disk(sum(record_size(item.length) for item in items))
        if self._segment is None or self._segment.size >= SEGMENT_BYTES:
            self._open_segment()
        wanted = [(item.key, record_size(item.length), item.limit) for item in items]
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
        records = [(item.key, (item.head, item.payload), item.checksum) for item in items]
        try:
            entries = self._segment.append(self._number, records)
        except OSError:  # the segment ends where it ended before
            self._index.remove_segments([], sum(record_size(item.length) for item in items))
            raise
        # Bytes first, index after: an entry never promises what a kill could have prevented.
        self._index.publish(self._number, [(i.key, e) for i, e in zip(items, entries, strict=True)])
        if self._segment.is_unlinked() and self._index.has_segment(self._number):
            raise FileNotFoundError(errno.ENOENT, "the cache directory was removed while in use")
        for item in items:
            item.counters.add("cache.writes")
            item.counters.add("cache.write_bytes", item.length)

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
        # Here a process notices that the cache was cleared: deleted files fill the disk while they are open.
        self._files.keep(self._index.segments().keys())

    def _leave_segment(self) -> None:
        if self._segment is not None:
            with contextlib.suppress(OSError):
                self._segment.close()
            self._segment = None


QUEUE_BYTES = 128 << 20
# Larger batches are cold in the caches of the processor when they are copied: 16 MB took twice the time of 2.
BATCH_BYTES = 2 << 20
BATCH_RECORDS = 256  # four buffers each; one pwritev takes 1,024
LINGER = 0.05  # seconds that a batch waits for more records


class Item(NamedTuple):
    """A record to write. `limit` is the cache's size_limit in bytes, `counters` are its counters.

    Its payload is in two parts, of which `head` may be empty: to join them would be a copy.
    """

    key: bytes
    payload: memoryview
    checksum: int
    limit: int | None
    counters: Counters
    head: bytes = b""

    @property
    def length(self) -> int:
        """Bytes of the payload."""
        return len(self.head) + len(self.payload)


class Batch(NamedTuple):
    """Records to write, and bad entries to remove from the index."""

    items: list[Item]
    drops: list[tuple[bytes, Entry]]


class WriteQueue:
    """Records and removals that wait for the writer. Bounded in bytes. Threads may share it.

    Attributes:
        error: the failure that ended it, or None.
        nbytes: bytes on disk of the records that are not yet written.
        waiting_bytes: those of them that no batch has taken. The index counts the others itself: whoever adds
            both would count a batch twice, and find a cache full that has room.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.nbytes = 0
        self.waiting_bytes = 0
        # `with` takes the lock itself: Ctrl-C in the Python code of a condition would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._items: deque[Item] = deque()
        self._drops: list[tuple[bytes, Entry]] = []
        self._keys: set[bytes] = set()
        self._submitted = 0
        self._finished = 0
        self._flushers = 0
        self._closed = False

    @property
    def has_ended(self) -> bool:
        """Whether it takes nothing more: it was closed, or the writer failed."""
        return self.error is not None or self._closed

    def put(self, item: Item, wait: float = 0.0) -> bool:
        """Queue a record. False when it was dropped: full for `wait` seconds, or ended."""
        size = record_size(item.length)
        with self._lock:
            if wait > 0:
                self._changed.wait_for(lambda: self._has_room(size) or self.has_ended, wait)
            if self.has_ended:
                return False
            if item.key in self._keys:
                return True
            if not self._has_room(size):
                return False
            self._items.append(item)
            self._keys.add(item.key)
            self.nbytes += size
            self.waiting_bytes += size
            self._submitted += 1
            if len(self._items) == 1 or self._is_batch():
                self._changed.notify_all()
        return True

    def _has_room(self, size: int) -> bool:
        return not self.nbytes or self.nbytes + size <= min(QUEUE_BYTES, payload_limit())

    def _is_batch(self) -> bool:
        """Return whether what is queued need not wait: it fills a batch, or half of a smaller queue."""
        return len(self._items) >= BATCH_RECORDS or self.nbytes >= min(BATCH_BYTES, payload_limit() // 2)

    def drop(self, key: bytes, entry: Entry) -> None:
        """Queue the removal of a bad entry."""
        with self._lock:
            if not self.has_ended:
                self._drops.append((key, entry))
                self._submitted += 1
                self._changed.notify_all()

    def add_job(self) -> None:
        """Count a job that is not in the queue: `flush` waits for its `finish` too."""
        with self._lock:
            self._submitted += 1

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued before is written and indexed, or was dropped by a failure."""
        with self._lock:
            target = self._submitted
            self._flushers += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: self._finished >= target, timeout)
            finally:
                self._flushers -= 1

    def close(self) -> None:
        """Take nothing more. The writer still gets all that is queued."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def reopen(self) -> None:
        """Take records again, after `close`, for a writer that has not ended."""
        with self._lock:
            self._closed = False

    def take(self) -> Batch | None:
        """Return the next batch, once there is one; None once the queue is closed and empty."""
        with self._lock:
            self._changed.wait_for(lambda: self._items or self._drops or self._closed)
            self._changed.wait_for(lambda: self._is_batch() or self._flushers or self._closed, LINGER)
            items: list[Item] = []
            size = 0
            while self._items and len(items) < BATCH_RECORDS and size < BATCH_BYTES:
                items.append(self._items.popleft())
                size += record_size(items[-1].length)
            self.waiting_bytes -= size
            drops, self._drops = self._drops, []
        return Batch(items, drops) if items or drops else None

    def finish(self, items: Sequence[Item], count: int) -> None:
        """Count these records, and `count` queued things in all, as done."""
        with self._lock:
            self.nbytes -= sum(record_size(item.length) for item in items)
            self._keys.difference_update(item.key for item in items)
            self._finished += count
            self._changed.notify_all()

    def fail(self, error: BaseException, taken: Sequence[Item], lose: Callable[[list[Item]], None]) -> None:
        """End with an error. `lose` gets all records that are not written, before any `flush` returns."""
        with self._lock:
            self.error = error
            lose([*taken, *self._items])
            self._items.clear()
            self._drops.clear()
            self._keys.clear()
            self.nbytes = self.waiting_bytes = 0
            self._finished = self._submitted
            self._changed.notify_all()


_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid: of 64-bit Linux
_TAKEN = (errno.EAGAIN, errno.EACCES)
# The kernel goes through all locks of a file for each new one. Measured for one lock and unlock while
# 2,000 others are held: 28 us with one file, 7 us with eight.
LOCK_FILES = tuple(f"claims{number}" for number in range(8))


class InflightLocks:
    """The in-flight locks of one process in one cache directory. Threads may share it.

    Where a lock cannot be tried (a file system without such locks, no permission), it is granted.
    """

    def __init__(self, root_fd: int) -> None:
        self._guard = threading.RLock()  # a payload that is collected gives its lock back, in any thread
        self._held: set[bytes] = set()
        self._fds: list[int] = []
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            for name in LOCK_FILES:
                self._fds.append(os.open(name, flags, 0o600, dir_fd=root_fd))
        except OSError:
            self.close()

    def lock(self, key: bytes) -> bool:
        """Lock the object with this cache key. False: it is locked, perhaps by another thread here."""
        with self._guard:
            if key in self._held:
                return False
            try:
                self._set(key, fcntl.F_WRLCK)
            except OSError as error:
                if error.errno in _TAKEN:
                    return False
            self._held.add(key)
        return True

    def unlock(self, key: bytes) -> None:
        """Unlock the object; nothing happens where this process has no lock on it."""
        with self._guard:
            if key not in self._held:
                return
            self._held.discard(key)
            with contextlib.suppress(OSError):
                self._set(key, fcntl.F_UNLCK)

    def _set(self, key: bytes, lock_type: int) -> None:
        fds = self._fds
        if not fds:
            return
        # 63 bits of a digest: two objects in flight that share a byte are unlikely, and would only wait for
        # each other.
        byte = int.from_bytes(key[:8], "little") >> 1
        fcntl.fcntl(
            fds[key[8] % len(fds)], fcntl.F_OFD_SETLK, _FLOCK.pack(lock_type, os.SEEK_SET, byte, 1, 0)
        )

    def close(self) -> None:
        """Unlock all. In a forked child this leaves the parent's locks as they are."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
