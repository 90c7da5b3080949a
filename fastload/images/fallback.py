"""The kernel's Python fallback: the same functions by simplejpeg, and by Pillow for the resize.

It runs where the installation found no C compiler or no libjpeg-turbo, and the kernel is tested against it.
It decodes the whole image; the kernel decodes only the crop, at the smallest sufficient scale. So pixels
differ a little (tests/unit/test_kernel.py says how little), and speed a lot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from fastload.formats.jpeg import has_end, is_record

Pixels = NDArray[np.uint8]


def jpeg_size(data: Any, max_pixels: int, strict: bool) -> tuple[int, int]:
    """Return (width, height) of a JPEG's header; ValueError for more than `max_pixels`, or a cut file."""
    height, width, _ = _header(data)
    if height * width > max_pixels:
        raise ValueError(
            f"{width} x {height} pixels are more than max_pixels={max_pixels}: "
            "resize the image before, or read it by a decode= of your own"
        )
    if strict and not has_end(data):
        raise ValueError("premature end: the file was cut, it has no end marker")
    return width, height


def _header(data: Any) -> tuple[int, int, str]:
    """Return (height, width, colour space) of a JPEG."""
    if is_record(data):
        raise ValueError("a record of a cache, which only the compiled kernel reads")
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except KeyError:  # simplejpeg's error for a header that it does not understand
        raise ValueError("a damaged JPEG header, or a kind of JPEG that only the kernel reads") from None
    return height, width, colorspace


def decode(data: Any, out: Pixels, denominator: int, max_pixels: int, strict: bool) -> None:
    """Decode a JPEG at 1/`denominator` of its size into `out` (H, W, 3)."""
    jpeg_size(data, max_pixels, strict)
    out[:] = _decode(data, strict, out.shape[0], out.shape[1])


def crop_resize(
    out: Pixels, items: Sequence[Any], channels_last: bool, clamp: bool, max_pixels: int, strict: bool
) -> list[tuple[int, str]]:
    """Resize each item's box into its row of `out`; returns (row, reason) of those that failed."""
    size = out.shape[1:3] if channels_last else out.shape[2:4]
    failures = []
    for row, source, x0, y0, x1, y1, flip in items:
        try:
            pixels = source
            if not isinstance(source, np.ndarray) or source.ndim != 3:
                jpeg_size(source, max_pixels, strict)
                pixels = _decode(source, strict)
            resized = _resize(pixels, (x0, y0, x1, y1), size, clamp)
        except (ValueError, MemoryError) as error:
            failures.append((row, str(error) or type(error).__name__))
            continue
        if flip:
            resized = resized[:, ::-1]
        out[row] = resized if channels_last else resized.transpose(2, 0, 1)
    return failures


def set_threads(count: int) -> int:
    """Make no threads: the calling thread makes all rows."""
    return 0


def begin_rows(
    out: Pixels,
    places: NDArray[np.void],
    rows: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    law: Any,
    pixels: bool,
    channels_last: bool,
    clamp: bool,
    max_pixels: int,
    strict: bool,
    owner: object,
) -> list[int]:
    """Leave all rows to the caller, who makes those that are not made here in the general way."""
    left: list[int] = rows.tolist()
    return left


def finish_rows(job: list[int]) -> tuple[list[tuple[int, str]], float, float]:
    """Return the rows of a job, none of them made."""
    return [(row, "the kernel is missing") for row in job], 0.0, 0.0


def read_ahead(places: NDArray[np.void]) -> None:
    """Do nothing: the general way reads ahead by itself."""


def _decode(data: Any, strict: bool, min_height: int = 0, min_width: int = 0) -> Pixels:
    """Decode a JPEG to RGB pixels. With a minimum: at the smallest scale that reaches it."""
    cmyk = _header(data)[2] in ("CMYK", "YCCK")
    options = {
        "colorspace": "CMYK" if cmyk else "RGB",
        "fastdct": False,
        "fastupsample": False,
        "min_height": min_height,
        "min_width": min_width,
    }
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, strict=strict, **options)
    except ValueError as error:
        # Padding between the last pixel and the end marker, as some cameras write it, harms no pixel.
        if "extraneous bytes before marker 0xd9" not in str(error):
            raise
        pixels = simplejpeg.decode_jpeg(data, strict=False, **options)
    return _cmyk_to_rgb(pixels) if cmyk else pixels


def _cmyk_to_rgb(inverted: Pixels) -> Pixels:
    """Return RGB of CMYK stored inverted, as Pillow assumes of every JPEG; Pillow's rounding."""
    black = inverted[..., 3:].astype(np.int32)
    product = (255 - inverted[..., :3].astype(np.int32)) * black + 128
    return np.clip(black - (((product >> 8) + product) >> 8), 0, 255).astype(np.uint8)


def _resize(
    pixels: Pixels, box: tuple[float, float, float, float], size: tuple[int, int], clamp: bool
) -> Pixels:
    """Resize the box of `pixels` to `size` (height, width) by an antialiased bilinear filter."""
    if clamp:
        (x0, y0), (x1, y1) = map(math.floor, box[:2]), map(math.ceil, box[2:])  # whole pixels, as the kernel
        pixels, box = pixels[y0:y1, x0:x1], (box[0] - x0, box[1] - y0, box[2] - x0, box[3] - y0)
    resized = Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)
    return np.asarray(resized)
