"""Samples that cannot be made, or make no batch, are named in the error; an epoch without batches is told."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler, Subset

from fastload import CenterCrop, DataLoader, ImageFolder
from fastload.errors import ArgumentError
from tests.loaderdata import Numbers
from tests.photos import pillow_jpeg, scene
from tests.sharddata import write

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six photos in two classes, no two of one size."""
    files = {f"class{i // 3}/{i}.jpg": pillow_jpeg(scene(40, 32 + i)) for i in range(6)}
    return Path(write(tmp_path_factory.mktemp("photos"), files))


def to_tensor(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


def divide(image: Any) -> Any:
    raise ZeroDivisionError("of my own")


def error_of(dataset: Any, num_workers: int, **options: Any) -> tuple[type[Exception], str]:
    """Its type, and its last line on the terminal."""
    with pytest.raises(Exception) as raised:
        list(DataLoader(dataset, 4, num_workers=num_workers, **options))
    shown = "".join(traceback.format_exception(raised.value)).strip()
    return type(raised.value), shown.rpartition("\n")[2]


RAGGED: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "tensors": (
        lambda i: torch.zeros(3, i // 2),
        RuntimeError,
        "(sample 0 has shape (3, 0), but sample 2 has shape (3, 1): pass collate_fn, or",
    ),
    "arrays in a dict": (
        lambda i: {"label": i, "mask": np.zeros(i // 3)},
        RuntimeError,
        "(sample 0 has shape (0,) at ['mask'], but sample 3 has shape (1,): pass collate_fn, or",
    ),
    "lists": (
        lambda i: (i, [1.0] * (i + 1)),
        RuntimeError,
        "(sample 0 is a list of 1 at [1], but sample 1 is a list of 2: pass collate_fn, or",
    ),
    "a missing field": (
        lambda i: {"a": i} if i == 3 else {"a": i, "b": i},
        KeyError,
        "(sample 0 has 'b', but sample 3 lacks it: pass collate_fn, or",
    ),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", RAGGED)
def test_samples_that_differ_are_named_with_the_remedy(kind: str, num_workers: int) -> None:
    make, expected, text = RAGGED[kind]
    found, line = error_of(Numbers(6, make), num_workers)
    assert found is expected and line.startswith(text), line


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("subset", [False, True])
def test_images_that_differ_are_named_by_key(folder: Path, subset: bool, num_workers: int) -> None:
    dataset: Any = ImageFolder(str(folder), to_tensor)
    dataset = Subset(dataset, [4, 5]) if subset else dataset
    first, second = ("class1/4.jpg", "class1/5.jpg") if subset else ("class0/0.jpg", "class0/1.jpg")
    found, line = error_of(dataset, num_workers)
    assert found is RuntimeError
    pattern = (
        rf"\(sample 0 '{first}' has shape \(.*\) at \[0\], but sample 1 '{second}' has shape \(.*\): pass "
    )
    assert re.match(pattern, line), line


@pytest.mark.parametrize("num_workers", [0, 2])
def test_images_without_a_transform_are_told_to_have_one(folder: Path, num_workers: int) -> None:
    found, line = error_of(ImageFolder(str(folder)), num_workers)
    assert found is TypeError
    assert line.startswith("(sample 0 'class0/0.jpg' is a PIL.Image at [0]: give the dataset a transform"), (
        line
    )
    assert "transform=fastload.RandomResizedCrop(224)" in line


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_in_a_transform_names_index_and_key(folder: Path, num_workers: int) -> None:
    dataset = ImageFolder(str(folder), divide)
    assert error_of(dataset, num_workers) == (ZeroDivisionError, "(sample 0 'class0/0.jpg')")
    assert error_of(Subset(dataset, [5, 4]), num_workers) == (ZeroDivisionError, "(sample 0 'class1/5.jpg')")


def test_own_collate_fn_is_left_to_its_own_errors() -> None:
    def collate(samples: list[Any]) -> Any:
        raise ValueError("mine")

    assert error_of(Numbers(4), 0, collate_fn=collate) == (ValueError, "ValueError: mine")


def test_batch_size_as_text_is_refused_as_text() -> None:
    with pytest.raises(ArgumentError, match="batch_size must be an int >= 1 or None, found the text '64'"):
        DataLoader(Numbers(4), "64")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"sampler": SequentialSampler(range(6))}], ids=["default", "sampler"]
)
def test_epoch_without_a_batch_is_warned_of_once(options: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(Numbers(6), 64, drop_last=True, **options)
        assert list(loader) == list(loader) == []
    (warning,) = caught
    assert "every epoch is empty" in str(warning.message) and warning.filename == __file__
    assert "6 samples are fewer than batch_size=64" in str(warning.message)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_targets_that_differ_beside_a_fused_transform_are_named(folder: Path, num_workers: int) -> None:
    """Three samples of each class: the fourth is the first whose target has another length."""
    dataset = ImageFolder(str(folder), CenterCrop(8), target_transform=lambda label: [0] * (1 + label))
    _, text = error_of(dataset, num_workers)
    assert re.search(r"sample 0 'class0/0.jpg' .*, but sample 3 'class1/3.jpg' .*pass collate_fn", text), text


def test_error_that_is_raised_again_has_one_note() -> None:
    error = ValueError("always the same")

    def fail(index: int) -> int:
        raise error

    for index in (3, 4):
        with pytest.raises(ValueError, match="always the same") as caught:
            list(DataLoader(Numbers(8, fail), sampler=[index]))
        assert caught.value.__notes__ == [f"(sample {index})"]


def test_sampler_that_refuses_to_tell_its_length_is_left_alone() -> None:
    class Sampler:
        def __iter__(self) -> Any:
            return iter(range(4))

        def __len__(self) -> int:
            raise RuntimeError("not known yet")

    assert sum(1 for _ in DataLoader(Numbers(4), 2, sampler=Sampler(), drop_last=True)) == 2
