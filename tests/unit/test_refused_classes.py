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

transforms: Any = torchvision.transforms


@pytest.fixture
def photos(tmp_path: Path) -> str:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "photos" / "a" / "0.jpg").write_bytes(pillow_jpeg(scene(40, 30)))
    return str(tmp_path / "photos")


class Blur(torch.nn.Module):
    def __init__(self, radius: float, *, sigma: float, times: int = 1) -> None:
        super().__init__()


class Wide(fastload.RandomResizedCrop):
    pass


CLASSES = [
    (fastload.RandomResizedCrop, r"RandomResizedCrop\(224\)"),
    (fastload.CenterCrop, r"CenterCrop\(224\)"),
    (fastload.Normalize, r"Normalize\(mean, std\)"),
    (ByEpoch, r"ByEpoch\(transforms\)"),
    (Wide, r"Wide\(224\)"),
    (Blur, r"Blur\(radius, sigma\)"),
    (transforms.ToTensor, r"ToTensor\(\)"),
    (transforms.Compose, r"Compose\(transforms\)"),
    (transforms.CenterCrop, r"CenterCrop\(224\)"),
]
every_class = pytest.mark.parametrize(("kind", "words"), CLASSES, ids=[kind.__name__ for kind, _ in CLASSES])


@every_class
def test_class_as_transform_of_a_dataset_is_refused(photos: str, kind: type, words: str) -> None:
    makers: list[Callable[[], Any]] = [
        lambda: ImageFolder(photos, kind),
        lambda: ObjectDataset(photos, transform=kind),
    ]
    for make in makers:
        with pytest.raises(ArgumentError, match=f"transform is a class: write {words}"):
            make()


@every_class
def test_class_as_decode_of_a_dataset_is_refused(photos: str, kind: type, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"decode is a class: write {words}"):
        ObjectDataset(photos, decode=kind)


@every_class
def test_class_for_shards_is_refused(tmp_path: Path, kind: type, words: str) -> None:
    """Before the store is asked for anything."""
    url, spec = str(tmp_path), {"image": bytes}
    makers: list[tuple[str, Callable[[], Any]]] = [
        ("transform", lambda: TarDataset(url, transform=kind)),
        (r"transform\['jpg'\]", lambda: TarDataset(url, transform={"jpg": kind})),
        ("decode", lambda: TarDataset(url, decode=kind)),
        (r"decode\['jpg'\]", lambda: TarDataset(url, decode={"jpg": kind})),
        ("transform", lambda: TFRecordDataset(url, spec, transform=kind)),
        (r"transform\['image'\]", lambda: TFRecordDataset(url, spec, transform={"image": kind})),
        ("decode", lambda: TFRecordDataset(url, decode=kind)),
    ]
    for name, make in makers:
        with pytest.raises(ArgumentError, match=f"{name} is a class: write {words}"):
            make()


@every_class
def test_class_in_by_epoch_is_refused(kind: type, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"from epoch 2 is a class: write {words}"):
        ByEpoch({0: len, 2: kind})


@every_class
def test_class_as_argument_of_the_loader_is_refused(kind: type, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"batch_transform is a class: write {words}"):
        DataLoader(TensorDataset(torch.zeros(3)), batch_transform=kind)
    with pytest.raises(ArgumentError, match=r"decoder is a class: write Dali\(\)"):
        DataLoader(TensorDataset(torch.zeros(3)), decoder=fastload.Dali)  # type: ignore[arg-type]


class Sample:
    """A class that is a callable on a sample, as any function is."""

    def __init__(self, data: Any) -> None:
        self.data = data


def test_other_classes_are_callables_like_any_other(photos: str) -> None:
    assert isinstance(ImageFolder(photos, Sample)[0][0], Sample)
    assert isinstance(ObjectDataset(photos, decode=Sample)[0], Sample)
    assert isinstance(ObjectDataset(photos, decode=bytes, transform=bytearray)[0], bytearray)
    [batch] = DataLoader(TensorDataset(torch.zeros(3)), 3, batch_transform=Sample)
    assert isinstance(batch, Sample)
    for value in (None, len, Sample, dict, 3, "text", fastload.CenterCrop(4)):
        refuse_class("transform", value)
