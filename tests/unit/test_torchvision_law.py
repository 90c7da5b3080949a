"""The fused transforms against torchvision's own: the same boxes, the same pixels, the same distribution."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bench.peers.scripts.torchvision_on_cpu import torchvision
from fastload import CenterCrop, RandomResizedCrop
from fastload.errors import ArgumentError
from fastload.images import SampleRng, decode_image, sample_seed
from fastload.images.rng import TorchRng
from tests.laws import far, kolmogorov
from tests.loaderdata import default
from tests.photos import path as path
from tests.photos import pillow_jpeg, psnr, scene

transforms: Any = torchvision.transforms
Pixels = np.ndarray[Any, Any]

GREY_LEVELS = 2  # by which a resized pixel may differ from Pillow's
LAWS = [
    ((0.08, 1.0), (3 / 4, 4 / 3)),
    ((0.9, 1.0), (1.0, 1.0)),
    ((0.01, 0.02), (0.2, 5.0)),
    ((0.3, 1), (2, 3)),
]


def filled(transform: Any, image: Any, seed: int = 0) -> Pixels:
    """(H, W, 3) of one image, by `fill`."""
    out = np.full((1, *transform.sample_shape), 77, np.uint8)
    assert transform.fill(out, [image], [seed]) == []
    return out[0] if transform.channels_last else out[0].transpose(1, 2, 0)


def assert_alike(ours: Pixels, theirs: Any) -> None:
    expected = np.asarray(theirs)
    assert ours.shape == expected.shape
    assert np.abs(ours.astype(int) - expected).max() <= GREY_LEVELS


# ---------------------------------------------------------------- RandomResizedCrop


@pytest.mark.parametrize(
    "shape", [(500, 375), (375, 500), (31, 97), (2000, 3), (3, 2000), (1, 1), (224, 224), (5000, 37)]
)
@pytest.mark.parametrize("law", LAWS)
def test_called_on_an_image_it_draws_torchvisions_boxes(shape: tuple[int, int], law: Any) -> None:
    transform, image = RandomResizedCrop(224, *law, flip=0.5), Image.new("RGB", shape)
    for seed in range(40):
        torch.manual_seed(seed)
        top, left, height, width = transforms.RandomResizedCrop.get_params(image, *law)
        flip = bool(torch.rand(1) < 0.5)  # RandomHorizontalFlip's draw
        torch.manual_seed(seed)
        place = transform._box_for(*shape, TorchRng())
        assert place == ((left, top, left + width, top + height), flip, None, False)


@pytest.mark.parametrize("size", [64, (40, 72), (300, 20), 1, [33]])
@pytest.mark.parametrize("flip", [0.0, 0.5, 1.0])
def test_called_on_an_image_it_gives_torchvisions_pixels(path: str, size: Any, flip: float) -> None:
    theirs = transforms.Compose(
        [transforms.RandomResizedCrop(size)] + [transforms.RandomHorizontalFlip(flip)] * (flip > 0)
    )
    photo = pillow_jpeg(scene(161, 119), quality=97)
    for seed, shape in enumerate([(161, 119), (97, 300), (3, 90), (1, 1), (161, 119)]):
        pixels = scene(*shape) if seed < 4 else decode_image(photo)
        torch.manual_seed(seed)
        expected = theirs(Image.fromarray(pixels))
        for given in (pixels, Image.fromarray(pixels)):
            torch.manual_seed(seed)
            ours = RandomResizedCrop(size, flip=flip)(given)
            assert ours.dtype is torch.uint8
            assert_alike(ours.permute(1, 2, 0).numpy(), expected)
        torch.manual_seed(seed)
        last = RandomResizedCrop(size, flip=flip, channels_last=True)(pixels)
        assert torch.equal(last.permute(2, 0, 1), ours)
    torch.manual_seed(4)
    encoded = RandomResizedCrop(size, flip=flip)(photo)
    if min(encoded.shape[1:]) >= 64:  # smaller ones are decoded at a smaller scale: see test_kernel
        assert psnr(encoded.permute(1, 2, 0).numpy(), np.asarray(expected)) > 45


DRAWS = 5000
FAR = far(DRAWS)


def features(box: Any, width: int, height: int) -> list[float]:
    """A box's share of the area, its ratio and its position."""
    x0, y0, x1, y1 = box
    columns, rows = x1 - x0, y1 - y0
    return [
        columns * rows / (width * height),
        math.log(columns / rows),
        x0 / max(1, width - columns),
        y0 / max(1, height - rows),
    ]


