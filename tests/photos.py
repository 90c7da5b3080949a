"""Test pictures: smooth ones with detail, encoded in every way that a JPEG in the wild is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from fastload.images import kernel as native

Pixels = NDArray[np.uint8]


@cache
def scene(width: int, height: int, seed: int = 0) -> Pixels:
    """(height, width, 3) RGB uint8 with the 1/f spectrum of photos."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = 1
    planes = []
    for _ in range(3):
        noise = rng.standard_normal((height, width // 2 + 1, 2)).view(np.complex128)[..., 0]
        plane = np.fft.irfft2(noise * frequency**-1.3, (height, width))
        planes.append(plane / (plane.std() or 1))
    luma = planes[0][..., None] * 45
    colour = np.stack(planes, axis=-1) * 14
    pixels: Pixels = np.clip(luma + colour + 120, 0, 255).astype(np.uint8)
    return pixels


def pillow_jpeg(pixels: Pixels, mode: str = "RGB", **options: Any) -> bytes:
    """Encoded by Pillow, in any mode and with any of its options."""
    file = BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", **{"quality": 92, **options})
    return file.getvalue()


def png(image: Image.Image, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


LIMIT = 10**9  # pixels


def kernel_decode(data: bytes, denominator: int = 1, strict: bool = True) -> Pixels:
    """Decoded by the compiled kernel, whole, at 1/`denominator` of its size."""
    kernel: Any = native.kernel
    width, height = kernel.jpeg_size(data, LIMIT, strict)
    out = np.empty((-(-height // denominator), -(-width // denominator), 3), np.uint8)
    kernel.decode(data, out, denominator, LIMIT, strict)
    return out


def rare_files() -> dict[str, bytes]:
    """Made by libjpeg-turbo's jpegtran of a photo of 45 x 33 pixels.

    -arithmetic, -arithmetic -progressive, a scan for each component, and a progressive script that leaves the
    last bits out ("unfinished").
    """
    return {path.stem: path.read_bytes() for path in (Path(__file__).parent / "data/jpeg").glob("*.jpg")}


@cache
def variants(width: int = 161, height: int = 119) -> dict[str, bytes]:
    """The same odd-sized picture in every kind of JPEG that the decoders must agree on."""
    pixels = scene(width, height)
    cmyk = pillow_jpeg(pixels, "CMYK")
    adobe = cmyk.index(b"Adobe") + 11
    plain = {
        subsampling: simplejpeg.encode_jpeg(pixels, 92, "RGB", subsampling)
        for subsampling in ("444", "422", "420", "440", "411")
    }
    return {
        **plain,
        "gray": pillow_jpeg(pixels, "L"),
        "cmyk": cmyk,
        # The same samples, declared as YCCK in Adobe's marker.
        "ycck": cmyk[:adobe] + b"\x02" + cmyk[adobe + 1 :],
        "progressive": pillow_jpeg(pixels, progressive=True),
        "progressive gray": pillow_jpeg(pixels, "L", progressive=True),
        "progressive cmyk": pillow_jpeg(pixels, "CMYK", progressive=True),
        "progressive 444": pillow_jpeg(pixels, progressive=True, subsampling=0),
        "restarts by row": pillow_jpeg(pixels, restart_marker_rows=1),
        "restarts by block": pillow_jpeg(pixels, restart_marker_blocks=3),
        "optimised": pillow_jpeg(pixels, optimize=True),
        "stored as RGB": pillow_jpeg(pixels, keep_rgb=True),
        "quality 5": pillow_jpeg(pixels, quality=5),
        "with EXIF and ICC": pillow_jpeg(pixels, exif=oriented(6), icc_profile=bytes(range(256)) * 300),
    }


def oriented(orientation: int) -> Image.Exif:
    """EXIF with an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def with_size(jpeg: bytes, width: int, height: int) -> bytes:
    """A JPEG whose header says another size."""
    for marker in (b"\xff\xc0", b"\xff\xc2"):
        at = jpeg.find(marker)
        if at > 0:
            return jpeg[: at + 5] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + jpeg[at + 9 :]
    raise AssertionError("no SOF marker")


def psnr(a: Pixels, b: Pixels) -> float:
    """Peak signal-to-noise ratio in dB; 99 when equal."""
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return 99.0 if error == 0 else float(10 * np.log10(255**2 / error))


# --- Fixtures, for modules that import them ---------------------------------------------------------------


@pytest.fixture(params=["kernel", "fallback"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way that images are decoded and resized."""
    if request.param == "kernel" and native.kernel is None:
        pytest.skip("the kernel is not built")
    if request.param == "fallback":
        monkeypatch.setattr(native, "kernel", None)
    return str(request.param)


@pytest.fixture(params=["simd", "scalar"])
def simd(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both forms of the kernel's resize."""
    kernel: Any = native.kernel
    kernel._set_simd(request.param == "simd")
    yield request.param
    kernel._set_simd(True)
