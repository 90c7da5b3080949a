"""The memory of a slot, mapped once by each side, and the tensors over it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastload.metrics.platform import memory_file

__all__ = [
    "Bytes",
    "Lease",
    "Pin",
    "anonymous_file",
    "contiguous_stride",
    "extent",
    "map_shared",
    "storage_over",
    "tensor_over",
]

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


class Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """A slot's bytes for the life of one batch. A separate class, so that NumPy's views keep it as their
    base: its finalizer then runs when the last tensor over the slot dies."""


def anonymous_file(nbytes: int) -> int:
    """A descriptor of a new memory file of `nbytes` bytes, with no name that could leak in /dev/shm."""
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
    """A tensor over `memory[offset:]`. Not a view of another: `_base` is None, as in torch's batches."""
    storage = storage_over(memory, offset, extent(shape, stride) * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), tuple(stride))


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of storage elements that a strided tensor spans."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))
