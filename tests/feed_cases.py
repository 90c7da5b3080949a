"""What the feed promises on every device. Run over the CPU and the fake by test_feed.py, over CUDA by gpu/.

Each takes `target`: the device to ask for, and what makes of a function one that this device can run later.
"""

from __future__ import annotations

import gc
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fastload import DataLoader, Normalize
from tests.loaderdata import Numbers, numbered

__all__ = [
    "test_a_failing_sample_is_raised_at_its_batch",
    "test_a_failing_transform_is_raised_at_its_batch",
    "test_a_new_epoch_after_a_break",
    "test_a_transform_alone_changes_the_batches",
    "test_every_kind_of_dataset",
    "test_every_sample_once",
    "test_leaves_that_are_no_tensors",
    "test_many_epochs_take_no_more_memory",
    "test_nested_batches",
    "test_normalised_on_the_device",
    "test_state_counts_what_was_handed_out",
    "test_stop_iteration_is_no_end",
]

Pair = namedtuple("Pair", "x y")


class Target(NamedTuple):
    device: str
    kernels: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]
    type: str  # of the device that batches are on


@dataclass(frozen=True)
class Item:
    name: str
    data: torch.Tensor


class Moved:
    """Another library's batch: has a `to`, and keeps its tensors in its attributes."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def to(self, device: Any, copy: bool = False) -> Moved:
        return Moved(self.data.to(device, copy=copy))


class Endless(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return (numbered(i) for i in range(first, self.length, step))


class Images(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8, generator=generator)


def ids(batch: torch.Tensor) -> list[int]:
    """Of a batch of `numbered` samples, from all of its content."""
    host = batch.cpu()
    assert (host == host[:, :1]).all(), "a batch with content of several samples in one row"
    return [int(i) for i in host[:, 0]]


def is_on(batch: torch.Tensor, target: Target) -> bool:
    return batch.device.type == target.type


@pytest.mark.parametrize(("workers", "in_order"), [(0, False), (1, True), (2, True), (2, False)])
def test_every_sample_once(target: Target, workers: int, in_order: bool) -> None:
    loader = DataLoader(
        Numbers(101, numbered),
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        in_order=in_order,
        device=target.device,
    )
    for _ in range(2):
        seen = Counter[int]()
        for batch in loader:
            assert is_on(batch, target)
            seen.update(ids(batch))
        assert seen == Counter(range(101))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_kind_of_dataset(target: Target, workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers, "device": target.device}
    plain = DataLoader(
        Numbers(30, lambda i: torch.tensor([i])), batch_size=7, **options
    )  # inside the message
    assert [int(i) for batch in plain for i in batch.flatten()] == list(range(30))
    single = DataLoader(Numbers(9, numbered), batch_size=None, **options)
    assert [ids(sample[None])[0] for sample in single] == list(range(9))
    stream = DataLoader(Endless(25), batch_size=4, **options)
    assert sorted(i for batch in stream for i in ids(batch)) == list(range(25))
    none = DataLoader(Numbers(0, numbered), **options)
    assert list(none) == []


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's, where it unpickles one
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_nested_batches(target: Target, workers: int) -> None:
    def collate(samples: list[torch.Tensor]) -> Any:
        batch = torch.stack(samples)
        return {
            "pair": Pair(batch, [batch + 1, "text"]),
            "item": Item("name", batch + 2),
            "packed": pack_sequence(samples),
            "moved": Moved(batch + 3),
            "again": batch,
            "empty": torch.empty(0, 3),
            "channels_last": batch.view(2, 10, 50, 50).contiguous(memory_format=torch.channels_last),
            "sparse": torch.eye(3).to_sparse(),
            "ragged": torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
        }

    options: dict[str, Any] = {"batch_size": 2, "num_workers": workers, "collate_fn": collate}
    loader = DataLoader(Numbers(8, numbered), device=target.device, **options)
    for number, batch in enumerate(loader):
        wanted = [2 * number, 2 * number + 1]
        assert type(batch["pair"]) is Pair and ids(batch["pair"].x) == wanted
        assert batch["pair"].y[1] == "text" and ids(batch["pair"].y[0] - 1) == wanted
        assert batch["item"].name == "name" and ids(batch["item"].data - 2) == wanted
        assert isinstance(batch["packed"], PackedSequence)
        assert sorted(set(batch["packed"].data.tolist())) == wanted
        assert ids(batch["moved"].data - 3) == wanted
        assert batch["again"] is batch["pair"].x
        assert batch["empty"].shape == (0, 3)
        assert batch["channels_last"].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(batch["sparse"].to_dense().cpu(), torch.eye(3))
        assert [row.tolist() for row in batch["ragged"].unbind()] == [[1, 1, 1], [1, 1]]
        moved = [batch["pair"].x, batch["item"].data, batch["packed"].data, batch["moved"].data]
        assert all(is_on(tensor, target) for tensor in moved)


def test_leaves_that_are_no_tensors(target: Target) -> None:
    array = np.arange(5000)

    def collate(samples: list[int]) -> Any:
        return {"ids": samples, "text": "abc", "bytes": b"x", "none": None, "array": array, "range": range(3)}

    for workers in (0, 1):
        loader = DataLoader(
            Numbers(3), batch_size=1, num_workers=workers, collate_fn=collate, device=target.device
        )
        for number, batch in enumerate(loader):
            assert np.array_equal(batch.pop("array"), array)
            assert batch == {"ids": [number], "text": "abc", "bytes": b"x", "none": None, "range": range(3)}


@pytest.mark.parametrize("workers", [0, 2])
def test_normalised_on_the_device(target: Target, workers: int) -> None:
    normalize = Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), dtype=torch.bfloat16)
    plain = list(DataLoader(Images(), batch_size=6))
    loader = DataLoader(
        Images(),
        batch_size=6,
        num_workers=workers,
        device=target.device,
        batch_transform=target.kernels(normalize),
    )
    count = 0
    for raw, batch in zip(plain, loader, strict=True):
        assert is_on(batch, target) and batch.dtype is torch.bfloat16
        torch.testing.assert_close(batch.cpu().float(), normalize(raw).float(), atol=0.02, rtol=0.01)
        count += len(batch)
    assert count == 24


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_alone_changes_the_batches(workers: int) -> None:
    calls = []

    def transform(batch: torch.Tensor) -> Any:
        calls.append(len(batch))
        return {"twice": batch * 2}

    loader = DataLoader(
        Numbers(20, numbered), batch_size=4, num_workers=workers, batch_transform=transform, pin_memory=False
    )
    assert [i for batch in loader for i in ids(batch["twice"])] == [2 * i for i in range(20)]
    assert calls == [4] * 5
    iterator = iter(loader)
    next(iterator)
    assert len(calls) == 6, "without a device nothing is made ahead"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_transform_is_raised_at_its_batch(target: Target, workers: int) -> None:
    calls = iter(range(100))

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 3:
            raise LookupError("no such thing")
        return batch

    loader = DataLoader(
        Numbers(24, numbered),
        batch_size=3,
        num_workers=workers,
        device=target.device,
        batch_transform=transform,
    )
    iterator = iter(loader)
    got = [ids(next(iterator)) for _ in range(3)]
    assert got == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(LookupError, match="no such thing") as caught:
        next(iterator)
    assert not hasattr(caught.value, "add_note") or "[batch_transform]" in caught.value.__notes__[0]
    rest = [i for batch in iterator for i in ids(batch)]
    assert rest == list(range(12, 24))


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_is_no_end(target: Target, workers: int) -> None:
    def transform(batch: Any) -> Any:
        raise StopIteration

    options: dict[str, Any] = {"num_workers": workers, "device": target.device, "batch_transform": transform}
    with pytest.raises(RuntimeError, match="batch_transform"):
        next(iter(DataLoader(Numbers(3, numbered), **options)))


def test_a_failing_sample_is_raised_at_its_batch(target: Target) -> None:
    def make(index: int) -> torch.Tensor:
        if index == 9:
            raise LookupError("bad sample")
        return numbered(index)

    iterator = iter(DataLoader(Numbers(16, make), batch_size=2, num_workers=2, device=target.device))
    assert [i for _ in range(4) for i in ids(next(iterator))] == list(range(8))
    with pytest.raises(LookupError, match="bad sample"):
        next(iterator)
    assert [i for batch in iterator for i in ids(batch)] == list(range(10, 16))


@pytest.mark.parametrize("workers", [0, 2])
def test_state_counts_what_was_handed_out(target: Target, workers: int) -> None:
    def loader(**feed: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(Numbers(40, numbered), batch_size=4, shuffle=True, generator=generator, **feed)

    feed: dict[str, Any] = {"num_workers": workers, "device": target.device}
    whole = [ids(batch) for batch in loader()]
    for stop in (1, 9, 10) if workers else (0, 1, 4, 9, 10):
        first = loader(**feed)
        iterator = iter(first)
        got = [ids(next(iterator)) for _ in range(stop)]
        state = first.state_dict()
        assert state["batches"] == stop
        second = loader(**feed)
        second.load_state_dict(state)
        assert got + [ids(batch) for batch in second] == whole


def test_a_new_epoch_after_a_break(target: Target) -> None:
    loader = DataLoader(
        Numbers(60, numbered), batch_size=3, num_workers=2, persistent_workers=True, device=target.device
    )
    for stop in (0, 1, 5, 2):
        for number, batch in enumerate(loader):
            assert ids(batch) == list(range(3 * number, 3 * number + 3))
            if number == stop:
                break
    assert [i for batch in loader for i in ids(batch)] == list(range(60))


def test_many_epochs_take_no_more_memory(target: Target) -> None:
    """Slots come back, of batches that were handed out and of those that were staged and dropped."""
    loader = DataLoader(
        Numbers(60, numbered), batch_size=3, num_workers=2, persistent_workers=True, device=target.device
    )
    mapped = []
    for epoch in range(6):
        for number, batch in enumerate(loader):
            del batch
            if epoch % 2 and number == 4:
                break
        gc.collect()
        mapped.append(sum(len(worker.slots._memory) for worker in loader._iterator._engine._workers))
    # Two batches made ahead, one in the making, three with the feed and one with this loop; spread unevenly.
    assert max(mapped) <= 2 * 3 + 2 * 4
