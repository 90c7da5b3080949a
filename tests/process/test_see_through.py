"""Wrappers are seen through: read ahead, rows into the batch, and samples, errors and seeds as ever."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

import fastload
from fastload import (
    ByEpoch,
    Cache,
    CenterCrop,
    DataLoader,
    ImageFolder,
    RandomResizedCrop,
    TarDataset,
    cached,
)
from fastload.datasets.sample_fields import ordinary_memory
from fastload.datasets.wrappers import MapDataset, view_of
from fastload.errors import ArgumentError
from tests.loaderdata import told
from tests.photos import pillow_jpeg, scene
from tests.sharddata import TOTAL, shards, write
from tests.shortform import short_form

COUNTS = {"a": 12, "b": 8}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {
        f"{part}/class{k % 2}/{k:02}.jpg": pillow_jpeg(scene(40 + k, 36, 7 * k + len(part) + ord(part)))
        for part, count in COUNTS.items()
        for k in range(count)
    }
    return Path(write(tmp_path_factory.mktemp("photos"), files))


@pytest.fixture
def opened(photos: Path, no_leaks: None, keep: Callable[[Any], Any]) -> Callable[..., ImageFolder]:
    """Open a folder."""

    def make(part: str, transform: Any = None, **options: Any) -> Any:
        return keep(ImageFolder(str(photos / part), transform or CenterCrop(16, resize=20), **options))

    return make


def as_dict(sample: Any) -> Any:
    image, label = sample
    return {"image": image, "label": label + 100}


def noisy(sample: Any) -> Any:
    image, label = sample
    return image, label, torch.rand(()).item(), float(np.random.rand())


def to_tensor(image: Any) -> torch.Tensor:
    """A transform that is not fused."""
    return torch.as_tensor(np.asarray(image.resize((16, 16))).copy())


class Announcing(Dataset[Any]):
    """A wrapper of the user's that offers `prefetch`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        image, label = self.inner[index]
        return image, label + 1000

    def prefetch(self, indices: list[int]) -> None:
        self.inner.prefetch(indices)


class Half(Announcing):
    """Announces twice as many samples as it reads."""

    def __len__(self) -> int:
        return len(self.inner) // 2

    def prefetch(self, indices: list[int]) -> None:
        self.inner.prefetch([*indices, *(index + len(self) for index in indices)])


class OwnConcat(ConcatDataset[Any]):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image, label, index


Tree = Callable[[Any, Any], Any]
# name -> (dataset of two folders, whether rows are written straight into the batch, samples read for one)
TREES: dict[str, tuple[Tree, bool, int]] = {
    "concat": (lambda a, b: ConcatDataset([a, b]), True, 1),
    "concat of subsets": (
        lambda a, b: ConcatDataset([Subset(b, [3, 1, -1]), a, Subset(Subset(b, range(5)), [4, 0])]),
        True,
        1,
    ),
    "subset of concat of concat": (
        lambda a, b: Subset(ConcatDataset([ConcatDataset([a, b]), b]), [27, 0, 12, 19, 20, 5, 11, -1]),
        True,
        1,
    ),
    "stack": (lambda a, b: StackDataset(Subset(a, range(8)), b), True, 2),
    "stack by name": (lambda a, b: StackDataset(left=b, right=Subset(a, range(2, 10))), True, 2),
    "stack of one dataset": (lambda a, b: StackDataset(a, a), True, 2),
    "map": (lambda a, b: fastload.map(a, as_dict), False, 1),
    "map of concat": (lambda a, b: fastload.map(ConcatDataset([a, b]), as_dict), False, 1),
    "concat of map and plain": (
        lambda a, b: ConcatDataset([fastload.map(a, tuple), [(torch.zeros(3, 16, 16), 7)] * 3]),
        False,
        1,
    ),
    "stack of numbers": (lambda a, b: StackDataset(photo=b, number=range(8)), False, 1),
    "map of a stack of a map": (
        lambda a, b: fastload.map(StackDataset(fastload.map(b, as_dict), b), tuple),
        False,
        2,
    ),
    "prefetch": (lambda a, b: Announcing(a), False, 1),
    "map of a subset of prefetch": (
        lambda a, b: fastload.map(Subset(Announcing(a), [5, 3, 8]), tuple),
        False,
        1,
    ),
    "subclass of concat": (lambda a, b: OwnConcat([a, b]), False, 1),
}


