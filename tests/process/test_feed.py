"""The feed over the CPU and over a fake of CUDA whose copies come late; and the guards of memory it needs."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import fastload.gpu.transfer
import fastload.loader.dataloader
from fastload import DataLoader
from fastload.errors import ArgumentError, WorkerError
from fastload.gpu.decoding import Decoding
from fastload.gpu.transfer import Cuda, Device, DevicePrefetcher
from fastload.gpu.tree import tree_leaves
from fastload.metrics.counters import BadSamples, Counters
from fastload.workers import slots as memory
from fastload.workers.slots import SlotMap, SlotPool
from tests.fakecuda import GARBAGE, FakeCuda, FakeEvent
from tests.feed_cases import *  # noqa: F403
from tests.feed_cases import Target, ids
from tests.loaderdata import Numbers, numbered

pytestmark = pytest.mark.usefixtures("no_leaks")


def _install(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastload.gpu.transfer, "Cuda", fake)
    monkeypatch.setattr(
        "fastload.loader.dataloader.resolve_device",
        lambda name: None if name is None else torch.device(name),
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    _install(fake, monkeypatch)
    yield fake
    gc.collect()  # iterators that an exception holds
    fake.stop()
    assert fake.faults == []
    assert not fake.registered, "memory is still registered, and its mapping is gone or leaks"


@pytest.fixture(params=["cpu", "fake"])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "cpu":
        return Target("cpu", lambda transform: transform, "cpu")
    return Target("cuda", request.getfixturevalue("fake").kernels, "cpu")


# --- lifetimes ---------------------------------------------------------------------------------------------


class Slots:
    """A worker's pool and the trainer's map, in one process."""

    def __init__(self, feed: DevicePrefetcher) -> None:
        self.pool, self.map = SlotPool(keep=4), SlotMap(feed.pin)

    def send(self, number: int, batch_of: Callable[[torch.Tensor], Any] = lambda tensor: tensor) -> Any:
        """What loads a batch full of `number`, made in a free slot."""
        for slot_id in self.map.take_returned()[0]:
            self.pool.release(slot_id)
        tensor = self.pool.allocate((4, 25_000), torch.float32)
        tensor.fill_(number)
        packed, fds = self.pool.pack(batch_of(tensor))
        self.map.attach(packed, fds)
        return lambda: self.map.unpack(packed)


def _late_copy(fake: FakeCuda, batch_of: Callable[[torch.Tensor], Any] = lambda tensor: tensor) -> list[int]:
    """The first values of two batches; the copy of the first runs after the second was made."""
    feed = DevicePrefetcher(torch.device("cuda"), None, Counters())
    slots = Slots(feed)
    fake.gate.clear()
    feed.start(0, slots.send(0, batch_of))
    second = slots.send(1, batch_of)
    fake.gate.set()
    batches = [feed.get(key, load) for key, load in ((0, None), (1, second))]
    values = [int(tensor[0, 0]) for batch in batches for tensor in tree_leaves(batch)]
    feed.close()
    return values


def test_a_slot_is_not_used_again_before_its_copy_ended(fake: FakeCuda) -> None:
    assert _late_copy(fake) == [0, 1]


class MovedInPlace:
    """As Hugging Face's BatchEncoding and PyG's Batch: `to` replaces the tensors of the object itself."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def to(self, device: Any, non_blocking: bool = False) -> MovedInPlace:
        self.data = self.data.to(device, non_blocking=non_blocking)
        return self


class Fields(UserDict[str, torch.Tensor]):
    """A mapping whose copy shares its content."""

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__(data=data)

    def __copy__(self) -> Fields:
        clone = Fields.__new__(Fields)
        clone.data = self.data
        return clone


@pytest.mark.parametrize("batch_of", [MovedInPlace, Fields])
def test_a_batch_that_is_moved_in_place_keeps_its_slot(fake: FakeCuda, batch_of: Any) -> None:
    assert _late_copy(fake, batch_of) == [0, 1]


@pytest.mark.stress
def test_slot_with_guard_removed_is_used_again(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DevicePrefetcher, "_hold", lambda self, copy: None)
    assert _late_copy(fake) == [1, 1]


