"""Records of streams that wait to be decoded: their payloads, or the futures of these.

They do not wait in the prefetcher with the records that are read at random, for three reasons. A record of a
shard that is not indexed yet has an offset that only the stream knows, and errors name it. Its payload was
counted by the stream's own budget. And it is prepared by as many threads as there are cores, where the
prefetcher has as many as there are requests in flight.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch.utils.data import get_worker_info

from fastload.fetch.threads import ReadPool
from fastload.metrics.counters import Counters
from fastload.shards.stream import StreamedRecord

__all__ = ["PendingRecords"]


class PendingRecords:
    """The pending records of one dataset in one process.

    Args:
        prepare: payload -> what is cached and used; None: the payload itself. Runs in threads, while other
            records are decoded.
        keep: writes a record's prepared payload to the cache.
        counters: get.* are added here.
    """

    def __init__(
        self,
        prepare: Callable[[Any], Any] | None,
        keep: Callable[[StreamedRecord, Any], None],
        counters: Counters,
    ) -> None:
        self._prepare = prepare
        self._keep = keep
        self._counters = counters
        self._values: dict[int, Any] = {}
        self._offsets: dict[int, int] = {}
        self._more: dict[int, int] = {}  # record -> how often it is pending, beyond once
        self._pool: ReadPool | None = None

    def __contains__(self, record: int) -> bool:
        return record in self._values

    def __len__(self) -> int:
        return len(self._values)

    def add(self, record: int, found: StreamedRecord) -> None:
        """Keep a record until `get` and `drop` were called as often as this."""
        if record in self._values:
            self._more[record] = self._more.get(record, 0) + 1
            return
        payload: Any = found.record.payload
        if found.record.error is not None:
            payload = found.record.error
            self._counters.add("bad.bytes", found.record.size)
        elif not found.ready:
            self._counters.add("get.samples")
            if self._prepare is not None:
                payload = self._threads().submit(functools.partial(self._ready, found))
            else:
                self._keep(found, payload)
        self._values[record] = payload
        self._offsets[record] = found.record.offset

    def offset(self, record: int) -> int:
        """The record's offset in its shard."""
        return self._offsets[record]

    def get(self, record: int) -> Any:
        """The payload of a record, which is then pending once less.

        Raises:
            DecodeError: the record is damaged, or cannot be prepared.
        """
        value = self.drop(record)
        if isinstance(value, Future):
            value = self._threads().wait(value)
        if isinstance(value, Exception):
            raise value
        return value

    def drop(self, record: int) -> Any:
        """Let go of a record, once; returns its payload, the future of that, or its error."""
        if record not in self._more:
            del self._offsets[record]
            return self._values.pop(record)
        self._more[record] -= 1
        if not self._more[record]:
            del self._more[record]
        return self._values[record]

    def settle(self) -> None:
        """Wait until all payloads were prepared and written to the cache."""
        for value in list(self._values.values()):
            if isinstance(value, Future):
                value.exception()

    def close(self) -> None:
        """Let go of all records, and end the threads."""
        self._values.clear()
        self._offsets.clear()
        self._more.clear()
        if self._pool is not None:
            self._pool.close()

    def _ready(self, found: StreamedRecord) -> Any:
        assert self._prepare is not None
        payload = self._prepare(found.record.payload)
        self._keep(found, payload)
        return payload

    def _threads(self) -> ReadPool:
        if self._pool is None:
            worker = get_worker_info()
            processes = 1 if worker is None else worker.num_workers
            self._pool = ReadPool(max(1, (os.cpu_count() or 1) // processes), self._counters)
        return self._pool
