"""Batch slots: memory shared by a worker and the trainer's process, written once and used again.

    worker                                        trainer
    SlotPool.allocate ─ memfd, mapped once ──────▶ SlotMap: the same pages, mapped once
        ▲  pack(batch): tensors lie in slots,          │ unpack: tensors that view the slot
        │  the rest of the structure is pickled        │
        └── slot id, when the last view has died ◀─────┘ weakref.finalize on the lease

A slot is an anonymous memory file: no name in /dev/shm to leak, no limit of 64 MB in a container, and neither
side keeps a descriptor once it has mapped it. The pages stay mapped while the slot is in use, so a batch
costs one memcpy and no page faults; torch's way, a fresh shared-memory file per batch, costs both.

Slots never grow: a batch that does not fit takes a second one, and the next slot is made as large as the
largest batch so far. Growing in place was rejected, since tensors already handed out would have to move.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.multiprocessing  # registers how sparse, CUDA and other special tensors are pickled

from fastload.channel import anonymous_file

__all__ = ["PackedBatch", "SlotMap", "SlotPool"]

_ALIGN = 64
# A batch below this travels inside the message: one copy of a few KiB is cheaper than a slot, and users who
# keep 100,000 tiny batches would otherwise run into the kernel's limit of 65,530 mappings.
_INLINE_LIMIT = 16 << 10
# Room for labels and the pickled structure beside the one large tensor of a first batch.
_SLACK = 256 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

Bytes = npt.NDArray[np.uint8]


class _Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """A slot's bytes for the life of one batch. A class of its own, so that NumPy's views of it keep it as
    their base: its finalizer then runs when the last tensor over the slot dies."""


def _map(fd: int, nbytes: int) -> Bytes:
    """Map the whole of `fd` shared and writable, and close it. Unmapped when the last view dies.

    `mmap.mmap` was rejected: before Python 3.13 it keeps a duplicate of the descriptor for each mapping, and
    `list(loader)` over a few thousand batches would run out of them.
    """
    try:
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(
            code,
            f"cannot map a batch slot of {nbytes} bytes ({os.strerror(code)}): memory is short, or more "
            "batches are held than vm.max_map_count allows",
        )
    pages = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(pages, _libc.munmap, address, nbytes).atexit = False
    return np.ctypeslib.as_array(pages)


def _storage(memory: Bytes, offset: int, nbytes: int) -> torch.UntypedStorage:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


def _tensor(
    memory: Bytes, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor over `memory[offset:]`. Not a view of another: `_base` is None, as in torch's batches."""
    storage = _storage(memory, offset, _extent(shape, stride) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(stride))


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of storage a strided tensor spans."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


@dataclass
class _Slot:
    id: int
    memory: Bytes
    fd: int  # until the trainer has been sent it; then -1
    used: int = 0
    lease: Bytes | None = None
    alive: Callable[[], Any] = lambda: None  # weak reference to the lease: does a tensor still lie here?


@dataclass
class PackedBatch:
    """A batch as it travels: where its bytes lie in which slots, and its pickled structure."""

    slots: list[int]  # ids, in the order that offsets refer to
    new: list[tuple[int, int]]  # (id, bytes) of slots whose descriptors come with this message
    retired: list[int]  # ids that the trainer may unmap
    inline: bytes | None  # the content of the only slot, for small batches
    buffers: list[tuple[int, int, int]]  # (slot, offset, bytes) of pickle's out-of-band buffers
    structure: bytes | tuple[int, int, int]  # the pickle, or where it lies


