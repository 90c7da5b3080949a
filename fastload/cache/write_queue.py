"""The queue between the threads that read from the store and the one thread that writes to the disk.

Filling must never slow training, so `put` waits for nothing unless it is told to, and a full queue drops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fastload.cache.segment import Entry, record_size
from fastload.metrics.counters import Counters
from fastload.metrics.memory import payload_limit

__all__ = ["Batch", "Item", "WriteQueue"]

QUEUE_BYTES = 128 << 20
# Larger batches are cold in the caches of the processor when they are copied: 16 MB took twice the time of 2.
BATCH_BYTES = 2 << 20
BATCH_RECORDS = 256  # three buffers each; one pwritev takes 1,024
LINGER = 0.05  # seconds that a batch waits for more records


class Item(NamedTuple):
    """A record to write. `limit` is the cache's size_limit in bytes, `counters` are its counters."""

    key: bytes
    payload: memoryview
    checksum: int
    limit: int | None
    counters: Counters


class Batch(NamedTuple):
    """Records to write, and bad entries to remove from the index."""

    items: list[Item]
    drops: list[tuple[bytes, Entry]]


class WriteQueue:
    """Records and removals that wait for the writer. Bounded in bytes. Threads may share it.

    Attributes:
        error: the failure that ended it, or None.
        nbytes: bytes on disk of the records that are not yet written.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.nbytes = 0
        self._changed = threading.Condition()
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
        size = record_size(len(item.payload))
        with self._changed:
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
            self._submitted += 1
            if len(self._items) == 1 or self._is_batch():
                self._changed.notify_all()
        return True

    def _has_room(self, size: int) -> bool:
        return not self.nbytes or self.nbytes + size <= min(QUEUE_BYTES, payload_limit())

    def _is_batch(self) -> bool:
        """Whether what is queued need not wait for more: it fills a batch, or half of a smaller queue."""
        return len(self._items) >= BATCH_RECORDS or self.nbytes >= min(BATCH_BYTES, payload_limit() // 2)

    def drop(self, key: bytes, entry: Entry) -> None:
        """Queue the removal of a bad entry."""
        with self._changed:
            if not self.has_ended:
                self._drops.append((key, entry))
                self._submitted += 1
                self._changed.notify_all()

    def add_job(self) -> None:
        """Count a job that is not in the queue: `flush` waits for its `finish` too."""
        with self._changed:
            self._submitted += 1

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued before is written and indexed, or was dropped by a failure."""
        with self._changed:
            target = self._submitted
            self._flushers += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: self._finished >= target, timeout)
            finally:
                self._flushers -= 1

    def close(self) -> None:
        """Take nothing more. The writer still gets all that is queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self) -> Batch | None:
        """The next batch, once there is one; None once the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._drops or self._closed)
            self._changed.wait_for(lambda: self._is_batch() or self._flushers or self._closed, LINGER)
            items: list[Item] = []
            size = 0
            while self._items and len(items) < BATCH_RECORDS and size < BATCH_BYTES:
                items.append(self._items.popleft())
                size += record_size(len(items[-1].payload))
            drops, self._drops = self._drops, []
        return Batch(items, drops) if items or drops else None

    def finish(self, items: Sequence[Item], count: int) -> None:
        """These records, and `count` queued things in all, are settled."""
        with self._changed:
            self.nbytes -= sum(record_size(len(item.payload)) for item in items)
            self._keys.difference_update(item.key for item in items)
            self._finished += count
            self._changed.notify_all()

    def fail(self, error: BaseException, taken: Sequence[Item], lose: Callable[[list[Item]], None]) -> None:
        """End with an error. `lose` gets all records that are not written, before any `flush` returns."""
        with self._changed:
            self.error = error
            lose([*taken, *self._items])
            self._items.clear()
            self._drops.clear()
            self._keys.clear()
            self.nbytes = 0
            self._finished = self._submitted
            self._changed.notify_all()
