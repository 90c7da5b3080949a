"""The substitute of a bad sample is another sample, wherever there is another one."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from fastload import DataLoader, ObjectDataset
from fastload.errors import ArgumentError
from tests.loaderdata import Numbers


def first_is_bad(index: int) -> int:
    if index == 0:
        raise ValueError("bad")
    return index


def load(count: int, seed: int) -> tuple[list[Any], list[Any]]:
    """(the samples of an epoch, what the loader noted as bad)."""
    loader = DataLoader(Numbers(count, first_is_bad), batch_size=None, seed=seed, on_error="replace")
    return [int(sample) for sample in loader], loader.stats()["bad"]


def test_bad_sample_of_many_seeds_is_noted_once() -> None:
    for seed in range(50):
        samples, bad = load(2, seed)
        assert samples == [1, 1]
        assert bad == [("0", "ValueError: bad")]


def test_bad_sample_without_another_one_is_raised() -> None:
    with pytest.raises(ValueError, match="bad"):
        load(1, 0)


class Batches(torch.utils.data.Dataset[list[int]]):
    """Makes a batch of a list of indices; none with the sample 5."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return [self[one] for one in index]
        if index == 5:
            raise ValueError("bad")
        return index


@pytest.mark.parametrize("on_error", ["repeat", "replace"])
def test_batch_that_the_dataset_makes_is_not_replaced_by_a_sample(on_error: str) -> None:
    sampler = BatchSampler(SequentialSampler(range(12)), 4, drop_last=False)
    batches = iter(DataLoader(Batches(), batch_size=None, sampler=sampler, on_error=on_error))
    assert next(batches) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="bad"):
        next(batches)


class Endless(torch.utils.data.Dataset[int]):
    """It has no length, which torch accepts beside a sampler."""

    def __getitem__(self, index: int) -> int:
        return index


def test_dataset_without_a_length_has_no_other_samples_and_says_so() -> None:
    with pytest.raises(ArgumentError, match="Endless has no length: give it a __len__, or use 'repeat'"):
        DataLoader(Endless(), sampler=range(3), on_error="replace")
    loader = DataLoader(Endless(), sampler=range(3), on_error="repeat")
    for leave_out in (loader.skip, loader.exclude):
        with pytest.raises(ArgumentError, match="Endless has no length: give it a __len__"):
            leave_out(1)
    assert torch.cat(list(loader)).tolist() == [0, 1, 2]


def most_are_bad(index: int) -> int:
    if index % 10 < 6:
        raise ValueError(f"no label\nin {index}")
    return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_than_a_few_bad_samples_are_warned_of_once(num_workers: int) -> None:
    dataset = Numbers(40, most_are_bad)
    loader = DataLoader(dataset, 10, num_workers=num_workers, on_error="repeat")
    with pytest.warns(
        RuntimeWarning, match=r"6 bad samples of this epoch so far.* ValueError: no label\. See"
    ):
        for _ in range(2):
            list(loader)
    stats = loader.stats()
    assert stats["counters"]["bad.samples"] == 48 and len(stats["bad"]) == 48
    assert "24 bad samples were replaced" in stats["verdict"], "those of the epoch"


def test_a_few_bad_samples_an_epoch_are_no_warning() -> None:
    loader = DataLoader(Numbers(8, lambda index: 1 // index % 2), 8, on_error="repeat")
    for _ in range(8):
        list(loader)
    stats = loader.stats()
    assert stats["counters"]["bad.samples"] == 8 and "replaced" not in stats["verdict"]


def refuse_a(text: bytes) -> bytes:
    if text == b"a":
        raise ValueError("no label")
    return text


def texts(root: Path, *names: str) -> ObjectDataset:
    for number, name in enumerate(names):
        (root / f"{number}.txt").write_text(name)
    return ObjectDataset(root, transform=refuse_a)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_sample_of_a_transform_is_noted_by_its_key(num_workers: int, tmp_path: Path) -> None:
    loader = DataLoader(texts(tmp_path, "a", "b"), None, num_workers=num_workers, on_error="replace")
    assert list(loader) == [b"b", b"b"]
    assert loader.stats()["bad"] == [("0.txt", "ValueError: no label")]


@pytest.mark.parametrize(
    ("on_error", "words"), [("replace", "the 16 that it was to replace"), ("repeat", "all of its batch")]
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_error_of_a_transform_says_that_substitutes_are_bad_too(
    on_error: str, words: str, num_workers: int, tmp_path: Path
) -> None:
    loader = DataLoader(texts(tmp_path, "a", "a"), 2, num_workers=num_workers, on_error=on_error)
    with (
        pytest.warns(RuntimeWarning, match="bad samples") if on_error == "replace" else nullcontext(),
        pytest.raises(ValueError, match="no label") as caught,
    ):
        list(loader)
    told = "".join(traceback.format_exception_only(caught.value))
    assert f".txt'. on_error='{on_error}' ends here: {words} are bad too)" in told