@pytest.mark.stress
def test_slot_with_guard_removed_from_event_is_used_again(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fakecuda.FakeEvent.query", lambda self: True)
    monkeypatch.setattr("tests.fakecuda.FakeEvent.elapsed_time", lambda self, other: 0.0)
    feed = DevicePrefetcher(torch.device("cuda"), None, Counters())
    slots = Slots(feed)
    fake.gate.clear()
    feed.start(0, slots.send(0))
    feed._release_read()
    slots.send(1)
    fake.gate.set()
    assert int(feed.get(0, None)[0, 0]) == 1
    feed.close()


def test_the_consumer_waits_for_the_copy(fake: FakeCuda) -> None:
    fake._delay = 0.05
    for batch in DataLoader(Numbers(8, numbered), batch_size=2, num_workers=1, device="cuda"):
        ids(batch)


@pytest.mark.stress
def test_consumer_with_guard_removed_sees_garbage(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCuda, "wait", lambda self, event: None)
    feed = DevicePrefetcher(torch.device("cuda"), None, Counters())
    slots = Slots(feed)
    fake.gate.clear()
    batch = feed.get(0, slots.send(7))
    assert (batch.view(torch.uint8) == GARBAGE).all()
    fake.gate.set()
    feed.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_handed_over_batch_is_kept_for_the_consumers_stream(fake: FakeCuda, workers: int) -> None:
    def collate(samples: list[torch.Tensor]) -> Any:
        return {"a": torch.stack(samples), "b": [samples[0].clone()]}

    loader = DataLoader(
        Numbers(12, numbered), batch_size=2, num_workers=workers, collate_fn=collate, device="cuda"
    )
    for batch in loader:
        wait = max(i for i, (what, _) in enumerate(fake.log) if what == "wait")
        kept = {address for what, address in fake.log[wait:] if what == "keep"}
        assert kept == {batch["a"].data_ptr(), batch["b"][0].data_ptr()}


class Recording(TorchFunctionMode):
    """Notes the tensors whose stream is recorded. CUDA has `record_stream` for dense ones only."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.record_stream:
            return self.noted.append(args[0])
        return func(*args, **(kwargs or {}))


class Side(torch.Stream):
    def wait_stream(self, stream: object) -> None: ...


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: torch.ones(2), 1),
        (lambda: torch.eye(2).to_sparse(), 2),
        (lambda: torch.eye(2).to_sparse_csr(), 3),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), 1),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged), 2),
    ],
    ids=["dense", "sparse", "csr", "nested", "jagged"],
)
def test_tensor_that_is_on_the_device_is_kept_by_its_dense_parts(make: Any, parts: int) -> None:
    there: Any = SimpleNamespace(_device=torch.device("cpu"), _side=Side(device="cpu"), _consumer=None)
    leaf = make()
    with Recording() as recording:
        assert Cuda.copy(there, leaf) is leaf
    assert len(recording.noted) == len(list(tree_leaves(leaf))) == parts
    assert all(part.layout is torch.strided and not part.is_nested for part in recording.noted)


@dataclass(slots=True)
class Slotted:
    images: torch.Tensor


class SlottedWithTo:
    __slots__ = ("images",)

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def to(self, device: Any, **options: Any) -> SlottedWithTo:
        return type(self)(self.images.to(device, **options))


class SlottedBelow(SlottedWithTo):
    __slots__ = "label"

    def __init__(self, images: torch.Tensor) -> None:
        super().__init__(images)
        self.label = images.sum()


@pytest.mark.parametrize("kind", [Slotted, SlottedWithTo, SlottedBelow])
def test_tensors_in_slots_are_kept_for_the_consumers_stream(fake: FakeCuda, kind: Any) -> None:
    loader = DataLoader(
        Numbers(4, numbered), 2, collate_fn=lambda rows: kind(torch.stack(rows)), device="cuda"
    )
    for batch in loader:
        tensors = [batch.images, batch.label] if kind is SlottedBelow else [batch.images]
        kept = {address for what, address in fake.log if what == "keep"}
        assert {tensor.data_ptr() for tensor in tensors} <= kept


def test_memory_that_only_the_transform_knows_waits_for_the_consumer(fake: FakeCuda) -> None:
    """No walk through a batch finds it. So new work waits for the request before the last one.

    At the start of an epoch it waits for this one: there may have been batches of another loader in between.
    """
    feed = DevicePrefetcher(torch.device("cuda"), lambda batch: SimpleNamespace(images=batch), Counters())
    for _ in range(2):
        requests = []
        for number in range(4):
            feed.mark_wait()
            requests.append(feed._asked[-1])
            fake.log.clear()
            feed.get(number, lambda: torch.zeros(1))
            waits = [event for what, event in fake.log if what == "side wait"]
            assert waits == [requests[max(0, number - 1)]]
        feed.end_epoch()
    feed.close()


def test_epochs_and_loaders_share_one_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream an epoch would keep a pool of device memory an epoch."""
    made: list[object] = []

    class Stream:
        def __init__(self, device: object) -> None:
            made.append(device)

        def wait_stream(self, other: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the consumer's")
    for index in (6, 7, 6, 6):
        Cuda(torch.device("cuda", index))
    assert made == [torch.device("cuda", 6), torch.device("cuda", 7)]


def test_decoder_stays_on_the_device_of_the_copies(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder lives as long as the loader. In a later epoch another device may be the current one."""
    bad = BadSamples()
    decoding = Decoding("torch", torch.device("cuda"), on_error="raise", counters=Counters(), bad=bad)
    for current in (6, 7):
        made = SimpleNamespace(device=torch.device("cuda", current))
        monkeypatch.setattr(torch, "empty", lambda *shape, made=made, **options: made)
        feed = DevicePrefetcher(torch.device("cuda"), None, Counters(), decoding)
        feed.mark_wait()
        feed.close()
    assert fake.opened == [torch.device("cuda:6")] * 2 == [decoding.device] * 2


def test_memory_is_unregistered_and_then_unmapped(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        mmap = memory._libc.mmap

        def munmap(self, address: int, nbytes: int) -> None:
            if threading.current_thread() is threading.main_thread():
                fake.log.append(("munmap", address))
            memory_libc.munmap(address, nbytes)

    memory_libc = memory._libc
    monkeypatch.setattr(memory, "_libc", Libc())

    # Batches that grow make new slots, and the old ones go.
    loader = DataLoader(
        Numbers(40, lambda i: torch.full((25_000 * (1 + i // 4),), float(i))), num_workers=2, device="cuda"
    )
    for number, batch in enumerate(loader):
        assert (batch == number).all()
    del loader, batch
    ends: dict[int, str] = {}
    for what, address in fake.log:
        if what == "register":
            ends[address] = what
        elif what == "unregister":
            assert ends.pop(address) == "register"
            ends[address] = what
        elif what == "munmap" and address in ends:
            assert ends.pop(address) == "unregister", "unmapped while it was registered"
    assert not ends and sum(what == "register" for what, _ in fake.log) > 10


def test_exhausted_iterator_holds_no_registered_memory(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeCuda, "wait", lambda self, event: None)  # a GPU's consumer does not
    fake.gate.clear()
    iterator = iter(DataLoader(Numbers(8, numbered), batch_size=4, num_workers=1, device="cuda"))
    opener = threading.Timer(0.5, fake.gate.set)
    opener.start()
    assert len([None for _ in iterator]) == 2
    assert not fake.registered
    opener.join()


def test_each_slot_is_registered_once(fake: FakeCuda) -> None:
    loader = DataLoader(
        Numbers(200, numbered), batch_size=4, num_workers=2, persistent_workers=True, device="cuda"
    )
    for _ in range(3):
        for batch in loader:
            ids(batch)
    assert sum(what == "register" for what, _ in fake.log) <= 2 * 8
    assert loader.stats()["counters"]["copy.batches"] > 145
    assert loader.stats()["counters"]["copy.bytes"] == 3 * 200 * 100_000


def test_memory_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(refuse=True)
    _install(fake, monkeypatch)
    loader = DataLoader(Numbers(40, numbered), batch_size=4, num_workers=2, device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [i for batch in loader for i in ids(batch)] == list(range(40))
    assert len(caught) == 1 and "could not be registered" in str(caught[0].message)
    assert loader.stats()["counters"]["copy.unregistered"] >= 2
    fake.stop()


def test_requests_from_streams_without_an_order_end_no_epoch(fake: FakeCuda) -> None:
    """The device may have reached the second of them, and not the first."""
    feed = DevicePrefetcher(torch.device("cuda"), None, Counters())
    fake.late = []
    for number in range(3):
        feed.mark_wait()
        if number:
            fake.late[number].pass_by()
        feed.get(number, lambda: torch.zeros(1))
    fake.late[0].pass_by()
    feed.close()


def test_failed_device_is_the_error_that_is_raised(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the user's kernel, for one: CUDA raises it at any later call."""
    iterator = iter(DataLoader(Numbers(3), device="cuda"))
    next(iterator)

    def fail(event: FakeEvent) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "query", fail)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            next(iterator)


@pytest.mark.parametrize("workers", [0, 2])
def test_expanded_tensors(fake: FakeCuda, workers: int) -> None:
    """One element stands for many, so torch refuses to pin a copy of them with these strides."""

    def positions(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.arange(len(rows[0])).expand(len(rows), -1)

    for make in (numbered, lambda index: torch.zeros(3)):
        loader = DataLoader(Numbers(4, make), 2, num_workers=workers, collate_fn=positions, device="cuda")
        for batch in loader:
            assert batch.shape[0] == 2 and (batch == torch.arange(batch.shape[1])).all()


# --- the device and its owner ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_device_is_opened_with_the_first_batch(fake: FakeCuda, workers: int) -> None:
    loader = DataLoader(Numbers(8, numbered), num_workers=workers, device="cuda:1")
    iterator = iter(loader)
    assert fake.opened == []
    next(iterator)
    assert fake.opened == [torch.device("cuda:1")]


def test_one_batch_goes_while_the_next_ones_are_copied(fake: FakeCuda) -> None:
    loader = DataLoader(Numbers(40, numbered), num_workers=2, prefetch_factor=4, device="cuda")
    iterator = iter(loader)
    next(iterator)
    while sum(1 for _ in iterator._reorder.first(4)) < 4:
        iterator._receive()
    next(iterator)
    assert len(iterator._device._started) == 2


def test_a_fork_leaves_the_device_alone(fake: FakeCuda) -> None:
    """Like workers of a second loader, which inherit started batches and registered slots."""
    loader = DataLoader(Numbers(40, numbered), num_workers=1, device="cuda")
    iterator = iter(loader)
    next(iterator)
    other = DataLoader(Numbers(12, numbered), batch_size=3, num_workers=2, device="cuda")
    assert [i for batch in other for i in ids(batch)] == list(range(12))
    pid = os.fork()
    if pid == 0:
        try:
            iterator._device.close()  # FakeCuda raises in any other process
            iterator._engine._workers.clear()
            del iterator, loader
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert [ids(batch)[0] for batch in iterator] == list(range(1, 40))


def test_an_interrupt_ends_the_iterator_and_a_resume_has_the_batches_after_it(fake: FakeCuda) -> None:
    """It came again when the batch was due, which had met it two batches ahead."""
    calls = iter(range(100))

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return batch

    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(10, numbered), num_workers=1, device="cuda", batch_transform=transform)

    loader, got = make(), list[int]()
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        for batch in iterator:
            got += ids(batch)
    with pytest.raises(WorkerError, match="an interruption ended this iterator"):
        next(iterator)
    again = make()
    again.load_state_dict(loader.state_dict())
    assert len(got) < 4 and [*got, *(id for batch in again for id in ids(batch))] == list(range(10))


def test_time_of_the_device_is_counted(fake: FakeCuda) -> None:
    loader = DataLoader(Numbers(40, numbered), batch_size=4, num_workers=1, device="cuda")
    for batch in loader:
        del batch
    counters = loader.stats()["counters"]
    assert 0 <= counters["device.idle.seconds"] <= counters["device.seconds"]
    assert counters["copy.seconds"] > 0
    assert counters["copy.bytes"] == 40 * 100_000


# --- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "gpu"}, "device must be None"),
        ({"device": object()}, "device must be None"),
        ({"device": "meta"}, "device must be on the CPU or a CUDA GPU"),
        ({"batch_transform": 3}, "batch_transform must be a function"),
    ],
)
def test_arguments(options: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        DataLoader(Numbers(3), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_missing_gpu_is_reported_at_once(device: Any) -> None:
    with pytest.raises(ArgumentError, match=r"needs CUDA, and .*use device='cpu'"):
        DataLoader(Numbers(3), device=device)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert fastload.gpu.transfer.resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ArgumentError, match="torch sees 2 GPUs here"):
        DataLoader(Numbers(3), device="cuda:2")


def test_the_arguments_are_kept_as_attributes() -> None:
    loader = DataLoader(Numbers(3), device="cpu", batch_transform=len)
    assert loader.device == torch.device("cpu") and loader.batch_transform is len
    assert DataLoader(Numbers(3)).device is None


def test_the_cpu_copies_nothing() -> None:
    tensor = torch.arange(3)
    assert Device().copy(tensor) is tensor
