"""Normalize: torchvision's arithmetic, a batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image

from bench.peers.scripts.torchvision_on_cpu import torchvision
from fastload import CenterCrop, DataLoader, ImageFolder, Normalize
from fastload.errors import ArgumentError
from tests.loaderdata import default
from tests.photos import pillow_jpeg, scene
from tests.sharddata import write

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGES = torch.randint(0, 256, (5, 3, 7, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def expected(images: torch.Tensor) -> torch.Tensor:
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    return (images.float() / 255 - mean) / std


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float64, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_is_torchvisions(dtype: torch.dtype, tolerance: float, channels_last: bool) -> None:
    normalize = Normalize(MEAN, STD, dtype=dtype, channels_last=channels_last)
    images = IMAGES.permute(0, 2, 3, 1).contiguous() if channels_last else IMAGES
    for given, wanted in ((images, expected(IMAGES)), (images[0], expected(IMAGES)[0])):
        result = normalize(given)
        assert result.dtype is dtype and result.shape == wanted.shape
        torch.testing.assert_close(result.double(), wanted.double(), atol=tolerance, rtol=tolerance)
    result = normalize(images)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert result.is_contiguous(memory_format=layout)


def test_keeps_the_memory_format_of_a_batch() -> None:
    images = IMAGES.to(memory_format=torch.channels_last)
    assert Normalize(MEAN, STD)(images).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_memory_format_in_the_same_pass(dtype: torch.dtype) -> None:
    normalize = Normalize(MEAN, STD, dtype=dtype, memory_format=torch.channels_last)
    result = normalize(IMAGES)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(result, Normalize(MEAN, STD, dtype=dtype)(IMAGES))
    assert normalize(IMAGES[0]).shape == IMAGES[0].shape
    assert "channels_last" in repr(normalize)
    back = Normalize(MEAN, STD, channels_last=True, memory_format=torch.contiguous_format)
    assert back(IMAGES.permute(0, 2, 3, 1)).is_contiguous()


def test_every_byte_is_rounded_once() -> None:
    """To the nearest half or bfloat16 of the exact value: the arithmetic is in float32."""
    ramp = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256).contiguous()
    exact = Normalize(MEAN, STD, dtype=torch.float64)(ramp)
    for dtype in (torch.float16, torch.bfloat16):
        error = (Normalize(MEAN, STD, dtype=dtype)(ramp).double() - exact).abs()
        assert (error <= torch.finfo(dtype).eps * exact.abs() / 2 * 1.01 + 1e-6).all()


def test_other_numbers_of_channels() -> None:
    gray = Normalize([0.5], [0.25])(IMAGES[:, :1])
    torch.testing.assert_close(gray, (IMAGES[:, :1].float() / 255 - 0.5) / 0.25)


def test_repr() -> None:
    assert repr(Normalize([0.5], [1])) == "Normalize((0.5,), (1.0,))"


@pytest.mark.parametrize(
    "arguments",
    [
        {"mean": [0.5], "std": MEAN},
        {"mean": 0.5, "std": [1]},
        {"mean": [], "std": []},
        {"mean": [float("nan")], "std": [1]},
        {"mean": [0.5], "std": [0]},
        {"mean": [0.5], "std": [1], "dtype": torch.uint8},
        {"mean": [0.5], "std": [1], "memory_format": "channels_last"},
    ],
)
def test_arguments_are_checked(arguments: Any) -> None:
    with pytest.raises(ArgumentError):
        Normalize(**arguments)


@pytest.mark.parametrize(
    "images", [IMAGES.float(), IMAGES[:, :2], IMAGES.permute(0, 2, 3, 1), IMAGES[0, 0], IMAGES[None]]
)
def test_images_are_checked(images: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match="channels first; found"):
        Normalize(MEAN, STD)(images)


# --- batches


class Pair(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


@dataclass
class Record:
    images: torch.Tensor
    name: str


LABELS = torch.arange(5)
MASKS = IMAGES[:, :1]
BATCHES: list[Any] = [
    [IMAGES, LABELS],
    (IMAGES, LABELS),
    (LABELS, IMAGES),
    [IMAGES],
    Pair(IMAGES, LABELS),
    Record(IMAGES, "x"),
    {"jpg": IMAGES, "cls": LABELS, "__key__": ["a", "b", "c", "d", "e"]},
    {"jpg": IMAGES, "mask": MASKS, "flat": IMAGES[:, 0], "depth": IMAGES.float(), "n": 3, "none": None},
    {"inputs": [{"image": IMAGES}, "text"], "labels": (LABELS, LABELS)},
    [IMAGES, IMAGES],  # one tensor, twice
]


def leaves(batch: Any) -> list[Any]:
    if isinstance(batch, Record):
        return [batch.images, batch.name]
    if isinstance(batch, dict):
        return [leaf for part in batch.values() for leaf in leaves(part)]
    return [leaf for part in batch for leaf in leaves(part)] if isinstance(batch, list | tuple) else [batch]


@pytest.mark.parametrize("batch", BATCHES, ids=range(len(BATCHES)))
def test_only_the_images_of_a_batch_are_normalised(batch: Any) -> None:
    before = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(batch)]
    result = Normalize(MEAN, STD)(batch)
    assert type(result) is type(batch)
    for given, old, new in zip(leaves(batch), before, leaves(result), strict=True):
        if given is IMAGES:
            torch.testing.assert_close(new, expected(IMAGES))
            assert torch.equal(given, old)
        else:
            assert new is given


def test_batch_with_channels_last() -> None:
    last = IMAGES.permute(0, 2, 3, 1).contiguous()
    images, labels = Normalize(MEAN, STD, channels_last=True)((last, LABELS))
    torch.testing.assert_close(images, expected(IMAGES))
    assert labels is LABELS


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([IMAGES, IMAGES.clone()], r"has 2 tensors of uint8 images with 3 channels.*choose one with batch_"),
        ({"a": IMAGES, "b": (IMAGES[:2], 1)}, r"\(5, 3, 7, 9\), \(2, 3, 7, 9\): choose one"),
        ([IMAGES.float(), LABELS], r"in this list.*float32 \(5, 3, 7, 9\), int64 \(5,\).*RandomResizedCrop"),
        ((IMAGES[0], 3), r"in this tuple. Its tensors are: uint8 \(3, 7, 9\)"),
        ({"mask": MASKS}, r"in this dict. Its tensors are: uint8 \(5, 1, 7, 9\)"),
        ([IMAGES.permute(0, 2, 3, 1), LABELS], r"uint8 \(5, 7, 9, 3\), int64"),
        (["a", 3], "in this list. Its tensors are: none"),
        ([], "in this list. Its tensors are: none"),
    ],
)
def test_batch_with_no_or_several_images_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Normalize(MEAN, STD)(batch)


@pytest.mark.parametrize("sample", [Image.new("RGB", (8, 8)), IMAGES[0].numpy(), b"bytes", "text", 3, None])
def test_as_transform_of_a_sample_it_names_its_right_place(sample: Any) -> None:
    with pytest.raises(ArgumentError, match=r"not a transform for a dataset: give the dataset transform="):
        Normalize(MEAN, STD)(sample)


@pytest.fixture
def photos(tmp_path: Path) -> str:
    return write(
        tmp_path / "photos", {f"{'ab'[k % 2]}/{k}.jpg": pillow_jpeg(scene(60, 50, k)) for k in range(6)}
    )


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_as_batch_transform_of_image_folder_it_normalises_images(
    photos: str, num_workers: int, device: str | None
) -> None:
    """As in the docstring of DataLoader."""
    dataset = ImageFolder(photos, CenterCrop(40))
    plain = DataLoader(dataset, 4, num_workers=num_workers)
    loader = DataLoader(
        dataset, 4, num_workers=num_workers, device=device, batch_transform=Normalize(MEAN, STD)
    )
    for (images, labels), (floats, same) in zip(plain, loader, strict=True):
        torch.testing.assert_close(floats, expected(images))
        assert same.tolist() == labels.tolist()
    dataset.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_as_transform_of_image_folder_it_is_refused_with_advice(photos: str, num_workers: int) -> None:
    dataset = ImageFolder(photos, Normalize(MEAN, STD))
    with pytest.raises(ArgumentError, match=r"not a transform for a dataset.*batch_transform=Normalize"):
        next(iter(DataLoader(dataset, 2, num_workers=num_workers)))
    dataset.close()


def test_behind_a_crop_in_compose_it_takes_single_images(photos: str) -> None:
    chain = torchvision.transforms.Compose([CenterCrop(40), Normalize(MEAN, STD)])
    floats = ImageFolder(photos, chain)[0][0]
    torch.testing.assert_close(floats, expected(ImageFolder(photos, CenterCrop(40))[0][0]))


@pytest.mark.parametrize("change", ["float64", "meta"])
def test_the_default_dtype_and_device_change_nothing(change: str) -> None:
    wanted = [Normalize(MEAN, STD, dtype=dtype)([IMAGES, LABELS])[0] for dtype in (torch.float32, torch.half)]
    with default(change):
        found = [Normalize(MEAN, STD, dtype=one.dtype)([IMAGES, LABELS])[0] for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)
