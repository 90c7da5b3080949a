"""The prefetcher: reads the coming samples in the order in which they will be wanted, through the cache.

    request(indices) ─▶ in the cache? ── yes ─▶ the kernel reads it ahead (fadvise)      ─▶ get(index)
                             └────────── no ──▶ queue ─▶ reader threads ─▶ store ─▶ cache ─▶ get(index)

`queues` says which read goes next, `threads` how many are in flight, and `reads` does one of them.

Blocking reads on threads, not an event loop: measured on 138 KB objects they cost the process 0.17 ms of CPU
each beside a decoding thread, asyncio 0.30 ms and uvloop 0.21 ms.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fastload.cache import Cache
from fastload.errors import FastloadError, StoreError
from fastload.fetch import threads
from fastload.fetch.queues import DeferredReads, Read, ReaderQueues, Request
from fastload.fetch.reads import SampleReads, Source
from fastload.fetch.threads import ByteBudget, Hedging, ReadSettings, ThreadTeam, process_share, this_thread
from fastload.metrics.counters import Counters

_CLOSE_SECONDS = 1.0
_LOOK_SECONDS = 0.02


class Outstanding(NamedTuple):
    """The samples that a prefetcher has requested or read.

    Attributes:
        samples: requested and not delivered.
        awaited: those of them that a consumer has begun to wait for.
        requests: in flight.
        bytes: of samples that were read or are being read, and were not delivered.
    """

    samples: int
    awaited: tuple[int, ...]
    requests: int
    bytes: int


class Prefetcher:
    """Reads samples of one dataset in one process. Threads may share it.

    Args:
        source: how a sample is read.
        cache: where to look first and what to fill, or None.
        prepare: (bytes from the store, index) -> what is cached and delivered (None: the bytes themselves).
            Runs in the reader threads.
        counters: get.* and cache.* are added here.
        settings: limits. Default: `SETTINGS`.

    Attributes:
        limiter: says how many requests may be in flight.
    """

    def __init__(
        self,
        source: Source,
        cache: Cache | None,
        *,
        prepare: Callable[[Any, int], Any] | None,
        counters: Counters,
        settings: ReadSettings | None = None,
    ) -> None:
        settings = settings or threads.SETTINGS
        self._source = source
        self._counters = counters
        self.limiter, most_bytes = process_share(source.store, settings)
        self._hedging = Hedging(settings) if source.store.reading.hedge else None
        self._samples = SampleReads(
            source, cache, prepare=prepare, counters=counters, wait=self._before_retry
        )
        # Taken by `with`, see `ThreadTeam`.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # reader threads wait here for requests
        self._done = threading.Condition(self._lock)  # consumers wait here for reads
        self._reads: dict[int, Read] = {}
        self._cancelled: deque[int] = deque()
        self._queues = ReaderQueues(self.limiter, ByteBudget(most_bytes))
        self._threads = ThreadTeam(self._read_on, "fastload-read")
        self._closing = threading.Event()
        self._deferred = DeferredReads(
            self._lock,
            settings.inflight_patience,
            find=self._samples.found_meanwhile,
            reserve=self._samples.reserve,
            complete=self._complete,
            put_back=self._put_back,
        )

    def request(self, indices: Iterable[int], reader: object = None) -> None:
        """Start reading samples that `reader` will get in this order. Does not block."""
        new: dict[int, int] = {}  # how often each is requested
        with self._lock:
            for index in indices:
                known = self._reads.get(index)
                if known is None:
                    new[index] = new.get(index, 0) + 1
                else:
                    known.wanted += 1
        reads = [self._new_read(index) for index in new]
        self._samples.look_up(reads)
        planned = self._samples.plan([read for read in reads if read.entry is None])
        with self._lock:
            for read in reads:
                known = self._reads.setdefault(read.index, read)
                if known is read:
                    read.wanted = new[read.index]
                else:  # another thread has requested it meanwhile
                    known.wanted += new[read.index]
            ours = (request.without(lambda read: self._reads[read.index] is not read) for request in planned)
            requests = [request for request in ours if request is not None]
            self._queues.add(requests, reader)
            if requests:
                self._queues.open_with({read for request in requests for read in request.reads})
            self._wake(len(self._queues))
        self._samples.drain_counters()

    def is_here(self, index: int) -> bool:
        """Return whether `get` will not wait for the store."""
        read = self._reads.get(index)
        return read is not None and (read.done or read.entry is not None)

    def get(self, index: int) -> Any:
        """Return the sample's bytes (or what `prepare` made of them). Blocks until they are there.

        Raises:
            StoreError, DecodeError: reading or preparing this sample failed; the error carries its key.
        """
        turn = this_thread.turn
        if turn is not None:
            read = self._reads.get(index)
            if read is None or not read.done:
                return turn.waiting(lambda: self._get(index))
        return self._get(index)

    def _get(self, index: int) -> Any:
        read = self._reads.get(index)
        if read is None:
            return self._read_now(index)
        self._counters.add("get.ahead")
        if read.entry is not None:
            self._drop(read)
            return self._samples.read_now(read)
        if not read.done:
            self._wait(read)
        self._drop(read)
        if read.error is not None:
            raise read.error
        if read.payload is None:  # it was cancelled before it was read
            return self._read_now(index)
        return read.payload

    def cancel(self, indices: Iterable[int]) -> None:
        """Forget requested samples: `get` will not be called for them.

        Never waits for the lock: an iterator that is collected calls this, in any thread at any moment, also
        in one that holds the lock. A sample that cannot be dropped at once goes when the next request begins,
        or the next sample is delivered.
        """
        self._cancelled.extend(indices)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_cancelled()
            finally:
                self._lock.release()

    def forget_made(self, indices: list[int]) -> tuple[int, set[int]]:
        """Forget samples that were made without `get`, from the cache.

        Returns:
            (how many of them were requested, those that were read from the store: the cache has them since).
        """
        requested = [read for index in indices if (read := self._reads.get(index)) is not None]
        self.cancel([read.index for read in requested])
        return len(requested), {read.index for read in requested if read.missed}

    def outstanding(self) -> Outstanding:
        """Return the samples that were requested and not delivered, and their requests."""
        with self._lock:
            self._drop_cancelled()
            awaited = tuple(index for index, read in self._reads.items() if read.awaited)
            return Outstanding(len(self._reads), awaited, self._queues.requests, self._queues.held)

    def close(self) -> None:
        """End the threads (after the read each is busy with) and write out the cache."""
        with self._lock:
            self._closing.set()
            self._queues.clear()
            self._deferred.close()
            self._work.notify_all()
        self._threads.join(_CLOSE_SECONDS)
        self._deferred.join(_CLOSE_SECONDS)
        with self._lock:
            late = list(self._reads.values())
        for read in late:  # another dataset, or process, may read these now
            self._samples.release(read)
        self._samples.close()

    # --- for the consumer

    def _new_read(self, index: int) -> Read:
        fresh = self._source.fresh(index)  # before its size and key, which may so be newer, but not older
        return Read(index, self._source.size(index), fresh=fresh)

    def _read_now(self, index: int) -> Any:
        """Read a sample that was not announced, in this thread."""
        read = self._new_read(index)
        self._samples.look_up([read])
        return self._samples.read_now(read)

    def _wait(self, read: Read) -> None:
        with self._counters.timed("get"), self._lock:
            opened = self._queues.await_read(read)
            if (not read.started or read.deferred) and read.wanted > 0 and not self._queues.is_next(read):
                self._advance(read)
            self._wake(len(self._queues) if opened else 1)
            looked = time.monotonic()
            while not read.done and read.wanted > 0:
                if self._closing.is_set():
                    raise StoreError("the reader was closed during a wait for its bytes")
                if self._queues and self._queues.requests >= self.limiter.value:
                    self.limiter.grow(looked)
                    self._wake(self.limiter.value - self._queues.requests)
                if self._hedging is not None and self._is_late(read, self._hedging):
                    self._ask_again(read)
                # The threads' own reads have deadlines, and a thread reports whatever ends it.
                self._done.wait(timeout=_LOOK_SECONDS)
                before, looked = looked, time.monotonic()
                if self._queues.grow_bytes(looked - before):
                    self._wake(self.limiter.value - self._queues.requests)

    def _wake(self, threads: int) -> None:
        self._staff()
        self._work.notify(max(0, threads))

    def _advance(self, read: Read) -> None:
        """Let a read that a consumer waits for be next: in its queue it may lie behind later samples."""
        if not self._queues.advance(read) and not read.started:  # Ctrl-C came while it was announced
            self._queues.add(self._samples.plan([read]), None)
            self._queues.advance(read)

    def _is_late(self, read: Read, hedging: Hedging) -> bool:
        by_one_request = read.started and not read.hedged and not read.ranged
        return bool(by_one_request) and hedging.due(time.monotonic() - read.started)

    def _ask_again(self, read: Read) -> None:
        """Ask for a late read once more, before anything else; the first answer counts."""
        read.hedged = True
        read.attempts += 1
        self._counters.add("get.hedged")
        self._queues.put_first(Request(read, 0, read.size))
        self._wake(1)

    def _drop(self, read: Read) -> None:
        with self._lock:
            self._forget(read)
            self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            read = self._reads.get(self._cancelled.popleft())
            if read is not None:
                self._forget(read)

    def _forget(self, read: Read) -> None:
        """Note that one of the readers that requested it does not want it any more."""
        read.wanted -= 1
        if read.wanted != 0:  # still wanted elsewhere, or already released
            return
        self._reads.pop(read.index, None)
        if self._queues.passed(read):
            self._work.notify(len(self._queues))
        if read.done and read.entry is None:
            self._queues.let_go(read)
            if self._queues:
                self._work.notify()

    # --- in the reader threads

    def _staff(self) -> None:
        """Have a thread for every request that may be read now."""
        busy = len(self._threads) - self._threads.idle
        self._threads.grow(min(self.limiter.value, busy + self._queues.may_begin()))

    def _read_on(self) -> None:
        """Read the queue in order, within the limits on requests and bytes: a reader thread."""
        while (request := self._next_request()) is not None:
            self._make_request(request)
            del request  # an idle thread holds no payload

    def _make_request(self, request: Request) -> None:
        if request.others:
            self._make_group(request)
            return
        read, start = request.read, time.monotonic()
        payload, error = None, None
        try:
            if self._samples.reserve(read):
                payload = self._samples.read(read, request.start, request.stop)
            elif (payload := self._samples.found_meanwhile([read])[0]) is None:
                self._defer(request)
                return
        except BaseException as caught:  # a panic of the store's client is no Exception
            error = caught
            self._samples.release(read)
        self._finish(read, payload, error, time.monotonic() - start)

    def _make_group(self, request: Request) -> None:
        """Read a group by one request, without those of it that another run is reading."""
        start = time.monotonic()
        results: dict[Read, Any] = {}  # the sample; its error; None: another run is reading it
        reads = [read for read in request.reads if not read.done]
        try:
            ours = [read for read in reads if self._samples.reserve(read)]
            others = [read for read in reads if read not in ours]
            results.update(zip(others, self._samples.found_meanwhile(others) if others else (), strict=True))
            results.update(zip(ours, self._samples.read_group(ours) if ours else (), strict=True))
        except BaseException as error:
            # Each gets its own: whoever handles one writes the name of a sample into it.
            several = isinstance(error, FastloadError)
            results |= {read: copy.copy(error) if several else error for read in reads if read not in results}
        for read, result in results.items():
            if isinstance(result, BaseException):
                self._samples.release(read)
        self._finish_group(results, time.monotonic() - start)

    def _finish_group(self, results: dict[Read, Any], seconds: float) -> None:
        with self._lock:
            self._request_ended(seconds)
            for read, result in results.items():
                if isinstance(result, BaseException):
                    self._complete(read, None, result)
                elif result is not None:
                    self._complete(read, result, None)
                else:
                    self._queues.passed(read)
                    self._deferred.add(Request(read, 0, read.size))
            self._work.notify()

    def _next_request(self) -> Request | None:
        with self._lock:
            self._drop_cancelled()
            woken = self._threads.wait(
                self._work, lambda: self._closing.is_set() or self._queues.startable() is not None
            )
            if not woken or self._closing.is_set():
                return None
            queue = self._queues.startable()
            assert queue is not None
            return self._queues.begin(queue, time.monotonic())

    def _defer(self, request: Request) -> None:
        """Look for it later; another read may begin in its place."""
        with self._lock:
            self._queues.requests -= 1
            self._queues.passed(request.read)
            self._deferred.add(request)
            self._work.notify()

    def _put_back(self, request: Request) -> None:
        """Queue a request that was deferred; or end its sample, where that is over."""
        read = request.read
        if read.wanted > 0:
            self._queues.put_back(request)
            if read.awaited:  # behind others, which may not start before this one is delivered
                self._queues.advance(read)
            self._wake(1)
        elif not read.done:  # cancelled meanwhile
            self._samples.release(read)
            read.done = True
            self._queues.let_go(read)

    def _finish(self, read: Read, payload: Any, error: BaseException | None, seconds: float) -> None:
        """Note that a request has ended: `payload` is the sample, or None while others are missing."""
        with self._lock:
            self._request_ended(seconds)
            self._complete(read, payload, error)

    def _request_ended(self, seconds: float) -> None:
        self._queues.requests -= 1
        self.limiter.finished(seconds)
        self._deferred.measured(seconds)
        if self._hedging is not None:
            self._hedging.finished(seconds)

    def _complete(self, read: Read, payload: Any, error: BaseException | None) -> None:
        """Do as `_finish` for a read that has no request in flight. The lock is held."""
        if read.done or (payload is None and error is None):
            return
        if error is not None:
            read.attempts -= 1
            if read.attempts:  # the other request for it may still succeed
                return
        read.payload, read.error, read.done = payload, error, True
        if read.wanted <= 0:
            self._queues.let_go(read)
        if read.awaited:
            self._done.notify_all()

    def _before_retry(self, error: StoreError, seconds: float) -> None:
        """Wait before a request is repeated."""
        self._counters.add("get.retries")
        if error.retry == "slower":
            with self._lock:
                self.limiter.slow_down(time.monotonic())
        if self._closing.wait(seconds):
            raise error