# The short form has a transform that is not fused in one tree of each sort.
@pytest.mark.parametrize(
    ("name", "fused"),
    short_form(
        itertools.product(TREES, (True, False)),
        lambda name, fused: fused or name in ("concat", "stack", "map"),
    ),
)
def test_wrapper_gives_the_batches_of_torch_and_all_its_samples_are_read_ahead(
    opened: Any, name: str, fused: bool
) -> None:
    make, direct, reads = TREES[name]
    transform = CenterCrop(16, resize=20) if fused else to_tensor
    dataset = make(opened("a", transform), opened("b", transform))
    rows = view_of(dataset)
    assert rows.reads_ahead
    assert (rows.new_batch(4, ordinary_memory) is not None) == (direct and fused)
    if not fused and name == "concat of map and plain":
        return  # its samples are of two shapes
    for options in ({"batch_size": 5}, {"batch_size": None}, {"batch_size": 3, "collate_fn": list}):
        expected = told(list(torch.utils.data.DataLoader(dataset, **options)))  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loader: Any = DataLoader(dataset, **options)  # type: ignore[arg-type]
        assert told(list(loader)) == expected
        counters = loader.stats()["counters"]
        plain = 3 if "plain" in name else 0
        assert counters["get.ahead"] == reads * (len(dataset) - plain) and "get.alone" not in counters
        assert counters["decode.samples"] >= len(dataset)


@pytest.mark.parametrize("seed", [None, 5])
def test_randomness_is_that_of_the_sample_and_its_part_for_any_workers(opened: Any, seed: int | None) -> None:
    crop = RandomResizedCrop(16)
    a, twin = opened("a", crop), opened("a", crop)
    dataset: Any = ConcatDataset([a, twin, fastload.map(a, tuple)])
    seen = []
    for workers in (0, 2):
        torch.manual_seed(3)
        loader: Any = DataLoader(dataset, 7, num_workers=workers, seed=seed)
        seen.append([torch.cat([images for images, _ in loader]) for _ in range(2)])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
    first, second = seen[0]
    assert not torch.equal(first, second)
    parts = first.reshape(3, -1).tolist()
    assert len({tuple(part) for part in parts}) == 3


def test_two_views_of_one_sample_differ(opened: Any) -> None:
    a = opened("a", RandomResizedCrop(16))
    ((left, _), (right, _)) = next(iter(DataLoader(StackDataset(a, a), 12)))
    assert all(not torch.equal(one, other) for one, other in zip(left, right, strict=True))


def fails(sample: Any) -> Any:
    if sample[1] == 1:
        raise KeyError("of the user's")
    return sample


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_the_function_of_map_names_the_sample(opened: Any, workers: int) -> None:
    dataset = fastload.map(ConcatDataset([opened("b"), opened("a")]), fails)
    with pytest.raises(KeyError) as caught:
        list(DataLoader(dataset, 4, num_workers=workers))
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert "sample 4 'class1/01.jpg'" in text
    loader: Any = DataLoader(dataset, 20, num_workers=workers, on_error="repeat")
    ((_, labels),) = loader
    assert not labels.any() and loader.stats()["counters"]["bad.samples"] == 10


def test_negative_indices_of_a_concat_are_those_of_torch_and_others_are_bad_samples(opened: Any) -> None:
    dataset: Any = ConcatDataset([opened("a"), opened("b")])
    ((images, _),) = DataLoader(dataset, 3, sampler=[-1, -9, 0])
    for image, index in zip(images, (19, 11, 0), strict=True):
        assert torch.equal(image, dataset[index][0])
    for index in (20, -21):
        with pytest.raises((IndexError, ValueError), match="out of range for 20 samples"):
            list(DataLoader(dataset, 3, sampler=[0, index]))


def test_parts_of_a_concat_may_differ_in_their_target_transform(opened: Any) -> None:
    plain, other = opened("a"), opened("b", target_transform=lambda label: label + 100)
    for parts in ([plain, other], [other, plain]):
        dataset: Any = ConcatDataset(parts)
        expected = told(list(torch.utils.data.DataLoader(dataset, 5)))
        assert told(list(DataLoader(dataset, 5))) == expected


@pytest.mark.parametrize("wrap", [lambda part: ConcatDataset([part]), lambda part: fastload.map(part, tuple)])
@pytest.mark.parametrize("workers", [0, 1])
def test_wrapper_tells_the_epoch_to_what_it_holds(opened: Any, wrap: Any, workers: int) -> None:
    dataset = wrap(opened("b", ByEpoch({0: CenterCrop(8), 1: CenterCrop(12)})))
    loader: Any = DataLoader(dataset, 8, num_workers=workers)
    assert [images.shape[-1] for _ in range(2) for images, _ in loader] == [8, 12]


