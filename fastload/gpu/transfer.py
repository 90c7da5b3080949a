"""The device prefetcher: from a batch in host memory to one on the device, transformed and safe to use.

    arrived, due next ─▶ unpack ─▶ copy ─▶ batch_transform ─▶ ready ─▶ the consumer's stream waits, takes over
                         (slot)    └─── on the side stream ───┘  │
                         slot goes back, once the device is there┘

`start` does all steps but the last, for batches that are not asked for yet, and never waits for the device.
`get` hands over. There is no thread: a start costs a few launches, in calls of `next()` that happen anyway.

All calls of CUDA go through `Cuda`. There is none before the first batch, so that workers are forked from a
process without a CUDA context, and none in a worker.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fastload.errors import ArgumentError
from fastload.gpu.tree import parts_of, tree_leaves, tree_map
from fastload.metrics.counters import Counters, stage

if TYPE_CHECKING:
    from fastload.gpu.decoding import Decoding


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
            for part in parts_of(leaf):
                part.record_stream(self._side)
            return leaf
        on_host = leaf.device.type == "cpu" and leaf.layout is torch.strided
        if on_host and not leaf.is_pinned() and not _is_expanded(leaf):
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


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether one element stands for many: torch refuses to pin, as it would write it many times."""
    (part,) = parts_of(tensor)
    return any(n > 1 and step == 0 for n, step in zip(part.shape, part.stride(), strict=True))


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


# One is copied while the consumer's stream works on the batch before it. The second helps where that work is
# shorter than the time from a call of `next()` to the copy.
_AHEAD = 2


@dataclass
class _Started:
    """A batch on the device, or its error."""

    batch: Any = None
    decoding: bool = False  # the batch waits for its pixels, and for the transform
    ready: Event | None = None
    error: BaseException | None = None


class _Copy(NamedTuple):
    """Host memory that the device may be reading, until `ready`."""

    host: Any
    started: Event
    copied: Event
    ready: Event


