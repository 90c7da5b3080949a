"""Normalize: torchvision's arithmetic, a batch at once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from fastload import Normalize
from fastload.errors import ArgumentError

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


def test_pickle_and_repr() -> None:
    normalize = Normalize(MEAN, STD, dtype=torch.bfloat16, channels_last=True)
    images = IMAGES.permute(0, 2, 3, 1)
    first = normalize(images)
    again = pickle.loads(pickle.dumps(normalize))
    assert torch.equal(again(images), first)
    assert repr(again) == repr(normalize)
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
