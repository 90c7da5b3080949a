"""Values of samples out of their bytes, as several formats write them.

Sizes are compared with the bytes at hand before anything is allocated.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.errors import DecodeError

if TYPE_CHECKING:
    from PIL.Image import Image

Open = Callable[[Any], Any]  # makes a value of its bytes

_MOST_PIXELS = 2 * 89_478_485  # as in images.decode
_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
# Pillow's mode -> bytes of a pixel; of "1", a row is padded to whole bytes.
_MODES = {
    "1": 0, "L": 1, "P": 1, "LA": 2, "La": 2, "PA": 2, "RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3, "RGBA": 4,
    "RGBa": 4, "RGBX": 4, "CMYK": 4, "I": 4, "F": 4, "I;16": 2, "I;16B": 2, "I;16L": 2,
}  # fmt: skip


def as_text(value: Any) -> str:
    """Return the text of UTF-8."""
    return str(value, "utf-8")


def as_json(value: Any) -> Any:
    """Return the value of JSON."""
    return json.loads(bytes(value))


def check_size(data: memoryview, dtype: Any, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` unless an array of this dtype, of numpy or torch, and shape has as many bytes."""
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"shape {shape} of {dtype} needs other than its {len(data):,} bytes")


def as_array(data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the array of these bytes, its own memory.

    Raises:
        ValueError: the bytes are not as many.
    """
    check_size(data, dtype, shape)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def as_pil(value: Any) -> Image:
    """Return an encoded image, decoded by Pillow in the mode that it has.

    Raises:
        DecodeError: it is none of a known format, or too large.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(BytesIO(value), formats=_FORMATS)
        if image.width * image.height > _MOST_PIXELS:
            raise DecodeError(f"an image of {image.width} x {image.height} is larger than the limit")
        image.load()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DecodeError(f"not an image that can be decoded: {error}") from None
    return image


def pil_from_raw(value: Any) -> Image:
    """Return a PIL image out of uint32 width, height, length of its mode | the mode | pixels.

    Raises:
        ValueError: the pixels are not as many.
    """
    from PIL import Image

    data = memoryview(value)
    width, height, length = np.frombuffer(data, "<u4", 3).tolist()
    mode, raw = str(data[12 : 12 + length], "ascii"), data[12 + length :]
    if mode not in _MODES:
        raise ValueError(f"a PIL image of mode {mode[:20]!r}")
    row = _MODES[mode] * width or (width + 7) // 8
    if row * height != len(raw):
        raise ValueError(f"a PIL image {mode} of {width} x {height} has other than {len(raw):,} bytes")
    return Image.frombytes(mode, (width, height), bytes(raw))


def open_list(value: Any, *, open_one: Open, start: int) -> list[Any]:
    """Return the values of the parts of: `start` bytes | uint32 n | uint32 size of each part | the parts.

    Raises:
        ValueError: the parts do not fill the value.
    """
    data = memoryview(value)
    count = int.from_bytes(data[start : start + 4], "little")
    at = start + 4 + 4 * count
    if at > len(data):
        raise ValueError(f"a list of {count:,} parts in {len(data):,} bytes")
    parts = []
    for size in np.frombuffer(data, "<u4", count, start + 4).tolist():
        parts.append(open_one(data[at : at + size]))
        at += size
    if at != len(data):
        raise ValueError(f"a list of {at:,} bytes in {len(data):,}")
    return parts


def unpickle(value: Any) -> Any:
    """Return the object of a pickle, which can run any code: only where the user asked for it."""
    return pickle.loads(value)
