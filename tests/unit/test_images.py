"""Transforms and decoding, through the kernel and through its fallback."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import pickle
import re
import resource
import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from fastload import CenterCrop, RandomResizedCrop
from fastload.cli.doctor import check_jpegs, check_pillow
from fastload.errors import ArgumentError, DecodeError
from fastload.images import (
    SampleRng,
    backend,
    decode_image,
    decode_pil,
    decode_resized,
    fallback,
    sample_seed,
    shrink,
)
from fastload.images import kernel as native
from fastload.images.decode import is_image
from tests.patience import PATIENCE
from tests.photos import path as path
from tests.photos import pillow_jpeg, png, psnr, scene, variants, with_size

JPEGS = variants()
PHOTO = JPEGS["420"]
TRANSFORMS = [
    RandomResizedCrop(64, flip=0.5),
    RandomResizedCrop((40, 72), scale=(0.5, 1), ratio=(1, 2), flip=1, channels_last=True),
    CenterCrop(64),
    CenterCrop(64, resize=73),
    CenterCrop((30, 50), resize=60, channels_last=True),
    CenterCrop((140, 100)),
    CenterCrop(90, resize=80, channels_last=True),
]


def run(transform: Any, images: list[Any], seeds: Any = None) -> np.ndarray[Any, Any]:
    out = np.zeros((len(images), *transform.sample_shape), np.uint8)
    assert transform.fill(out, images, range(len(images)) if seeds is None else seeds) == []
    return out


# ---------------------------------------------------------------- randomness


def test_rng_is_splitmix64() -> None:
    """The published first outputs of SplitMix64 for seed 1234567."""
    rng = SampleRng(1234567)
    assert [rng.bits() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_rng_ranges() -> None:
    rng = SampleRng(-5)
    values = [rng.random() for _ in range(4000)]
    assert min(values) >= 0 and max(values) < 1 and abs(np.mean(values) - 0.5) < 0.02
    assert {rng.integers(5) for _ in range(300)} == set(range(5))
    logs = [math.log(rng.log_uniform(3 / 4, 4 / 3)) for _ in range(4000)]
    assert abs(np.mean(logs)) < 0.01 and max(map(abs, logs)) <= math.log(4 / 3)


def test_sample_seeds_differ() -> None:
    seeds = {sample_seed(s, e, i) for s in range(12) for e in range(12) for i in range(50)}
    assert len(seeds) == 12 * 12 * 50
    assert sample_seed(1, 2, 3) == sample_seed(1 + (1 << 64), 2, 3) < 1 << 64
    assert sample_seed(-1, 2, 3) == sample_seed(np.int64(-1), np.uint8(2), np.int32(3))
    assert SampleRng(np.int64(-9)).bits() == SampleRng(-9).bits()


# ---------------------------------------------------------------- what the transforms promise


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_samples_depend_on_image_and_seed_alone(path: str, transform: Any) -> None:
    images = [JPEGS["420"], JPEGS["progressive"], JPEGS["gray"], scene(90, 70)]
    whole = run(transform, images, [5, 6, 7, 8])
    np.testing.assert_array_equal(run(transform, images[::-1], [8, 7, 6, 5])[::-1], whole)
    for k, seed in enumerate([5, 6, 7, 8]):
        np.testing.assert_array_equal(run(transform, [images[k]], [seed])[0], whole[k])
    again = run(pickle.loads(pickle.dumps(transform)), images, [5, 6, 7, 8])
    np.testing.assert_array_equal(again, whole)
    if isinstance(transform, RandomResizedCrop):
        assert not np.array_equal(run(transform, images, [9, 10, 11, 12]), whole)


def test_flip_is_a_mirror(path: str) -> None:
    images = [PHOTO, scene(90, 70)]
    for width in (64, 61):  # whole vectors and a remainder
        plain, mirrored = (run(RandomResizedCrop((50, width), flip=p), images) for p in (0, 1))
        np.testing.assert_array_equal(mirrored, plain[..., ::-1])


def test_channels_last_is_the_same_image(path: str) -> None:
    for size in (64, 61, (5, 3)):
        for kind in (RandomResizedCrop, CenterCrop):
            first = run(kind(size), [PHOTO, scene(90, 70)])
            last = run(kind(size, channels_last=True), [PHOTO, scene(90, 70)])
            np.testing.assert_array_equal(last, first.transpose(0, 2, 3, 1))


def test_every_kind_of_buffer(path: str) -> None:
    kinds = [PHOTO, bytearray(PHOTO), memoryview(PHOTO), np.frombuffer(PHOTO, np.uint8)]
    kinds.append(memoryview(b"".join(bytes([byte, 0]) for byte in PHOTO))[::2])
    out = run(CenterCrop(64), kinds)
    assert (out == out[0]).all()


def test_decoded_images_are_resized_like_encoded_ones(path: str) -> None:
    pixels = decode_image(PHOTO)
    transform = RandomResizedCrop(64)
    seeds = range(6)
    ours, theirs = run(transform, [PHOTO] * 6, seeds), run(transform, [pixels] * 6, seeds)
    for a, b in zip(ours, theirs, strict=True):
        assert psnr(a, b) > 40
    np.testing.assert_array_equal(run(transform, [np.asfortranarray(pixels)] * 6, seeds), theirs)


def test_failures_are_returned_and_the_rest_is_done(path: str) -> None:
    images = [
        PHOTO,
        b"",
        JPEGS["444"],
        PHOTO[:900],
        b"<!doctype html>",
        scene(90, 70),
        "text",
        np.zeros((4, 4)),
    ]
    out = np.zeros((len(images), 3, 64, 64), np.uint8)
    transform = CenterCrop(64)
    failures = transform.fill(out, images, range(len(images)))
    assert [k for k, _ in failures] == [1, 3, 4, 6, 7]
    assert all(isinstance(error, DecodeError) for _, error in failures)
    for k in (0, 2, 5):
        np.testing.assert_array_equal(out[k], run(transform, [images[k]])[0])
    assert "0 bytes" in str(failures[0][1]) and "HTML" in str(failures[2][1])
    with pytest.raises(DecodeError):
        transform(PHOTO[:900])


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomResizedCrop(0),
        lambda: RandomResizedCrop(224.5),
        lambda: RandomResizedCrop((1, 2, 3)),
        lambda: RandomResizedCrop(10_000),
        lambda: RandomResizedCrop(224, scale=(0, 1)),
        lambda: RandomResizedCrop(224, scale=(0.5, 0.4)),
        lambda: RandomResizedCrop(224, scale=(0.5, 1.1)),
        lambda: RandomResizedCrop(224, scale=(0.5,)),
        lambda: RandomResizedCrop(224, scale=0.5),
        lambda: RandomResizedCrop(224, ratio=(-1, 1)),
        lambda: RandomResizedCrop(224, ratio=(1, math.nan)),
        lambda: RandomResizedCrop(224, flip=1.5),
        lambda: RandomResizedCrop(224, flip="yes"),
        lambda: RandomResizedCrop(224, flip=True),
        lambda: RandomResizedCrop("224"),
        lambda: RandomResizedCrop(True),
        lambda: RandomResizedCrop(()),
        lambda: CenterCrop(224, resize=0),
        lambda: CenterCrop(224, resize=(256, 256, 3)),
        lambda: CenterCrop(224, resize=256.0),
        lambda: CenterCrop(224, resize=True),
    ],
)
def test_arguments_are_checked(make: Any) -> None:
    with pytest.raises(ArgumentError):
        make()


def test_out_is_checked() -> None:
    transform = CenterCrop(8)
    for out in (
        np.zeros((1, 3, 8, 8)),
        np.zeros((2, 3, 8, 8), np.uint8),
        np.zeros((1, 3, 8, 16), np.uint8)[..., ::2],
    ):
        with pytest.raises(ArgumentError, match="out must be"):
            transform.fill(out, [PHOTO], [0])


def test_defaults_and_repr() -> None:
    assert CenterCrop(224).resize is None and RandomResizedCrop(224).flip == 0
    assert CenterCrop(224).sample_shape == (3, 224, 224)
    assert CenterCrop([7]).sample_shape == RandomResizedCrop(np.int64(7)).sample_shape == (3, 7, 7)
    assert RandomResizedCrop((5, 6), channels_last=True).sample_shape == (5, 6, 3)
    assert "flip" not in repr(RandomResizedCrop(5)) and "flip=0.5" in repr(RandomResizedCrop(5, flip=0.5))
    assert repr(CenterCrop(5)) == "CenterCrop((5, 5))"
    assert repr(CenterCrop(5, resize=6)) == "CenterCrop((5, 5), resize=6)"
    for transform in TRANSFORMS:
        assert repr(eval(repr(transform))) == repr(transform)


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("name", JPEGS)
def test_every_kind_of_jpeg(path: str, name: str) -> None:
    expected = np.asarray(Image.open(BytesIO(JPEGS[name])).convert("RGB"))
    ours = decode_image(JPEGS[name])
    assert ours.shape == expected.shape and ours.dtype == np.uint8
    assert np.abs(ours.astype(int) - expected).max() <= 2


@pytest.mark.parametrize("shape", [(1, 1), (65_500, 1), (1, 65_500), (3, 2), (17, 8)])
def test_odd_shapes(path: str, shape: tuple[int, int]) -> None:
    pixels = np.full((*shape, 3), 90, np.uint8)
    data = pillow_jpeg(pixels)
    assert decode_image(data).shape == (*shape, 3)
    assert decode_resized(data, 300).shape == (*shape, 3)
    assert (run(RandomResizedCrop(7), [data, pixels]) == 90).all()
    assert (run(CenterCrop(7, resize=8), [data, pixels]) == 90).all()


def other_formats() -> dict[str, tuple[bytes, Image.Image]]:
    """name -> (file, its pixels)."""
    image = Image.fromarray(scene(61, 43))
    wide = np.arange(61 * 43, dtype=np.uint16).reshape(43, 61) * 20
    alpha = image.convert("RGBA")
    alpha.putalpha(image.convert("L"))
    palette = image.quantize(64)

    def save(source: Image.Image, kind: str, **options: Any) -> bytes:
        file = BytesIO()
        source.save(file, kind, **options)
        return file.getvalue()

    files = {
        "png": save(image, "PNG"),
        "png gray": save(image.convert("L"), "PNG"),
        "png 1 bit": save(image.convert("1"), "PNG"),
        "png 16 bit": save(Image.fromarray(wide), "PNG"),
        "png alpha": save(alpha, "PNG"),
        "png gray alpha": save(alpha.convert("LA"), "PNG"),
        "png palette": save(palette, "PNG"),
        "png palette, one transparent": save(palette, "PNG", transparency=3),
        "gif": save(palette, "GIF"),
        "gif, transparent": save(palette, "GIF", transparency=3),
        "bmp": save(image, "BMP"),
        "tiff": save(image, "TIFF"),
        "tiff, large": save(image, "TIFF", big_tiff=True),
        "ppm": save(image, "PPM"),
        "pgm": save(image.convert("L"), "PPM"),
        "pgm, comment": b"P5\n# of a scanner\n61 43\n255\n" + image.convert("L").tobytes(),
    }
    if features.check("webp"):
        files["webp"] = save(image, "WEBP", lossless=True)
    return {name: (data, Image.open(BytesIO(data)).convert("RGB")) for name, data in files.items()}


OTHERS = other_formats()


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats(path: str, name: str) -> None:
    data, expected = OTHERS[name]
    np.testing.assert_array_equal(decode_image(data), np.asarray(expected))
    [ours] = run(CenterCrop(32), [data])
    np.testing.assert_array_equal(ours, run(CenterCrop(32), [np.asarray(expected)])[0])


def test_palette_with_transparencies() -> None:
    """Pillow warns when it converts such an image straight to RGB; fastload converts it without a warning."""
    image = Image.fromarray(scene(61, 43)).quantize(64)
    data = png(image, transparency=bytes(range(64)))
    with pytest.warns(UserWarning, match="Transparency"):
        expected = Image.open(BytesIO(data)).convert("RGB")
    np.testing.assert_array_equal(decode_image(data), np.asarray(expected))


@pytest.mark.skipif(features.check("webp"), reason="this Pillow has WebP")
def test_webp_without_support_says_so() -> None:
    with pytest.raises(DecodeError, match="no WebP"):
        decode_image(b"RIFF\x24\0\0\0WEBPVP8 " + bytes(40))


def test_pil_images(path: str) -> None:
    image = decode_pil(PHOTO)
    assert image.mode == "RGB" and image.size == (161, 119)
    np.testing.assert_array_equal(np.asarray(image), decode_image(PHOTO))


def test_resized_and_shrunk(path: str) -> None:
    expected = Image.fromarray(decode_image(PHOTO)).resize((98, 73), Image.Resampling.BILINEAR)
    pixels = decode_resized(PHOTO, 73)
    assert psnr(pixels, np.asarray(expected)) > 45
    assert pixels.shape == (73, 98, 3)
    small = shrink(PHOTO, 73, 90)
    assert len(small) < len(PHOTO)
    assert psnr(decode_image(small), pixels) > 30
    assert b"\xff\xc0\x00\x11\x08\x00\x49\x00\x62\x03\x01\x22" in small  # 98 x 73, baseline, 4:2:0
    assert shrink(PHOTO, 119, 90) == PHOTO
    assert decode_resized(PHOTO, 119).shape == decode_resized(PHOTO, 500).shape == (119, 161, 3)
    portrait = decode_resized(np.ascontiguousarray(scene(119, 161)), 73)
    assert portrait.shape == (98, 73, 3)
    data, image = OTHERS["png"]
    assert decode_image(shrink(data, 500, 90)).shape == (43, 61, 3)
    assert psnr(decode_image(shrink(data, 500, 100)), np.asarray(image)) > 25


def test_images_of_extreme_sides_are_images(path: str) -> None:
    """A scan, a film strip; and the most that a file of 10 KB may hold."""
    column = np.lib.stride_tricks.as_strided(np.full((1, 1, 3), 9, np.uint8), (1 << 26, 1, 3), (0, 3, 1))
    assert (run(RandomResizedCrop(8), [column]) == 9).all()
    strip = png(Image.new("L", (110_000, 3), 9))
    assert decode_resized(strip, 2).shape == (2, 73_333, 3) and (decode_resized(strip, 2) == 9).all()
    with pytest.raises(DecodeError, match=r"73333 x 2 pixels, .* more than 65500 on a .*'auto'"):
        shrink(strip, 2, 90)
    assert decode_image(shrink(png(Image.new("L", (65_500, 3), 9)), 3, 90)).shape == (3, 65_500, 3)


# ---------------------------------------------------------------- damage and limits


def test_cut_at_every_twentieth(path: str) -> None:
    """A cut file is an error wherever it is cut; with strict=False, a cut inside the pixels is not."""
    for name in ("420", "progressive", "cmyk", "restarts by row"):
        data = JPEGS[name]
        for percent in range(0, 100, 5):
            cut = data[: len(data) * percent // 100]
            with pytest.raises(DecodeError):
                decode_image(cut)
        assert decode_image(data[: len(data) // 2], strict=False).shape == (119, 161, 3)
    for name, (data, _) in OTHERS.items():
        for percent in range(0, 95, 5) if name.startswith("png") else (0, 20):
            with pytest.raises(DecodeError):
                decode_image(data[: len(data) * percent // 100])


@pytest.mark.parametrize("name", ["420", "progressive", "cmyk", "with EXIF and ICC", "restarts by block"])
def test_a_cut_file_is_refused_by_every_crop_and_by_shrink(path: str, name: str) -> None:
    """Also where the crop needs no missing part. Bytes after the end marker are ignored."""
    data = JPEGS[name]
    top = RandomResizedCrop(8, scale=(0.01, 0.02), ratio=(1, 1))
    out = np.empty((30, *top.sample_shape), np.uint8)
    for cut in (data[:-2], data[:-1], data[: len(data) * 9 // 10], data[:-2] + bytes(5000)):
        assert [k for k, _ in top.fill(out, [cut] * 30, range(30))] == list(range(30))
        for call in (lambda d: shrink(d, 1000, 90), lambda d: decode_resized(d, 1000), decode_pil):
            with pytest.raises(DecodeError, match="end"):
                call(cut)
    for whole in (data, data + bytes(5000), data + data[:3000], data + b"\xff"):
        assert shrink(whole, 1000, 90) == whole
        np.testing.assert_array_equal(decode_image(whole), decode_image(data))
        assert top.fill(out, [whole] * 30, range(30)) == []


def test_the_end_of_a_thumbnail_is_not_the_end(path: str) -> None:
    """A JPEG in the EXIF segment of a cut one."""
    thumbnail = pillow_jpeg(scene(16, 16))
    segment = b"\xff\xe1" + (len(thumbnail) + 8).to_bytes(2, "big") + b"Exif\0\0" + thumbnail
    whole = PHOTO[:2] + segment + PHOTO[2:]
    assert decode_image(whole).shape == (119, 161, 3)
    for cut in (whole[:-2], whole[: len(whole) // 2]):
        with pytest.raises(DecodeError, match="end"):
            shrink(cut, 1000, 90)


@pytest.mark.stress
def test_cut_file_with_guard_removed_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of the end marker, `shrink` returns a cut file unchanged."""
    monkeypatch.setattr(native, "kernel", None)
    monkeypatch.setattr(fallback, "has_end", lambda data: True)
    cut = PHOTO[: len(PHOTO) // 2]
    assert shrink(cut, 1000, 90) == cut


def test_padding_before_the_end_is_harmless(path: str) -> None:
    """Some cameras write it, and Pillow reads it; the same bytes between two scans are damage."""
    for name in ("420", "progressive", "gray"):
        data = JPEGS[name]
        np.testing.assert_array_equal(decode_image(data[:-2] + bytes(40) + data[-2:]), decode_image(data))
    data = JPEGS["progressive"]
    scan = data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)
    table = data.rindex(b"\xff\xc4", 0, scan)
    with pytest.raises(DecodeError, match="extraneous bytes"):
        decode_image(data[:table] + bytes(40) + data[table:])


