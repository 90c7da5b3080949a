"""Batch slots: memory shared by a worker and the trainer's process, written once and used again.

    worker                                        trainer
    SlotPool.allocate ─ memfd, mapped once ──────▶ SlotMap: the same pages, mapped once
        ▲  pack(batch): tensors lie in slots,          │ unpack: tensors that view the slot
        │  the rest of the structure is pickled        │
        └── slot id, when the last view has died ◀─────┘ weakref.finalize on the lease

A slot is an anonymous memory file: no name in /dev/shm to leak, no limit of 64 MB in a container, and neither
side keeps a descriptor once it has mapped it. The pages stay mapped while the slot is in use, so a batch
costs one memcpy and no page faults; torch's way, a fresh shared-memory file per batch, costs both.

A process that is forked from the trainer sees the live batches in the same pages. Their slots are given up
instead of used again, so that its batches do not change. A worker is no exception: its dataset may hold
batches of another loader.

Slots never grow: a batch that does not fit takes a second one, and the next slot is made as large as the
largest batch so far. Growing in place was rejected: tensors already delivered would have to move.
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

from fastload.metrics.machine import memory_file

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

Bytes = npt.NDArray[np.uint8]
Pin = Callable[[int, int], Callable[[], object]]  # (address, bytes) -> a function that undoes it


# Methods of the pool. The first copies bytes into the batch's slots and returns (slot, offset, bytes). The
# second finds a tensor in the slots or copies it there, and returns (slot, offset, shape, stride).
StoreBytes = Callable[[memoryview], tuple[int, int, int]]
LocateTensor = Callable[[torch.Tensor], tuple[int, int, tuple[int, ...], tuple[int, ...]]]


class Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """A slot's bytes for the life of one batch. A separate class, so that NumPy's views keep it as their
    base: its finalizer then runs when the last tensor over the slot dies."""


def anonymous_file(nbytes: int) -> int:
    """Return a descriptor of a new memory file of `nbytes` bytes, without a name that could leak."""
    fd = memory_file("fastload")
    os.ftruncate(fd, nbytes)
    return fd


def map_shared(fd: int, nbytes: int, pin: Pin | None = None) -> Bytes:
    """Map the whole of `fd` shared and writable, and close it. Unmapped when the last view dies.

    `pin` is called with the new mapping, and its result just before the memory is unmapped.

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
            "batches are kept than vm.max_map_count allows",
        )
    pages = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(pages, _libc.munmap, address, nbytes).atexit = False
    if pin is not None:  # finalizers run in reverse order
        weakref.finalize(pages, pin(address, nbytes)).atexit = False
    return np.ctypeslib.as_array(pages)


def storage_over(memory: Bytes, offset: int, nbytes: int) -> torch.UntypedStorage:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


def tensor_over(
    memory: Bytes, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a tensor over `memory[offset:]`. It is no view: `_base` is None, as in torch's batches."""
    storage = storage_over(memory, offset, extent(shape, stride) * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), tuple(stride))


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of storage elements that a strided tensor spans."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


@dataclass
class PackedBatch:
    """A batch in a message: the positions of its bytes in slots, and its pickled structure."""

    slots: list[int]  # ids, in the order that offsets refer to
    new: list[tuple[int, int]]  # (id, bytes) of slots whose descriptors come with this message
    retired: list[int]  # ids that the trainer may unmap
    inline: bytes | None  # the content of the only slot, for small batches
    buffers: list[tuple[int, int, int]]  # (slot, offset, bytes) of pickle's out-of-band buffers
    structure: bytes | tuple[int, int, int]  # the pickle, or its (slot, offset, bytes)


class _Pickler(ForkingPickler):
    """Torch's own pickler, with the CPU memory of tensors in slots.

    A plain tensor is stored directly. torch takes others (subclasses, sparse, quantized) apart, down to
    storages; torch itself would make a file in /dev/shm of each storage.
    """

    def __init__(
        self, file: io.BytesIO, store: StoreBytes, locate: LocateTensor, buffers: list[tuple[int, int, int]]
    ) -> None:
        def keep_out_of_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < 1024:
                return True
            buffers.append(store(raw))
            return False

        super().__init__(file, pickle.HIGHEST_PROTOCOL, True, keep_out_of_band)
        self._locate = locate
        self._located: dict[int, tuple[Any, Any]] = {}  # by id, with the object, which keeps the id valid

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            if not _is_plain(obj):
                return None
        elif type(obj) is not torch.UntypedStorage or obj.device.type != "cpu":
            return None
        known = self._located.get(id(obj))
        if known is None:
            number = len(self._located)
            self._located[id(obj)] = known = (obj, (number, *self._describe(obj)))
        return known[1]

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and not obj.flags.writeable:
            return obj.__reduce__()  # as a buffer it would arrive read-only, unlike by torch's pickle
        return NotImplemented

    def _describe(self, obj: torch.Tensor | torch.UntypedStorage) -> tuple[Any, ...]:
        if isinstance(obj, torch.Tensor):
            values = obj.detach().resolve_conj().resolve_neg()  # a pickle would lose these marks
            return *self._locate(values), obj.dtype, obj.requires_grad
        content = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj)
        return *self._locate(content), None, False


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_nested)
        and not (tensor.requires_grad and not tensor.is_leaf)
    )


def dump(batch: Any, store: StoreBytes, locate: LocateTensor) -> tuple[bytes, list[tuple[int, int, int]]]:
    """Return the pickled structure of `batch`, and where its out-of-band buffers were stored."""
    file = io.BytesIO()
    buffers: list[tuple[int, int, int]] = []
    _Pickler(file, store, locate, buffers).dump(batch)
    return file.getvalue(), buffers


def load(packed: PackedBatch, leases: list[Bytes]) -> Any:
    """Return the batch, its tensors lying in the leased slots."""
    structure = packed.structure
    if not isinstance(structure, bytes):
        position, offset, nbytes = structure
        structure = leases[position][offset : offset + nbytes].tobytes()
    buffers = [leases[slot][offset : offset + nbytes] for slot, offset, nbytes in packed.buffers]
    return _Unpickler(structure, buffers, leases).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, buffers: list[Bytes], leases: list[Bytes]) -> None:
        super().__init__(io.BytesIO(structure), buffers=buffers)
        self._leases = leases
        self._seen: dict[int, Any] = {}  # a tensor that is twice in the batch is the same object here too

    def persistent_load(self, position: Any) -> Any:
        number, slot, offset, shape, stride, dtype, requires_grad = position
        if number not in self._seen:
            memory = self._leases[slot] if self._leases else np.empty(0, np.uint8)
            if dtype is None:
                self._seen[number] = storage_over(memory, offset, *shape)
            else:
                tensor = tensor_over(memory, offset, dtype, shape, stride)
                self._seen[number] = tensor.requires_grad_(requires_grad)
        return self._seen[number]


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
        stride = torch.empty(tuple(shape), device="meta").stride()
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


def _before_fork() -> None:
    """Give up the live batches: a child sees them in the same pages as this process, so they must not change.

    Copying them for the child was rejected: most forks of a trainer do not read batches.
    """
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
        queues = (self._leases.released, self._leases.given_up)  # finalizers append to them at any moment
        released, given_up = ([ids.popleft() for _ in range(len(ids))] for ids in queues)
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

    def close(self) -> None:
        """Let go of all slots, once the worker has ended. Live batches keep theirs."""
        self._memory.clear()

    def _lease(self, slot_id: int) -> Bytes:
        lease = self._memory[slot_id].view(Lease)
        self._leases.begin(slot_id)
        weakref.finalize(lease, self._leases.end, slot_id).atexit = False
        return lease
