"""The trainer's side of the slots of one worker."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastload.slots.memory import Bytes, Lease, Pin, map_shared
from fastload.slots.packing import PackedBatch, load

__all__ = ["SlotMap"]


class SlotMap:
    """The trainer's side, for one worker: maps its slots once, and notes which of them are free again.

    `released` holds the ids to send back. Only appended to by finalizers, which may run in any thread and at
    any moment; a deque's append takes no lock.

    Args:
        pin: called with (address, bytes) of each slot that is mapped, once; returns what undoes it.
    """

    def __init__(self, pin: Pin | None = None) -> None:
        self._pin = pin
        self.released: deque[int] = deque()
        self._memory: dict[int, Bytes] = {}

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
        weakref.finalize(lease, self.released.append, slot_id).atexit = False
        return lease
