"""`threads=`: the samples of announced index batches, made by threads of this process, handed over in order.

    submit ─▶ queue, in the order of the epoch ─▶ threads: dataset[index] ─▶ result, in that order

Without a seed the threads run freely. With one, a `Turn` lets one of them run the user's code, and another
one while that waits for a read of fastload's. The generators of torch's CPU, Python and numpy belong to the
process: samples that are made at the same time would draw from them in any order, so no seed could say what
each gets. In its turn a sample has them for itself: they are saved when its thread begins to wait for a read,
and are put back when the read has ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fastload.errors import WorkerError
from fastload.fetch.threads import ThreadTeam, this_thread
from fastload.images.rng import SampleSeeds

_LOOK_SECONDS = 0.5
_TURN_SECONDS = 1.0  # that Ctrl-C waits for the sample that a thread is making
_CLOSE_SECONDS = 1.0
_STUCK_SECONDS = 60.0  # that a thread may have the turn without running, while another one needs it


class TurnOver(BaseException):
    """The turn was closed: this thread must end. No `Exception`, which the user's code may catch."""


class GeneratorStates:
    """The states of torch's CPU generator, Python's and numpy's, as they are now; `with` puts them back."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def __enter__(self) -> GeneratorStates:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def changed(self) -> bool:
        """Return whether one of them has drawn, or was seeded, since."""
        state: Any = np.random.get_state()
        name, keys, *rest = state
        return (
            not torch.equal(torch.get_rng_state(), self._torch)
            or random.getstate() != self._python
            or [name, *rest] != [self._numpy[0], *self._numpy[2:]]
            or not np.array_equal(keys, self._numpy[1])
        )

    def restore(self) -> None:
        """Put the generators back into these states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class Turn:
    """What a thread needs to run the user's code; closed once, by the thread that waits for the samples.

    That thread comes first: others may hold the turn for samples of later batches.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # see `SampleThreads`
        self._free = threading.Condition(self._lock)
        self._taken = self._first_waits = self._closed = False
        self._holder = 0  # the thread that has it, if it makes a sample
        self.mine = False  # the thread that waits for the samples has it

    def close(self) -> None:
        """Raise `TurnOver` in each thread that waits for the turn, now or later."""
        with self._lock:
            self._closed = True
            self._free.notify_all()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the turn inside, in a thread that makes a sample.

        Raises:
            TurnOver: the turn was closed.
        """
        self._acquire()
        this_thread.turn = self
        try:
            yield
        finally:
            if this_thread.turn is not None:  # else it was closed while the thread waited
                this_thread.turn = None
                self._release()

    def waiting(self, wait: Callable[[], Any]) -> Any:
        """Return the result of `wait`, during which another thread may have the turn.

        Raises:
            TurnOver: the turn was closed meanwhile.
            WorkerError: the sample that has the turn seems to wait for a lock that this one holds.
            What `wait` raises.
        """
        states = GeneratorStates()
        this_thread.turn = None
        self._release()
        try:
            return wait()
        finally:
            self._acquire(in_the_middle=True)
            this_thread.turn = self
            states.restore()

    def _acquire(self, *, in_the_middle: bool = False) -> None:
        with self._lock:
            ran, since = self._run_time(), time.monotonic()
            while (self._taken or self._first_waits) and not self._closed:
                self._free.wait(_LOOK_SECONDS)
                if not in_the_middle:
                    continue
                before, ran = ran, self._run_time()
                if ran is None or ran != before:
                    since = time.monotonic()
                elif time.monotonic() - since > _STUCK_SECONDS:
                    raise _deadlock()
            if self._closed:
                raise TurnOver
            self._taken, self._holder = True, threading.get_ident()

    def _run_time(self) -> tuple[int, float] | None:
        """Return (thread, seconds of CPU) of the sample that has the turn, to a tenth; None if none has it.

        A thread that waits for a lock uses none. The thread that waits for the samples may keep the turn: a
        trainer may pause.
        """
        if not self._taken or self.mine or not hasattr(time, "pthread_getcpuclockid"):  # macOS has none
            return None
        clock = time.pthread_getcpuclockid(self._holder)  # it lives: it cannot give the turn away meanwhile
        return self._holder, round(time.clock_gettime(clock), 1)

    def _release(self) -> None:
        with self._lock:
            self._taken = self.mine = False
            self._free.notify_all()

    # --- for the thread that waits for the samples, which may be interrupted anywhere

    def acquire(self, timeout: float | None = None) -> None:
        """Take the turn before the other threads, unless it is `mine`; give up after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._first_waits = True
            try:
                while self._taken and not self.mine and (deadline is None or time.monotonic() < deadline):
                    self._free.wait(_LOOK_SECONDS)
                if not self._taken:
                    self._taken = self.mine = True
            finally:
                self._first_waits = False
                self._free.notify_all()

    def release(self) -> None:
        """Give the turn away, if it is `mine`."""
        if self.mine:
            self._release()


def _deadlock() -> WorkerError:
    return WorkerError(
        "a sample cannot go on after a read: another one has its turn, and seems to wait for a lock that "
        "this one holds. With seed= and threads=, hold no lock while __getitem__ reads from a dataset of "
        "fastload (a functools.cached_property of Python 3.11 holds one), or leave out threads="
    )


class Task:
    """One sample on its way, or all of an index batch.

    Args:
        index: what its seed is a function of.
        make: makes it.
        last: of its batch, so that `collate_fn` draws from the state after it.
    """

    __slots__ = ("cancelled", "done", "error", "index", "last", "make", "states", "value")

    def __init__(self, index: Any, make: Callable[[], Any], last: bool) -> None:
        self.index = index
        self.make: Callable[[], Any] | None = make
        self.last = last
        self.done = self.cancelled = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.states: GeneratorStates | None = None


class SampleThreads:
    """Threads that make samples. One thread submits tasks and asks for their results.

    Args:
        count: of threads at most.
        seeds: of the loader's `seed`, or None.
        shares: the thread that submits runs other code too, whose generators must not change. With a seed it
            has the turn whenever it does not wait for a result; else only between `with self` and its end.
    """

    def __init__(self, count: int, seeds: SampleSeeds | None, *, shares: bool) -> None:
        self._count = count
        self._seeds = seeds
        self._turn = None if seeds is None else Turn()
        self._shares = shares
        # Reentrant: an iterator that is collected closes this, in any thread. `with`: see `ThreadTeam`.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._finished = threading.Condition(self._lock)
        self._queue: deque[Task] = deque()
        self._threads = ThreadTeam(self._run, "fastload-sample")
        self._closed = False
        self._owner = os.getpid()
        if shares and self._turn is not None:
            self._turn.acquire()

    def submit(self, index: Any, make: Callable[[], Any], *, last: bool = False) -> Task:
        """Have a sample made after those that were submitted before."""
        task = Task(index, make, last)
        with self._lock:
            self._queue.append(task)
            busy = len(self._threads) - self._threads.idle
            self._threads.grow(min(self._count, busy + len(self._queue)))
            self._work.notify()
        return task

    def result(self, task: Task) -> Any:
        """Return the sample, once it is made. The last one of a batch leaves the generators as its code did.

        Raises:
            BaseException: what making it has raised.
        """
        if not task.done:
            with self._turn_given():
                self._wait(task)
        if task.states is not None:
            task.states.restore()
        value, error = task.value, task.error
        task.value = task.error = None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
        return value

    def cancel(self, tasks: Iterable[Task]) -> None:
        """Drop tasks whose results nobody will ask for: those that a thread is making, once they are made."""
        for task in tasks:
            task.cancelled = True
            task.value = task.error = None

    def close(self) -> None:
        """End the threads, each after the sample that it is making. Harmless if repeated."""
        if self._owner != os.getpid():  # a fork has the locks, but not the threads that may hold them
            return
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._work.notify_all()
        if self._turn is not None:
            self._turn.close()
            self._turn.release()
        self._threads.join(_CLOSE_SECONDS)

    def __enter__(self) -> None:
        """Begin to run code in this thread that uses the generators."""
        if self._turn is not None:
            self._turn.acquire()

    def __exit__(self, *_: object) -> None:
        if self._turn is not None and not self._shares:
            self._turn.release()

    @contextlib.contextmanager
    def _turn_given(self) -> Iterator[None]:
        if self._turn is None or not self._turn.mine:
            yield
            return
        self._turn.release()
        try:
            yield
        except BaseException:  # Ctrl-C, perhaps in the middle of a sample that takes for ever
            self._turn.acquire(_TURN_SECONDS)
            raise
        self._turn.acquire()

    def _wait(self, task: Task) -> None:
        with self._lock:
            while not task.done:
                if self._closed:
                    raise RuntimeError("the loader was closed during a wait for a sample")
                self._finished.wait(_LOOK_SECONDS)  # a thread reports whatever ends its sample

    # --- in the threads

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                self._make(task)
            except TurnOver:
                return
            del task  # an idle thread holds no sample

    def _next(self) -> Task | None:
        with self._lock:
            woken = self._threads.wait(self._work, lambda: self._queue or self._closed)
            return self._queue.popleft() if woken and not self._closed else None

    def _make(self, task: Task) -> None:
        if self._turn is None:
            self._call(task)
        else:
            with self._turn.taken():
                self._call(task)
                if task.last:
                    task.states = GeneratorStates()
        with self._lock:
            task.done = True
            if task.cancelled:
                task.value = task.error = None
            self._finished.notify_all()

    def _call(self, task: Task) -> None:
        make, task.make = task.make, None
        if task.cancelled or make is None:
            return
        try:
            if self._seeds is not None:
                self._seeds.set(task.index)
            task.value = make()
        except TurnOver:
            raise
        except BaseException as error:  # raised again where the result is asked for
            task.error = error