@dataclass
class SlotPool:
    """The worker's side: makes slots, hands out their memory, packs batches.

    A slot serves one batch at a time: from `allocate` or `pack` until `release(id)`. Used by one thread.

    Args:
        keep: how many free slots to keep for later batches. The memory of more goes back to the system, as
            when a user lets go of a whole epoch of batches.
    """

    keep: int
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _free: list[_Slot] = field(default_factory=list)
    _current: list[_Slot] = field(default_factory=list)
    _retired: list[int] = field(default_factory=list)
    _largest: int = 0
    _made: int = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor in the slot of the batch that is being made."""
        stride = _contiguous_stride(shape)
        slot, offset = self._reserve(_extent(shape, stride) * dtype.itemsize)
        return _tensor(self._lease(slot), offset, dtype, shape, stride)

    def pack(self, batch: Any) -> tuple[PackedBatch, list[int]]:
        """Move `batch` into slots. Returns what travels, and the descriptors to send with it.

        Raises whatever pickling an object of the batch raises; the slots are then free again.
        """
        buffers: list[tuple[int, int, int]] = []
        try:
            structure = _dump(self, batch, buffers)
            inline = self._inline(structure)
            place: bytes | tuple[int, int, int] = structure
            if inline is None and len(structure) > _INLINE_LIMIT:
                place = self._store(structure)
        except BaseException:
            self.abandon()
            raise
        return self._hand_over(inline, buffers, place)

    def release(self, slot_id: int) -> None:
        """The trainer no longer uses this slot."""
        slot = self._slots[slot_id]
        if slot.memory.nbytes < self._largest or len(self._free) >= self.keep:
            self._retire(slot)
        else:
            self._free.append(slot)

    def abandon(self) -> None:
        """Forget the batch in the making; its slots are free again."""
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
        """(position in the current batch's slots, offset) of `nbytes` free bytes."""
        for position, slot in enumerate(self._current):
            start = -(-slot.used // _ALIGN) * _ALIGN
            if start + nbytes <= slot.memory.nbytes:
                slot.used = start + nbytes
                return position, start
        slot = self._take(nbytes)
        slot.lease = slot.memory.view(_Lease)
        slot.alive = weakref.ref(slot.lease)
        slot.used = nbytes
        self._current.append(slot)
        return len(self._current) - 1, 0

    def _take(self, nbytes: int) -> _Slot:
        while self._free:
            slot = self._free.pop()
            # A slot is alive where the dataset or collate_fn has kept a tensor that lies in it: the next
            # batch must not overwrite that.
            if slot.memory.nbytes >= nbytes and slot.alive() is None:
                return slot
            self._retire(slot)
        # Doubling bounds the number of slots, and so of descriptors, that one batch can take.
        so_far = sum(slot.memory.nbytes for slot in self._current)
        size = -(-max(nbytes + _SLACK, self._largest, so_far) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = anonymous_file(size)
        memory = _map(os.dup(fd), size)
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

    def _place(self, tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """(slot, offset, shape, stride) of the tensor's elements: where they are, or were copied to."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        nbytes = _extent(shape, stride) * tensor.element_size()
        if (found := self._find(tensor.data_ptr(), nbytes)) is not None:
            return *found, shape, stride
        if _extent(shape, stride) < tensor.numel():  # expanded: one element stands for many
            span = (_extent(shape, stride),)
            position, offset = self._reserve(nbytes)
            copy = _tensor(self._lease(position), offset, tensor.dtype, span, (1,))
            copy.copy_(tensor.as_strided(span, (1,)))
            return position, offset, shape, stride
        if not tensor.is_contiguous():  # a permutation keeps its strides; gaps and overlaps do not travel
            stride = tuple(torch.empty_like(tensor, device="meta").stride())
        position, offset = self._reserve(tensor.numel() * tensor.element_size())
        _tensor(self._lease(position), offset, tensor.dtype, shape, stride).copy_(tensor)
        return position, offset, shape, stride

    def _find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(slot, offset) where these bytes already lie in the batch's slots."""
        for position, slot in enumerate(self._current):
            offset = address - slot.memory.ctypes.data
            if nbytes and offset >= 0 and offset + nbytes <= slot.memory.nbytes:
                return position, offset
        return None

    def _inline(self, structure: bytes) -> bytes | None:
        """The slot's content, where the batch is small enough to travel inside the message."""
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
            slot.lease = None  # from here on only the batch's own tensors keep it
            if slot.fd >= 0:
                new.append((slot.id, slot.memory.nbytes))
                fds.append(slot.fd)
                slot.fd = -1
            if inline is not None:
                self._free.append(slot)
        slots = [] if inline is not None else [slot.id for slot in used]
        return PackedBatch(slots, new, retired, inline, buffers, structure), fds


class _Pickler(ForkingPickler):
    """Torch's own pickler, but what CPU memory a tensor needs lies in slots.

    A plain tensor takes the short way. Others (subclasses, sparse, quantized ...) are torch's to take apart;
    in the end they come down to storages, which torch would each make a file in /dev/shm.
    """

    def __init__(self, file: io.BytesIO, pool: SlotPool, buffers: list[tuple[int, int, int]]) -> None:
        def keep_out_of_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < 1024:
                return True
            buffers.append(pool._store(raw))
            return False

        super().__init__(file, pickle.HIGHEST_PROTOCOL, True, keep_out_of_band)
        self._pool = pool
        self._placed: dict[int, tuple[Any, Any]] = {}  # by id, with the object, which keeps the id valid

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            if not _is_plain(obj):
                return None
        elif type(obj) is not torch.UntypedStorage or obj.device.type != "cpu":
            return None
        known = self._placed.get(id(obj))
        if known is None:
            number = len(self._placed)
            self._placed[id(obj)] = known = (obj, (number, *self._place(obj)))
        return known[1]

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and not obj.flags.writeable:
            return obj.__reduce__()  # a buffer would arrive read-only, which torch's pickle does not do to it
        return NotImplemented

    def _place(self, obj: torch.Tensor | torch.UntypedStorage) -> tuple[Any, ...]:
        if isinstance(obj, torch.Tensor):
            return *self._pool._place(obj.detach()), obj.dtype, obj.requires_grad
        content = torch.empty(0, dtype=torch.uint8).set_(obj)
        return *self._pool._place(content), None, False


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
        and not (tensor.requires_grad and not tensor.is_leaf)
    )


def _dump(pool: SlotPool, batch: Any, buffers: list[tuple[int, int, int]]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pool, buffers).dump(batch)
    return file.getvalue()


class SlotMap:
    """The trainer's side, for one worker: maps its slots once, and notes which of them are free again.

    `released` holds the ids to send back. Only appended to by finalizers, which may run in any thread and at
    any moment; a deque's append takes no lock.
    """

    def __init__(self) -> None:
        self.released: deque[int] = deque()
        self._memory: dict[int, Bytes] = {}

    def attach(self, packed: PackedBatch, fds: Sequence[int]) -> None:
        """Map the slots that are new with this batch; their descriptors are closed."""
        for (slot_id, nbytes), fd in zip(packed.new, fds, strict=True):
            self._memory[slot_id] = _map(fd, nbytes)
        for slot_id in packed.retired:
            self._memory.pop(slot_id, None)

    def unpack(self, packed: PackedBatch) -> Any:
        """The batch, its tensors lying in the slots (or in memory of their own, for small batches)."""
        leases = [self._lease(slot_id) for slot_id in packed.slots]
        if packed.inline is not None:
            leases = [np.frombuffer(bytearray(packed.inline), np.uint8)] if packed.inline else []
        structure = packed.structure
        if not isinstance(structure, bytes):
            position, offset, nbytes = structure
            structure = leases[position][offset : offset + nbytes]  # type: ignore[assignment]
        buffers = [leases[slot][offset : offset + nbytes] for slot, offset, nbytes in packed.buffers]
        return _Unpickler(structure, buffers, leases).load()

    def _lease(self, slot_id: int) -> Bytes:
        lease = self._memory[slot_id].view(_Lease)
        weakref.finalize(lease, self.released.append, slot_id).atexit = False
        return lease


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: Any, buffers: list[Bytes], leases: list[Bytes]) -> None:
        super().__init__(io.BytesIO(structure), buffers=buffers)
        self._leases = leases
        self._seen: dict[int, Any] = {}  # so that what lay twice in the batch does so here

    def persistent_load(self, place: Any) -> Any:
        number, slot, offset, shape, stride, dtype, requires_grad = place
        if number not in self._seen:
            memory = self._leases[slot] if self._leases else np.empty(0, np.uint8)
            if dtype is None:
                self._seen[number] = _storage(memory, offset, *shape)
            else:
                tensor = _tensor(memory, offset, dtype, shape, stride)
                self._seen[number] = tensor.requires_grad_(requires_grad)
        return self._seen[number]
