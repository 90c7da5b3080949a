"""The feed: from a batch in host memory to one on the device, transformed, and safe to use.

    arrived, due next ─▶ unpack ─▶ copy ─▶ batch_transform ─▶ ready ─▶ the consumer's stream waits, takes over
                         (slot)    └─── on the side stream ───┘  │
                         slot goes back, once the device is there┘

`stage` does all but the last step, for batches that are not asked for yet; none of it waits for the device.
`take` hands over. There is no thread: staging costs a few launches, in calls of `next()` that happen anyway.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from fastload.gpu.cuda import Cpu, Cuda, Device, Event
from fastload.gpu.tree import tree_leaves, tree_map
from fastload.metrics.counters import Counters

__all__ = ["DevicePrefetcher"]

# One is copied while the consumer's stream works on the batch before it; the second is there where that
# work is shorter than the way from one call of `next()` to the copy.
_AHEAD = 2


class Decodes(Protocol):
    """What decodes images that come encoded, to the device; see `fastload.gpu.decoding`."""

    def begin(self, batch: Any) -> Any:
        """The batch with its encoded images on their way; the batch itself if there are none."""

    def finish(self, batch: Any) -> Any:
        """What `begin` returned, with pixels. Waits for them."""


@dataclass
class _Staged:
    """A batch on the device, or what went wrong."""

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
        device: where to; "cpu" leaves them where they are; None too, and nothing is staged ahead.
        transform: called with each batch, on the side stream. None: the batch as it is.
        counters: gets copy.* and device.*, see `fastload.metrics.counters`.
        decoding: decodes what comes encoded; then batches are staged ahead without a device too.

    The device is touched with the first batch, not before. To be used by one thread.
    """

    def __init__(
        self,
        device: torch.device | None,
        transform: Callable[[Any], Any] | None,
        counters: Counters,
        decoding: Decodes | None = None,
    ) -> None:
        self.ahead = 0 if device is None and decoding is None else _AHEAD
        self._decoding = decoding
        self.copies = device is not None and device.type != "cpu"
        self._wanted = device
        self._transform = transform
        self._counters = counters
        self._owner = os.getpid()
        self._staged: dict[Hashable, _Staged] = {}
        self._reading: deque[_Copy] = deque()
        self._asked: Event | None = None
        self._last_ready: Event | None = None
        self._watched: deque[tuple[Event, Event, Event]] = deque()
        self._warned = False

    @functools.cached_property
    def _device(self) -> Device:
        return Cuda(self._wanted) if self.copies and self._wanted is not None else Cpu()

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Register a slot's memory with the device; returns what undoes it, to be called before unmapping."""
        device = self._device
        if device.register(address, nbytes):
            # Without `self`: the feed holds batches, whose memory holds this.
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
        return _nothing

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory for a batch that is made in this process."""
        return self._device.allocate(shape, dtype)

    def rest(self) -> None:
        """An epoch is over: what the device does until the next one is not about these batches."""
        self._asked = None

    def ask(self) -> None:
        """The consumer asks for its next batch."""
        if not self.copies:
            return
        asked = self._device.event()
        if self._asked is not None and self._last_ready is not None:
            self._watched.append((self._asked, self._last_ready, asked))
        self._asked, self._last_ready = asked, None

    def stage(self, key: Hashable, load: Callable[[], Any]) -> None:
        """Start the batch `load()` on its way, unless it is. `load` is called once, whatever happens.

        An exception is kept for `take(key)`. What is not an `Exception`, such as Ctrl-C, is raised here too.
        """
        if key in self._staged:
            return
        self._let_go()
        staged = self._staged[key] = _Staged()
        try:
            self._send(load(), staged)
        except BaseException as error:
            staged.error = error
            if not isinstance(error, Exception):
                raise

    def take(self, key: Hashable, load: Callable[[], Any]) -> Any:
        """The batch, for the consumer's current stream; staged now, if it was not.

        Raises:
            What `load`, a copy or the transform raised, the latter with a note that names it.
        """
        try:
            self.stage(key, load)
        finally:
            staged = self._staged.pop(key)
        if staged.error is not None:
            raise staged.error
        if staged.decoding:
            self._finish(staged)
        assert staged.ready is not None
        self._device.wait(staged.ready)
        for tensor in tree_leaves(staged.batch) if self.copies else ():
            self._device.keep(tensor)
        self._last_ready = staged.ready
        self._let_go()
        return staged.batch

    def drop(self, key: Hashable) -> bool:
        """Forget a staged batch; False if it is none."""
        return self._staged.pop(key, None) is not None

    def close(self) -> None:
        """Forget what is staged, and wait until the device no longer reads from host memory."""
        if os.getpid() != self._owner:
            return
        self._staged.clear()
        start = time.perf_counter()
        while self._reading:
            self._reading[0].ready.synchronize()
            self._let_go()
        self._counters.add("copy.wait_seconds", time.perf_counter() - start)

    def _send(self, host: Any, staged: _Staged) -> None:
        device = self._device
        with device.side():
            started = copied = device.event()
            try:
                begun = host if self._decoding is None else self._decoding.begin(host)
                staged.batch = tree_map(begun, self._copy)
                copied = device.event()
                staged.decoding = begun is not host
                if not staged.decoding:
                    self._transform_it(staged)
            finally:
                # Whatever happened: a copy may be on its way, and a transform may read from the host too.
                staged.ready = device.event()
                self._hold(_Copy(host, started, copied, staged.ready))

    def _finish(self, staged: _Staged) -> None:
        """Wait for the pixels of a batch that was asked for. Those staged behind it are decoded meanwhile."""
        assert self._decoding is not None
        with self._device.side():
            staged.batch = self._decoding.finish(staged.batch)
            self._transform_it(staged)
            staged.ready = self._device.event()

    def _copy(self, leaf: Any) -> Any:
        copy = self._device.copy(leaf)
        if copy is not leaf and isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            self._counters.add("copy.bytes", leaf.nbytes)
        return copy

    def _transform_it(self, staged: _Staged) -> None:
        if self._transform is None:
            return
        try:
            with torch.profiler.record_function("fastload.batch_transform"):
                staged.batch = self._transform(staged.batch)
        except StopIteration as error:
            # Left alone it would end the epoch without a word.
            raise RuntimeError("[batch_transform] raised StopIteration") from error
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note("[batch_transform] The batch_transform of the DataLoader raised this.")
            raise

    def _hold(self, copy: _Copy) -> None:
        self._reading.append(copy)

    def _let_go(self) -> None:
        """Of the host memory that the device has read; its slots can go back."""
        while self._reading and self._reading[0].ready.query():
            copy = self._reading.popleft()
            if self.copies:
                self._counters.add("copy.batches")
                self._counters.add("copy.seconds", copy.started.elapsed_time(copy.copied) / 1000)
        while self._watched and self._watched[0][2].query():
            asked, ready, again = self._watched.popleft()
            self._counters.add("device.seconds", asked.elapsed_time(again) / 1000)
            # Negative where the batch was there before the device had come to the point of asking for it.
            self._counters.add("device.idle.seconds", max(0.0, asked.elapsed_time(ready)) / 1000)


def _nothing() -> None:
    pass
