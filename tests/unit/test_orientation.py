"""EXIF orientation: never applied by us, and found by a transform that applies it, in every cache mode."""

from __future__ import annotations

import re
from contextlib import closing
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from fastload import Cache, CenterCrop, DataLoader, ImageFolder, ObjectDataset, TarDataset
from fastload.formats.jpeg import exif_of, is_plain_jpeg, jpeg_orientation, with_orientation
from fastload.formats.tar import TarWriter
from fastload.images import decode_image, decode_pil, decode_resized, fallback, shrink
from fastload.images import kernel as native
from fastload.images.decode import open_smaller
from tests.photos import oriented, pillow_jpeg, png, psnr, scene

MODES = ["auto", "raw", "dct", "shrunk", "decoded"]
XMP = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description %s/></x:xmpmeta>"


def tiff(image: Image.Image, orientation: int) -> bytes:
    file = BytesIO()
    image.save(file, "TIFF", exif=oriented(orientation))
    return file.getvalue()


def files(orientation: int) -> dict[str, bytes]:
    """Larger and smaller than the images in a cache of mode "shrunk"."""
    large, small = scene(180, 120), scene(60, 40)
    return {
        "large.jpg": pillow_jpeg(large, exif=oriented(orientation), quality=97),
        "small.jpg": pillow_jpeg(small, exif=oriented(orientation), quality=97),
        "large.png": png(Image.fromarray(large), exif=oriented(orientation)),
        "small.png": png(Image.fromarray(small), exif=oriented(orientation)),
        "large.tiff": tiff(Image.fromarray(large), orientation),
    }


def upright(image: Image.Image) -> np.ndarray[Any, Any]:
    """A common transform."""
    return np.asarray(ImageOps.exif_transpose(image).convert("RGB").resize((32, 32)))


def upright_file(data: bytes) -> np.ndarray[Any, Any]:
    return upright(Image.open(BytesIO(data)))


def shape_of(image: Image.Image) -> tuple[int, int]:
    """Whether it is landscape or portrait, at any size."""
    width, height = ImageOps.exif_transpose(image).size
    return (1, round(height / width)) if height > width else (round(width / height), 1)


@pytest.mark.parametrize(
    ("mode", "orientation"),
    [*product(("dct", "decoded"), range(1, 9)), *product(("auto", "raw", "shrunk"), (1, 6))],
)
def test_a_transform_that_turns_images_gets_them_alike_in_every_mode(
    tmp_path: Path, mode: str, orientation: int
) -> None:
    """It gets PIL images equal to those of torchvision's default loader."""
    for name, data in files(orientation).items():
        path = tmp_path / "photos" / "a" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    cache = Cache(tmp_path / "cache", mode, short_side=60)
    with closing(ImageFolder(str(tmp_path / "photos"), upright, cache=cache)) as dataset:
        for _ in range(2):  # made anew, and from the cache
            for (key, _), (image, _) in zip(dataset.samples, dataset, strict=False):
                expected = upright(Image.open(tmp_path / "photos" / key))
                assert psnr(image, expected) > 24, key
            dataset._flush_cache()


@pytest.mark.parametrize("mode", ["auto", "raw", "dct", "shrunk"])
@pytest.mark.parametrize("orientation", [3, 6])
def test_a_transform_that_turns_files_gets_them_alike_in_every_mode(
    tmp_path: Path, mode: str, orientation: int
) -> None:
    (tmp_path / "photos").mkdir()
    for name, data in files(orientation).items():
        (tmp_path / "photos" / name).write_bytes(data)
    cache = Cache(tmp_path / "cache", mode, short_side=60)
    with closing(ObjectDataset(str(tmp_path / "photos"), transform=upright_file, cache=cache)) as dataset:
        for index in range(len(dataset)):
            expected = upright(Image.open(tmp_path / "photos" / dataset.key(index)))
            assert psnr(dataset[index], expected) > 24, dataset.key(index)