def torchvisions_features(width: int, height: int, law: Any) -> Any:
    torch.manual_seed(1)
    image, drawn = Image.new("RGB", (width, height)), []
    for _ in range(DRAWS):
        top, left, rows, columns = transforms.RandomResizedCrop.get_params(image, *law)
        drawn.append(features((left, top, left + columns, top + rows), width, height))
    return np.array(drawn)


SHAPES = [(500, 375), (300, 1000), (64, 64)]


# Each law and each shape in `make test`; all pairs in `make stress`.
@pytest.mark.parametrize(
    ("law", "shape"),
    [
        pytest.param(law, shape, marks=[pytest.mark.stress] if (i - j) % 3 else [])
        for i, law in enumerate(LAWS)
        for j, shape in enumerate(SHAPES)
    ],
)
def test_a_samples_own_randomness_follows_torchvisions_law(law: Any, shape: tuple[int, int]) -> None:
    transform = RandomResizedCrop(224, *law, flip=0.3)
    places = [transform._box_for(*shape, SampleRng(sample_seed(0, 3, index))) for index in range(DRAWS)]
    ours = np.array([features(place.box, *shape) for place in places])
    theirs = torchvisions_features(*shape, law)
    for column in range(4):
        assert kolmogorov(ours[:, column], theirs[:, column]) < FAR
    flips = np.array([place.flip for place in places])
    assert abs(flips.mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / DRAWS)
    wide = ours[:, 0] > np.median(ours[:, 0])
    if wide.any():  # drawn apart from the box
        assert abs(flips[wide].mean() - flips[~wide].mean()) < 0.06


@pytest.mark.stress
def test_law_with_guard_removed_has_another_distance() -> None:
    """Uniform ratios, in place of uniform logarithms of ratios, are seen."""

    class Uniform(SampleRng):
        def log_uniform(self, low: float, high: float) -> float:
            return self.uniform(low, high)

    law = (0.08, 1.0), (1 / 2, 2)
    transform, theirs = RandomResizedCrop(224, *law), torchvisions_features(500, 500, law)

    def distance(kind: type[SampleRng]) -> float:
        boxes = [transform._box_for(500, 500, kind(sample_seed(0, 0, index))).box for index in range(DRAWS)]
        return kolmogorov([features(box, 500, 500)[1] for box in boxes], theirs[:, 1])

    assert distance(SampleRng) < FAR < distance(Uniform)


def test_flip_is_off_by_default(path: str) -> None:
    image = np.zeros((50, 60, 3), np.uint8)
    image[:, :30] = 255
    whole = {"scale": (1, 1), "ratio": (1.2, 1.2)}
    for seed in range(30):
        assert filled(RandomResizedCrop(20, **whole), image, seed)[:, 0].min() == 255
        assert RandomResizedCrop(20, **whole)(image)[:, :, 0].min() == 255
        assert filled(RandomResizedCrop(20, **whole, flip=1), image, seed)[:, 0].max() == 0


# ---------------------------------------------------------------- CenterCrop


def shapes() -> list[tuple[int, int]]:
    rng = random.Random(2)
    odd = [(rng.randint(1, 90), rng.randint(1, 90)) for _ in range(30)]
    return [(1, 1), (1, 60), (60, 1), (40, 40), (41, 40), (40, 41), (39, 41), (200, 7), *odd]


