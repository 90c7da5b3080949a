"""The compiled kernel against its Python fallback, against Pillow, and against hostile bytes."""

from __future__ import annotations

import base64
import sys
import threading
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastload import CenterCrop, RandomResizedCrop
from fastload.images import decode_image, fallback
from fastload.images import kernel as native
from tests.photos import LIMIT, Pixels, pillow_jpeg, psnr, scene, variants, with_size
from tests.photos import kernel_decode as decode
from tests.photos import simd as simd

kernel: Any = native.kernel
pytestmark = pytest.mark.skipif(kernel is None, reason="the kernel is not built: pip install -e .")

VARIANTS = variants() if kernel else {}
every_variant = pytest.mark.parametrize("name", VARIANTS)


def crop(
    source: Any, box: tuple[float, ...], size: tuple[int, int], *, clamp: bool = True, flip: bool = False
) -> Pixels:
    """The kernel's resize of one box to (height, width)."""
    out = np.empty((1, *size, 3), np.uint8)
    failures = kernel.crop_resize(out, [(0, source, *box, flip)], True, clamp, LIMIT, True)
    assert failures == []
    return out[0]


# ---------------------------------------------------------------- decoding


@every_variant
@pytest.mark.parametrize("denominator", [1, 2, 4, 8])
def test_whole_images_equal_pillow(name: str, denominator: int) -> None:
    image = Image.open(BytesIO(VARIANTS[name]))
    if denominator > 1:
        image.draft(None, (image.width // denominator, image.height // denominator))
    ours, theirs = decode(VARIANTS[name], denominator), np.asarray(image.convert("RGB"))
    assert ours.shape == theirs.shape
    # Both are libjpeg-turbo; versions differ by a rounding here and there.
    assert np.abs(ours.astype(int) - theirs).max() <= 2


@every_variant
@pytest.mark.parametrize("denominator", [1, 2])
def test_a_region_has_exactly_the_pixels_of_the_whole(name: str, denominator: int) -> None:
    """Cropped columns, skipped rows and an early end change no pixel: a resize 1:1 shows them bare."""
    whole = decode(VARIANTS[name], denominator)
    rng = np.random.default_rng(7)
    for _ in range(60):
        height, width = (int(rng.integers(1, side // 2)) for side in whole.shape[:2])
        top, left = (
            int(rng.integers(0, side // denominator - n + 1)) for side, n in ((119, height), (161, width))
        )
        expected = whole[top : top + height, left : left + width]
        box = [edge * denominator for edge in (left, top, left + width, top + height)]
        np.testing.assert_array_equal(crop(VARIANTS[name], tuple(box), (height, width)), expected)


# 96 x 64 pixels of which chroma has 24 x 32 (cjpeg -sample 4x2); only few encoders write such files.
RARE = base64.b85decode(
    b"|JeWF01!$>Nk#wx0RR9200961|JwjV02>k%7Zed27Zw*D92+1gLMtdGB`8rkJupIGRb^yfRb5+Zc$tA}agcLcU4^xVke;Kft"
    b"*d8%yve$z$C;?Br2pFhLjfEf9w;LyPAe-"
    b";q;6eqq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@<*zq@@4A01*fPKmcF^0YU%*5di}c0sq7R"
    b"8UO(S0RaI40RR910000000065009IA2LHqW9S{Hm0RRI50RaF200000000010ud5HVId+>|HJ?p0RaF50RaF200000000000"
    b"0aO61_1;A!~h%-00II70RaF2000000000000IF61QH<;QUBTi3<CiG0ucid06zfy>XE4^q-"
    b"sE<YDT1LMASuKDH@Pc<z94kNo6N5;>Flhlu}Hm>>$dR3Pz-AMx+Wxq@s~xOIg~uEm-+#2B4yWr~;9x8j-"
    b"0bMtxYGV%ATNy<<={2DPs`Mp88;6ohx)$&uB!38*NbY6ELtbcCd8MPHfpnv>Gk(y13)bn&Sgk*O7aXV9o9plV6d<z94NUqqH"
    b"O$ll2%B@~TF)PX?M4M9Z!svN9MNYsLtD)XbNODHw0Si1^=s3ueP5M@kw)Qw56;?L+*l~O##te+iv#H7AU_^`iB^-"
    b"KjLQc+0Mfk@PiK-86}Vz4t7vRrlR8j-0rt$ETik*O%48@~2TjjgzU|Je"
)


def test_rare_sampling_is_decoded_at_full_size() -> None:
    """libjpeg-turbo 2.1.5 gets scaled regions of such files wrong by up to 60 levels."""
    whole = decode(RARE)
    box = (20, 10, 80, 50)
    expected = Image.fromarray(whole).crop(box).resize((30, 20), Image.Resampling.BILINEAR)
    assert np.abs(crop(RARE, box, (20, 30)).astype(int) - np.asarray(expected)).max() <= 2
    np.testing.assert_array_equal(crop(RARE, box, (40, 60)), whole[10:50, 20:80])


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 17), (23, 1), (65_500, 1), (1, 65_500), (7, 7)])
@pytest.mark.parametrize("progressive", [False, True])
def test_extreme_shapes(width: int, height: int, progressive: bool) -> None:
    data = pillow_jpeg(np.full((height, width, 3), (200, 30, 90), np.uint8), progressive=progressive)
    assert decode(data).shape == (height, width, 3)
    for transform in (RandomResizedCrop(8, flip=0.5), CenterCrop(8, resize=9)):
        out = np.empty((1, 3, 8, 8), np.uint8)
        assert transform.fill(out, [data], [3]) == []
        assert np.abs(out[0].mean(axis=(1, 2)) - (200, 30, 90)).max() < 4


# ---------------------------------------------------------------- resize


@pytest.mark.parametrize("size", [(224, 224), (37, 91), (8, 8), (5, 300), (1, 1), (119, 161)])
@pytest.mark.parametrize("clamp", [True, False])
def test_resize_equals_pillow(simd: str, size: tuple[int, int], clamp: bool) -> None:
    pixels = scene(161, 119)
    rng = np.random.default_rng(3)
    for _ in range(10):
        x0, x1 = np.sort(rng.choice(162, 2, replace=False))
        y0, y1 = np.sort(rng.choice(120, 2, replace=False))
        box = (float(x0), float(y0), float(x1), float(y1))
        image = Image.fromarray(pixels)
        if clamp:
            expected = image.crop((x0, y0, x1, y1)).resize(size[::-1], Image.Resampling.BILINEAR)
        else:
            expected = image.resize(size[::-1], Image.Resampling.BILINEAR, box=box)
        ours = crop(pixels, box, size, clamp=clamp)
        assert np.abs(ours.astype(int) - np.asarray(expected)).max() <= 2


@pytest.mark.parametrize("clamp", [True, False])
@pytest.mark.parametrize("box", [(10.3, 4.7, 99.9, 88.1), (20.4, 30.6, 26.1, 35.2)])
def test_boxes_between_pixels(box: tuple[float, ...], clamp: bool) -> None:
    pixels = scene(161, 119)
    expected = np.empty((1, 40, 50, 3), np.uint8)
    assert fallback.crop_resize(expected, [(0, pixels, *box, False)], True, clamp, LIMIT, True) == []
    ours = crop(pixels, box, (40, 50), clamp=clamp)
    assert np.abs(ours.astype(int) - expected[0]).max() <= 2


def test_strong_reduction_uses_every_pixel(simd: str) -> None:
    """Beyond 128 source rows per output row the sums are wider; a mean must stay a mean."""
    pixels = np.random.default_rng(0).integers(0, 256, (3000, 700, 3), dtype=np.uint8)
    expected = Image.fromarray(pixels).resize((2, 2), Image.Resampling.BILINEAR)
    ours = crop(pixels, (0, 0, 700, 3000), (2, 2))
    assert np.abs(ours.astype(int) - np.asarray(expected)).max() <= 1


def test_simd_and_scalar_are_the_same_bytes() -> None:
    """A sample is the same on every machine."""
    results = []
    for on in (True, False):
        kernel._set_simd(on)
        for size in ((224, 224), (33, 65), (3, 7)):
            out = np.empty((len(VARIANTS), 3, *size), np.uint8)
            transform = RandomResizedCrop(size, flip=0.5)
            assert transform.fill(out, list(VARIANTS.values()), range(len(VARIANTS))) == []
            results.append(out)
    kernel._set_simd(True)
    for first, second in zip(results[:3], results[3:], strict=True):
        np.testing.assert_array_equal(first, second)


def test_rows_at_any_distance() -> None:
    """Pixels straight from a mapped file or a cropped view, without a copy; no byte after a row is read."""
    pixels = scene(161, 119)
    view = pixels[5:100, 20:120]
    np.testing.assert_array_equal(
        crop(view, (0, 0, 100, 95), (64, 64)), crop(np.ascontiguousarray(view), (0, 0, 100, 95), (64, 64))
    )
    upside_down = crop(pixels[::-1], (0, 0, 161, 119), (64, 64))
    np.testing.assert_array_equal(
        upside_down, crop(np.ascontiguousarray(pixels[::-1]), (0, 0, 161, 119), (64, 64))
    )


def test_flat_colours_stay_exact() -> None:
    """Weights sum to one exactly, at every scale: white stays white."""
    for value in (0, 1, 127, 254, 255):
        pixels = np.full((100, 130, 3), value, np.uint8)
        for size in ((224, 224), (9, 50), (100, 130), (1, 1)):
            assert (crop(pixels, (0, 0, 130, 100), size) == value).all()


# ---------------------------------------------------------------- fused, against the whole way round

# (side of the result, lowest mean PSNR, lowest single PSNR) for photos of 1000 x 750 pixels: 224 decodes them
# at full size or a half, 48 at 1/2 to 1/8.
QUALITY = [(400, 45.0, 40.0), (224, 40.0, 34.0), (112, 38.0, 32.0), (48, 36.0, 30.0), (24, 35.0, 28.0)]


@pytest.mark.parametrize(("size", "mean", "lowest"), QUALITY)
@pytest.mark.parametrize("kind", ["random", "centre"])
def test_kernel_and_fallback_agree(kind: str, size: int, mean: float, lowest: float) -> None:
    photos = [pillow_jpeg(scene(1000, 750, seed), quality=90) for seed in range(4)] * 4
    transform: Any = RandomResizedCrop(size, flip=0.5)
    if kind == "centre":
        transform = CenterCrop(size, resize=round(size * 256 / 224))
    ours, theirs = (np.empty((len(photos), 3, size, size), np.uint8) for _ in range(2))
    assert transform.fill(ours, photos, range(len(photos))) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "kernel", None)
        assert transform.fill(theirs, photos, range(len(photos))) == []
    found = [psnr(a, b) for a, b in zip(ours, theirs, strict=True)]
    assert np.mean(found) >= mean, found
    assert min(found) >= lowest, found


@pytest.mark.parametrize("denominator", [1, 2, 4, 8])
def test_quality_by_scale(denominator: int) -> None:
    """PSNR against full decode and Pillow's resize: >= 40 dB at full size, >= 35 dB when scaled."""
    found = []
    for seed in range(6):
        data = pillow_jpeg(scene(1000, 750, seed), quality=90)
        size = (700 // denominator // 4 * 3, 900 // denominator // 4 * 3)  # 1/denominator is just allowed
        box = (50.0, 25.0, 950.0, 725.0)
        cut = Image.fromarray(decode_image(data)).crop((50, 25, 950, 725))
        expected = np.asarray(cut.resize(size[::-1], Image.Resampling.BILINEAR))
        found.append(psnr(crop(data, box, size), expected))
    assert np.mean(found) >= (40 if denominator == 1 else 35), found


@every_variant
def test_kernel_and_fallback_agree_on_every_kind(name: str) -> None:
    """Full-size decoding: only the rounding of the resize differs."""
    ours, theirs = (np.empty((8, 100, 140, 3), np.uint8) for _ in range(2))
    rng = np.random.default_rng(1)
    items = []
    for row in range(8):
        x0, y0 = rng.integers(0, 40, 2)
        items.append(
            (row, VARIANTS[name], x0, y0, x0 + rng.integers(20, 120), y0 + rng.integers(20, 79), row % 2)
        )
    assert kernel.crop_resize(ours, items, True, True, LIMIT, True) == []
    assert fallback.crop_resize(theirs, items, True, True, LIMIT, True) == []
    assert np.abs(ours.astype(int) - theirs).max() <= 3
    assert psnr(ours, theirs) >= 48


# ---------------------------------------------------------------- damage and limits


def test_warnings_are_errors_unless_strict_is_off() -> None:
    """strict refuses a cut image; strict=False returns a part of it."""
    data = VARIANTS["420"]
    cut = data[: len(data) // 2]
    with pytest.raises(ValueError, match=r"[Pp]remature end"):
        decode(cut)
    partial = decode(cut, strict=False)
    whole = decode(data)
    np.testing.assert_array_equal(partial[:16], whole[:16])
    assert not np.array_equal(partial, whole)


def test_a_cut_file_is_refused_wherever_the_crop_lies() -> None:
    """Rows below a crop are not read. Still every crop of a cut file is refused, so that epochs agree."""
    data = pillow_jpeg(scene(320, 320), quality=90)
    cut, above, below = data[: len(data) * 3 // 4], (0.0, 0.0, 320.0, 100.0), (0.0, 220.0, 320.0, 320.0)

    def reasons(source: bytes, box: tuple[float, ...], strict: bool) -> list[str]:
        out = np.empty((1, 64, 64, 3), np.uint8)
        items = [(0, source, *box, False)]
        return [reason for _, reason in kernel.crop_resize(out, items, True, True, LIMIT, strict)]

    for box in (above, below):
        [reason] = reasons(cut, box, True)
        assert "no end marker" in reason
        assert reasons(cut, box, False) == []
    # Without the guard (an end marker where the cut was) the judgement depends on the crop.
    marked = cut + b"\xff\xd9"
    assert reasons(marked, above, True) == []
    assert len(reasons(marked, below, True)) == 1
    np.testing.assert_array_equal(crop(marked, above, (64, 64)), crop(data, above, (64, 64)))


def test_tables_of_the_image_before_are_not_used() -> None:
    """A JPEG without quantisation tables fails, also right after one that has them."""
    data = VARIANTS["444"]
    at = data.index(b"\xff\xdb")
    bare = data[:at]
    while data[at : at + 2] == b"\xff\xdb":
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    bare += data[at:]
    out = np.empty((2, 32, 32, 3), np.uint8)
    items = [(0, data, 0, 0, 32, 32, False), (1, bare, 0, 0, 32, 32, False)]
    [(row, reason)] = kernel.crop_resize(out, items, True, True, LIMIT, True)
    assert row == 1 and "table" in reason


def test_max_pixels_is_checked_before_allocation() -> None:
    huge = with_size(VARIANTS["420"], 65_500, 65_500)
    for call in (
        lambda: kernel.jpeg_size(huge, 2 * 89_478_485, True),
        lambda: kernel.decode(huge, np.empty((1, 1, 3), np.uint8), 1, 2 * 89_478_485, True),
    ):
        with pytest.raises(ValueError, match="65500 x 65500 pixels are more than max_pixels"):
            call()
    assert kernel.jpeg_size(huge, 65_500**2, True) == (65_500, 65_500)  # the same header without the guard


def test_scans_are_limited() -> None:
    """A progressive file may repeat a scan of a few bytes without end; each costs a pass over all pixels."""
    data = VARIANTS["progressive gray"]
    start = data.rindex(b"\xff\xda")
    scan = data[start:-2]
    assert decode(data).shape == (119, 161, 3)
    with pytest.raises(ValueError, match="too many scans"):
        decode(data[:-2] + scan * 600 + b"\xff\xd9", strict=False)


@pytest.mark.parametrize(
    "box",
    [
        (-1, 0, 5, 5),
        (0, 0, 162, 5),
        (0, 0, 5, 120),
        (5, 0, 5, 5),
        (9, 0, 5, 5),
        (float("nan"), 0, 5, 5),
        (0, 0, float("inf"), 5),
    ],
)
def test_boxes_outside_the_image_are_refused(box: tuple[float, ...]) -> None:
    out = np.empty((1, 3, 8, 8), np.uint8)
    for source in (VARIANTS["420"], scene(161, 119)):
        [(_, reason)] = kernel.crop_resize(out, [(0, source, *box, False)], False, True, LIMIT, True)
        assert reason == "the box is not inside the image"


def test_wrong_arguments_are_refused() -> None:
    out = np.empty((1, 3, 8, 8), np.uint8)
    good = (0, VARIANTS["420"], 0, 0, 8, 8, False)
    frozen = out.copy()
    frozen.flags.writeable = False
    for wrong, items in [
        (out[:, :, ::2], [good]),
        (out[0], [good]),
        (out.astype(np.float32), [good]),
        (frozen, [good]),
        (out, [(1, *good[1:])]),
        (out, [(-1, *good[1:])]),
        (out, [good[:-1]]),
        (out, [list(good)]),
        (out, [(0, scene(161, 119)[:, ::2], *good[2:])]),
        (out, [(0, scene(161, 119)[..., 0], *good[2:])]),
        (out, [(0, "text", *good[2:])]),
        (out, None),
    ]:
        with pytest.raises((ValueError, TypeError, IndexError, BufferError)):
            kernel.crop_resize(wrong, items, False, True, LIMIT, True)
    with pytest.raises(ValueError, match="another size"):
        kernel.decode(VARIANTS["420"], np.empty((119, 160, 3), np.uint8), 1, LIMIT, True)
    with pytest.raises(ValueError, match="denominator"):
        kernel.decode(VARIANTS["420"], np.empty((119, 161, 3), np.uint8), 3, LIMIT, True)


def test_inputs_are_released() -> None:
    """No reference and no exported buffer is left behind, whether images decode or not."""
    good, bad = bytearray(VARIANTS["420"]), bytearray(VARIANTS["420"][:200])
    out = np.empty((2, 3, 8, 8), np.uint8)
    before = sys.getrefcount(good), sys.getrefcount(out)
    for _ in range(3):
        items = [(0, good, 0, 0, 8, 8, False), (1, bad, 0, 0, 8, 8, False)]
        assert [row for row, _ in kernel.crop_resize(out, items, False, True, LIMIT, True)] == [1]
        with pytest.raises(IndexError):
            kernel.crop_resize(out, [*items, (7, good, 0, 0, 8, 8, False)], False, True, LIMIT, True)
        del items
    assert (sys.getrefcount(good), sys.getrefcount(out)) == before
    good.append(0)  # BufferError while a view is exported
    bad.append(0)


def test_memory_stays_flat() -> None:
    import psutil

    process = psutil.Process()
    images = [*VARIANTS.values(), *(data[: len(data) * 2 // 3] for data in VARIANTS.values())]
    out = np.empty((len(images), 3, 64, 64), np.uint8)
    transform = RandomResizedCrop(64, flip=0.5)
    for round_ in range(12):
        transform.fill(out, images, range(len(images)))
        if round_ == 3:
            before = process.memory_info().rss
    assert process.memory_info().rss - before < 8 << 20


def test_many_threads() -> None:
    """Eight threads on the same images, good and bad, give the results of one thread."""
    images = [*VARIANTS.values(), *(data[: len(data) // 2] for data in VARIANTS.values()), scene(161, 119)]
    transform = RandomResizedCrop(48, flip=0.5)
    seeds = range(len(images))
    expected = np.zeros((len(images), 3, 48, 48), np.uint8)
    failed = [k for k, _ in transform.fill(expected, images, seeds)]
    good = np.setdiff1d(np.arange(len(images)), failed)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(5):
            out = np.zeros_like(expected)
            if [k for k, _ in transform.fill(out, images, seeds)] != failed:
                wrong.append("failures")
            if not np.array_equal(out[good], expected[good]):
                wrong.append("pixels")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_gil_is_released() -> None:
    """Python runs in another thread while the kernel decodes one long batch."""
    images = [pillow_jpeg(scene(1000, 750))] * 24
    transform = RandomResizedCrop(224, scale=(1, 1), flip=0.5)
    out = np.empty((len(images), 3, 224, 224), np.uint8)
    started, done = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        transform.fill(out, images, range(len(images)))
        done.set()

    turns = 0
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # so that only a released GIL lets this thread run
    try:
        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        while not done.is_set():
            turns += 1
            done.wait(0.001)
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert turns > 5