def test_flipped_bytes(path: str) -> None:
    """Any damage ends in a DecodeError or in an image."""
    rng = np.random.default_rng(0)
    transform = RandomResizedCrop(16)
    good = 0
    out = np.empty((1, *transform.sample_shape), np.uint8)
    for name in ("420", "progressive", "cmyk"):
        for round_ in range(60):
            damaged = bytearray(JPEGS[name])
            for at in rng.integers(0, len(damaged), 1 + round_ % 4):
                damaged[at] ^= 1 << int(rng.integers(8))
            failures = transform.fill(out, [damaged], [round_])
            assert all(isinstance(error, DecodeError) for _, error in failures)
            good += not failures
    assert good > 10


def refuse_bombs(bombs: list[tuple[bytes, str]]) -> None:
    """The life of a process that has no memory for the pixels of an image."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30), resource.RLIM_INFINITY))
    out = np.empty((1, 3, 8, 8), np.uint8)
    for bomb, words in bombs:
        with pytest.raises(DecodeError, match=words):
            decode_image(bomb)
        [(_, error)] = CenterCrop(8).fill(out, [bomb], [0])
        assert re.search(words, str(error))


@pytest.mark.parametrize("decoder", ["kernel", "fallback"])
def test_bombs_are_refused_before_allocation(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if decoder == "kernel" and native.kernel is None:
        pytest.skip("the kernel is not built")
    if decoder == "fallback":
        monkeypatch.setattr(native, "kernel", None)
    said = "65500 x 65500 pixels are more than max_pixels"
    bombs = [(with_size(JPEGS[kind], 65_500, 65_500), said) for kind in ("420", "progressive")]
    header = b"IHDR" + struct.pack(">II", 50_000, 50_000) + bytes([8, 2, 0, 0, 0])
    whole = png(Image.new("RGB", (1, 1)))
    bomb = whole[:12] + header + struct.pack(">I", zlib.crc32(header)) + whole[33:]
    child = multiprocessing.get_context("fork").Process(
        target=refuse_bombs, args=([*bombs, (bomb, "decompression bomb")],)
    )
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0


def test_images_of_too_many_pixels_are_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard at work, and what happens without it."""
    for data, pixels in ((PHOTO, 161 * 119), (OTHERS["png"][0], 61 * 43)):
        assert decode_image(data, max_pixels=pixels).size == 3 * pixels
        with pytest.raises(DecodeError, match=r"are more than max_pixels="):
            decode_image(data, max_pixels=pixels - 1)
        out = np.empty((1, 3, 8, 8), np.uint8)
        monkeypatch.setattr(CenterCrop, "_max_pixels", pixels)
        assert CenterCrop(8).fill(out, [data], [0]) == []
        monkeypatch.setattr(CenterCrop, "_max_pixels", pixels - 1)
        [(_, error)] = CenterCrop(8).fill(out, [data], [0])
        assert "max_pixels" in str(error)