@pytest.mark.parametrize(
    ("size", "resize"),
    [
        *((size, None) for size in (40, 41, (40, 61), (61, 40), (1, 90), [33])),
        *((40, 46), (40, 40), (41, 40), (40, 39), (64, 30), ((30, 70), 35), ((70, 30), 36)),
    ],
)
def test_centre_crop_is_torchvisions(path: str, size: Any, resize: int | None) -> None:
    """To the bit where nothing is resized. With padding, on the same sides as torchvision."""
    theirs = transforms.Compose(
        [*([transforms.Resize(resize)] if resize else []), transforms.CenterCrop(size)]
    )
    crop, last = CenterCrop(size, resize=resize), CenterCrop(size, resize=resize, channels_last=True)
    for width, height in shapes():
        pixels = scene(width, height) | 1  # no black pixel in it
        image = Image.fromarray(pixels)
        expected = theirs(image)
        for found in (filled(crop, pixels), filled(last, pixels), crop(image).permute(1, 2, 0).numpy()):
            if resize is None:
                np.testing.assert_array_equal(found, np.asarray(expected))
            else:
                assert_alike(found, expected)


def test_centre_crop_of_a_jpeg_is_torchvisions(path: str) -> None:
    for width, height in [(161, 119), (119, 161), (50, 200), (30, 20)]:
        photo = pillow_jpeg(scene(width, height), quality=97)
        image = Image.fromarray(decode_image(photo))
        np.testing.assert_array_equal(filled(CenterCrop(64), photo), transforms.CenterCrop(64)(image))
        theirs = transforms.Compose([transforms.Resize(73), transforms.CenterCrop(64)])
        assert psnr(filled(CenterCrop(64, resize=73), photo), np.asarray(theirs(image))) > 45


def test_a_batch_of_padded_and_whole_images_is_that_of_each_alone(path: str) -> None:
    images = [pillow_jpeg(scene(w, h)) for w, h in [(90, 90), (20, 90), (90, 20), (8, 8)]] + [scene(30, 99)]
    transform = CenterCrop(50)
    out = np.full((5, *transform.sample_shape), 77, np.uint8)
    assert transform.fill(out, images, range(5)) == []
    for row, image in zip(out, images, strict=True):
        np.testing.assert_array_equal(row.transpose(1, 2, 0), filled(transform, image))
    bad = [images[0], images[1][:-9], images[2]]
    failures = transform.fill(out[:3], bad, range(3))
    assert [k for k, _ in failures] == [1]


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "bilinear",
    ["bilinear", 2, Image.BILINEAR, Image.Resampling.BILINEAR, transforms.InterpolationMode.BILINEAR],
)
def test_arguments_of_torchvision_are_taken_in_its_order(bilinear: Any) -> None:
    ours = RandomResizedCrop([33], [0.2, 0.9], [0.5, 2.0], interpolation=bilinear)
    theirs = transforms.RandomResizedCrop(
        [33], [0.2, 0.9], [0.5, 2.0], bilinear if bilinear != "bilinear" else 2, True
    )
    pixels = scene(80, 60)
    torch.manual_seed(3)
    expected = theirs(Image.fromarray(pixels))
    torch.manual_seed(3)
    assert_alike(ours(pixels).permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"interpolation": "bicubic"}, "must be 'bilinear' or 'nearest', found 'bicubic'.*any callable"),
        ({"interpolation": transforms.InterpolationMode.NEAREST_EXACT}, "must be 'bilinear' or 'nearest'"),
        ({"interpolation": 3}, "must be 'bilinear' or 'nearest', found 3"),
        ({"interpolation": None}, "must be 'bilinear' or 'nearest', found None"),
        ({"interpolation": []}, r"must be 'bilinear' or 'nearest', found \[\]"),
        ({"channels": 4}, r"channels must be 3 \(RGB\) or 1 .*, found 4"),
        ({"channels": True}, "channels must be 3"),
    ],
)
def test_other_resizes_are_refused_with_advice(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        RandomResizedCrop(224, **arguments)


@pytest.mark.parametrize("change", ["float64", "meta"])
def test_the_default_dtype_and_device_change_no_sample(path: str, change: str) -> None:
    pixels = scene(161, 119)

    def samples() -> list[torch.Tensor]:
        torch.manual_seed(11)
        crops = [RandomResizedCrop(48, flip=0.5)(pixels) for _ in range(8)]
        return [*crops, CenterCrop(48, resize=60)(pixels), CenterCrop(130)(pixels)]

    expected = samples()
    with default(change):
        found = samples()
    assert all(map(torch.equal, found, expected))
