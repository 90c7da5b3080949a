"""What a dataset asked of its store, over all processes that read it, and what it may ask.

    trainer, workers ── reserve ──▶ numbers in memory that all map ── within the limits ──▶ request

Each request is reserved before it goes out: so `max_gets=` and `max_egress=` hold to the request, and a
refused request costs nothing. What was reserved is never given back, since a request that failed may be
billed too.

Rejected: a share for each worker, because the last one would stop while others have some left; a semaphore,
because a process that is killed while it holds one stops all others. The kernel frees a lock on a file with
the process that holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing import context, reduction
from typing import Any, NamedTuple

from fastload.errors import LimitError, StoreTimeoutError
from fastload.metrics.platform import memory_file
from fastload.metrics.units import format_size
from fastload.store.process import ProcessLocal

__all__ = ["Allowance", "Asked", "Limits"]

_STATE = struct.Struct("QQQQ")  # the fields of `Asked`
_LOCK_SECONDS = 60.0
_LOOK_SECONDS = 0.0005


class Limits(NamedTuple):
    """Of one store. None: without limit."""

    gets: int | None = None  # GETs and HEADs
    egress: int | None = None  # bytes of bodies


class Asked(NamedTuple):
    """Requests by kind, and the bytes of the bodies that the GETs asked for."""

    gets: int = 0
    heads: int = 0
    lists: int = 0
    egress: int = 0


_NOTHING = Asked()


class Allowance:
    """What was asked for so far, and the limits. All processes and threads that have it count together.

    A copy is this object. A process that is forked or spawned shares it; any other pickle counts on its own
    from the state at that moment.

    Args:
        limits: of one trainer.
        asked: so far.
    """

    def __init__(self, limits: Limits, asked: Asked = _NOTHING) -> None:
        descriptor = memory_file("fastload-allowance")
        os.ftruncate(descriptor, _STATE.size)
        self._map_file(limits, descriptor)
        _STATE.pack_into(self._map, 0, *asked)

    def _map_file(self, limits: Limits, descriptor: int) -> None:
        self.limits = limits
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        self._map = mmap.mmap(descriptor, _STATE.size)
        self._threads = ProcessLocal(threading.Lock)  # the lock on the file is one of processes

    def __deepcopy__(self, memo: dict[int, Any]) -> Allowance:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None:
            return _from_handle, (self.limits, reduction.DupFd(self._descriptor))
        return Allowance, (self.limits, self.asked())

    def asked(self) -> Asked:
        """What was asked for so far."""
        return Asked(*_STATE.unpack_from(self._map))

    def used(self) -> Limits:
        """What was asked for so far, in the terms of the limits."""
        gets, heads, _, egress = self.asked()
        return Limits(gets + heads, egress)

    def count(self, lists: int = 0, egress: int = 0) -> None:
        """Count what has no limit, or could not be known before."""
        with self._locked():
            asked = self.asked()
            self._set(asked._replace(lists=asked.lists + lists, egress=asked.egress + egress))

    def reserve(self, key: str, size: int | None) -> None:
        """Count a GET of `size` bytes of an object that is about to go out; None: a HEAD.

        Raises:
            LimitError: it would pass a limit, and must not go out.
            StoreTimeoutError: a process that was stopped holds the lock.
        """
        with self._locked():
            asked, (most_gets, most_egress) = self.asked(), self.limits
            if most_gets is not None and asked.gets + asked.heads >= most_gets:
                raise LimitError(
                    f"max_gets={most_gets:,} requests of this dataset were reserved, and this one is more; "
                    "raise max_gets, give the dataset a cache, or take fewer samples",
                    key=key,
                )
            if most_egress is not None and asked.egress + (size or 0) > most_egress:
                raise LimitError(
                    f"max_egress is {format_size(most_egress)}: {format_size(asked.egress)} were asked for, "
                    f"and this request is for {format_size(size or 0)} more; raise max_egress, "
                    "give the dataset a cache, or take fewer samples",
                    key=key,
                )
            if size is None:
                self._set(asked._replace(heads=asked.heads + 1))
            else:
                self._set(asked._replace(gets=asked.gets + 1, egress=asked.egress + size))

    def _set(self, asked: Asked) -> None:
        _STATE.pack_into(self._map, 0, *asked)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among the threads of this process, and among the processes."""
        with self._threads.get():
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreTimeoutError(
                            f"a process has held the counter of max_gets and max_egress for "
                            f"{_LOCK_SECONDS:.0f} s: is a worker stopped?"
                        ) from None
                    time.sleep(_LOOK_SECONDS)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def _from_handle(limits: Limits, handle: Any) -> Allowance:
    shared = Allowance.__new__(Allowance)
    shared._map_file(limits, handle.detach())
    return shared