# --- prefetch(indices)


def test_what_prefetch_announced_and_was_not_read_is_let_go_of(opened: Any) -> None:
    inner = opened("a")
    loader: Any = DataLoader(Half(inner), 2)
    assert sum(1 for _ in loader) == 3
    assert inner._outstanding() == 0
    iterator = iter(loader)
    next(iterator)
    assert inner._outstanding() > 0
    del iterator
    assert inner._outstanding() == 0


def test_announcements_that_are_never_used_end_with_a_warning(
    opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fastload.workers.reading._UNUSED", 4)
    other = opened("b")
    loader: Any = DataLoader(Mistaken(opened("a"), other), 2)
    assert sum(1 for _ in loader) == 6
    assert other._outstanding() == 0
    (record,) = caplog.records
    assert "the last 4 samples that prefetch() of the dataset announced were not read" in record.message


class Mistaken(Announcing):
    """Announces samples of another dataset than it reads."""

    def __init__(self, inner: Any, other: Any) -> None:
        super().__init__(inner)
        self.other = other

    def prefetch(self, indices: list[int]) -> None:
        self.other.prefetch([index % len(self.other) for index in indices])


class BadPrefetch(Announcing):
    def prefetch(self, indices: list[int]) -> None:
        raise LookupError(f"no file for {indices}")


class OtherPrefetch(Announcing):
    """The name means something else here."""

    def prefetch(self, count: int = 2) -> None:  # type: ignore[override]
        raise AssertionError


@pytest.mark.parametrize("workers", [0, 1])
def test_error_in_prefetch_is_an_error_of_its_batch(opened: Any, workers: int) -> None:
    with pytest.raises(LookupError, match=r"no file for \[0, 1\]"):
        list(DataLoader(BadPrefetch(opened("a")), 2, num_workers=workers, on_error="repeat"))


def test_prefetch_with_another_signature_is_not_called(opened: Any) -> None:
    with pytest.warns(UserWarning, match="one sample at a time"):
        loader: Any = DataLoader(OtherPrefetch(opened("b")), 4)
    assert sum(1 for _ in loader) == 2


# --- map


class OwnMap(MapDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)["label"]


@pytest.mark.parametrize("workers", [0, 1])
def test_dataset_inside_cached_is_read_ahead_until_the_cache_has_its_samples(
    opened: Any, tmp_path: Path, workers: int
) -> None:
    kept = cached(ConcatDataset([opened("a"), opened("b")]), tmp_path / "cache")
    loader: Any = DataLoader(kept, 4, num_workers=workers)
    first, second = ([told(batch) for batch in loader] for _ in range(2))
    assert first == second
    counters = loader.stats()["counters"]
    assert counters["get.ahead"] == counters["cache.misses"] == counters["cache.hits"] == 20
    kept.close()


def test_map_is_a_dataset_that_can_be_cached(opened: Any, tmp_path: Path) -> None:
    inner = opened("b", to_tensor)
    dataset = fastload.map(inner, as_dict)
    assert len(dataset) == 8 and told(dataset[3]) == told(as_dict(inner[3]))
    kept = cached(dataset, tmp_path / "cache")
    assert kept.fingerprint == cached(fastload.map(inner, as_dict), tmp_path / "cache").fingerprint
    assert kept.fingerprint != cached(fastload.map(inner, noisy), tmp_path / "cache").fingerprint
    first, second = ([told(batch) for batch in DataLoader(kept, 4, num_workers=1)] for _ in range(2))
    assert first == second == told(list(torch.utils.data.DataLoader(dataset, 4)))
    kept.close()


def test_subclass_of_map_is_obeyed_and_read_ahead(opened: Any) -> None:
    loader: Any = DataLoader(OwnMap(opened("b"), as_dict), 4)
    assert torch.cat(list(loader)).tolist() == [100] * 4 + [101] * 4
    assert loader.stats()["counters"]["get.ahead"] == 8


class Bulk(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index, 0

    def __getitems__(self, indices: list[int]) -> Any:
        return [(index, len(indices)) for index in indices]


def test_getitems_inside_a_map_or_stack_is_called_once_a_batch(opened: Any) -> None:
    for dataset in (fastload.map(Bulk(), tuple), fastload.map(Subset(Bulk(), range(8)), tuple)):
        assert [told(batch) for batch in DataLoader(dataset, 4)] == [
            [[0, 1, 2, 3], [4] * 4],
            [[4, 5, 6, 7], [4] * 4],
        ]
    ((_, bulk),) = DataLoader(StackDataset(opened("b"), Bulk()), 8)
    assert told(bulk) == [list(range(8)), [8] * 8]


def test_getitem_is_called_where_torch_calls_it_beside_rows(opened: Any) -> None:
    concat: Any = ConcatDataset([fastload.map(opened("b"), as_dict), Bulk()])
    assert list(DataLoader(concat, 4, sampler=range(8, 12), collate_fn=list)) == [[(n, 0) for n in range(4)]]
    stack: Any = StackDataset(opened("b"), Bulk())
    assert [told(bulk) for _, bulk in DataLoader(stack, None)] == [[n, 0] for n in range(8)]


@pytest.mark.parametrize("wrap", [lambda part: part, lambda part: fastload.map(part, tuple)])
def test_crops_beside_a_getitems_are_those_of_the_sample_for_any_workers(opened: Any, wrap: Any) -> None:
    folder, seen = opened("b", RandomResizedCrop(16)), []
    for other, workers in ((range(8), 0), (Bulk(), 0), (Bulk(), 2)):
        torch.manual_seed(3)
        loader: Any = DataLoader(wrap(StackDataset(folder, other)), 4, num_workers=workers)
        seen.append(torch.cat([images for (images, _), _ in loader]))
    assert all(torch.equal(images, seen[0]) for images in seen)


class FailingBulk(Bulk):
    def __getitems__(self, indices: list[int]) -> Any:
        if 2 in indices:
            raise LookupError("no sample 2")
        return super().__getitems__(indices)


def test_error_of_a_getitems_beside_rows_is_that_of_its_sample(opened: Any) -> None:
    dataset: Any = StackDataset(opened("b"), FailingBulk())
    with pytest.raises(LookupError, match=r"^no sample 2$"):
        list(DataLoader(dataset, 8))
    loader: Any = DataLoader(dataset, 8, on_error="repeat")
    ((_, (indices, _)),) = loader
    assert indices.tolist() == [0, 1, 3, 3, 4, 5, 6, 7] and loader.stats()["counters"]["bad.samples"] == 1


def number_of(sample: Any) -> int:
    return int(sample["cls"])


@pytest.mark.parametrize("workers", [0, 2])
def test_map_of_shards_is_streamed_and_then_read_at_random(
    tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr("fastload.shards.dataset.SMALL_RECORD", 0)
    write(tmp_path / "data", shards("tar"))
    inner = TarDataset(str(tmp_path / "data"), cache=Cache(tmp_path / "cache"))
    dataset = fastload.map(inner, number_of)
    with pytest.raises(TypeError, match="no length yet"):
        len(dataset)
    with pytest.raises(ArgumentError, match="a Subset chooses samples by index"):
        DataLoader(Subset(dataset, range(3)))
    hinted = TarDataset(str(tmp_path / "data"), num_samples=7)  # a hint is no number of samples by index
    for several in (ConcatDataset([hinted, hinted]), StackDataset(hinted, range(7))):
        with pytest.raises(ArgumentError, match=r"chooses samples by index: .*not indexed yet"):
            DataLoader(several)
    loader: Any = DataLoader(dataset, 16, shuffle=True, num_workers=workers)
    for _ in range(2):
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(TOTAL))
    assert len(dataset) == TOTAL
    inner.close()


def test_map_of_streamed_shards_resumes_in_the_middle(tmp_path: Path, no_leaks: None) -> None:
    write(tmp_path / "data", shards("tar"))

    def made() -> Any:
        return fastload.map(TarDataset(str(tmp_path / "data")), number_of)

    loader: Any = DataLoader(made(), 16, num_workers=1)
    iterator = iter(loader)
    before = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    del iterator
    again: Any = DataLoader(made(), 16, num_workers=2)
    again.load_state_dict(state)
    assert sorted(torch.cat([*before, *again]).tolist()) == list(range(TOTAL))
    for one in (loader, again):
        one.dataset.dataset.close()


def test_map_with_bad_arguments_is_refused(opened: Any) -> None:
    with pytest.raises(ArgumentError, match="function must be a function of one sample, found None"):
        fastload.map(opened("a"), None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="must be map-style, found Stream"):
        fastload.map(Stream(), tuple)
    with pytest.raises(ArgumentError, match="dataset is the class Bulk"):
        fastload.map(Bulk, tuple)  # type: ignore[arg-type]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())
