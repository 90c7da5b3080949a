"""Reader threads, and the limits of reading in one process: requests in flight, bytes ahead, second requests.

Requests and bytes begin small and are found by measuring. More requests go out while that makes a consumer
wait less, and fewer when the store asks for it. The bytes double while a consumer waits although nothing but
they hold the next reads back: workers that decode as fast as the store answers keep the first budget, because
more samples would only lie in memory.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from fastload.distributed import local_ranks
from fastload.errors import StoreError
from fastload.images.kernel import threads
from fastload.metrics.counters import Counters
from fastload.metrics.machine import payload_limit
from fastload.store import Store
from fastload.store.node import ProcessLocal


@dataclass(frozen=True)
class ReadSettings:
    """Limits of reading.

    Attributes:
        large_object: bytes from which on an object is read in ranges, side by side.
        range_size: bytes of such a range at most.
        process_requests: in flight at most from one process, for each thread of the kernel that it has. More
            threads cost more than they bring.
        node_requests: in flight at most from all processes of a node, unless the user gives `max_requests`.
        process_bytes: at most, of samples that were read or are being read and were not delivered.
        node_bytes: the same for all processes of a node.
        inflight_patience: seconds that another run gets for an object that it is reading into our cache.
        hedge_after: reads that are measured before one of them is requested a second time.
        hedge_share: of the reads that may be requested a second time, 0 to 1.
    """

    large_object: int = 16 << 20
    range_size: int = 8 << 20
    process_requests: int = 128
    node_requests: int = 1024
    process_bytes: int = 256 << 20
    node_bytes: int = 4 << 30
    inflight_patience: float = 2.0
    hedge_after: int = 64
    hedge_share: float = 0.03


# The settings of prefetchers that are given none of their own.
SETTINGS = ReadSettings()


_FIRST_REQUESTS = 32
_GLANCE = 4  # reads, after which
_FAR = 0.06  # seconds are far away
_HOLD = 5.0  # seconds until growth that did not help is tried again
_CUT = 1.0  # seconds for a cut to show: the refusals of one moment are one
_RECOVERY = 0.5  # seconds per request more after a cut
_QUANTILE = 0.95  # of the latest reads: one that takes longer is late
_REMEMBERED = 512  # reads of which the latency is kept


class ConcurrencyLimiter:
    """The number of requests in flight that this process may have.

    By Little's law the rate is requests in flight / latency. So more requests help as long as the latency
    stays; once it grows as they do, something is full, and more of them only wait in a longer queue.

    * A consumer that waits, while every request allowed is in flight, doubles the limit, once per two rounds
      of `value` reads. If a longer latency cancels most of that, the step is undone for a while. If the first
      answers come from far away, the first step is made at once.
    * A store that asks for fewer requests halves it, at most once a second; from then on it grows by one per
      half second. All processes of a node meet the same store and do the same, so their shares stay fair
      without a word between them, and nothing is left behind by one that dies.

    Args:
        most: never more than this.
        pinned: start at `most` and go below only when the store asks for it.

    Every call gets the time `now` in seconds, by any clock.
    """

    def __init__(self, most: int, *, pinned: bool = False) -> None:
        self.most = most
        self._pinned = pinned
        self.value = most if pinned else min(_FIRST_REQUESTS, most)
        self._reads, self._seconds = 0, 0.0  # since the limit's last change
        self._before: tuple[int, float] | None = None  # the limit before it grew, and its latency
        self._far = self._stepped = False
        self._hold = -1.0  # no growth until then
        self._cut_at: float | None = None
        self._recovered_at = 0.0

    def finished(self, seconds: float) -> None:
        """Note how long a read took."""
        self._reads += 1
        if self._reads == _GLANCE:
            self._far = seconds > _FAR
        # The first round after a step is still that of the step before, or opens connections.
        if self._reads > self.value:
            self._seconds += seconds

    def grow(self, now: float) -> None:
        """Grow where it helps: the consumer waits, and `value` requests are in flight."""
        if self._cut_at is not None:
            self._recover(now)
        elif self._far and not self._pinned and not self._stepped:
            self._stepped = True
            self._set(min(self.most, 2 * self.value))
        elif not self._pinned and self._reads >= 2 * self.value and now >= self._hold:
            self._step(self._seconds / (self._reads - self.value), now)

    def slow_down(self, now: float) -> None:
        """Halve the limit: the store asked for fewer requests."""
        if self._cut_at is None or now - self._cut_at >= _CUT:
            self._cut_at = self._recovered_at = now
            self._set(max(1, self.value // 2))

    def _step(self, latency: float, now: float) -> None:
        before, self._before, self._stepped = self._before, None, True
        if before is not None and latency / before[1] > 1 + 0.7 * (self.value / before[0] - 1):
            self._hold = now + _HOLD
            self._set(before[0])
        elif self.value < self.most:
            self._before = self.value, latency
            self._set(min(self.most, 2 * self.value))

    def _recover(self, now: float) -> None:
        steps = int((now - self._recovered_at) / _RECOVERY)
        if steps:
            self._recovered_at += steps * _RECOVERY
            self._set(min(self.most, self.value + steps))

    def _set(self, value: int) -> None:
        self.value = value
        self._reads, self._seconds = 0, 0.0


class Hedging:
    """Decides which late reads are requested a second time. Arithmetic on what was measured, no clock.

    Only reads that a consumer waits for are worth it.
    """

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._latencies: deque[float] = deque(maxlen=_REMEMBERED)
        self._reads = self._hedged = 0

    def finished(self, seconds: float) -> None:
        """Note how long a read took."""
        self._latencies.append(seconds)
        self._reads += 1

    def due(self, seconds: float) -> bool:
        """Return whether to repeat a request that has taken `seconds` so far. True counts as a repeat."""
        settings = self._settings
        if self._reads < settings.hedge_after or self._hedged + 1 > settings.hedge_share * self._reads:
            return False
        late = sorted(self._latencies)[int(_QUANTILE * len(self._latencies))]
        if seconds <= late:
            return False
        self._hedged += 1
        return True


def process_share(store: Store, settings: ReadSettings | None = None) -> tuple[ConcurrencyLimiter, int]:
    """Return this process's part of the node's limit of requests and bytes in flight.

    Threads of the kernel take samples as fast as so many processes, and far stores need requests as many.
    """
    from torch.utils.data import get_worker_info

    settings = settings or SETTINGS
    worker = get_worker_info()
    processes = local_ranks() * (1 if worker is None else worker.num_workers)
    size = min(settings.process_bytes, settings.node_bytes // processes)
    pinned = store.reading.max_requests
    if pinned is not None:
        return ConcurrencyLimiter(max(1, pinned // processes), pinned=True), size
    wanted = settings.process_requests * max(1, threads())
    requests = min(wanted, settings.node_requests // processes)
    return ConcurrencyLimiter(max(1, requests)), size


_FIRST_BYTES = 8 << 20
_LEAST_READS = 32  # of large samples, that are begun at first
_WAITED = 0.1  # of the time; a consumer that waits less has enough


class ByteBudget:
    """The budget of one prefetcher. Callers hold its lock.

    Args:
        most: never more than this, nor more than this prefetcher's part of the process's limit.
        clock: in seconds.

    Attributes:
        value: as it was when it was last asked for.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._wanted = self.value = min(most, _FIRST_BYTES)
        self._passed, self._waited = 0, 0.0  # bytes delivered, seconds waited for since it was set
        self._since = clock()
        _budgets.get().add(self)

    def bytes(self, size: int) -> int:
        """Return the bytes that may be held, where the next sample has this size."""
        share = payload_limit() // max(1, len(_budgets.get()))
        self.value = min(self._most, share, max(self._wanted, _LEAST_READS * size))
        return self.value

    def delivered(self, size: int) -> None:
        """Note that a sample has left."""
        self._passed += size

    def grow(self, size: int, seconds: float) -> bool:
        """Grow where a consumer has waited for a sample of this size, which the budget holds back.

        Each step has to show its effect first: at the start of an epoch, every sample is waited for.

        Args:
            seconds: the wait since the last call.

        Returns:
            Whether the budget has grown.
        """
        self._waited += seconds
        before, now = self.bytes(size), self._clock()
        if self._passed < before:
            return False
        is_short = self._waited > _WAITED * (now - self._since)
        self._passed, self._waited, self._since = 0, 0.0, now
        if is_short:
            self._wanted = max(self._wanted, min(self._most, 2 * before))
        return self.bytes(size) > before


