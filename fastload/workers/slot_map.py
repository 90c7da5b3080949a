"""The trainer's side of the slots of one worker."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fastload.workers.packing import PackedBatch, load
from fastload.workers.slot_memory import Bytes, Lease, Pin, map_shared

__all__ = ["SlotMap", "forking_a_worker"]


class _Leases:
    """Which slots of one worker lie in batches that live, and what is to be told it of the others.

    `released`: free to be used again. `given_up`: never, as a fork of this process may still look at them.
    Finalizers end leases, in any thread and at any moment: all that they do is done by one call each, without
    a lock.
    """

    def __init__(self) -> None:
        self.released: deque[int] = deque()
        self.given_up: deque[int] = deque()
        self._leased: set[int] = set()
        self._seen: set[int] = set()  # by a fork

    def begin(self, slot_id: int) -> None:
        self._leased.add(slot_id)

    def end(self, slot_id: int) -> None:
        self._leased.discard(slot_id)
        (self.given_up if slot_id in self._seen else self.released).append(slot_id)

    def before_fork(self) -> None:
        self._seen |= self._leased.copy()


_all: weakref.WeakSet[_Leases] = weakref.WeakSet()
_workers_fork = threading.local()


@contextmanager
def forking_a_worker() -> Iterator[None]:
    """Around the fork of a worker: it looks at no batch."""
    _workers_fork.now = True
    try:
        yield
    finally:
        _workers_fork.now = False


def _before_fork() -> None:
    """The child sees the batches that live now in the same pages as this process: they must not change.

    To copy them for the child was rejected: a fork of a trainer may be about anything else.
    """
    if not getattr(_workers_fork, "now", False):
        for leases in list(_all):
            leases.before_fork()


os.register_at_fork(before=_before_fork)


class SlotMap:
    """The trainer's side, for one worker: maps its slots once, and notes which of them are free again.

    Args:
        pin: called with (address, bytes) of each slot that is mapped, once; returns what undoes it.
    """

    def __init__(self, pin: Pin | None = None) -> None:
        self._pin = pin
        self._leases = _Leases()
        self._memory: dict[int, Bytes] = {}
        _all.add(self._leases)

    def take_returned(self) -> tuple[list[int], list[int]]:
        """The slots to tell the worker of: those that it may use again, and those that it may not."""
        released = _emptied(self._leases.released)
        given_up = _emptied(self._leases.given_up)
        for slot_id in given_up:
            self._memory.pop(slot_id, None)
        return released, given_up

    def attach(self, packed: PackedBatch, fds: Sequence[int]) -> None:
        """Map the slots that are new with this batch; their descriptors are closed."""
        for (slot_id, nbytes), fd in zip(packed.new, fds, strict=True):
            self._memory[slot_id] = map_shared(fd, nbytes, self._pin)
        for slot_id in packed.retired:
            self._memory.pop(slot_id, None)

    def unpack(self, packed: PackedBatch) -> Any:
        """The batch, its tensors lying in the slots (or in memory of their own, for small batches)."""
        leases = [self._lease(slot_id) for slot_id in packed.slots]
        if packed.inline is not None:
            leases = [np.frombuffer(bytearray(packed.inline), np.uint8)] if packed.inline else []
        return load(packed, leases)

    def _lease(self, slot_id: int) -> Bytes:
        lease = self._memory[slot_id].view(Lease)
        self._leases.begin(slot_id)
        weakref.finalize(lease, self._leases.end, slot_id).atexit = False
        return lease


def _emptied(ids: deque[int]) -> list[int]:
    found = []
    while ids:
        found.append(ids.popleft())
    return found
