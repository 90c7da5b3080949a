"""A CUDA device that is none, but as dangerous: its copies run later, in a thread, and read host memory then.

A stream is a thread with a queue. A copy knows its source by address alone, as the hardware does: who gives
the memory away too early gets other bytes, and who unmaps it is reported. Device memory is full of 0xFD
before the copy is through, so a consumer that does not wait sees that.

`Cuda.copy` runs as it is, with the `to` of a batch's own class: what it asks of torch comes to the fake.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastload.gpu.transfer import Cuda
from fastload.gpu.tree import tree_leaves
from tests.patience import PATIENCE

GARBAGE = 0xFD


class FakeEvent:
    def __init__(self) -> None:
        self._passed = threading.Event()
        self._time = 0.0

    def pass_by(self) -> None:
        self._time = time.perf_counter()
        self._passed.set()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        assert self._passed.wait(PATIENCE), "the fake stream is stuck"

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query() and end_event.query(), "elapsed_time of an event that is not over raises in CUDA"
        return (end_event._time - self._time) * 1000


class FakeCuda:
    """See `fastload.gpu.transfer.Device`.

    Args:
        delay: seconds before each copy.
        refuse: cudaHostRegister fails.
    """

    def __init__(self, delay: float = 0.002, refuse: bool = False) -> None:
        self.opened: list[torch.device] = []
        self.registered: dict[int, int] = {}
        self.log: list[tuple[str, Any]] = []
        self.faults: list[str] = []
        self.gate = threading.Event()  # copies wait for it
        self.gate.set()
        self._delay, self._refuse = delay, refuse
        self._pid = os.getpid()
        self.late: list[FakeEvent] | None = None  # the consumer's events, where a test lets them pass
        self._device = torch.device("cuda")
        self._on_side = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake stream", daemon=True)
        self._thread.start()

    def __call__(self, device: torch.device) -> FakeCuda:
        """In place of the class `Cuda`."""
        self._here()
        self.opened.append(device)
        return self

    def stop(self) -> None:
        self.gate.set()
        self._work.put(None)
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _here(self) -> None:
        assert os.getpid() == self._pid, "CUDA was used in a forked process"

    # --- fastload.gpu.transfer.Device

    @contextlib.contextmanager
    def side(self) -> Iterator[None]:
        self._here()
        self._on_side = True
        try:
            yield
        finally:
            self._on_side = False

    def event(self) -> FakeEvent:
        self._here()
        event = FakeEvent()
        if self._on_side:
            self._work.put(event.pass_by)
        elif self.late is not None:
            self.late.append(event)
        else:  # the consumer's stream is this thread
            event.pass_by()
        return event

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def copy(self, leaf: Any) -> Any:
        self._here()
        assert self._on_side
        with _Calls(self):
            return Cuda.copy(self, leaf)  # type: ignore[arg-type]

    def _to(self, leaf: torch.Tensor) -> torch.Tensor:
        if leaf.layout is not torch.strided or leaf.is_nested:
            return leaf.clone()
        target = torch.empty_like(leaf)
        raw = target.untyped_storage()
        ctypes.memset(raw.data_ptr(), GARBAGE, raw.nbytes())
        if self._region(leaf.data_ptr()) is None:
            pinned = leaf.clone(memory_format=torch.preserve_format)  # by torch's allocator, which keeps it
            self._enqueue(lambda: target.detach().copy_(pinned.detach()))
            return target
        address, span = leaf.data_ptr(), _span(leaf)
        dtype, shape, stride = leaf.dtype, tuple(leaf.shape), tuple(leaf.stride())

        def run() -> None:
            region = self._region(address)
            if region is None or address + span > region[0] + region[1]:
                self.faults.append(f"a copy read {span} bytes at {address:#x}, which nobody holds any more")
                return
            memory = (ctypes.c_uint8 * span).from_address(address)
            source = torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)
            target.detach().copy_(source)

        if span:
            self._enqueue(run)
        return target

    def wait(self, event: FakeEvent) -> None:
        self._here()
        if self._on_side:
            self._work.put(event.synchronize)
        elif self.late is None:
            event.synchronize()
        self.log.append(("side wait" if self._on_side else "wait", event))

    def keep(self, tensor: torch.Tensor) -> None:
        self._here()
        self.log.append(("keep", tensor.data_ptr()))

    def register(self, address: int, nbytes: int) -> bool:
        self._here()
        if self._refuse:
            return False
        assert address not in self.registered
        self.registered[address] = nbytes
        self.log.append(("register", address))
        return True

    def unregister(self, address: int) -> None:
        if os.getpid() != self._pid:
            return
        if self.registered.pop(address, None) is None:
            self.faults.append(f"{address:#x} was not registered")
        self.log.append(("unregister", address))

    # --- for tests

    def kernels(self, transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The transform as it is on a GPU: it returns at once, and its kernels run after the copies.

        It is called twice, now for the shapes and in the stream for the values, and has to be a function.
        """

        def launch(batch: Any) -> Any:
            result = transform(batch)
            inside = {id(tensor) for tensor in tree_leaves(batch)}
            made = [tensor for tensor in tree_leaves(result) if id(tensor) not in inside]

            def run() -> None:
                again = [tensor for tensor in tree_leaves(transform(batch)) if id(tensor) not in inside]
                for target, source in zip(made, again, strict=True):
                    target.copy_(source)

            self._work.put(run)
            return result

        return launch

    def _enqueue(self, work: Callable[[], None]) -> None:
        def run() -> None:
            assert self.gate.wait(PATIENCE)
            time.sleep(self._delay)
            work()

        self._work.put(run)

    def _region(self, address: int) -> tuple[int, int] | None:
        for start, nbytes in list(self.registered.items()):
            if start <= address < start + nbytes:
                return start, nbytes
        return None


class _Calls(TorchFunctionMode):
    """The calls of CUDA below `Cuda.copy`."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            return self._fake._to(args[0])
        if func is torch.Tensor.is_pinned:
            return self._fake._region(args[0].data_ptr()) is not None
        if (
            func is torch.Tensor.pin_memory and not args[0].is_nested
        ):  # it keeps the strides, and writes no element twice
            pinned = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype)
            return pinned.copy_(args[0])
        if func is torch.Tensor.pin_memory:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return elements * tensor.element_size()
