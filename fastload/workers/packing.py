"""A batch as it travels: its tensors lie in slots, the rest of its structure is pickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # registers how sparse, CUDA and other special tensors are pickled

from fastload.workers.slot_memory import Bytes, storage_over, tensor_over

__all__ = ["PackedBatch", "dump", "load"]

# Of the pool: copy bytes into the batch's slots, (slot, offset, bytes); find or make a tensor's place there,
# (slot, offset, shape, stride).
Store = Callable[[memoryview], tuple[int, int, int]]
Place = Callable[[torch.Tensor], tuple[int, int, tuple[int, ...], tuple[int, ...]]]


@dataclass
class PackedBatch:
    """A batch as it travels: where its bytes lie in which slots, and its pickled structure."""

    slots: list[int]  # ids, in the order that offsets refer to
    new: list[tuple[int, int]]  # (id, bytes) of slots whose descriptors come with this message
    retired: list[int]  # ids that the trainer may unmap
    inline: bytes | None  # the content of the only slot, for small batches
    buffers: list[tuple[int, int, int]]  # (slot, offset, bytes) of pickle's out-of-band buffers
    structure: bytes | tuple[int, int, int]  # the pickle, or where it lies


class _Pickler(ForkingPickler):
    """Torch's own pickler, but what CPU memory a tensor needs lies in slots.

    A plain tensor takes the short way. Others (subclasses, sparse, quantized ...) are torch's to take apart;
    in the end they come down to storages, which torch would each make a file in /dev/shm.
    """

    def __init__(
        self, file: io.BytesIO, store: Store, place: Place, buffers: list[tuple[int, int, int]]
    ) -> None:
        def keep_out_of_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < 1024:
                return True
            buffers.append(store(raw))
            return False

        super().__init__(file, pickle.HIGHEST_PROTOCOL, True, keep_out_of_band)
        self._place = place
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
            self._placed[id(obj)] = known = (obj, (number, *self._describe(obj)))
        return known[1]

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and not obj.flags.writeable:
            return obj.__reduce__()  # a buffer would arrive read-only, which torch's pickle does not do to it
        return NotImplemented

    def _describe(self, obj: torch.Tensor | torch.UntypedStorage) -> tuple[Any, ...]:
        if isinstance(obj, torch.Tensor):
            return *self._place(obj.detach()), obj.dtype, obj.requires_grad
        content = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj)
        return *self._place(content), None, False


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
        and not (tensor.requires_grad and not tensor.is_leaf)
    )


def dump(batch: Any, store: Store, place: Place) -> tuple[bytes, list[tuple[int, int, int]]]:
    """The pickled structure of `batch`, and where its out-of-band buffers were stored."""
    file = io.BytesIO()
    buffers: list[tuple[int, int, int]] = []
    _Pickler(file, store, place, buffers).dump(batch)
    return file.getvalue(), buffers


def load(packed: PackedBatch, leases: list[Bytes]) -> Any:
    """The batch, its tensors lying in the leased slots."""
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
        self._seen: dict[int, Any] = {}  # so that what lay twice in the batch does so here

    def persistent_load(self, place: Any) -> Any:
        number, slot, offset, shape, stride, dtype, requires_grad = place
        if number not in self._seen:
            memory = self._leases[slot] if self._leases else np.empty(0, np.uint8)
            if dtype is None:
                self._seen[number] = storage_over(memory, offset, *shape)
            else:
                tensor = tensor_over(memory, offset, dtype, shape, stride)
                self._seen[number] = tensor.requires_grad_(requires_grad)
        return self._seen[number]
