"""One thread at a time runs the user's code; while it waits for bytes, another one does.

The generators of torch's CPU, Python and numpy belong to the process. Samples that are made at the same time
would draw from them in any order, so no seed could say what each gets. In its turn a sample has them for
itself: they are saved when its thread begins to wait for a read, and are put back when the read has ended.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fastload.errors import WorkerError
from fastload.fetch.threads import this_thread

__all__ = ["GeneratorStates", "Turn", "TurnOver"]

_LOOK_SECONDS = 0.5
_STUCK_SECONDS = 60.0  # that a thread may have the turn without running, while another one needs it


class TurnOver(BaseException):
    """The turn was closed: this thread must end. No `Exception`, which the user's code may catch."""


class GeneratorStates:
    """The states of torch's CPU generator, Python's and numpy's, as they are now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def changed(self) -> bool:
        """Whether one of them has drawn, or was seeded, since."""
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
        """For a thread that makes a sample.

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
        """The result of `wait`, during which another thread may have the turn.

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
        """(thread, seconds of CPU) of the sample that has the turn, to a tenth; None if none has it.

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