@pytest.mark.parametrize("mode", MODES)
def test_members_of_tar_shards_keep_their_orientation(tmp_path: Path, mode: str) -> None:
    stored = {name: data for name, data in files(6).items() if not name.endswith("tiff")}
    (tmp_path / "shards").mkdir()
    with (tmp_path / "shards" / "a.tar").open("wb") as file:
        writer = TarWriter(file)
        for number, (name, data) in enumerate(stored.items()):
            writer.write(f"{number}", {name.rpartition(".")[2]: data})
        writer.close()
    cache = Cache(tmp_path / "cache", mode, short_side=60)
    dataset = TarDataset(str(tmp_path / "shards"), cache=cache)
    with closing(dataset):
        for _ in range(2):
            found = [sample for [sample] in DataLoader(dataset, 1, collate_fn=list)]
            assert len(found) == len(stored)
            for sample in found:
                image = sample.get("jpg") or sample["png"]
                assert shape_of(image) == (1, 2)


@pytest.mark.parametrize("mode", MODES)
def test_fused_transforms_turn_nothing_in_any_mode(tmp_path: Path, mode: str) -> None:
    """Like torchvision's default loader: with workers, sample by sample, and from a cache of pixels."""
    path = tmp_path / "photos" / "a"
    path.mkdir(parents=True)
    for name, data in files(6).items():
        if not name.endswith("tiff"):  # Pillow turns these itself
            (path / name).write_bytes(data)
    with closing(
        ImageFolder(
            str(tmp_path / "photos"),
            CenterCrop((36, 48), resize=40, channels_last=True),
            cache=Cache(tmp_path / "cache", mode, short_side=60),
        )
    ) as dataset:
        for _ in range(2):
            [(images, _)] = DataLoader(dataset, len(dataset), num_workers=2)
            for image, (key, _) in zip(images, dataset.samples, strict=True):
                stored = Image.open(tmp_path / "photos" / key).convert("RGB").resize((60, 40))
                assert psnr(image.numpy(), np.asarray(stored)[2:38, 6:54]) > 24, key
        np.testing.assert_array_equal(dataset[0][0].numpy(), images[0].numpy())


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pil_images_are_turned_with_exif(
    monkeypatch: pytest.MonkeyPatch, orientation: int, kernel: bool
) -> None:
    if not kernel:
        monkeypatch.setattr(native, "kernel", None)
    for data in (
        pillow_jpeg(scene(61, 43), exif=oriented(orientation), quality=100),
        png(Image.fromarray(scene(61, 43)), exif=oriented(orientation)),
    ):
        stored = decode_pil(data)
        assert stored.size == (61, 43) and stored.getexif().get(0x0112, 1) == orientation
        expected = ImageOps.exif_transpose(Image.open(BytesIO(data)))
        for ours in (decode_pil(data, exif=True), ImageOps.exif_transpose(stored)):
            assert ours.size == expected.size and 0x0112 not in ours.getexif()
            assert np.abs(np.asarray(ours).astype(int) - np.asarray(expected)).max() <= 2


# ---------------------------------------------------------------- the bytes


def header(*segments: bytes) -> bytes:
    """A JPEG whose APP1 segments are these."""
    jpeg = pillow_jpeg(scene(16, 8))
    parts = b"".join(b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body for body in segments)
    return jpeg[:2] + parts + jpeg[2:]


def pillows(data: bytes) -> int:
    return int(Image.open(BytesIO(data)).getexif().get(0x0112, 1))


def exif_entry(kind: int, count: int, value: bytes, order: str = "big") -> bytes:
    def number(n: int, size: int) -> bytes:
        return n.to_bytes(size, order)  # type: ignore[arg-type]

    head = b"MM\0*" if order == "big" else b"II*\0"
    other = number(0x0100, 2) + number(4, 2) + number(1, 4) + number(7, 4)
    entry = number(0x0112, 2) + number(kind, 2) + number(count, 4) + value
    return b"Exif\0\0" + head + number(8, 4) + number(2, 2) + other + entry + bytes(4)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_a_jpeg_equals_pillow(orientation: int) -> None:
    attribute = XMP % (b'tiff:Orientation="%d"' % orientation)
    cases = [
        pillow_jpeg(scene(16, 8), exif=oriented(orientation)),
        header(exif_of(orientation)),
        header(exif_entry(3, 1, orientation.to_bytes(2, "little") + bytes(2), "little")),
        header(exif_entry(4, 1, orientation.to_bytes(4, "big"))),
        header(attribute),
        header(exif_of(orientation), XMP % b'tiff:Orientation="5"'),
        header(exif_of(orientation)[:20], b"Exif\0\0" + exif_of(orientation)[20:]),
        with_orientation(pillow_jpeg(scene(16, 8)), orientation),
    ]
    for data in cases:
        assert jpeg_orientation(data) == pillows(data) == orientation
        assert decode_image(data).shape == (8, 16, 3)


