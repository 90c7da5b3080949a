"""A transform's class where an instance is meant: refused at once, and the message says what to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import fastload
from bench.peers.scripts.torchvision_on_cpu import torchvision
from fastload import ByEpoch, DataLoader, ImageFolder, ObjectDataset, TarDataset, TFRecordDataset
from fastload.checks import refuse_class
from fastload.errors import ArgumentError
from tests.photos import pillow_jpeg, scene
from tests.storedata import write

transforms: Any = torchvision.transforms


@pytest.fixture
def photos(tmp_path: Path) -> str:
    return write(tmp_path / "photos", {"a/0.jpg": pillow_jpeg(scene(40, 30))})


class Blur(torch.nn.Module):
    def __init__(self, radius: float, *, sigma: float, times: int = 1) -> None:
        super().__init__()


class Wide(fastload.RandomResizedCrop):
    pass


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (fastload.RandomResizedCrop, r"RandomResizedCrop\(224\)"),
        (fastload.CenterCrop, r"CenterCrop\(224\)"),
        (fastload.Normalize, r"Normalize\(mean, std\)"),
        (ByEpoch, r"ByEpoch\(transforms\)"),
        (Wide, r"Wide\(224\)"),
        (Blur, r"Blur\(radius, sigma\)"),
        (transforms.ToTensor, r"ToTensor\(\)"),
        (transforms.Compose, r"Compose\(transforms\)"),
        (transforms.CenterCrop, r"CenterCrop\(224\)"),
        (ImageFolder, r"ImageFolder\(url\)"),
    ],
)
def test_message_says_how_an_instance_is_made(photos: str, kind: type, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"transform is a class: write {words}"):
        ImageFolder(photos, kind)


CROP: Any = fastload.CenterCrop


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("target_transform", lambda url: ImageFolder(url, None, CROP)),
        ("transform", lambda url: ObjectDataset(url, transform=CROP)),
        ("decode", lambda url: ObjectDataset(url, decode=CROP)),
        ("transform", lambda url: TarDataset(url, transform=CROP)),
        (r"transform\['jpg'\]", lambda url: TarDataset(url, transform={"jpg": CROP})),
        ("decode", lambda url: TarDataset(url, decode=CROP)),
        (r"decode\['jpg'\]", lambda url: TarDataset(url, decode={"jpg": CROP})),
        ("transform", lambda url: TFRecordDataset(url, {"image": bytes}, transform=CROP)),
        (
            r"transform\['image'\]",
            lambda url: TFRecordDataset(url, {"image": bytes}, transform={"image": CROP}),
        ),
        ("decode", lambda url: TFRecordDataset(url, decode=CROP)),
        ("from epoch 2", lambda url: ByEpoch({0: len, 2: CROP})),
        ("batch_transform", lambda url: DataLoader(TensorDataset(torch.zeros(3)), batch_transform=CROP)),
    ],
)
def test_class_is_refused_before_the_store_is_asked(
    name: str, make: Callable[[str], Any], tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=rf"{name} is a class: write CenterCrop\(224\)"):
        make(str(tmp_path))


def test_class_of_the_decoder_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"decoder is a class: write Dali\(\)"):
        DataLoader(TensorDataset(torch.zeros(3)), decoder=fastload.Dali)  # type: ignore[arg-type]


class Sample:
    """A class that is a callable on a sample, as any function is."""

    def __init__(self, data: Any) -> None:
        self.data = data


def test_other_classes_are_callables_like_any_other(photos: str) -> None:
    image, label = ImageFolder(photos, Sample, float)[0]
    assert isinstance(image, Sample) and type(label) is float
    assert isinstance(ObjectDataset(photos, decode=Sample)[0], Sample)
    assert isinstance(ObjectDataset(photos, decode=bytes, transform=bytearray)[0], bytearray)
    [batch] = DataLoader(TensorDataset(torch.zeros(3)), 3, batch_transform=Sample)
    assert isinstance(batch, Sample)
    for value in (None, len, Sample, dict, 3, "text", fastload.CenterCrop(4)):
        refuse_class("transform", value)
