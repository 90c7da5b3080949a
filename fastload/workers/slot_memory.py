"""The memory of a slot, mapped once by each side, and a batch in it.

The batch's tensors lie in slots; the rest of its structure is pickled.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.multiprocessing  # registers how sparse, CUDA and other special tensors are pickled

from fastload.metrics.machine import memory_file

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


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


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
