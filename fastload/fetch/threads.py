"""Reader threads: a team that grows as it is needed, and a pool that does tasks in their order."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from fastload.errors import StoreError
from fastload.metrics.counters import Counters

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

    The owner's lock is held in every call but `join`. Not the standard library's executor: its threads are
    joined at the interpreter's exit, however long the store that they wait for takes to answer.

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
        # Event would not do, for its own lock is not.
        lock = threading.RLock()
        self._work = threading.Condition(lock)  # idle threads wait here for tasks
        self._ended = threading.Condition(lock)  # those that pause wait here, as long as the pool is open
        self._threads = ThreadTeam(self._run, "fastload-shard")
        self._closing = False

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Have `work` done by a thread; a future that is cancelled is left out."""
        future: Future[Any] = Future()
        with self._work:
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
        with self._ended:
            if self._ended.wait_for(lambda: self._closing, seconds):
                raise error

    def close(self) -> None:
        """End the threads, after the read that each is busy with.

        An iterator that is collected calls this, in any thread: also in one of these.
        """
        with self._work:
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
        with self._work:
            woken = self._threads.wait(self._work, lambda: self._tasks or self._closing)
            return self._tasks.popleft() if woken and not self._closing else None
