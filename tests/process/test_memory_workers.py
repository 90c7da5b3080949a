"""`memory_limit=` with real workers: nothing hangs, nothing is lost, and what cannot be held is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastload import Cache, DataLoader, ObjectDataset
from fastload.errors import ArgumentError
from tests.loaderdata import Numbers

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

MB = 1_000_000


def number_and_size(payload: Any) -> np.ndarray[Any, Any]:
    data = np.frombuffer(payload, np.uint8)
    return np.array([data[0], data[-1], len(data)])


@pytest.fixture
def large(tmp_path: Path) -> Callable[..., ObjectDataset[Any]]:
    """Objects that are larger than most of what a worker may read ahead in these tests."""
    sizes = [(9 + number % 5) * MB for number in range(10)]
    for number, size in enumerate(sizes):
        body = bytearray(size)
        body[0] = body[-1] = number
        (tmp_path / f"{number:02}.bin").write_bytes(body)
    return lambda **more: ObjectDataset(str(tmp_path), decode=number_and_size, **more)


def seen(loader: Any) -> list[list[int]]:
    return sorted(row for batch in loader for row in batch.tolist())


WHOLE = [[number, number, (9 + number % 5) * MB] for number in range(10)]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.stress), 3])
def test_objects_larger_than_the_share_arrive_once_each(
    large: Callable[..., ObjectDataset[Any]], workers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = Cache(tmp_path_factory.mktemp("cache"), "raw")
    loader: Any = DataLoader(
        large(cache=cache),
        batch_size=3,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
        memory_limit=(70 * workers or 170) * MB,
    )
    for _ in range(2):
        assert seen(loader) == WHOLE
    memory = loader.stats()["memory"]
    assert memory["limit"] == (70 * workers or 170) * MB
    if workers:
        assert 0 < memory["used"] <= memory["peak"]


@pytest.mark.stress
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_started_workers_read_all_under_a_limit(
    large: Callable[..., ObjectDataset[Any]], method: str
) -> None:
    loader: Any = DataLoader(
        large(),
        batch_size=3,
        num_workers=2,
        multiprocessing_context=method,
        memory_limit="700MB",
    )
    assert seen(loader) == WHOLE


def test_without_a_limit_stats_have_no_memory() -> None:
    loader: Any = DataLoader(Numbers(6), num_workers=1)
    list(loader)
    assert loader.stats()["memory"] == {}


class Wide(Dataset[torch.Tensor]):
    """Samples of 8 MB."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8 * MB,), index, dtype=torch.uint8)


def test_batches_too_large_for_the_limit_are_refused_and_the_smallest_one_named_is_enough() -> None:
    arguments: Any = {"batch_size": 2, "num_workers": 2, "multiprocessing_context": "fork"}
    with pytest.raises(ArgumentError, match="memory_limit='120MB' is too little") as refused:
        list(DataLoader(Wide(), memory_limit="120MB", **arguments))
    least = re.search(r"give at least (\d+) MB", str(refused.value))
    assert least is not None
    enough = int(least[1]) + 10  # a process does not take the same to the page each time
    loader: Any = DataLoader(Wide(), memory_limit=f"{enough}MB", **arguments)
    assert [int(batch[0, 0]) for batch in loader] == list(range(0, 12, 2))


def test_kept_batches_exceed_the_limit_with_a_warning_and_nothing_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader: Any = DataLoader(
        Wide(), batch_size=1, num_workers=1, multiprocessing_context="fork", memory_limit="85MB"
    )
    kept = list(loader)
    assert [int(batch[0, 0]) for batch in kept] == list(range(12))
    assert loader.stats()["memory"]["peak"] > 85 * MB
    assert caplog.text.count("more than its share of memory_limit='85MB'") == 1