class DevicePrefetcher:
    """Puts the batches of one iterator onto a device, ahead of the consumer.

    Args:
        device: the target. "cpu" and None leave batches in host memory; with None, none is started ahead.
        transform: called with each batch, on the side stream. None: batches stay unchanged.
        counters: gets copy.* and device.*, see `fastload.metrics.counters`.
        decoding: decodes encoded images; with it, batches are started ahead without a device too.

    Used by one thread. It does not touch the device before the first batch.

    Attributes:
        ahead: batches to start before they are asked for.
        copies: whether batches are copied to another device.
    """

    def __init__(
        self,
        device: torch.device | None,
        transform: Callable[[Any], Any] | None,
        counters: Counters,
        decoding: Decoding | None = None,
    ) -> None:
        self.ahead = 0 if device is None and decoding is None else _AHEAD
        self._decoding = decoding
        self.copies = device is not None and device.type != "cpu"
        self._wanted = device
        self._transform = transform
        self._counters = counters
        self._owner = os.getpid()
        self._started: dict[Hashable, _Started] = {}
        self._reading: deque[_Copy] = deque()
        self._asked: deque[Event] = deque(maxlen=2)  # on the consumer's stream, at its last requests
        self._idle = _IdleTime(counters)
        self._warned = False

    @functools.cached_property
    def _device(self) -> Device:
        if not self.copies or self._wanted is None:
            return Device()
        return Cuda(self._wanted if self._decoding is None else self._decoding.device)

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Register a slot's memory with the device. Call the result, which undoes it, before unmapping."""
        device = self._device
        if device.register(address, nbytes):
            # Without `self`, which holds batches, whose memory holds this function.
            return functools.partial(device.unregister, address)
        self._counters.add("copy.unregistered")
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a batch slot of {nbytes >> 20} MiB could not be registered with CUDA: such batches are "
                "copied to pinned memory first, in the trainer's process. Look at the memory limits of the "
                "container",
                RuntimeWarning,
                stacklevel=2,
            )
        return lambda: None

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory for a batch made in this process."""
        return self._device.allocate(shape, dtype)

    def end_epoch(self) -> None:
        """Note the end of an epoch: the device's work until the next one does not count."""
        self._idle.forget()
        self._asked.clear()

    def mark_wait(self) -> None:
        """Note that the consumer asks for its next batch."""
        if self.copies:
            self._asked.append(self._device.event())
            self._idle.ask(self._asked[-1])

    def start(self, key: Hashable, load: Callable[[], Any]) -> None:
        """Start the batch `load()`, unless it was started. `load` is called once in any case.

        An error is kept for `get(key)`. Ctrl-C, and others that are not an `Exception`, are raised here too.
        """
        if key in self._started:
            return
        started = self._started[key] = _Started()
        try:
            self._release_read()
            self._send(load(), started)
        except BaseException as error:
            started.error = error
            if not isinstance(error, Exception):
                raise

    def get(self, key: Hashable, load: Callable[[], Any]) -> Any:
        """Return the batch, for the consumer's current stream; started now if it was not.

        Raises:
            Exception: the error of `load`, of a copy, or of the transform (with a note that names it).
        """
        try:
            self.start(key, load)
        finally:
            started = self._started.pop(key)
        if started.error is not None:
            raise started.error
        if started.decoding:
            self._finish(started)
        assert started.ready is not None
        self._device.wait(started.ready)
        for tensor in tree_leaves(started.batch) if self.copies else ():
            self._device.keep(tensor)
        self._idle.ready(started.ready)
        self._release_read()
        return started.batch

    def drop(self, key: Hashable) -> bool:
        """Forget a started batch; False if it was not started."""
        return self._started.pop(key, None) is not None

    def close(self) -> None:
        """Forget the started batches, and wait until the device has read all host memory."""
        if os.getpid() != self._owner:
            return
        self._started.clear()
        start = time.perf_counter()
        while self._reading:
            self._reading[0].ready.synchronize()
            self._release_read()
        self._counters.add("copy.wait_seconds", time.perf_counter() - start)

    def _send(self, host: Any, started: _Started) -> None:
        device = self._device
        # Kept by themselves: an object's `to` may replace its tensors by the moved ones.
        tensors = list(tree_leaves(host)) if self.copies else []
        with device.side():
            # The memory of dropped batches is given out again on this stream. `keep` tells the allocator who
            # still reads them, but finds no tensor in an object of a class that only the transform knows. So
            # this stream waits for the request before the last one; a copy still overlaps a whole step. In
            # the first of an epoch it waits for this one: other loaders may have had batches before.
            if self._asked:
                device.wait(self._asked[0])
            before = copied = device.event()
            try:
                begun = host if self._decoding is None else self._decoding.begin(host)
                started.batch = tree_map(begun, self._copy)
                copied = device.event()
                started.decoding = begun is not host
                if not started.decoding:
                    self._apply_transform(started)
            finally:
                # After an error too: a copy may be running, and a transform may read host memory.
                started.ready = device.event()
                self._hold(_Copy((host, tensors), before, copied, started.ready))

    def _finish(self, started: _Started) -> None:
        """Wait for the pixels of a batch that was asked for. Later batches are decoded meanwhile."""
        assert self._decoding is not None
        with self._device.side():
            started.batch = self._decoding.finish(started.batch)
            self._apply_transform(started)
            started.ready = self._device.event()

    def _copy(self, leaf: Any) -> Any:
        copy = self._device.copy(leaf)
        if copy is not leaf and isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            self._counters.add("copy.bytes", leaf.nbytes)
        return copy

    def _apply_transform(self, started: _Started) -> None:
        if self._transform is None:
            return
        try:
            with stage("batch_transform"):
                started.batch = self._transform(started.batch)
        except StopIteration as error:
            # Left alone it would end the epoch silently.
            raise RuntimeError("[batch_transform] raised StopIteration") from error
        except Exception as error:
            error.add_note("[batch_transform] The batch_transform of the DataLoader raised this.")
            raise

    def _hold(self, copy: _Copy) -> None:
        self._reading.append(copy)

    def _release_read(self) -> None:
        """Release the host memory that the device has read; its slots can go back."""
        while self._reading and self._reading[0].ready.query():
            copy = self._reading.popleft()
            if self.copies:
                self._counters.add("copy.batches")
                self._counters.add("copy.seconds", copy.started.elapsed_time(copy.copied) / 1000)
        self._idle.count()


class _IdleTime:
    """Counts the device's time between requests for batches, and the part of it without a batch."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._asked: Event | None = None
        self._ready: Event | None = None
        self._spans: deque[tuple[Event, Event, Event]] = deque()  # (asked, ready, asked again)

    def forget(self) -> None:
        """Leave out the time until the next request."""
        self._asked = None

    def ask(self, asked: Event) -> None:
        """Note that the device has come to the point where it needs a batch."""
        if self._asked is not None and self._ready is not None:
            self._spans.append((self._asked, self._ready, asked))
        self._asked, self._ready = asked, None

    def ready(self, ready: Event) -> None:
        """Note that the batch is ready at this event."""
        self._ready = ready

    def count(self) -> None:
        """Count the spans that the device has completed."""
        # All three: the requests may come from streams without an order.
        while self._spans and all(event.query() for event in self._spans[0]):
            asked, ready, again = self._spans.popleft()
            self._counters.add("device.seconds", asked.elapsed_time(again) / 1000)
            # Negative where the batch was ready before the device needed it.
            self._counters.add("device.idle.seconds", max(0.0, asked.elapsed_time(ready)) / 1000)
