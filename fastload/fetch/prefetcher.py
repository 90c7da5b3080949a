"""The fetch window: reads of the coming samples, in the order they will be asked for, through the cache.

    request(indices) ─▶ in the cache? ── yes ─▶ the kernel reads it ahead (fadvise)      ─▶ take(index)
                             └────────── no ──▶ queue ─▶ reader threads ─▶ store ─▶ cache ─▶ take(index)

Blocking reads on threads, not an event loop: measured on 138 KB objects they cost the process 0.17 ms of
CPU each beside a decoding thread, asyncio 0.30 ms and uvloop 0.21 ms. `ConcurrencyLimiter` says how many are
in flight.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from fastload.cache import Cache
from fastload.errors import AccessDeniedError, ObjectChangedError, StoreError
from fastload.fetch import threads
from fastload.fetch.hedge import Hedge
from fastload.fetch.lines import Lines
from fastload.fetch.read import Part, Read
from fastload.fetch.share import process_share
from fastload.fetch.source import Source
from fastload.fetch.threads import add_thread
from fastload.metrics.counters import Counters

__all__ = ["Prefetcher"]

_REFUSED_SECONDS = 5.0  # without requests after the store refused our credentials
_CHANGES = 3  # of one object while it is being read, under on_change="refresh"
_CLOSE_SECONDS = 1.0
_PATIENCE = 2.0  # seconds that another run gets for an object which it is reading into the cache we share
_PUT_OFF = 0.02  # seconds until we look again


class Prefetcher:
    """Reads samples of one dataset in one process: which when, and how many at once.

    Args:
        source: how a sample is read.
        cache: where to look first and what to fill, or None.
        prepare: bytes from the store -> what is cached and handed out (None: the bytes themselves). Runs in
            the reader threads.
        counters: get.* and cache.* are added here.
    """

    def __init__(
        self,
        source: Source,
        cache: Cache | None,
        *,
        prepare: Callable[[Any], Any] | None,
        counters: Counters,
    ) -> None:
        self._source = source
        self._cache = cache
        self._prepare = prepare
        self._counters = counters
        self._refused: tuple[float, AccessDeniedError] | None = None
        self._limit, self._most_bytes = process_share(source.store)
        self._hedge = Hedge() if source.store.reading.hedge else None
        lock = threading.Lock()
        self._work = threading.Condition(lock)  # reader threads wait here for parts
        self._done = threading.Condition(lock)  # consumers wait here for reads
        self._reads: dict[int, Read] = {}
        self._cancelled: deque[int] = deque()
        self._lines = Lines()
        self._threads: list[threading.Thread] = []
        self._idle = self._busy = 0
        self._claiming = threading.Lock()
        self._closing = threading.Event()

    @property
    def _held(self) -> int:
        return self._lines.held

    def request(self, indices: Iterable[int], reader: object = None) -> None:
        """Start reading samples that `reader` will take in this order. Does not block."""
        for index in indices:
            with self._work:
                known = self._reads.get(index)
                if known is not None:
                    known.wanted += 1
                    continue
            read = self._new_read(index)
            parts = self._parts(read) if read.entry is None else []
            with self._work:
                self._reads[index] = read
                self._lines.add(parts, reader)
        with self._work:
            self._staff()
            self._work.notify(len(self._lines))
        if self._cache is not None:
            self._counters.merge(self._cache.counters.drain())

    def take(self, index: int) -> Any:
        """The sample's bytes (or what `prepare` made of them). Blocks until they are there.

        Raises:
            StoreError, DecodeError: reading or preparing this sample failed; the error carries its key.
        """
        read = self._reads.get(index)
        if read is None:
            return self._take_now(self._new_read(index))
        self._counters.add("get.ahead")
        if read.entry is not None:
            self._drop(read)
            return self._take_now(read)
        if not read.done:
            self._wait(read)
        self._drop(read)
        if read.error is not None:
            raise read.error
        if read.payload is None:  # who had requested it has cancelled it, before it was read
            return self._take_now(self._new_read(index))
        return read.payload

    def cancel(self, indices: Iterable[int]) -> None:
        """Requested samples that will not be taken.

        Never waits for the lock: an iterator that is collected calls this, in any thread at any moment, also
        in one that holds the lock. What cannot be dropped at once goes when the next part is begun or taken.
        """
        self._cancelled.extend(indices)
        if self._work.acquire(blocking=False):
            try:
                self._drop_cancelled()
            finally:
                self._work.release()

    def close(self) -> None:
        """End the threads (after the read each is busy with) and write out the cache."""
        with self._work:
            self._closing.set()
            self._lines.clear()
            self._work.notify_all()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if self._cache is not None:
            self._cache.close()

    # --- for the consumer

    def _new_read(self, index: int) -> Read:
        read = Read(index, self._source.size(index))
        if self._cache is not None:
            read.key = self._source.cache_key(index)
            read.entry = self._cache.lookup(read.key)
            if read.entry is not None:
                self._cache.will_need(read.entry)
        return read

    def _parts(self, read: Read) -> list[Part]:
        ranges = self._source.ranges(read.index)
        if not ranges:
            return [Part(read, 0, read.size)]
        read.missing = len(ranges)
        read.body = bytearray()  # made when the first part is read
        return [Part(read, start, stop) for start, stop in ranges]

    def _wait(self, read: Read) -> None:
        with self._counters.timed("get"), self._done:
            read.awaited = True
            if not read.started and read.wanted > 0 and not self._lines.is_next(read):
                self._advance(read)
            self._staff()
            self._work.notify()
            while not read.done and read.wanted > 0:
                if self._closing.is_set():
                    raise StoreError("the reader was closed while its bytes were waited for")
                if self._lines and self._busy >= self._limit.value:
                    self._limit.grow(time.monotonic())
                    self._staff()
                    self._work.notify(max(0, self._limit.value - self._busy))
                if read.put_off and not self._lines.is_next(read):
                    # It is behind others again, which may not start before this one is taken.
                    self._advance(read)
                    self._staff()
                    self._work.notify()
                if self._hedge is not None and self._late(read):
                    self._second(read)
                # The threads' own reads have deadlines, and a thread reports whatever ends it.
                self._done.wait(timeout=0.02)

    def _advance(self, read: Read) -> None:
        """Read next what is waited for now: its place may lie behind reads that are taken after it."""
        if not self._lines.advance(read) and not read.started:  # Ctrl-C came while it was announced
            self._lines.add(self._parts(read), None)
            self._lines.advance(read)

    def _late(self, read: Read) -> bool:
        assert self._hedge is not None
        once = read.started and not read.hedged and read.body is None
        return bool(once) and self._hedge.due(time.monotonic() - read.started)

    def _second(self, read: Read) -> None:
        """Ask for a late read once more, before anything else; the first answer counts."""
        read.hedged = True
        read.missing += 1
        self._counters.add("get.hedged")
        self._lines.again(Part(read, 0, read.size), first=True)
        self._staff()
        self._work.notify()

    def _drop(self, read: Read) -> None:
        with self._work:
            self._forget(read)
            self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            read = self._reads.get(self._cancelled.popleft())
            if read is not None:
                self._forget(read)

    def _forget(self, read: Read) -> None:
        """One who requested it does not want it any more."""
        read.wanted -= 1
        if read.wanted != 0:  # others do, or nobody did before
            return
        self._reads.pop(read.index, None)
        if read.done and read.entry is None:
            self._lines.let_go(read)
            if self._lines:
                self._work.notify()

    def _take_now(self, read: Read) -> Any:
        """Read one sample here: from the cache where it has a good copy, else from the store."""
        if read.entry is not None and self._cache is not None and read.key is not None:
            with self._counters.timed("cache"):
                payload = self._cache.read(read.key, read.entry)
            if payload is not None:
                return payload
        with self._counters.timed("get"):
            return self._fetch(read)

    # --- in the reader threads

    def _staff(self) -> None:
        """Have a thread for every part that may be read now."""
        wanted = min(self._limit.value, len(self._threads) - self._idle + len(self._lines))
        while len(self._threads) < wanted and add_thread(self._threads, self._read_on, "fastload-read"):
            pass

    def _read_on(self) -> None:
        """A reader thread: reads what is queued, in order, within the bounds on requests and bytes."""
        while (part := self._next_part()) is not None:
            start = time.monotonic()
            payload, error = None, None
            try:
                if not part.read.claimed and not self._claim(part.read):
                    payload = self._read_by_others(part.read)
                    if payload is None:
                        self._put_off(part)
                        continue
                elif part.whole:
                    payload = self._fetch(part.read)
                else:
                    payload = self._fetch_part(part)
            except BaseException as caught:  # a panic of the store's client is no Exception
                error = caught
                self._unclaim(part.read)
            self._finish(part.read, payload, error, time.monotonic() - start)

    def _claim(self, read: Read) -> bool:
        """Whether to read an object from the store: not while another run reads it into the same cache."""
        if self._cache is None or read.key is None:
            return True
        if read.put_off and time.monotonic() - read.put_off > _PATIENCE:
            return self._cache.lookup(read.key) is None
        with self._claiming:  # the threads that read its parts claim it once
            read.claimed = read.claimed or self._cache.lock_inflight(read.key)
        return read.claimed

    def _unclaim(self, read: Read) -> None:
        if self._cache is not None and read.key is not None and read.claimed:
            read.claimed = False
            self._cache.unlock_inflight(read.key)

    def _read_by_others(self, read: Read) -> Any:
        assert self._cache is not None and read.key is not None
        entry = self._cache.lookup(read.key)
        return None if entry is None else self._cache.read(read.key, entry)

    def _put_off(self, part: Part) -> None:
        """Look again when the rest of the queue is under way, but not at once."""
        if part.read.put_off:
            self._closing.wait(_PUT_OFF)
        else:
            part.read.put_off = time.monotonic()
        with self._work:
            self._busy -= 1
            if part.read.wanted > 0:
                self._lines.again(part)
                self._work.notify()
            elif not part.read.done:  # cancelled meanwhile
                part.read.done = True
                self._lines.let_go(part.read)

    def _next_part(self) -> Part | None:
        with self._work:
            self._idle += 1
            self._drop_cancelled()
            woken = self._work.wait_for(
                lambda: self._closing.is_set() or self._may_start(), threads.IDLE_SECONDS
            )
            self._idle -= 1
            if not woken:
                self._threads.remove(threading.current_thread())
            if not woken or self._closing.is_set():
                return None
            line = self._lines.startable(self._most_bytes)
            assert line is not None
            part = line.parts.popleft()
            self._busy += 1
            if not part.read.started:
                self._lines.hold(part.read)
                part.read.started = time.monotonic()
            return part

    def _may_start(self) -> bool:
        return self._busy < self._limit.value and self._lines.startable(self._most_bytes) is not None

    def _finish(self, read: Read, payload: Any, error: BaseException | None, seconds: float) -> None:
        """A part is done: `payload` is what the sample is, None while other parts are missing."""
        with self._done:
            self._busy -= 1
            self._limit.finished(seconds)
            if self._hedge is not None:
                self._hedge.finished(seconds)
            if read.done or (payload is None and error is None):
                return
            if error is not None and read.body is None:
                read.missing -= 1
                if read.missing > 0:  # of the two requests of a hedged read, the other may still succeed
                    return
            read.payload, read.error, read.done = payload, error, True
            read.body = None
            if read.wanted <= 0:
                self._lines.let_go(read)
            if read.awaited:
                self._done.notify_all()

    def _fetch(self, read: Read) -> Any:
        """Read a whole sample and keep it; see `_keep`."""
        try:
            body = self._ask(read, lambda: self._source.read(read.index, self._pause))
        except ObjectChangedError as error:
            return self._refresh(read, error)
        return self._keep(read, body)

    def _fetch_part(self, part: Part) -> Any:
        """Read a range of a sample; with the last one that is missing, keep the sample."""
        read, start, stop = part
        with self._work:
            if read.body is not None and not read.body:
                read.body = bytearray(read.size)
            body = read.body
        if body is None:  # it failed in another part
            return None
        try:
            piece = self._ask(read, lambda: self._source.read_part(read.index, start, stop, self._pause))
        except StoreError as error:
            with self._work:
                if read.body is not body:  # it failed in another part, or is read anew by that
                    return None
                if not isinstance(error, ObjectChangedError):
                    raise
                read.body, read.missing = None, 1
            return self._refresh(read, error)
        memoryview(body)[start:stop] = memoryview(piece)
        with self._work:
            if read.body is not body:
                return None
            read.missing -= 1
            if read.missing > 0:
                return None
        return self._keep(read, memoryview(body).toreadonly())

    def _refresh(self, read: Read, error: ObjectChangedError) -> Any:
        """Read the version that is there now in place of the listed one, which `error` says is gone."""
        read.changes += 1
        if read.changes > _CHANGES:
            raise error
        self._source.refresh(read.index, error, self._pause)
        self._counters.add("get.refreshed")
        if self._cache is not None:
            self._unclaim(read)
            read.key = self._source.cache_key(read.index)
            payload = self._cache.read(read.key)
            if payload is not None:
                return payload
        return self._fetch(read)

    def _ask(self, read: Read, request: Callable[[], Any]) -> Any:
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

    def _pause(self, error: StoreError, seconds: float) -> None:
        """Before a request is made again."""
        self._counters.add("get.retries")
        if error.retry == "slower":
            with self._work:
                self._limit.slow_down(time.monotonic())
        if self._closing.wait(seconds):
            raise error

    def _keep(self, read: Read, body: Any) -> Any:
        """A sample's bytes -> what is handed out, which goes into the cache too."""
        self._counters.add("get.samples")
        self._counters.add("get.bytes", len(body))
        payload = body if self._prepare is None else self._prepare(body)
        if self._cache is not None and read.key is not None:
            self._cache.write(read.key, payload)
        return payload
