"""Nearest neighbour and single channels: torchvision's pixels to the bit, and the file's own values."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bench.peers.scripts.torchvision_on_cpu import torchvision
from fastload import CenterCrop, RandomResizedCrop
from fastload.errors import DecodeError
from fastload.images import decode_image
from tests.photos import pillow_jpeg, png, scene

transforms: Any = torchvision.transforms
NEAREST = transforms.InterpolationMode.NEAREST
SHAPES = [(161, 119), (97, 300), (3, 90), (1, 1), (500, 375), (375, 500), (333, 77), (40, 40)]
MASK: dict[str, Any] = {"interpolation": "nearest", "channels": 1}
# libjpeg passes over the byte behind the first two.
JUNK = b"\xff\xd8\xff\xfe\0\2\0" + pillow_jpeg(scene(40, 30))[2:]


def mask(width: int, height: int, seed: int = 0) -> Image.Image:
    """A palette image of random class numbers; each one's colour says nothing about it."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (height, width), np.uint8), "P")
    image.putpalette(rng.integers(0, 256, 768, np.uint8).tobytes())
    return image


def values(image: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(image)


@pytest.mark.parametrize("size", [64, (40, 72), (300, 20), 1])
@pytest.mark.parametrize("nearest", ["nearest", 0, NEAREST])
def test_random_crop_of_a_mask_is_torchvisions_to_the_bit(size: Any, nearest: Any) -> None:
    theirs = transforms.Compose(
        [transforms.RandomResizedCrop(size, interpolation=NEAREST), transforms.RandomHorizontalFlip()]
    )
    ours = RandomResizedCrop(size, interpolation=nearest, flip=0.5, channels=1)
    for seed, shape in enumerate(SHAPES * 2):
        image = mask(*shape, seed)
        torch.manual_seed(seed)
        expected = values(theirs(image))
        for given in (image, png(image), values(image), values(image)[..., None]):
            torch.manual_seed(seed)
            found = ours(given)
            assert found.dtype is torch.uint8 and found.shape == ours.sample_shape
            np.testing.assert_array_equal(found[0].numpy(), expected)


@pytest.mark.parametrize(
    ("size", "resize"),
    [(40, 46), (41, 40), (64, 30), ((30, 70), 35), (224, 256), (50, (77, 133)), (90, (33, 200)), (40, None)],
)
def test_centre_crop_of_a_mask_is_torchvisions_to_the_bit(size: Any, resize: Any) -> None:
    first = [] if resize is None else [transforms.Resize(resize, interpolation=NEAREST)]
    theirs = transforms.Compose([*first, transforms.CenterCrop(size)])
    ours = CenterCrop(size, resize=resize, **MASK)
    last = CenterCrop(size, resize=resize, channels_last=True, **MASK)
    for seed, shape in enumerate(SHAPES):
        image = mask(*shape, seed)
        expected = values(theirs(image))
        np.testing.assert_array_equal(ours(png(image))[0].numpy(), expected)
        np.testing.assert_array_equal(last(png(image))[..., 0].numpy(), expected)
        out = np.full((1, *ours.sample_shape), 77, np.uint8)
        assert ours.fill(out, [png(image)], [seed]) == []
        np.testing.assert_array_equal(out[0, 0], expected)


@pytest.mark.parametrize("resize", [(60, 80), (80, 50)])
def test_centre_crop_of_an_image_resized_to_a_pair_is_torchvisions(resize: Any) -> None:
    theirs = transforms.Compose([transforms.Resize(resize), transforms.CenterCrop(48)])
    for shape in SHAPES:
        pixels = scene(*shape)
        found = CenterCrop(48, resize=resize)(pixels).permute(1, 2, 0).numpy()
        assert np.abs(found.astype(int) - values(theirs(Image.fromarray(pixels)))).max() <= 2


def test_nearest_in_colour_is_torchvisions_to_the_bit() -> None:
    jpeg = pillow_jpeg(scene(161, 119))
    for given in (jpeg, png(Image.fromarray(scene(90, 60))), png(mask(90, 60))):
        image = Image.fromarray(decode_image(given))
        torch.manual_seed(5)
        expected = values(transforms.RandomResizedCrop(50, interpolation=NEAREST)(image))
        torch.manual_seed(5)
        found = RandomResizedCrop(50, interpolation="nearest")(given)
        np.testing.assert_array_equal(found.permute(1, 2, 0).numpy(), expected)


WHOLE: dict[str, Any] = {"scale": (1, 1), "ratio": (1, 1)}


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF", "PPM"])
def test_each_format_keeps_its_own_values(kind: str) -> None:
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    file = BytesIO()
    grey.save(file, kind)
    found = RandomResizedCrop(16, **WHOLE, **MASK)(file.getvalue())
    np.testing.assert_array_equal(found[0].numpy(), values(grey))


def test_one_bit_is_zero_and_one() -> None:
    bits = Image.fromarray(np.eye(16, dtype=bool))
    assert RandomResizedCrop(16, **WHOLE, **MASK)(png(bits)).unique().tolist() == [0, 1]


def test_grey_image_is_interpolated_in_one_channel() -> None:
    grey = Image.fromarray(scene(120, 90)[..., 0])
    for given in (pillow_jpeg(scene(120, 90), "L"), png(grey), values(grey), grey):
        rgb = RandomResizedCrop(48, flip=0.5)
        torch.manual_seed(7)
        plain = given if isinstance(given, bytes) else np.repeat(values(grey)[..., None], 3, axis=2)
        expected = rgb(plain)
        torch.manual_seed(7)
        found = RandomResizedCrop(48, flip=0.5, channels=1)(given)
        assert found.shape == (1, 48, 48) and torch.equal(found[0], expected[0])
    one = CenterCrop(130, channels=1)  # larger than the image: padded
    assert torch.equal(one(png(grey))[0], CenterCrop(130)(np.repeat(values(grey)[..., None], 3, axis=2))[0])
    batch = np.full((3, *one.sample_shape), 77, np.uint8)
    given = [pillow_jpeg(scene(200, 190), "L"), png(grey), pillow_jpeg(scene(150, 140), "L")]
    assert one.fill(batch, given, [0, 1, 2]) == []
    for row, image in zip(batch, given, strict=True):
        np.testing.assert_array_equal(row, one(image).numpy())


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (pillow_jpeg(scene(40, 30)), "takes images of one channel, and this JPEG has 3: leave channels= out"),
        (JUNK, "this JPEG has 3: leave channels= out"),
        (JUNK[:30], "this JPEG has a damaged header"),
        (
            png(Image.fromarray(scene(40, 30))),
            "channels=1 takes images of one .* and this one is RGB, with 3 channels",
        ),
        (png(Image.fromarray(scene(40, 30)).convert("LA")), "this one is LA, with 2 channels"),
        (png(Image.fromarray(np.zeros((9, 9), np.uint16))), "is I;16, with more bits: write it with 8 bits"),
        (np.zeros((9, 9, 3), np.uint8), r"array of shape \(9, 9, 3\) and dtype uint8 is no image of one"),
        (np.zeros((9, 9), np.int64), "dtype int64 is no image of one channel"),
        (b"nothing of that kind", "not a JPEG, PNG"),
    ],
)
def test_other_images_are_refused_in_words(given: Any, words: str, interpolation: str) -> None:
    transform = CenterCrop(8, interpolation=interpolation, channels=1)
    with pytest.raises(DecodeError, match=words):
        transform(given)
    [(row, error)] = transform.fill(np.zeros((1, 1, 8, 8), np.uint8), [given], [0])
    assert row == 0 and isinstance(error, DecodeError)


