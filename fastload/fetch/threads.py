"""Threads that read, for lanes: tasks in the order of their submission, results by future."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fastload.errors import StoreError
from fastload.metrics.counters import Counters

__all__ = ["IDLE_SECONDS", "ReadPool", "add_thread"]

IDLE_SECONDS = 10.0  # after which a thread ends: what nobody closed is collected when its last one has
_CLOSE_SECONDS = 1.0
_LOOK_SECONDS = 0.5

Task = tuple["Future[Any]", Callable[[], Any]]


def add_thread(threads: list[threading.Thread], target: Callable[[], None], name: str) -> bool:
    """Start a daemon thread and list it. False where this process may not have more: fewer do as well.

    Raises:
        RuntimeError: there is none yet.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        if not threads:
            raise
        return False
    threads.append(thread)
    return True


class ReadPool:
    """At most `most` daemon threads, started as they are needed.

    Not the standard library's executor: its threads are joined at the interpreter's exit, however long the
    store that they wait for takes to answer.
    """

    def __init__(self, most: int, counters: Counters) -> None:
        self._most = most
        self._counters = counters
        self._tasks: deque[Task] = deque()
        # Reentrant: `close` is called wherever garbage is collected, also by a thread that holds this. An
        # Event would not do, for its own lock is not.
        lock = threading.RLock()
        self._work = threading.Condition(lock)  # idle threads wait here for tasks
        self._ended = threading.Condition(lock)  # those that pause wait here, as long as the pool is open
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closing = False

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Have `work` done by a thread; a future that is cancelled is left out."""
        future: Future[Any] = Future()
        with self._work:
            if len(self._tasks) >= self._idle and len(self._threads) < self._most:
                add_thread(self._threads, self._run, "fastload-lane")
            self._tasks.append((future, work))
            self._work.notify()
        return future

    def wait(self, future: Future[Any]) -> Any:
        """What the task returned, or raise what it raised. Time spent here counts as `get.seconds`.

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
                        raise StoreError("the reader was closed while its bytes were waited for") from None
            if error is not None:
                raise error
            return future.result()
        finally:
            self._counters.add("get.seconds", time.perf_counter() - start)

    def pause(self, error: StoreError, seconds: float) -> None:
        """Before a request is made again: `wait` of the store's reads."""
        self._counters.add("get.retries")
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
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=max(0.0, deadline - time.monotonic()))

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
            del future, work, task  # the bytes belong to the lane alone

    def _next(self) -> Task | None:
        with self._work:
            self._idle += 1
            woken = self._work.wait_for(lambda: self._tasks or self._closing, IDLE_SECONDS)
            self._idle -= 1
            if not woken:
                self._threads.remove(threading.current_thread())
            return self._tasks.popleft() if woken and not self._closing else None
