"""Batch slots: memory shared by a worker and the trainer's process, written once and used again.

    worker                                        trainer
    SlotPool.allocate ─ memfd, mapped once ──────▶ SlotMap: the same pages, mapped once
        ▲  pack(batch): tensors lie in slots,          │ unpack: tensors that view the slot
        │  the rest of the structure is pickled        │
        └── slot id, when the last view has died ◀─────┘ weakref.finalize on the lease

A slot is an anonymous memory file: no name in /dev/shm to leak, no limit of 64 MB in a container, and neither
side keeps a descriptor once it has mapped it. The pages stay mapped while the slot is in use, so a batch
costs one memcpy and no page faults; torch's way, a fresh shared-memory file per batch, costs both.

A process that the user forks from the trainer sees the live batches in the same pages. Their slots are given
up instead of used again, so that the fork's batches do not change.

Slots never grow: a batch that does not fit takes a second one, and the next slot is made as large as the
largest batch so far. Growing in place was rejected: tensors already delivered would have to move.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fastload.workers.slot_memory import (
    Bytes,
    Lease,
    PackedBatch,
    Pin,
    anonymous_file,
    contiguous_stride,
    dump,
    extent,
    load,
    map_shared,
    tensor_over,
)

_ALIGN = 64
# A batch below this travels inside the message: one copy of a few KiB is cheaper than a slot, and users who
# keep 100,000 tiny batches would otherwise run into the kernel's limit of 65,530 mappings.
_INLINE_LIMIT = 16 << 10
# Room for labels and the pickled structure besides the one large tensor of a first batch.
_SLACK = 256 << 10


@dataclass
class _Slot:
    id: int
    memory: Bytes
    fd: int  # until it was sent to the trainer; then -1
    used: int = 0
    lease: Bytes | None = None
    alive: Callable[[], Any] = lambda: None  # weak reference to the lease: does a tensor still use the slot?


@dataclass
class SlotPool:
    """The worker's side: makes slots, gives their memory, packs batches.

    A slot serves one batch at a time: from `allocate` or `pack` until `release(id)`. Used by one thread.

    Args:
        keep: free slots to keep for later batches. The memory of further ones goes back to the system, as
            when a user releases a whole epoch of batches.
        check: called with the bytes of each batch before it is handed over; it may refuse it.
    """

    keep: int
    check: Callable[[int], None] = lambda nbytes: None
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _free: list[_Slot] = field(default_factory=list)
    _current: list[_Slot] = field(default_factory=list)
    _retired: list[int] = field(default_factory=list)
    _largest: int = 0
    _made: int = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor in the slot of the current batch."""
        stride = contiguous_stride(shape)
        slot, offset = self._reserve(extent(shape, stride) * dtype.itemsize)
        return tensor_over(self._lease(slot), offset, dtype, shape, stride)

    def pack(self, batch: Any) -> tuple[PackedBatch, list[int]]:
        """Move `batch` into slots. Returns the message and the descriptors to send with it.

        Raises:
            Exception: any that pickling an object of the batch raises; the slots are then free again.
        """
        try:
            structure, buffers = dump(batch, self._store, self._locate)
            inline = self._inline(structure)
            place: bytes | tuple[int, int, int] = structure
            if inline is None and len(structure) > _INLINE_LIMIT:
                place = self._store(structure)
            self.check(sum(slot.used for slot in self._current))
        except BaseException:
            self.abandon()
            raise
        return self._hand_over(inline, buffers, place)

    @property
    def nbytes(self) -> int:
        """Return bytes of all slots, those that the trainer uses included."""
        return sum(slot.memory.nbytes for slot in self._slots.values())

    def release(self, slot_id: int) -> None:
        """Take back a slot that the trainer no longer uses."""
        slot = self._slots[slot_id]
        if slot.memory.nbytes < self._largest or len(self._free) >= self.keep:
            self._retire(slot)
        else:
            self._free.append(slot)

    def give_up(self, slot_id: int) -> None:
        """Forget a slot that the trainer will not send back: another process may read it."""
        del self._slots[slot_id]

    def set_aside(self) -> list[_Slot]:
        """Let another batch be the current one; return the slots of this one, for `resume`."""
        slots, self._current = self._current, []
        return slots

    def resume(self, slots: list[_Slot]) -> None:
        """Let the batch with these slots be the current one. There must be no other."""
        assert not self._current
        self._current = slots

    def abandon(self) -> None:
        """Forget the current batch; its slots are free again."""
        for slot in self._current:
            slot.lease = None
            if slot.fd >= 0:
                os.close(slot.fd)
                del self._slots[slot.id]
            else:
                self.release(slot.id)
        self._current = []

    def _retire(self, slot: _Slot) -> None:
        del self._slots[slot.id]
        self._retired.append(slot.id)

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        """Return (position in the current batch's slots, offset) of `nbytes` free bytes."""
        for position, slot in enumerate(self._current):
            start = -(-slot.used // _ALIGN) * _ALIGN
            if start + nbytes <= slot.memory.nbytes:
                slot.used = start + nbytes
                return position, start
        slot = self._take(nbytes)
        slot.lease = slot.memory.view(Lease)
        slot.alive = weakref.ref(slot.lease)
        slot.used = nbytes
        self._current.append(slot)
        return len(self._current) - 1, 0

    def _take(self, nbytes: int) -> _Slot:
        while self._free:
            slot = self._free.pop()
            # A slot is alive while the dataset or collate_fn keeps a tensor in it: the next batch must not
            # overwrite that.
            if slot.memory.nbytes >= nbytes and slot.alive() is None:
                return slot
            self._retire(slot)
        # Doubling bounds the number of slots, and so of descriptors, that one batch can take.
        so_far = sum(slot.memory.nbytes for slot in self._current)
        size = -(-max(nbytes + _SLACK, self._largest, so_far) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = anonymous_file(size)
        try:
            memory = map_shared(os.dup(fd), size)
        except OSError:
            os.close(fd)
            raise
        slot = _Slot(self._made, memory, fd)
        self._made += 1
        self._slots[slot.id] = slot
        return slot

    def _lease(self, position: int) -> Bytes:
        lease = self._current[position].lease
        assert lease is not None
        return lease

    def _store(self, data: bytes | memoryview) -> tuple[int, int, int]:
        """Copy `data` into the batch's slots: (slot, offset, bytes)."""
        position, offset = self._reserve(len(data))
        self._lease(position)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return position, offset, len(data)

    def _locate(self, tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """Return (slot, offset, shape, stride) of a tensor's elements, copied unless a slot has them."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        nbytes = extent(shape, stride) * tensor.element_size()
        if (found := self._find(tensor.data_ptr(), nbytes)) is not None:
            return *found, shape, stride
        if extent(shape, stride) < tensor.numel():  # expanded: one element stands for many
            span = (extent(shape, stride),)
            position, offset = self._reserve(nbytes)
            copy = tensor_over(self._lease(position), offset, tensor.dtype, span, (1,))
            copy.copy_(tensor.as_strided(span, (1,)))
            return position, offset, shape, stride
        if not tensor.is_contiguous():  # a permutation keeps its strides; gaps and overlaps do not travel
            stride = tuple(torch.empty_like(tensor, device="meta").stride())
        position, offset = self._reserve(tensor.numel() * tensor.element_size())
        tensor_over(self._lease(position), offset, tensor.dtype, shape, stride).copy_(tensor)
        return position, offset, shape, stride

    def _find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return (slot, offset) of these bytes, if the batch's slots have them already."""
        for position, slot in enumerate(self._current):
            offset = address - slot.memory.ctypes.data
            if nbytes and offset >= 0 and offset + nbytes <= slot.memory.nbytes:
                return position, offset
        return None

    def _inline(self, structure: bytes) -> bytes | None:
        """Return the slot's content, where the batch is small enough to travel inside the message."""
        used = sum(slot.used for slot in self._current)
        if len(self._current) > 1 or used + len(structure) > _INLINE_LIMIT:
            return None
        return b"".join(slot.memory[: slot.used].tobytes() for slot in self._current)

    def _hand_over(
        self,
        inline: bytes | None,
        buffers: list[tuple[int, int, int]],
        structure: bytes | tuple[int, int, int],
    ) -> tuple[PackedBatch, list[int]]:
        used, self._current = self._current, []
        retired, self._retired = self._retired, []
        new: list[tuple[int, int]] = []
        fds: list[int] = []
        self._largest = max(self._largest, sum(slot.used for slot in used) + _ALIGN * len(used))
        for slot in used:
            slot.lease = None  # from here on only the batch's tensors keep it alive
            if slot.fd >= 0:
                new.append((slot.id, slot.memory.nbytes))
                fds.append(slot.fd)
                slot.fd = -1
            if inline is not None:
                self._free.append(slot)
        slots = [] if inline is not None else [slot.id for slot in used]
        return PackedBatch(slots, new, retired, inline, buffers, structure), fds


class _Leases:
    """The slots of one worker that live batches use, and the others, which the worker is to learn of.

    `released`: may be used again. `given_up`: must not, because a fork of this process may still read them.
    Finalizers end leases, in any thread and at any moment: each step is one call, without a lock.
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
    """Stand around the fork of a worker, which reads no batch."""
    _workers_fork.now = True
    try:
        yield
    finally:
        _workers_fork.now = False


def _before_fork() -> None:
    """Give up the live batches: a child sees them in the same pages as this process, so they must not change.

    Copying them for the child was rejected: most forks of a trainer do not read batches.
    """
    if not getattr(_workers_fork, "now", False):
        for leases in list(_all):
            leases.before_fork()


os.register_at_fork(before=_before_fork)


class SlotMap:
    """The trainer's side, for one worker: maps its slots once, and notes which ones are free again.

    Args:
        pin: called once with (address, bytes) of each mapped slot; returns a function that undoes it.
    """

    def __init__(self, pin: Pin | None = None) -> None:
        self._pin = pin
        self._leases = _Leases()
        self._memory: dict[int, Bytes] = {}
        _all.add(self._leases)

    def take_returned(self) -> tuple[list[int], list[int]]:
        """Return (slots that the worker may use again, slots that it must not), since the last call."""
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
        """Return the batch, with its tensors in the slots (small batches: in ordinary memory)."""
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
