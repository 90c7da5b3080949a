"""The devices of the device prefetcher: the host, and CUDA.

All calls of CUDA go through `Cuda`. There is none before the first batch, so that workers are forked from a
process without a CUDA context, and none in a worker.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any

import torch

from fastload.errors import ArgumentError

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process, not only the current one


class Event:
    """A point in a stream's work that has passed. `torch.cuda.Event` is one that may be still to come."""

    def query(self) -> bool:
        """Return whether the stream has reached it."""
        return True

    def synchronize(self) -> None:
        """Wait until the stream has reached it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to another; the device has reached both."""
        return 0.0


class Device:
    """A device with a side stream, on which copies and transforms run in parallel to the consumer's work.

    This one is the host, for batches that stay there: no copies, no waits.
    """

    def side(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which work goes to the side stream."""
        return contextlib.nullcontext()

    def event(self) -> Event:
        """Return the current point of the current stream."""
        return Event()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in host memory that the device can read by itself."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def copy(self, leaf: Any) -> Any:
        """Return a tensor, or an object with a method `to`, on the device.

        The device reads the host's memory until the next event of this stream.
        """
        return leaf

    def wait(self, event: Event) -> None:
        """Make the current stream wait for `event`. This thread does not wait."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's memory from reuse until the current stream has used it."""

    def register(self, address: int, nbytes: int) -> bool:
        """Let the device read this host memory by itself; False where that fails."""
        return True

    def unregister(self, address: int) -> None:
        """Undo `register`. The device must have read the memory."""


@functools.cache  # of the process, and not of an epoch: each stream has a pool of memory of its own
def _side_stream(device: torch.device, process: int) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Cuda(Device):
    """One CUDA device.

    Args:
        device: of type "cuda". Without an index: the current device at this moment, even if another one
            becomes current later.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._owner = os.getpid()
        self._side = _side_stream(self._device, self._owner)
        self._consumer = torch.cuda.current_stream(self._device)
        # Tensors that the transform uses may still be in the making on the consumer's stream.
        self._side.wait_stream(self._consumer)

    def side(self) -> contextlib.AbstractContextManager[Any]:
        self._consumer = torch.cuda.current_stream(self._device)
        return torch.cuda.stream(self._side)

    def event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def copy(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            try:
                return leaf.to(self._device, non_blocking=True)
            except TypeError:  # a `to` without other arguments
                return leaf.to(self._device)
        if leaf.device == self._device:  # made by the consumer's stream, where there are no workers
            self._side.wait_stream(self._consumer)
            leaf.record_stream(self._side)
            return leaf
        if leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.is_pinned():
            leaf = leaf.pin_memory()  # torch's allocator takes the block back after the copy
        return leaf.detach().to(self._device, non_blocking=True).requires_grad_(leaf.requires_grad)

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)  # type: ignore[arg-type]

    def keep(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def register(self, address: int, nbytes: int) -> bool:
        # With this device current: on another one the call would create a context, which takes memory.
        with torch.cuda.device(self._device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if cudart.cudaHostRegister(address, nbytes, _PORTABLE) == cudart.cudaError.success:
                return True
            # The next kernel launch would raise this error again: clear it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)
            return False

    def unregister(self, address: int) -> None:
        if os.getpid() != self._owner:
            return  # a fork has the mapping, but not the context
        with torch.cuda.device(self._device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(address)


def resolve_device(device: Any) -> torch.device | None:
    """Return the argument `device` of a loader as a usable torch.device. Creates no CUDA context.

    Raises:
        ArgumentError: it names no device, or one that this machine lacks.
    """
    if device is None:
        return None
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"device must be None, 'cpu', 'cuda' or 'cuda:<n>', found {device!r}") from error
    if resolved.type == "cpu":
        return resolved
    if resolved.type != "cuda":
        raise ArgumentError(
            f"device must be on the CPU or a CUDA GPU, found {device!r}: leave device out, and move the "
            "batches in the training loop"
        )
    if not torch.cuda.is_available():
        build = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        raise ArgumentError(
            f"device={device!r} needs CUDA, and {build} (torch {torch.__version__}): run `nvidia-smi` and "
            "install torch for that driver, or use device='cpu'"
        )
    if resolved.index is not None and resolved.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ArgumentError(f"device={device!r}: torch sees {count} GPUs here, from 'cuda:0' on")
    return resolved
