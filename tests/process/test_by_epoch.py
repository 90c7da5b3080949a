"""ByEpoch: the size changes between epochs, in the workers that there are, and a resumed run has the same."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

from fastload import ByEpoch, CenterCrop, DataLoader, DistributedSampler, ImageFolder, RandomResizedCrop
from fastload.errors import ArgumentError
from tests.photos import pillow_jpeg, scene
from tests.sharddata import write

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {f"class_{i % 2}/{i}.jpg": pillow_jpeg(scene(90, 80, i)) for i in range(12)}
    return Path(write(tmp_path / "data", files))


def by_epoch() -> ByEpoch:
    return ByEpoch({3: CenterCrop(40), 0: RandomResizedCrop(16), 2: RandomResizedCrop((24, 32))})


SIZES = [(16, 16), (16, 16), (24, 32), (40, 40), (40, 40)]


def loader_of(dataset: Any, num_workers: int, persistent: bool = False) -> DataLoader[Any]:
    sampler = DistributedSampler(dataset, 1, 0, seed=3)
    return DataLoader(
        dataset, 4, sampler=sampler, num_workers=num_workers, persistent_workers=persistent, seed=7
    )


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_each_epoch_has_its_size(folder: Path, num_workers: int, persistent: bool) -> None:
    images_of_folder = ImageFolder(str(folder), by_epoch())
    dataset: Any = Subset(images_of_folder, range(1, 11))
    loader = loader_of(dataset, num_workers, persistent)
    pids = set()
    for size in SIZES:
        iterator = iter(loader)
        pids |= {process.pid for process in getattr(iterator, "_workers", [])}
        images = torch.cat([images for images, _ in iterator])
        assert images.shape == (len(dataset), 3, *size)
    images_of_folder.close()
    assert len(pids) == min(1, num_workers) * (1 if persistent else len(SIZES))


@pytest.mark.parametrize(("epochs", "num_workers"), [(1, 1), (2, 0)])
def test_a_resumed_run_has_the_same_pixels(folder: Path, epochs: int, num_workers: int) -> None:
    loader = loader_of(ImageFolder(str(folder), by_epoch()), 2, persistent=True)
    for _ in range(epochs):
        list(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [*iterator, *loader]
    with closing(ImageFolder(str(folder), by_epoch())) as dataset:
        again = loader_of(dataset, num_workers)
        again.load_state_dict(state)
        same = [*again, *again]
    assert len(rest) == len(same) == 5
    for (images, labels), (images_again, labels_again) in zip(rest, same, strict=True):
        assert torch.equal(images, images_again) and torch.equal(labels, labels_again)


def test_iterators_over_one_dataset_have_each_their_epoch(folder: Path) -> None:
    """Without workers they share its transform."""
    with closing(ImageFolder(str(folder), ByEpoch({0: CenterCrop(8), 1: CenterCrop(16)}))) as dataset:
        loader = loader_of(dataset, 0)
        for size in (8, 16):
            for images, _ in loader:
                assert images.shape[-1] == size
                other = loader_of(dataset, 0)
                assert [next(iter(other))[0].shape[-1] for _ in range(2)] == [8, 16]


def test_any_callables(folder: Path) -> None:
    def width(image: Image.Image) -> int:
        return image.size[0]

    with closing(ImageFolder(str(folder), ByEpoch({0: width, 1: CenterCrop(8)}))) as dataset:
        loader = loader_of(dataset, 1, persistent=True)
        assert [widths.tolist() for widths, _ in loader] == [[90] * 4] * 3
        assert [images.shape for images, _ in loader] == [(4, 3, 8, 8)] * 3
        assert dataset[0][0] == 90  # outside of a loader it is epoch 0


class WithStartEpoch(torch.utils.data.Dataset[int]):
    """A plain dataset to whose author this name means something else."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpid()

    def start_epoch(self) -> None:
        raise AssertionError


def test_plain_datasets_are_left_alone() -> None:
    assert len(list(DataLoader(WithStartEpoch(), num_workers=1))) == 4


@pytest.mark.parametrize(
    ("transforms", "text"),
    [
        ({}, "with a transform for epoch 0"),
        ({1: CenterCrop(8)}, "with a transform for epoch 0"),
        ([CenterCrop(8)], "with a transform for epoch 0"),
        ({0: CenterCrop(8), -1: CenterCrop(8)}, "not -1"),
        ({0: CenterCrop(8), 1.5: CenterCrop(8)}, "not 1.5"),
        ({0: CenterCrop(8), 2: 64}, "epoch 2 must be callable"),
    ],
)
def test_arguments(transforms: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        ByEpoch(transforms)
    assert "CenterCrop" in repr(by_epoch())