_budgets: ProcessLocal[weakref.WeakSet[ByteBudget]] = ProcessLocal(weakref.WeakSet)


def budgeted_bytes() -> int:
    """Return the sum of the budgets of this process's prefetchers, never above the process's limit."""
    return min(payload_limit(), sum(budget.value for budget in list(_budgets.get())))


IDLE_SECONDS = 10.0  # after which a thread ends: what nobody closed is collected when its last one has
_CLOSE_SECONDS = 1.0
_LOOK_SECONDS = 0.5


class Turn(Protocol):
    """What a thread gives away while it waits for a read, see `fastload.workers.sample_threads`."""

    def waiting(self, wait: Callable[[], Any]) -> Any:
        """Return the result of `wait`, without the turn."""


class _ThisThread(threading.local):
    turn: Turn | None = None


this_thread = _ThisThread()

Task = tuple["Future[Any]", Callable[[], Any]]


class ThreadTeam:
    """Daemon threads that do the same work, started as they are needed.

    The owner's lock is held in every call but `join`. `with` takes that lock, not a condition of it, whose
    `__exit__` is Python code: Ctrl-C there would leave it locked.

    Not the standard library's executor: its threads are joined at the interpreter's exit, however long the
    store that they wait for takes to answer.

    Args:
        run: what each of them runs; it ends when `wait` returns False.
        name: of the threads.

    Attributes:
        idle: how many of them are in `wait`.
    """

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._run = run
        self._name = name
        self._threads: list[threading.Thread] = []
        self.idle = 0

    def __len__(self) -> int:
        return len(self._threads)

    def grow(self, count: int) -> None:
        """Have at least `count` threads, or as many as this process may have: fewer do as well.

        Raises:
            RuntimeError: there is none, and none can be started.
        """
        while len(self._threads) < count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def wait(self, condition: threading.Condition, ready: Callable[[], Any]) -> bool:
        """Wait for work, in one of the threads. Returns False after a while: the thread must end."""
        self.idle += 1
        woken = condition.wait_for(ready, IDLE_SECONDS)
        self.idle -= 1
        if not woken:
            self._threads.remove(threading.current_thread())
        return bool(woken)

    def join(self, seconds: float) -> None:
        """Wait until they have ended, but not for the one that calls this."""
        deadline = time.monotonic() + seconds
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(timeout=max(0.0, deadline - time.monotonic()))


