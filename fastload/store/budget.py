"""The requests that a dataset makes of its stores, over all processes that read it, and their limits.

    trainer, workers ── reserve ──▶ numbers in memory that all map ── within the limits ──▶ request

Without limits each process counts in numbers of its own there, and waits for no other. With limits all count
in the same ones, under a lock. Each request is reserved before it goes out: so `max_gets=` and `max_egress=`
hold to the request, and a refused request costs nothing. What was reserved is never given back, since a
request that failed may be billed too.

Rejected: a share for each worker, because the last one would stop while others have some left; a semaphore,
because a process that is killed while it holds one stops all others. The kernel frees a lock on a file with
the process that holds it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import context
from typing import Any, NamedTuple

from fastload.checks import format_size
from fastload.errors import LimitError, StoreTimeoutError
from fastload.metrics.machine import memory_file
from fastload.store.node import ProcessLocal, share_descriptor

# The memory is an array of `RequestCounts`, each as `_WIDTH` numbers of 64 bits. The first one holds how many
# processes have one of their own; the second one is for all. Pages that nobody has written take no memory.
# Numbers are written one by one: `struct` sets all to 0 first, which a reader, or a kill, would find.
_SHARED, _FIRST, _MOST = 1, 2, 1 << 16
_LOCK_SECONDS = 60.0
_LOOK_SECONDS = 0.0005


class Limits(NamedTuple):
    """The limits of one budget. None: without limit."""

    gets: int | None = None  # GETs and HEADs
    egress: int | None = None  # bytes of bodies


class RequestCounts(NamedTuple):
    """Requests of each sort, and the bytes of the bodies that the GETs asked for."""

    gets: int = 0
    heads: int = 0
    lists: int = 0
    egress: int = 0


_NOTHING = RequestCounts()
_WIDTH = len(_NOTHING)
_BYTES = _MOST * _WIDTH * 8


class RequestBudget:
    """The requests made so far, and their limits. All processes and threads that have it count together.

    A copy is this object. A process that is forked or spawned shares it; any other pickle counts on its own
    from the state at that moment.

    Args:
        limits: the limits of one trainer.
        spent: the requests made before.
    """

    def __init__(self, limits: Limits, spent: RequestCounts = _NOTHING) -> None:
        descriptor = memory_file("fastload-budget")
        os.ftruncate(descriptor, _BYTES)
        self._map_file(limits, descriptor)
        self._increase(_SHARED, spent)

    def _map_file(self, limits: Limits, descriptor: int) -> None:
        self.limits = limits
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        self._map = mmap.mmap(descriptor, _BYTES)
        self._threads = ProcessLocal(threading.Lock)  # the lock on the file is one of processes
        self._own = ProcessLocal(self._reserve_place)

    def __deepcopy__(self, memo: dict[int, Any]) -> RequestBudget:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None:
            return _from_handle, (self.limits, share_descriptor(self._descriptor))
        return RequestBudget, (self.limits, self.spent())

    def spent(self) -> RequestCounts:
        """Return the requests made so far."""
        with memoryview(self._map).cast("Q") as numbers:
            end = (_FIRST + numbers[0]) * _WIDTH
            return RequestCounts(
                *(sum(numbers[_SHARED * _WIDTH + column : end : _WIDTH]) for column in range(_WIDTH))
            )

    def used(self) -> Limits:
        """Return the requests made so far, in the terms of the limits."""
        gets, heads, _, egress = self.spent()
        return Limits(gets + heads, egress)

    def count(self, lists: int = 0, egress: int = 0) -> None:
        """Count what has no limit, or could not be known before.

        Raises:
            StoreTimeoutError: as `reserve`.
        """
        self._add(RequestCounts(lists=lists, egress=egress))

    def reserve(self, key: str, size: int | None) -> None:
        """Count a GET of `size` bytes of an object that is about to go out; None: a HEAD.

        Raises:
            LimitError: it would pass a limit, and must not go out.
            StoreTimeoutError: a process that was stopped holds the lock.
        """
        more = RequestCounts(heads=1) if size is None else RequestCounts(gets=1, egress=size)
        self._add(more, lambda: self._check(key, more.egress))

    def _check(self, key: str, size: int) -> None:
        (gets, egress), (most_gets, most_egress) = self.used(), self.limits
        assert gets is not None and egress is not None
        if most_gets is not None and gets >= most_gets:
            raise LimitError(
                f"max_gets={most_gets:,} requests of this dataset were reserved, and this one is more; "
                "raise max_gets, give the dataset a cache, or take fewer samples",
                key=key,
            )
        if most_egress is not None and egress + size > most_egress:
            raise LimitError(
                f"max_egress is {format_size(most_egress)}: {format_size(egress)} were asked for, "
                f"and this request is for {format_size(size)} more; raise max_egress, "
                "give the dataset a cache, or take fewer samples",
                key=key,
            )

    def _add(self, more: RequestCounts, check: Callable[[], None] = lambda: None) -> None:
        own = _SHARED if any(self.limits) else self._own.get()
        with self._locked() if own == _SHARED else self._threads.get():
            check()
            self._increase(own, more)

    def _increase(self, place: int, more: RequestCounts) -> None:
        with memoryview(self._map).cast("Q") as numbers:
            for position, number in enumerate(more, place * _WIDTH):
                numbers[position] += number

    def _reserve_place(self) -> int:
        """Return a place of this process's own; once all are in use, the shared one."""
        with self._locked():
            with memoryview(self._map).cast("Q") as numbers:
                place = _FIRST + numbers[0]
                if place == _MOST:
                    return _SHARED
                numbers[0] += 1
            return place

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock among the threads of this process, and among the processes."""
        import fcntl  # which Windows lacks, where the command line still says so

        with self._threads.get():
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreTimeoutError(
                            "a process has held the lock of what is asked of the store for "
                            f"{_LOCK_SECONDS:.0f} s: is a worker stopped?"
                        ) from None
                    time.sleep(_LOOK_SECONDS)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def _from_handle(limits: Limits, handle: Any) -> RequestBudget:
    shared = RequestBudget.__new__(RequestBudget)
    shared._map_file(limits, handle.detach())
    return shared