def between(middle: bytes) -> bytes:
    """A JPEG with these bytes behind its first segment."""
    jpeg = pillow_jpeg(scene(16, 8))
    at = 4 + int.from_bytes(jpeg[4:6], "big")
    return jpeg[:at] + middle + jpeg[at:]


passed_over = pytest.mark.parametrize(
    "before",
    [b"", b"\0", b"abc", b"\xff\0", b"\xff\xff\xff", b"\xff\xe2\0\0", b"\xff\xe2\0\1", b"\xff\xd0"],
    ids=repr,
)


@passed_over
def test_orientation_is_found_behind_whatever_pillow_passes_over(before: bytes) -> None:
    exif = exif_of(6)
    data = between(before + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif)
    assert jpeg_orientation(data) == pillows(data) == 6
    assert decode_pil(data).getexif()[0x0112] == 6
    assert is_plain_jpeg(data) == (before.strip(b"\xff") == b"")


@passed_over
def test_end_marker_is_found_behind_it_too_without_the_kernel(before: bytes) -> None:
    data = between(before + b"\xff\xe2\0\6\xff\xd8\xff\xd9")  # a thumbnail has one of its own
    assert fallback.jpeg_size(data + bytes(9), 1 << 30, True) == (16, 8)
    with pytest.raises(ValueError, match="no end marker"):
        fallback.jpeg_size(data[:-2] + bytes(9), 1 << 30, True)


def test_doubled_header_and_doubled_orientation_are_read_as_pillow_does() -> None:
    twice = exif_of(3)[:14] + b"\0\2" + exif_of(3)[16:28] + exif_of(6)[16:]
    for data in (header(b"Exif\0\0" + exif_of(6)), header(twice)):
        assert jpeg_orientation(data) == pillows(data) == 6


@pytest.mark.parametrize(
    "data",
    [
        header(),
        header(b"Exif\0\0"),
        header(b"Exif\0\0MM\0*\0\0\xff\xff"),
        header(exif_of(6)[:-8]),
        header(exif_of(0)),
        header(exif_of(9)),
        header(exif_entry(3, 2, b"\0\6\0\6")),
        header(exif_entry(2, 1, b"6\0\0\0")),
        header(XMP % b""),
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff\xe1\xff\xff",
        png(Image.fromarray(scene(8, 8))),
    ],
)
def test_unreadable_orientation_is_none(data: bytes) -> None:
    assert jpeg_orientation(data) == 1


@pytest.mark.parametrize("name", files(6))
@pytest.mark.parametrize("short_side", [39, 60, 500])
def test_smaller_image_drawn_is_the_resized_one_with_its_orientation(name: str, short_side: int) -> None:
    data = files(6)[name]
    smaller = open_smaller(data, short_side)
    out = np.zeros(smaller.shape, np.uint8)
    smaller.draw(out)
    np.testing.assert_array_equal(out, decode_resized(data, short_side))
    assert smaller.orientation == (1 if name.endswith("tiff") else 6)


@pytest.mark.parametrize("jfif", [True, False])
def test_shrunk_jpeg_keeps_one_orientation_and_the_same_pixels(jfif: bool) -> None:
    data = pillow_jpeg(scene(180, 120), exif=oriented(6), quality=97)
    plain = pillow_jpeg(scene(180, 120), quality=97)
    small, other = shrink(data, 60, 90), shrink(plain, 60, 90)
    assert jpeg_orientation(small) == 6 and jpeg_orientation(other) == 1
    assert len(re.findall(b"Exif\0\0", small)) == 1 and b"Exif" not in other
    np.testing.assert_array_equal(decode_image(small), decode_image(other))
    np.testing.assert_array_equal(decode_resized(data, 60), decode_resized(plain, 60))
    bare = other if jfif else other[:2] + other[4 + int.from_bytes(other[4:6], "big") :]
    turned = with_orientation(bare, 3)
    assert Image.open(BytesIO(turned)).info.get("jfif") == (257 if jfif else None)
    np.testing.assert_array_equal(decode_image(turned), decode_image(bare))
