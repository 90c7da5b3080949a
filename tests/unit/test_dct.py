"""Records of cache mode "dct": the JPEG's pixels to the bit, in fewer instructions, and safe when damaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastload import CenterCrop, RandomResizedCrop
from fastload.errors import DecodeError
from fastload.formats.jpeg import DCT_MAGIC
from fastload.images import decode_image, decode_pil
from fastload.images import kernel as native
from fastload.images.decode import has_records, to_dct
from tests.photos import (
    LIMIT,
    Pixels,
    oriented,
    pillow_jpeg,
    rare_files,
    scene,
    variants,
)
from tests.photos import kernel_decode as decode
from tests.photos import simd as simd

kernel: Any = native.kernel
pytestmark = pytest.mark.skipif(not has_records(), reason="the kernel is not built: pip install -e .")

FILES = rare_files()
UNFINISHED = FILES.pop("unfinished")
KINDS = {**variants(), **FILES} if kernel else {}
every_kind = pytest.mark.parametrize("kind", KINDS)


def record_of(data: bytes) -> bytes:
    record = to_dct(data)
    assert record.startswith(DCT_MAGIC)
    return record


def crop(data: bytes, box: tuple[float, ...], size: int, clamp: bool, flip: bool) -> Pixels:
    out = np.empty((1, 3, size, size), np.uint8)
    assert kernel.crop_resize(out, [(0, data, *box, flip)], False, clamp, LIMIT, True) == []
    return out


def check_crops(data: bytes, record: bytes, count: int, rng: np.random.Generator) -> None:
    width, height = kernel.jpeg_size(record, LIMIT, True)
    for _ in range(count):
        x0, y0 = rng.uniform(0, width - 0.5), rng.uniform(0, height - 0.5)
        box = (x0, y0, rng.uniform(x0 + 0.5, width), rng.uniform(y0 + 0.5, height))
        size, clamp, flip = (
            int(rng.choice([1, 8, 16, 64, 224])),
            bool(rng.random() < 0.5),
            bool(rng.random() < 0.5),
        )
        expected = crop(data, box, size, clamp, flip)
        np.testing.assert_array_equal(crop(record, box, size, clamp, flip), expected, f"{box} {size} {clamp}")


# ---------------------------------------------------------------- the same pixels


@every_kind
def test_record_decoded_whole_at_each_scale_equals_its_jpeg(kind: str, simd: str) -> None:
    record = record_of(KINDS[kind])
    for denominator in (1, 2, 4, 8):
        np.testing.assert_array_equal(decode(record, denominator), decode(KINDS[kind], denominator))


@every_kind
def test_record_cropped_equals_its_jpeg(kind: str, simd: str) -> None:
    check_crops(KINDS[kind], record_of(KINDS[kind]), 40, np.random.default_rng(5))


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 17), (8, 8), (15, 33), (65_500, 1), (1, 65_500)])
def test_record_of_extreme_shape_equals_its_jpeg(width: int, height: int) -> None:
    for kind, data in variants(width, height).items():
        if (record := to_dct(data)) != data:  # too wide for one of the encoders otherwise
            np.testing.assert_array_equal(decode(record), decode(data), kind)


def test_record_made_by_scalar_code_equals_the_one_by_vectors() -> None:
    for data in KINDS.values():
        vectors = record_of(data)
        kernel._set_simd(False)
        try:
            assert record_of(data) == vectors
        finally:
            kernel._set_simd(True)


def test_record_with_large_coefficients_equals_its_jpeg(simd: str) -> None:
    """Black and white pixels at quality 100: numbers of more than 8 bits."""
    pixels = np.random.default_rng(0).integers(0, 2, (40, 56, 1)).repeat(3, 2).astype(np.uint8) * 255
    blocks = (
        np.kron(np.random.default_rng(1).integers(0, 2, (5, 7, 1)), np.ones((8, 8, 3))).astype(np.uint8) * 255
    )
    for data in (pillow_jpeg(pixels, quality=100), pillow_jpeg(blocks, quality=100, subsampling=0)):
        np.testing.assert_array_equal(decode(record_of(data)), decode(data))


@pytest.mark.stress
def test_ten_thousand_records_equal_their_jpegs() -> None:
    rng = np.random.default_rng(19)
    for n in range(10_000):
        width, height = (int(rng.integers(1, 260)) for _ in range(2))
        mode = str(rng.choice(["RGB", "RGB", "RGB", "L", "CMYK"]))
        options: dict[str, Any] = {
            "quality": int(rng.integers(1, 101)),
            "progressive": bool(rng.random() < 0.3),
        }
        if mode == "RGB":
            options["subsampling"] = int(rng.integers(0, 3))
        if rng.random() < 0.2:
            options["restart_marker_blocks"] = int(rng.integers(1, 9))
        data = pillow_jpeg(scene(width, height, n), mode, optimize=bool(rng.random() < 0.5), **options)
        record = record_of(data)
        denominator = int(rng.choice([1, 2, 4, 8]))
        np.testing.assert_array_equal(
            decode(record, denominator), decode(data, denominator), f"{n} {options}"
        )
        check_crops(data, record, 2, rng)


def test_transforms_and_pil_images_of_a_record_equal_those_of_its_jpeg() -> None:
    data = pillow_jpeg(scene(161, 119), exif=oriented(6))
    record = record_of(data)
    np.testing.assert_array_equal(decode_image(record), decode_image(data))
    for options in ({}, {"exif": True}):
        ours, theirs = decode_pil(record, **options), decode_pil(data, **options)
        assert (ours.size, ours.tobytes(), ours.info) == (theirs.size, theirs.tobytes(), theirs.info)
    for transform in (RandomResizedCrop(32, flip=0.5), CenterCrop(32, resize=40)):
        out = np.empty((2, 3, 32, 32), np.uint8)
        assert transform.fill(out, [data, record], [3, 3]) == []
        np.testing.assert_array_equal(out[0], out[1])


# ---------------------------------------------------------------- what has no record


@pytest.mark.parametrize(
    "data",
    [b"", b"no image", b"\x89PNG\r\n\x1a\n" + bytes(9), UNFINISHED, pillow_jpeg(scene(40, 40))[:-30]],
    ids=["empty", "text", "png", "unfinished", "cut"],
)
def test_file_without_record_comes_back_unchanged(data: bytes) -> None:
    assert to_dct(memoryview(data)) == data


def test_record_of_a_record_is_the_record() -> None:
    record = record_of(KINDS["420"])
    assert to_dct(record) == record


def test_image_above_the_pixel_limit_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(DecodeError, match="161 x 119 pixels are more than max_pixels=1000"):
        decode_image(record_of(KINDS["420"]), max_pixels=1000)


def test_record_without_the_kernel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    record, data = record_of(KINDS["420"]), KINDS["420"]
    monkeypatch.setattr(native, "kernel", None)
    with pytest.raises(DecodeError, match="a record of a cache, which only the compiled kernel reads"):
        decode_image(record)
    assert not has_records() and to_dct(data) == data


# ---------------------------------------------------------------- damage


def test_record_cut_anywhere_is_an_error() -> None:
    record = record_of(KINDS["420"])
    for size in range(4, len(record), 37):
        with pytest.raises(DecodeError):
            decode_image(record[:size])


def test_record_whose_rows_do_not_fit_is_an_error() -> None:
    record = bytearray(record_of(KINDS["gray"]))
    record[20 + 128 + 4 : 20 + 128 + 8] = (2**31).to_bytes(4, "little")  # the second row's offset
    with pytest.raises(DecodeError, match="damaged record"):
        decode_image(bytes(record))
