"""Datasets over a store: payloads, what the cache has, and one prefetcher in each process."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg

from fastload import CenterCrop, DataLoader, ImageFolder, ObjectDataset, TableDataset, TarDataset
from fastload.errors import ArgumentError
from fastload.fetch.prefetcher import Prefetcher
from tests.sharddata import TOTAL, jpeg, shards, write

pytestmark = pytest.mark.usefixtures("no_leaks")
N = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(write(tmp_path / "data", {f"{number}.bin": bytes([number]) * 100 for number in range(N)}))


class KeepsItsState(ObjectDataset):
    """Of a user who knows nothing of what belongs to one process."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_a_dataset_shows_what_its_user_needs(folder: Path, tmp_path: Path) -> None:
    """About fifteen names; what the engine calls begins with an underscore."""
    objects = ObjectDataset(str(folder))
    photos = ImageFolder(write(tmp_path / "photos", {"cat/0.jpg": jpeg(0)}))
    records = TarDataset(write(tmp_path / "shards", shards("tar", index=True)))
    table = TableDataset([{"number": 1}], "number")

    def shown(dataset: Any) -> set[str]:
        return {name for name in dir(dataset) if not name.startswith("_")}

    every = {"cache", "close", "contains", "counters", "decode", "find", "key", "prefetch", "transform"}
    every |= {"url", "warm"}
    assert shown(objects) == every | {"listing", "on_change"}
    labels = {"class_to_idx", "classes", "imgs", "samples", "target_transform", "targets"}
    assert shown(photos) == shown(objects) | labels
    assert shown(records) == every | {"shards"}
    assert shown(table) == every | {"fields", "on_change"}


def test_contains_says_whether_the_cache_has_a_sample_and_counts_no_miss(
    folder: Path, tmp_path: Path
) -> None:
    dataset = ObjectDataset(str(folder), cache=tmp_path / "cache")
    assert dataset.cache is not None
    assert not any(dataset.contains(index) for index in range(N))
    assert dataset[1] == bytes([1]) * 100
    dataset._flush_cache()
    assert [dataset.contains(index) for index in range(N)] == [index == 1 for index in range(N)]
    assert dataset.counters["cache.misses"] + dataset.cache.counters["cache.misses"] == 1
    assert dataset.cache.lookup(dataset._cache_keys(1)[0]) is not None
    dataset.close()


def test_contains_without_a_cache_is_an_error(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="cache="):
        ObjectDataset(str(folder)).contains(0)


def test_prefetch_with_an_index_out_of_range_requests_nothing(folder: Path) -> None:
    dataset = ObjectDataset(str(folder))
    with pytest.raises(IndexError):
        dataset.prefetch([0, 1, N])
    assert dataset._outstanding() == 0
    dataset.close()


@pytest.mark.parametrize("kind", [ObjectDataset, KeepsItsState])
@pytest.mark.parametrize("way", [copy.copy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_copy_of_a_dataset_in_use_has_a_prefetcher_of_its_own(
    kind: type[ObjectDataset], way: Any, folder: Path
) -> None:
    dataset = kind(str(folder))
    dataset.prefetch([3])
    other = way(dataset)
    if kind is ObjectDataset or way is not copy.copy:  # a shallow copy of all attributes shares it
        assert other._outstanding() == 0
    assert other[3] == dataset[3] == bytes([3]) * 100
    other.close()
    dataset.close()


@pytest.mark.parametrize("kind", ["objects", "tar"])
def test_forked_child_reads_with_threads_of_its_own(kind: str, folder: Path, tmp_path: Path) -> None:
    if kind == "tar":
        dataset: Any = TarDataset(write(tmp_path, shards("tar", index=True)))
        assert len(dataset) == TOTAL
    else:
        dataset = ObjectDataset(str(folder))
    dataset.prefetch([1, 2])
    expected = dataset.key(1), bytes(dataset._payload(1))
    child = os.fork()
    if child == 0:
        same = dataset._outstanding() == 0 and (dataset.key(1), bytes(dataset._payload(1))) == expected
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert dataset._outstanding() == 1
    dataset.close()


def test_failure_of_the_process_is_no_bad_sample(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in folder.iterdir():
        path.write_bytes(simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8)))
    dataset = ObjectDataset(str(folder), transform=CenterCrop(4))
    get = Prefetcher.get

    def without_memory(prefetcher: Prefetcher, record: int) -> Any:
        if record == 2:
            raise MemoryError
        return get(prefetcher, record)

    monkeypatch.setattr(Prefetcher, "get", without_memory)
    with pytest.raises(MemoryError):
        list(DataLoader(dataset, 4, on_error="repeat"))
    dataset.close()


def test_ctrl_c_while_the_cache_is_flushed_leaves_a_usable_iterator(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ObjectDataset(str(folder), cache=tmp_path / "cache")
    flush, calls = ObjectDataset._flush_cache, iter(range(100))

    def interrupted(self: ObjectDataset, timeout: float) -> None:
        if next(calls) == 0:
            raise KeyboardInterrupt
        flush(self, timeout)

    monkeypatch.setattr(ObjectDataset, "_flush_cache", interrupted)
    batches = iter(DataLoader(dataset, len(dataset), collate_fn=len))
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert next(batches, None) is None
    dataset.close()