class ReadPool:
    """Tasks done by at most `most` threads in the order of their submission, with results by future.

    Used by shard readers, which wait for one piece after the other.

    Args:
        most: number of threads.
        counters: get.* of the tasks, and of who reads by them, are added here.
    """

    def __init__(self, most: int, counters: Counters) -> None:
        self._most = most
        self.counters = counters
        self._tasks: deque[Task] = deque()
        # Reentrant: `close` is called wherever garbage is collected, also by a thread that holds this. An
        # Event would not do, for its own lock is not. `with`: see `ThreadTeam`.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # idle threads wait here for tasks
        self._ended = threading.Condition(self._lock)  # those that pause wait here while it is open
        self._threads = ThreadTeam(self._run, "fastload-shard")
        self._closing = False

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Have `work` done by a thread; a future that is cancelled is left out."""
        future: Future[Any] = Future()
        with self._lock:
            if len(self._tasks) >= self._threads.idle:
                self._threads.grow(min(self._most, len(self._threads) + 1))
            self._tasks.append((future, work))
            self._work.notify()
        return future

    def wait(self, future: Future[Any]) -> Any:
        """Return the task's result, or raise its error. Time spent here counts as `get.seconds`.

        Raises:
            StoreError: the pool was closed.
        """
        start = time.perf_counter()
        try:
            while True:
                try:
                    error = future.exception(_LOOK_SECONDS)
                    break
                except concurrent.futures.TimeoutError:
                    if self._closing:
                        raise StoreError("the reader was closed during a wait for its bytes") from None
            if error is not None:
                raise error
            return future.result()
        finally:
            self.counters.add("get.seconds", time.perf_counter() - start)

    def pause(self, error: StoreError, seconds: float) -> None:
        """Wait before a request is repeated: `wait` of the store's reads."""
        self.counters.add("get.retries")
        with self._lock:
            if self._ended.wait_for(lambda: self._closing, seconds):
                raise error

    def close(self) -> None:
        """End the threads, after the read that each is busy with.

        An iterator that is collected calls this, in any thread: also in one of these.
        """
        with self._lock:
            self._closing = True
            self._tasks.clear()
            self._work.notify_all()
            self._ended.notify_all()
        self._threads.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            future, work = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # raised again where the result is waited for
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, work, task  # an idle thread holds no bytes

    def _next(self) -> Task | None:
        with self._lock:
            woken = self._threads.wait(self._work, lambda: self._tasks or self._closing)
            return self._tasks.popleft() if woken and not self._closing else None
