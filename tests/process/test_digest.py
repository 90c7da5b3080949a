"""The digest of a loader: the same for the same data however it was made, and another for any other data."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

import fastload
from fastload import (
    Cache,
    CenterCrop,
    DataLoader,
    DistributedSampler,
    File,
    ImageFolder,
    Mixture,
    RandomResizedCrop,
    TableDataset,
    prove,
)
from fastload.errors import ArgumentError
from tests import sharddata
from tests.loaderdata import Numbers, Stream, through_json
from tests.photos import pillow_jpeg, scene

pytestmark = pytest.mark.usefixtures("no_leaks")

COUNT, BATCH = 24, 8
PHOTOS = [pillow_jpeg(scene(60 + 4 * (i % 3), 50, i), quality=70) for i in range(COUNT)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, photo in enumerate(PHOTOS):
        path = tmp_path / "data" / f"class_{number % 2}" / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo)
        os.utime(path, ns=(10**18, 10**18))
    return tmp_path / "data"


def crops(**options: Any) -> RandomResizedCrop:
    return RandomResizedCrop(16, flip=0.5, **options)


def epochs_of(loader: DataLoader[Any], count: int = 2) -> None:
    for _ in range(count):
        for _ in loader:
            pass


def total(digests: Sequence[bytes]) -> bytes:
    """The sum of the digests of several ranks."""
    lanes = [[int.from_bytes(one[at : at + 8], "little") for one in digests] for at in range(0, 32, 8)]
    return b"".join((sum(lane) % 2**64).to_bytes(8, "little") for lane in lanes)


def run(dataset: Any, *, ranks: int = 1, epochs: int = 2, order: int = 1, **options: Any) -> bytes:
    """The digest over all ranks of a run with one global batch."""
    digests = []
    for rank in range(ranks):
        torch.manual_seed(5)
        sampler = DistributedSampler(dataset, ranks, rank, seed=order)
        loader = DataLoader(dataset, BATCH // ranks, sampler=sampler, **options)
        epochs_of(loader, epochs)
        digests.append(loader.digest())
    return total(digests)


def close(*datasets: Any) -> None:
    for dataset in datasets:
        dataset.close()


# --- what does not change it


def test_other_place_of_the_same_objects_gives_one_digest(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(folder)
    here, there = ImageFolder(str(folder), crops()), ImageFolder(f"file://{tmp_path}/other", crops())
    assert run(here) == run(there)
    close(here, there)


def test_streamed_and_indexed_records_of_one_order_give_one_digest(tmp_path: Path) -> None:
    url = sharddata.write(tmp_path / "shards", dict(list(sharddata.shards("tar", index=True).items())[:4]))
    digests = []
    options = {"transform": {"jpg": crops()}, "cycle_length": 1, "shuffle_buffer": 1}
    for index in (False, True):
        cache = Cache(tmp_path / f"cache-{index}", "raw")
        data = sharddata.dataset("tar", url, index=index, cache=cache, **options)
        for _ in data._warm_shards(range(2)) if index else ():
            pass
        assert data._streams().must_stream() != index
        digests.append(digest_of(data, seed=3, shuffle=False))
        data.close()
    assert digests[0] == digests[1]


@pytest.mark.parametrize("inner_first", [False, True])
def test_iterations_in_turn_add_up_to_those_one_after_the_other(inner_first: bool) -> None:
    """As where a batch is drawn by `next(iter(loader))` within an epoch. Their states can be loaded."""
    one, other, resumed = (DataLoader(Numbers(COUNT), BATCH, shuffle=True, seed=4) for _ in range(3))
    epochs_of(one)
    first, second = iter(other), iter(other)
    if inner_first:
        list(second), list(first)
    else:
        list(zip(first, second, strict=True))
    state = through_json(other.state_dict())
    assert state["digest"] == one.state_dict()["digest"]
    resumed.load_state_dict(state)
    assert resumed.digest() == one.digest()


def ranked(dataset: Any, ranks: int, rank: int, **options: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(dataset, ranks, rank, seed=2)
    return DataLoader(dataset, BATCH // ranks, sampler=sampler, seed=4, **options)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 2)])
def test_resume_with_other_ranks_adds_up(before: int, after: int) -> None:
    dataset = Numbers(40)
    whole = ranked(dataset, 1, 0)
    epochs_of(whole)
    states = []
    for rank in range(before):
        loader = ranked(dataset, before, rank)
        batches = iter(loader)
        next(batches), next(batches)
        states.append(loader.state_dict())
    ends, digests = [], []
    for rank in range(after):
        loader = ranked(dataset, after, rank)
        loader.load_state_dict(states[rank % before])
        epochs_of(loader)
        ends.append(loader.state_dict())
        digests.append(loader.digest())
    if after >= before:
        assert total(digests) == whole.digest()
        assert prove(ends, whole.state_dict())
    else:
        with pytest.raises(ArgumentError, match="lacks ranks"):
            prove(ends, whole.state_dict())
        assert prove([*ends, *states[after:]], whole.state_dict())


def test_batches_as_single_samples_have_a_digest() -> None:
    one, other = (DataLoader(Numbers(5), None, num_workers=workers) for workers in (0, 2))
    epochs_of(one), epochs_of(other)
    assert one.digest() == other.digest() != bytes(32)


# --- what changes it


class Fails(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise fastload.errors.DecodeError("broken")
        return index


def digest_of(dataset: Any, *, count: int = 1, **options: Any) -> bytes:
    loader = DataLoader(dataset, BATCH, **options)
    epochs_of(loader, count)
    return loader.digest()


def test_another_seed_of_order_or_augmentation_changes_it(folder: Path) -> None:
    dataset = ImageFolder(str(folder), crops())
    digests = [run(dataset), run(dataset, order=2), run(dataset, epochs=1)]
    digests += [digest_of(dataset, seed=1), digest_of(dataset, seed=2)]
    assert len(set(digests)) == len(digests)
    close(dataset)


def test_random_numbers_that_nothing_draws_do_not_change_it(folder: Path) -> None:
    dataset = ImageFolder(str(folder), CenterCrop(16, resize=20))
    digests = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # the base seed of the epoch
        digests.append(digest_of(dataset))
    assert digests[0] == digests[1]
    close(dataset)


@pytest.mark.parametrize("workers", [0, 2])
def test_replaced_row_changes_it(workers: int) -> None:
    fine = digest_of(Numbers(16), seed=1)
    replaced = digest_of(Fails(16), seed=1, on_error="replace", num_workers=workers)
    skipped = digest_of(Fails(16), seed=1, on_error="repeat", num_workers=workers)
    assert len({fine, replaced, skipped}) == 3
    assert replaced == digest_of(Fails(16), seed=1, on_error="replace")


def test_raised_step_counts_without_rows() -> None:
    loader = DataLoader(Fails(16), BATCH)
    batches = iter(loader)
    with pytest.raises(fastload.errors.DecodeError):
        next(batches)
    next(batches)
    digest = loader.state_dict()["digest"]
    assert (digest["steps"], digest["samples"]) == (2, 8)


def test_swapped_steps_change_it() -> None:
    order = [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    first, second = (DataLoader(Numbers(24), batch_sampler=some) for some in (order, order[::-1]))
    within = DataLoader(Numbers(24), batch_sampler=[one[::-1] for one in order])
    for loader in (first, second, within):
        epochs_of(loader, 1)
    assert first.digest() != second.digest()
    assert first.digest() == within.digest()


def test_changed_object_changes_it(folder: Path) -> None:
    before = ImageFolder(str(folder), crops())
    wanted = run(before)
    (folder / "class_0" / "04.jpg").write_bytes(PHOTOS[5])
    after = ImageFolder(str(folder), crops())
    assert run(after) != wanted
    close(before, after)


def test_object_that_is_read_in_a_new_version_changes_it(folder: Path) -> None:
    listed = ImageFolder(str(folder), crops(), on_change="refresh")
    wanted = digest_of(listed, seed=1)
    (folder / "class_0" / "04.jpg").write_bytes(PHOTOS[5])
    listed.close()
    assert digest_of(listed, seed=1) != wanted
    new = ImageFolder(str(folder), crops())
    assert digest_of(new, seed=1) == digest_of(listed, seed=1)
    close(listed, new)


def test_other_labels_change_it(folder: Path) -> None:
    names = ["class_0", "class_1"]
    straight, swapped = (ImageFolder(str(folder), crops(), classes=some) for some in (names, names[::-1]))
    assert run(straight) != run(swapped)
    close(straight, swapped)


def test_permuted_column_of_labels_changes_it(folder: Path) -> None:
    keys = [f"class_{i % 2}/{i:02}.jpg" for i in range(COUNT)]
    tables = [{"file": keys, "label": labels} for labels in (list(range(COUNT)), list(range(COUNT))[::-1])]
    made = [TableDataset(one, (File("file"), "label"), url=str(folder), transform=crops()) for one in tables]
    made += [TableDataset(one, "label") for one in tables]  # without objects
    digests = [run(one) for one in made]
    assert len(set(digests)) == 4
    close(*made)


def test_other_part_or_wrapper_changes_it() -> None:
    data = Numbers(8)
    two = ConcatDataset([Numbers(8), Numbers(8)])
    digests = {
        digest_of(data),
        digest_of(Subset(data, [1, 0, 2, 3, 4, 5, 6, 7])),  # within a step the order does not count
        digest_of(Subset(two, range(8))),
        digest_of(Subset(two, range(8, 16))),
        digest_of(StackDataset(data, data)),
        digest_of(Mixture({"a": data, "b": data}, [0.5, 0.5], num_samples=8)),
    }
    assert len(digests) == 5
    assert digest_of(fastload.map(data, str)) == digest_of(data)


class Own(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__((index + 1) % len(self))


def test_own_getitem_counts_by_index(folder: Path) -> None:
    dataset = Own(str(folder), crops())
    assert digest_of(dataset) == digest_of(Numbers(COUNT))
    close(dataset)


class Named(Dataset[Any]):
    def __getitem__(self, name: Any) -> Any:
        return len(name)


def test_indices_that_are_no_numbers_count() -> None:
    digests = set()
    for names in (["a", "b"], ["a", "c"], [("a", 1), ("b", 2)]):
        loader = DataLoader(Named(), 2, sampler=names)
        epochs_of(loader, 1)
        digests.add(loader.digest())
    assert len(digests) == 3


def test_iterable_dataset_has_no_digest(tmp_path: Path) -> None:
    loader = DataLoader(Stream([4]), 2)
    epochs_of(loader, 1)
    with pytest.raises(ArgumentError, match="iterable"):
        loader.digest()
    with pytest.raises(ArgumentError, match="iterable"):
        prove(loader.state_dict(), loader.state_dict())
    with pytest.raises(ArgumentError, match="iterable"):
        DataLoader(Stream([4]), 2, sample_log=tmp_path)


# --- in the state


def test_state_stays_small() -> None:
    loader = DataLoader(Numbers(1500), 1)
    epochs_of(loader, 1)
    digest = loader._context.digest
    for epoch in range(1, 150):
        digest.add(epoch, 0, None)
    state = through_json(loader.state_dict())
    assert len(json.dumps(state["digest"])) < 8000
    again = DataLoader(Numbers(1500), 1)
    again.load_state_dict(state)
    assert again.digest() == loader.digest()


# --- other kinds of datasets


def test_records_of_tables_and_tokens_count_by_what_they_are(tmp_path: Path) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pq.write_table(pa.table({"a": list(range(16)), "b": list(range(16))}), tmp_path / "rows.parquet")
    np.arange(300, dtype="<u2").tofile(tmp_path / "tokens.bin")
    made = [
        fastload.ParquetDataset(str(tmp_path / "rows.parquet"), fields="a"),
        fastload.ParquetDataset(str(tmp_path / "rows.parquet"), fields="a", filters=[("b", ">", 3)]),
        fastload.TokenDataset(str(tmp_path / "tokens.bin"), "uint16", 16),
        fastload.TokenDataset(str(tmp_path / "tokens.bin"), "int16", 16),
        fastload.TokenDataset(str(tmp_path / "tokens.bin"), "uint16", 16, overlap=1),
    ]
    digests = [digest_of(Subset(one, range(8))) for one in made]
    assert len(set(digests)) == len(made)
    assert digests == [digest_of(Subset(one, range(8)), num_workers=1) for one in made]
    close(*made)


def test_object_in_the_middle_of_a_sample_counts(tmp_path: Path) -> None:
    """A sample of tokens may be cut from more than two objects."""
    digests = set()
    for middle in (1, 2):
        folder = tmp_path / str(middle)
        folder.mkdir()
        for number, value in enumerate((0, middle, 3)):
            path = folder / f"{number}.bin"
            np.full(4, value, np.uint16).tofile(path)
            os.utime(path, (100 + value, 100 + value))
        dataset = fastload.TokenDataset(str(folder), "uint16", 12)
        digests.add(digest_of(dataset))
        close(dataset)
    assert len(digests) == 2


@pytest.mark.parametrize(
    "change", [{"scale": (0.2, 1.0)}, {"size": 20}, {"flip": 0.4}, {"interpolation": "nearest"}]
)
def test_another_argument_of_the_crop_gives_another_digest(folder: Path, change: dict[str, Any]) -> None:
    """Although the random numbers are the same."""
    digests = set()
    for arguments in ({}, {}, change):
        options: dict[str, Any] = {"size": 16, "flip": 0.5} | arguments
        loader = DataLoader(ImageFolder(str(folder), RandomResizedCrop(**options)), 8, seed=1)
        for _ in loader:
            pass
        digests.add((bool(arguments), loader.digest()))
    assert len(digests) == 2 and len({digest for _, digest in digests}) == 2