def test_strict_is_an_argument_of_transforms(path: str) -> None:
    cut = PHOTO[: len(PHOTO) // 2]
    out = np.empty((1, 3, 8, 8), np.uint8)
    assert [k for k, _ in CenterCrop(8).fill(out, [cut], [0])] == [0]
    assert CenterCrop(8, strict=False).fill(out, [cut], [0]) == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (b"  \n<html><body>404</body></html>", "HTML or XML"),
        (b"hello world, no image", "start with 68 65 6c 6c 6f"),
        (b"\xff\xd8\xff", ""),
        (b"\xff\xd8\xff" + bytes(500), ""),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not a JPEG"),
        (b"II*\0" + b"\xff" * 60, "TIFF"),
        (None, "NoneType"),
        (np.zeros((5, 5), np.uint8), "shape"),
    ],
)
def test_bytes_that_are_not_an_image(path: str, data: Any, words: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_image(data)
    assert words in str(caught.value)
    assert caught.value.stage == "decode"


@pytest.mark.parametrize("begin", [b"BM", *(b"P%d" % kind for kind in range(1, 7))])
def test_text_or_hash_that_begins_like_an_image_is_none(begin: bytes) -> None:
    assert not is_image(begin) and not is_image(begin + b"W 3 series, parked")
    assert not is_image(begin + b" 2024, second draft")
    assert not any(is_image(begin + hashlib.sha256(b"%d" % n).digest()) for n in range(100))


# ---------------------------------------------------------------- what is installed


def test_backend_names_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.kernel is not None:
        assert backend()["jpeg"] == "kernel"
        assert backend()["simd"] in ("avx2", "neon", "scalar")
        assert str(backend()["libjpeg_turbo"])[0].isdigit()
        assert check_jpegs().state == "ok" and "compiled kernel" in check_jpegs().found
    monkeypatch.setattr(native, "kernel", None)
    found = backend()
    assert found["jpeg"] == "fallback" and found["simd"] is None
    assert check_jpegs().state == "warn" and "libjpeg-turbo" in check_jpegs().advice
    assert "torch-fastload" not in check_jpegs().advice, "it is not on PyPI yet: pip would find nothing"


WITHOUT_KERNEL = """
import sys, warnings
warnings.simplefilter("always")
sys.modules["fastload.images.compiled"] = None  # as where it was not built
import fastload
from fastload.images import backend, kernel as native
dataset = fastload.ImageFolder(sys.argv[1], fastload.CenterCrop(8))
print(backend()["jpeg"], file=sys.stderr)
print("not told yet", file=sys.stderr)
for _ in range(2):
    for images, labels in fastload.DataLoader(dataset, 1, num_workers=int(sys.argv[2])):
        assert images.any()
dataset[0]
"""


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.stress), 3])
def test_missing_kernel_is_warned_of_once_by_a_process_and_its_workers(
    tmp_path: Path, num_workers: int
) -> None:
    (tmp_path / "a").mkdir()
    for k in range(9):
        (tmp_path / "a" / f"{k}.jpg").write_bytes(PHOTO)
    command = [sys.executable, "-c", WITHOUT_KERNEL, str(tmp_path), str(num_workers)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stderr
    before, _, after = result.stderr.partition("not told yet")
    assert "fallback" in before and "RuntimeWarning" not in before
    assert after.count("RuntimeWarning: fastload's compiled kernel is missing") == 1
    assert "`fastload doctor` says what to install" in after


@pytest.mark.parametrize(
    ("versions", "found", "state", "words"),
    [
        ({"pillow-simd": "{}"}, "pillow-simd", "ok", ""),
        ({"pillow": "13.0", "pillow-simd": "{}"}, "pillow-simd", "ok", ""),  # the one installed last
        ({"pillow": "{}"}, "pillow", "ok", "4 times faster"),
        ({"pillow": "{}", "pillow-simd": "9.5.0.post2"}, "pillow", "warn", "has overwritten it"),
        ({"pillow": "1.0", "pillow-simd": "2.0"}, None, "warn", "has overwritten it"),
        ({"pillow": "2.0"}, None, "warn", "another installation overwrote it"),
    ],
)
def test_doctor_says_which_pillow_runs(
    versions: dict[str, str], found: str | None, state: str, words: str
) -> None:
    import PIL

    installed = {name: version.format(PIL.__version__) for name, version in versions.items()}
    check = check_pillow(installed.get)
    assert check.found == f"{found or 'Pillow'} {PIL.__version__}"
    assert check.state == state
    assert words in check.advice and bool(words) == bool(check.advice)
