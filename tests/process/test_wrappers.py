"""Datasets of the user's own around one of fastload's: what they read is counted, and named as reading."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

import fastload
from fastload import Cache, DataLoader, ImageFolder, RandomResizedCrop, cached
from tests.faultserver import Fault, FaultServer
from tests.photos import pillow_jpeg, scene
from tests.sharddata import write
from tests.shortform import short_form

pytestmark = pytest.mark.usefixtures("no_leaks")

IMAGES = 12
SUBCLASS = "asks the ImageFolder in its attribute .* for one sample at a time"


class Wrapper(Dataset[Any]):
    """Labels from elsewhere, as everybody writes it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.labels = list(range(100_000))  # not looked at one by one

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Slotted:
    """No torch dataset, no attribute dict, and its dataset in a list."""

    __slots__ = ("parts",)

    def __init__(self, inner: Any) -> None:
        self.parts = [inner]

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, index: int) -> Any:
        return self.parts[0][index]


class Stream(IterableDataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self.inner)):
            yield self.inner[index]


class Masked(ImageFolder):
    """A dataset of fastload's that asks another one."""

    masks: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.masks[index]


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "attribute": Wrapper,
    "slot": Slotted,
    "ConcatDataset of a wrapper": lambda inner: ConcatDataset([Wrapper(inner)]),
    "wrapper of a Subset of a ConcatDataset": lambda inner: Wrapper(
        Subset(ConcatDataset([inner]), range(IMAGES))
    ),
    "iterable": Stream,
}


@pytest.fixture(scope="module")
def slow_store() -> Iterator[dict[str, Any]]:
    """Storage options of a server that takes 250 ms for each of 12 small images."""
    photo = pillow_jpeg(scene(32, 32))
    objects = {f"class{i % 2}/{i:03d}.jpg": photo for i in range(IMAGES)}
    with FaultServer(objects) as server:
        for key in objects:
            server.script(key, Fault(delay=0.25), repeat=True)
        yield {"endpoint_url": server.endpoint_url, "key": "k", "secret": "s"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {f"class{i % 2}/{i:03d}.jpg": pillow_jpeg(scene(32, 32)) for i in range(IMAGES)}
    return Path(write(tmp_path / "photos", files))


def epoch(loader: Any) -> dict[str, Any]:
    for _ in loader:
        pass
    found: dict[str, Any] = loader.stats()
    return found


@pytest.mark.parametrize(
    ("num_workers", "wrapper"),
    short_form(
        itertools.product((0, 1), WRAPPERS),
        lambda workers, wrapper: not workers or wrapper == "attribute",
    ),
)
def test_wrapped_dataset_that_waits_for_the_store_is_counted_and_the_limit_is_get(
    slow_store: dict[str, Any], num_workers: int, wrapper: str
) -> None:
    inner = ImageFolder("s3://bucket", RandomResizedCrop(16), storage_options=slow_store)
    with pytest.warns(UserWarning, match=SUBCLASS):
        loader = DataLoader(WRAPPERS[wrapper](inner), 4, num_workers=num_workers)
    stats = epoch(loader)
    counters = stats["counters"]
    assert counters["get.samples"] == counters["get.alone"] == counters["collate.samples"] == IMAGES
    assert counters["get.seconds"] > IMAGES * 0.05 > counters["decode.seconds"]
    assert stats["rates"]["get.samples_per_second"] > 0
    assert stats["limit"] == "get", stats
    assert "one sample at a time" in stats["verdict"] and "prefetch(indices)" in stats["verdict"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_wrapped_dataset_with_a_cache_counts_hits_and_fills_it_in_one_epoch(
    folder: Path, tmp_path: Path, num_workers: int
) -> None:
    inner = ImageFolder(str(folder), RandomResizedCrop(16), cache=Cache(tmp_path / "cache"))
    with pytest.warns(UserWarning, match=SUBCLASS):
        loader = DataLoader(Wrapper(inner), 4, num_workers=num_workers)
    first, second = epoch(loader)["counters"], epoch(loader)["counters"]
    inner.close()
    assert (first["cache.misses"], first.get("cache.hits", 0)) == (IMAGES, 0)
    assert (second["cache.misses"], second["cache.hits"]) == (IMAGES, IMAGES)
    assert second["get.samples"] == IMAGES


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dataset_inside_cached_is_counted(
    slow_store: dict[str, Any], tmp_path: Path, num_workers: int
) -> None:
    inner = ImageFolder("s3://bucket", RandomResizedCrop(16), storage_options=slow_store)
    dataset = cached(inner, Cache(tmp_path / "cache"))
    loader: Any = DataLoader(dataset, 4, num_workers=num_workers)  # without a warning
    stats = epoch(loader)
    dataset.close()
    assert stats["counters"]["get.samples"] == stats["counters"]["cache.misses"] == IMAGES
    assert stats["limit"] == "get" and "later epochs read the cache" in stats["verdict"]


def test_wrapped_dataset_is_warned_of_once_and_where_the_loader_is_made(folder: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(Wrapper(ImageFolder(str(folder), RandomResizedCrop(16))), 4)
        epoch(loader)
        epoch(loader)
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert "Wrapper asks the ImageFolder in its attribute 'inner'" in text
    for instead in (
        "prefetch(self, indices)",
        "threads=16",
        "fastload.map",
        "Subset",
        "subclass of ImageFolder",
    ):
        assert instead in text


def test_warning_names_the_wrapper_inside_another_one(folder: Path) -> None:
    inner = ImageFolder(str(folder), RandomResizedCrop(16))
    with pytest.warns(UserWarning, match="Wrapper asks the ImageFolder in its attribute 'inner.dataset' for"):
        DataLoader(ConcatDataset([[1], Wrapper(Subset(inner, range(3)))]))


def test_dataset_held_by_a_subclass_is_warned_of(folder: Path) -> None:
    images = Masked(str(folder))
    images.masks = ImageFolder(str(folder), RandomResizedCrop(16))
    with pytest.warns(UserWarning, match="Masked asks the ImageFolder in its attribute 'masks'"):
        DataLoader(images)


def test_search_for_inner_datasets_ends_at_cycles_and_leaves_other_objects_alone(folder: Path) -> None:
    class Client:
        """Of the user's, and no dataset: not looked into."""

        def __init__(self) -> None:
            self.dataset = ImageFolder(str(folder))

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    class Holder(Wrapper):
        @property
        def dataset(self) -> Any:
            raise AssertionError("a property was asked for")

    holder = Holder([1, 2, 3])
    holder.client = Client()
    holder.myself = [holder, {"again": holder}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(DataLoader(holder))) == 3


def test_workers_do_not_count_reads_of_the_trainer_before_the_fork(folder: Path) -> None:
    dataset = fastload.ImageFolder(str(folder), RandomResizedCrop(16))
    assert dataset[0] and dataset[1]
    counters = epoch(DataLoader(dataset, 4, num_workers=2))["counters"]
    assert counters["get.samples"] == counters["decode.samples"] == IMAGES


def test_epoch_of_an_instant_is_too_short_to_tell() -> None:
    stats = epoch(DataLoader(Wrapper(list(range(48))), 64))
    assert stats["verdict"].startswith("too short to tell (1 batch in 0.0"), stats["verdict"]
