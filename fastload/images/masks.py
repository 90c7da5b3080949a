"""Images whose values are numbers, not colours: a segmentation mask, a depth map, a grey X-ray.

They are read without a way through RGB, and cut by nearest neighbour, which invents no value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import DecodeError
from fastload.formats.jpeg import jpeg_components
from fastload.images.decode import decode_image, decode_other, find_format, is_pixels, open_image
from fastload.images.kernel import Pixels, Source

_LONGEST = 1 << 22  # numbers of pixels of one axis that are computed: 32 MB


def open_values(image: Source, channels: int, max_pixels: int, strict: bool) -> Pixels:
    """Return all pixels of an image, (height, width, channels): its own single channel, or RGB.

    Raises:
        DecodeError: as `decode_image`; or one channel is wanted, and it has several, or one of 16 bits.
    """
    if channels == 3:
        return decode_image(image, max_pixels=max_pixels, strict=strict)
    if is_pixels(image):
        return _grey_array(image)
    data, name = find_format(image)
    if name == "JPEG":
        _check_grey(data)
        return decode_image(data, max_pixels=max_pixels, strict=strict)[..., :1]
    return decode_other(data, name, max_pixels, own_channel)[0]


def open_grey(image: Source, max_pixels: int, strict: bool) -> tuple[Source, int, int]:
    """Return (source, width, height) of an image of one channel to be interpolated, as `open_image`.

    Raises:
        DecodeError: as `open_values`; or its values are numbers that must not be interpolated.
    """
    if is_pixels(image):
        return open_image(np.repeat(_grey_array(image), 3, axis=2), max_pixels, strict)
    data, name = find_format(image)
    if name != "JPEG":
        grey = decode_other(data, name, max_pixels, own_grey)[0]
        return open_image(np.repeat(grey, 3, axis=2), max_pixels, strict)
    _check_grey(data)
    return open_image(data, max_pixels, strict)


def own_channel(image: Any) -> Pixels:
    """Return (height, width, 1) of a PIL image: grey values, indices into its palette, or 0 and 1 of one bit.

    Raises:
        DecodeError: it has several channels, or values of more than 8 bits.
    """
    if image.mode in ("L", "P", "1"):
        return np.array(image, np.uint8)[..., None]
    deep = image.mode in ("I", "F") or image.mode.startswith("I;")
    raise DecodeError(
        f"channels=1 takes images of one channel with 8 bits, and this one is {image.mode}, "
        + ("with more bits" if deep else f"with {len(image.getbands())} channels")
        + (": write it with 8 bits, or read it by decode=" if deep else ": leave channels= out for RGB")
    )


def own_grey(image: Any) -> Pixels:
    """Return what `own_channel` does, of a PIL image that is to be interpolated.

    Raises:
        DecodeError: as `own_channel`; or its values are numbers that must not be interpolated.
    """
    if image.mode in ("P", "1"):
        raise DecodeError(
            f"its values are {'indices into a palette' if image.mode == 'P' else 'single bits'}, which must "
            "not be interpolated: use interpolation='nearest'"
        )
    return own_channel(image)


def nearest(start: float, end: float, count: int, stop: int | None = None) -> NDArray[np.int64]:
    """Return the pixels of one axis that nearest neighbour takes: [start, end) is resized to `count` pixels.

    Equal to Pillow's to the bit: as there, each position is the one before it plus the step, and the rounding
    errors of these sums decide at the border of two pixels.

    Args:
        stop: how many of them are computed. Default: all.
    """
    stop = count if stop is None else stop
    if stop > _LONGEST:
        raise DecodeError(f"{end - start:.0f} pixels resized to {count} are too many for nearest neighbour")
    first = int(start)
    step = (end - start) / count
    positions = np.full(stop, step)
    positions[0] = start - first + step * 0.5
    return first + np.add.accumulate(positions).astype(np.int64)


def _check_grey(jpeg: memoryview) -> None:
    components = jpeg_components(jpeg)
    if components != 1:
        raise DecodeError(
            f"channels=1 takes images of one channel, and this JPEG has {components or 'a damaged header'}: "
            "leave channels= out for RGB"
        )


def _grey_array(image: np.ndarray[Any, Any]) -> Pixels:
    pixels = image[..., None] if image.ndim == 2 else image
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 1 or 0 in pixels.shape:
        raise DecodeError(
            f"an array of shape {image.shape} and dtype {image.dtype} is no image of one channel: pass "
            "(height, width) uint8, or the bytes of an image file"
        )
    return pixels
