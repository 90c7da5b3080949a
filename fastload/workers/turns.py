"""One thread at a time runs the user's code; while it waits for bytes, another one does.

The generators of torch's CPU, Python and numpy belong to the process. Samples that are made at the same time
would draw from them in any order, so no seed could say what each gets. In its turn a sample has them for
itself: they are saved when its thread begins to wait for a read, and are put back when the read has ended.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fastload.fetch.threads import this_thread

__all__ = ["GeneratorStates", "Turn", "TurnOver"]


class TurnOver(BaseException):
    """The turn was closed: this thread must end. No `Exception`, which the user's code may catch."""


class GeneratorStates:
    """The states of torch's CPU generator, Python's and numpy's, as they are now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def restore(self) -> None:
        """Put the generators back into these states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class Turn:
    """What a thread needs to run the user's code; closed once, by the thread that waits for the samples."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Raise `TurnOver` in each thread that waits for the turn, now or later."""
        self._closed = True

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
            this_thread.turn = None
            self._lock.release()

    def waiting(self, wait: Callable[[], Any]) -> Any:
        """The result of `wait`, during which another thread may have the turn.

        Raises:
            TurnOver: the turn was closed meanwhile. What `wait` raises.
        """
        states = GeneratorStates()
        this_thread.turn = None
        self._lock.release()
        try:
            return wait()
        finally:
            self._lock.acquire()  # `taken` releases it, so it must be held whatever comes now
            this_thread.turn = self
            if self._closed:
                raise TurnOver
            states.restore()

    def _acquire(self) -> None:
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise TurnOver

    # --- for the thread that waits for the samples, which may be interrupted anywhere

    def acquire(self, timeout: float = -1) -> bool:
        """Take the turn; False after `timeout` seconds without it."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Give the turn away."""
        self._lock.release()