@pytest.mark.parametrize("form", [png, lambda image: image], ids=["file", "PIL image"])
def test_class_numbers_are_not_interpolated(form: Any) -> None:
    with pytest.raises(DecodeError, match=r"indices into a palette, which must not be .*='nearest'"):
        CenterCrop(8, channels=1)(form(mask(20, 20)))
    with pytest.raises(DecodeError, match="single bits, which must not be interpolated"):
        CenterCrop(8, channels=1)(form(Image.fromarray(np.eye(16, dtype=bool))))


def test_repr_shows_what_differs() -> None:
    assert repr(CenterCrop(8, **MASK)) == "CenterCrop((8, 8), interpolation='nearest', channels=1)"


# ---------------------------------------------------------------- several images of one sample


@pytest.mark.parametrize("crop", [RandomResizedCrop, CenterCrop])
def test_smaller_copy_is_cut_like_the_first_image(crop: Any) -> None:
    """A mask of half the size, or a photo that a cache made smaller: each pixel stays on its place."""
    ramp = np.add.outer(np.arange(200), np.arange(300) // 2 * 0).astype(np.uint8)
    half = np.ascontiguousarray(ramp[::2, ::2])
    options: dict[str, Any] = {"flip": 0.5} if crop is RandomResizedCrop else {"resize": 60}
    transform = crop(40, **options, **MASK)
    for seed in range(20):
        out = np.zeros((2, 1, 1, 40, 40), np.uint8)
        sizes: list[Any] = [None]
        assert transform.fill(out[0], [ramp], [seed], sizes) == [] and sizes == [(300, 200)]
        assert transform.fill(out[1], [half], [seed], sizes) == []
        assert np.abs(out[0].astype(int) - out[1]).max() <= 4


def test_other_proportions_are_refused() -> None:
    sizes: list[Any] = [(300, 200)]
    out = np.zeros((1, 1, 8, 8), np.uint8)
    [(_, error)] = RandomResizedCrop(8, **MASK).fill(out, [np.zeros((300, 200), np.uint8)], [0], sizes)
    assert "has 200 x 300 pixels, and the first image of its sample 300 x 200" in str(error)
    [(_, error)] = CenterCrop(8, **MASK).fill(out, [np.zeros((100, 150), np.uint8)], [0], sizes)
    assert "CenterCrop needs resize=" in str(error)
