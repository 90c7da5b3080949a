"""Orders and batches are the same whatever torch's default dtype and default device are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, default_convert

import fastload
from fastload import CenterCrop, DataLoader, DistributedSampler, ImageFolder
from tests.loaderdata import default
from tests.photos import pillow_jpeg, scene
from tests.sharddata import shards

LENGTH = 30
# "meta" stands for "cuda": a device whose tensors the order and a batch in host memory cannot be made of.
DEFAULTS = ["float64", "bfloat16", "meta"]


class Samples(Dataset[Any]):
    """A tensor that travels in a slot, and numbers that `default_collate` makes tensors of."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        image = torch.full((5_000,), index, dtype=torch.float32, device="cpu")
        return {"image": image, "index": index, "float": index + 0.1, "array": np.array([index / 3])}


def drawn(make: Callable[[], Any]) -> list[Any]:
    torch.manual_seed(7)
    return list(make())


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, check_device=True, check_dtype=True)


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "with replacement": lambda: {"sampler": RandomSampler(range(LENGTH), True, 50)},
    "of one rank": lambda: {"sampler": DistributedSampler(range(LENGTH), 1, 0)},
    "of a node": lambda: {
        "sampler": DistributedSampler(range(LENGTH), 2, 1, partition="node", num_nodes=2, exchange=0.5)
    },
    "by a generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_default_device_that_was_taken_back(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    """torch 2.8 and 2.9 cannot tell the default device after `set_default_device(None)`."""

    def broken() -> torch.device:
        raise AttributeError("'NoneType' object has no attribute 'device'")

    expected = drawn(lambda: DataLoader(Samples(), 4, shuffle=True, num_workers=num_workers))
    monkeypatch.setattr(torch, "get_default_device", broken)
    same(drawn(lambda: DataLoader(Samples(), 4, shuffle=True, num_workers=num_workers)), expected)


# The order is made in this process, whoever makes the samples.
@pytest.mark.parametrize(("sampler", "workers"), [("shuffled", 2), *((sampler, 0) for sampler in SAMPLERS)])
def test_batches_under_another_default_are_the_same(sampler: str, workers: int) -> None:
    def make() -> Any:
        return DataLoader(Samples(), 4, num_workers=workers, **SAMPLERS[sampler]())

    expected = drawn(make)
    for name in DEFAULTS:
        with default(name):
            found = drawn(make)
        same(found, expected)


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ({"device": "cpu"}, 0),
        ({"device": "cpu"}, 2),
        ({"batch_size": None}, 0),
        ({"batch_size": None}, 2),
        ({"persistent_workers": True}, 2),
    ],
)
def test_two_epochs_under_a_default_device_are_the_same(options: dict[str, Any], workers: int) -> None:
    def epochs() -> Any:
        loader: Any = DataLoader(
            Samples(), **{"batch_size": 4, "shuffle": True, "num_workers": workers, "seed": 1} | options
        )
        return [*loader, *loader]

    expected = drawn(epochs)
    with default("meta"):
        found = drawn(epochs)
    same(found, expected)


class Streamed(IterableDataset[Any]):
    """The same samples, one after the other."""

    def __iter__(self) -> Any:
        return map(Samples().__getitem__, range(LENGTH))


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_an_iterable_dataset_lie_on_the_host(batch_size: int | None, workers: int) -> None:
    def epochs() -> Any:
        persistent = workers > 0
        loader: Any = DataLoader(Streamed(), batch_size, num_workers=workers, persistent_workers=persistent)
        return [*loader, *loader]

    expected = drawn(epochs)
    with default("meta"):
        found = drawn(epochs)
    same(found, expected)


def test_resumed_under_a_default_device_the_order_goes_on() -> None:
    def loader() -> Any:
        return DataLoader(Samples(), 4, shuffle=True)

    whole = drawn(loader)
    torch.manual_seed(7)
    first = loader()
    running = iter(first)
    head = [next(running) for _ in range(3)]
    state = first.state_dict()
    with default("meta"):
        second = loader()
        second.load_state_dict(state)
        same(head + list(second), whole)


@pytest.mark.parametrize("name", DEFAULTS)
def test_shares_of_nodes_do_not_depend_on_the_default_dtype(name: str) -> None:
    def shares() -> list[list[int]]:
        return [
            list(DistributedSampler(range(1000), 4, node, partition="node", num_nodes=4, exchange=0.2))
            for node in range(4)
        ]

    expected = shares()
    with default(name):
        assert shares() == expected


@pytest.mark.parametrize("name", DEFAULTS)
def test_numbers_of_records_are_exact_under_any_default(name: str, tmp_path: Path) -> None:
    """Rows that are filled in place: floats in lists too are float64, as `default_collate` makes them."""
    for key, content in shards("tar", index=True).items():
        (tmp_path / key).write_bytes(content)
    transform = {"jpg": fastload.CenterCrop(16), "json": lambda value: [value["n"] / 3, value["n"]]}
    data = fastload.TarDataset(str(tmp_path), transform=transform)
    with default(name):
        batches = list(DataLoader(data, 16))
    for batch in batches:
        thirds, numbers = batch["json"]
        assert thirds.dtype == torch.float64 and numbers.tolist() == batch["cls"].tolist()
        assert thirds.tolist() == [number / 3 for number in numbers.tolist()]
    data.close()


def test_default_convert_keeps_arrays_on_the_host_under_a_default_device() -> None:
    with default("meta"):
        batches = list(DataLoader(Samples(), batch_size=None, num_workers=0))
    same(
        [batch["array"] for batch in batches], [default_convert(Samples()[k]["array"]) for k in range(LENGTH)]
    )


def test_targets_of_a_function_lie_on_the_host_beside_a_fused_transform(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(4):
        (tmp_path / "a" / f"{number}.jpg").write_bytes(pillow_jpeg(scene(30, 20, number)))
    dataset = ImageFolder(str(tmp_path), CenterCrop(8), target_transform=float)
    with default("meta"):
        [(images, targets)] = DataLoader(dataset, 4)
    assert images.device.type == targets.device.type == "cpu" and targets.tolist() == [0.0] * 4
