"""Encoded images of any allowed format to RGB uint8: as an array, as a PIL image, smaller, or re-encoded.

JPEG goes through the kernel or its twin; every other format through Pillow, on an allow-list. Every image's
size is compared with `max_pixels` before its pixels are allocated. `strict` is the switch for damaged JPEGs:
True (the default) makes corrupt or missing data an error, and refuses a file without its end whatever part
of it is wanted; False serves what could be decoded, as a viewer would.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import simplejpeg

from fastload.errors import ArgumentError, DecodeError
from fastload.images import native
from fastload.images.native import Pixels, Source

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_PIXELS", "decode_image", "decode_pil", "decode_resized", "open_image", "shrink"]

# Where Pillow refuses to open an image ("decompression bomb"): 0.5 GB of RGB.
MAX_PIXELS = 2 * 89_478_485

# First bytes -> Pillow's name of the format: torchvision's extensions, and GIF. A format is
# recognised by content, never by the name of the file.
_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    *((b"P%d" % kind, "PPM") for kind in range(1, 7)),
)


def decode_image(data: Source, *, max_pixels: int = MAX_PIXELS, strict: bool = True) -> Pixels:
    """Decode an image to an array (height, width, 3) of RGB uint8: what Pillow's convert("RGB") gives.

    Args:
        data: the file's bytes, in anything with the buffer protocol.
        max_pixels: the largest width x height that is decoded.
        strict: see the module.

    Raises:
        DecodeError: not an image of a known format, damaged, or too large.
    """
    source, width, height = open_image(data, max_pixels, strict)
    return _whole(source, width, height, max_pixels, strict)


def decode_pil(
    data: Source,
    *,
    min_size: int | None = None,
    exif: bool = False,
    max_pixels: int = MAX_PIXELS,
    strict: bool = True,
) -> Image:
    """Decode an image to a PIL image in RGB, for transforms that take one; torchvision's default loader.

    Args:
        min_size: a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, which is faster, as long as no side
            falls below this many pixels. None: always the full size.
        exif: turn the image as its EXIF orientation says. torchvision does not, hence the default.

    Raises:
        ArgumentError: Pillow is not installed.
        DecodeError: as `decode_image`.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ArgumentError(
            "transforms on PIL images need Pillow: pip install 'fastload[simd]' or 'fastload[pillow]'"
        ) from None
    source, width, height = open_image(data, max_pixels, strict)
    if not _is_pixels(source):
        denominator = 1
        while min_size is not None and denominator < 8 and min(width, height) >= 2 * denominator * min_size:
            denominator *= 2
        source = _decode_jpeg(source, width, height, denominator, max_pixels, strict)
    image = Image.fromarray(source)
    turn = _exif_turn(data) if exif and not _is_pixels(data) else None
    return image if turn is None else image.transpose(turn)


def decode_resized(
    data: Source, short_side: int, *, max_pixels: int = MAX_PIXELS, strict: bool = True
) -> Pixels:
    """Decode an image and resize its shorter side to `short_side`, never up; (height, width, 3) RGB uint8.

    The longer side is rounded down, as torchvision's Resize does; the filter is antialiased bilinear.
    """
    source, width, height = open_image(data, max_pixels, strict)
    if min(width, height) <= short_side:
        return _whole(source, width, height, max_pixels, strict)
    new_width, new_height = resized_size(width, height, short_side)
    out = np.empty((1, new_height, new_width, 3), np.uint8)
    item = (0, source, 0.0, 0.0, float(width), float(height), False)
    for _, reason in native.active().crop_resize(out, [item], True, True, max_pixels, strict):
        raise DecodeError(reason)
    return out.reshape(out.shape[1:])


def shrink(
    data: Source, short_side: int, quality: int, *, max_pixels: int = MAX_PIXELS, strict: bool = True
) -> bytes:
    """Re-encode an image as a JPEG (4:2:0) whose shorter side is `short_side`.

    A JPEG that is not larger than that comes back as it is: encoding it again would cost quality and gain
    little. It is then looked at no further than to see that it was not cut.
    """
    source, width, height = open_image(data, max_pixels, strict)
    if not _is_pixels(source) and min(width, height) <= short_side:
        return bytes(source)
    pixels = decode_resized(source, short_side, max_pixels=max_pixels, strict=strict)
    encoded: bytes = simplejpeg.encode_jpeg(pixels, quality, "RGB", "420", fastdct=False)
    return encoded


def resized_size(width: int, height: int, short_side: int) -> tuple[int, int]:
    """(width, height) after torchvision's Resize(short_side): the longer side is rounded down."""
    if width <= height:
        return short_side, int(short_side * height / width)
    return int(short_side * width / height), short_side


def open_image(image: Source, max_pixels: int, strict: bool) -> tuple[Source, int, int]:
    """(source, width, height) of an image: a JPEG stays encoded, everything else is decoded to HWC uint8.

    Raises:
        DecodeError: as `decode_image`.
    """
    if _is_pixels(image):
        pixels = _check_pixels(image)
        return pixels, pixels.shape[1], pixels.shape[0]
    data = _as_bytes(image)
    if _sniff(data) == "JPEG":
        try:
            width, height = native.active().jpeg_size(data, max_pixels, strict)
        except ValueError as error:
            raise DecodeError(str(error)) from error
        return data, width, height
    pixels = _decode_other(data, max_pixels)
    return pixels, pixels.shape[1], pixels.shape[0]


def _is_pixels(image: Source) -> bool:
    """Decoded, rather than the bytes of a file?"""
    return isinstance(image, np.ndarray) and image.ndim != 1


def _check_pixels(image: np.ndarray[Any, Any]) -> Pixels:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise DecodeError(
            f"an array of shape {image.shape} and dtype {image.dtype} is no image: "
            "pass (height, width, 3) uint8, or the bytes of an image file"
        )
    return image if image.strides[1:] == (3, 1) else np.ascontiguousarray(image)


def _as_bytes(image: Source) -> memoryview:
    """One-dimensional view of an image file in memory."""
    try:
        data = memoryview(image)
    except TypeError:
        raise DecodeError(
            f"{type(image).__name__} is no image: "
            "pass the bytes of an image file, or (height, width, 3) uint8"
        ) from None
    if not data.c_contiguous:
        return memoryview(data.tobytes())
    return data.cast("B") if data.nbytes else memoryview(b"")


def _sniff(data: memoryview) -> str:
    """Pillow's name of the format, from the first bytes."""
    head = bytes(data[:16])
    for signature, name in _SIGNATURES:
        if head.startswith(signature):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if not head:
        raise DecodeError("0 bytes are no image")
    if head.lstrip()[:1] == b"<":
        raise DecodeError(
            "this is HTML or XML, no image: perhaps an error page that was saved under its name"
        )
    raise DecodeError(
        "not a JPEG, PNG, WebP, GIF, BMP, TIFF or PPM image: "
        f"its {len(data)} bytes start with {head[:8].hex(' ')}"
    )


def _whole(source: Source, width: int, height: int, max_pixels: int, strict: bool) -> Pixels:
    """All pixels of an opened image."""
    if not _is_pixels(source):
        return _decode_jpeg(source, width, height, 1, max_pixels, strict)
    pixels: Pixels = source
    return pixels


def _decode_jpeg(
    data: Source, width: int, height: int, denominator: int, max_pixels: int, strict: bool
) -> Pixels:
    out = np.empty((-(-height // denominator), -(-width // denominator), 3), np.uint8)
    try:
        native.active().decode(data, out, denominator, max_pixels, strict)
    except ValueError as error:
        raise DecodeError(str(error)) from error
    return out


def _decode_other(data: memoryview, max_pixels: int) -> Pixels:
    """RGB pixels of anything that is not a JPEG, by Pillow."""
    name = _sniff(data)
    try:
        from PIL import Image, features
    except ImportError:
        raise DecodeError(
            f"{name} images need Pillow: pip install 'fastload[simd]' or 'fastload[pillow]'"
        ) from None
    if name == "WEBP" and not features.check("webp"):
        raise DecodeError(
            "this build of Pillow has no WebP: pip uninstall -y pillow-simd, then pip install pillow"
        )
    try:
        with Image.open(BytesIO(data), formats=[name]) as image:
            if image.width * image.height > max_pixels:
                raise ValueError(
                    f"{image.width} x {image.height} pixels are more than max_pixels={max_pixels}"
                )
            if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
                # The same colours; straight to RGB Pillow warns about every such image.
                return np.array(image.convert("RGBA").convert("RGB"))
            return np.array(image.convert("RGB"))
    except Exception as error:  # on hostile bytes Pillow's plugins raise whatever their parsing runs into
        raise DecodeError(f"{name}: {error}") from error


def _exif_turn(data: Source) -> Any:
    """How to transpose an image so that it stands as its EXIF orientation says; None: as it is."""
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    try:
        with Image.open(BytesIO(data), formats=[_sniff(_as_bytes(data))]) as image:
            orientation = image.getexif().get(0x0112)
            return turns.get(orientation) if isinstance(orientation, int) else None
    except (OSError, ValueError, SyntaxError, KeyError, TypeError):
        return None  # broken EXIF of an image that decodes: it stays as it is
