"""Encoded images of any allowed format to RGB uint8: as an array, as a PIL image, smaller, or re-encoded.

The kernel or its fallback decodes JPEGs; Pillow, or another library (see `heif`), decodes the other formats,
on an allow-list. Every image's size is compared with `max_pixels` before its pixels are allocated. `strict`
decides about damaged JPEGs: True (the default) makes corrupt or missing data an error, and refuses a file
without its end marker, also where that part is not needed; False returns what could be decoded, as a viewer
would.

The EXIF orientation is not applied, as in torchvision's default loader. It is kept beside the pixels, in
every cache mode, for a transform that applies it (`ImageOps.exif_transpose`).

Three quarters of the time of a JPEG decode go into Huffman codes. That work is the same in every epoch, so a
cache can keep its result, a record: the quantised coefficients, in a form that vector instructions read
(`fastload/images/dct.h`). Functions of `fastload.images` take a record where they take a JPEG's bytes, and
its pixels are the same to the bit at each scale and in each crop. An index of the rows costs less: a crop of
a file that has one begins to decode at its own first row (`fastload/images/rows.h`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import simplejpeg

from fastload.errors import DecodeError
from fastload.formats.jpeg import (
    DCT_MAGIC,
    ROWS_MAGIC,
    exif_of,
    index_size,
    jpeg_orientation,
    used_index,
    with_orientation,
)
from fastload.images.heif import check_size, open_avif, open_heic, sniff_boxes, why_no_avif, why_no_heic
from fastload.images.kernel import Pixels, Source, active, record_writer, row_index

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow's own limit ("decompression bomb"): 0.5 GB of RGB.
MAX_PIXELS = 2 * 89_478_485
_LONGEST_JPEG = 65_500  # side, of libjpeg

# First bytes -> Pillow's name of the format: those of torchvision's extensions, and GIF. Only the content
# counts, never the name of the file.
_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (DCT_MAGIC, "JPEG"),  # as caches keep them; whatever reads JPEGs reads these (fastload.images.decode)
    (ROWS_MAGIC, "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),  # BigTIFF
    (b"MM\0+", "TIFF"),
)
# Formats of which two bytes are the signature. Hashes, ids and texts begin with these too, so the header
# counts: its size in a BMP, the width in a PPM, with the white space and comments that Pillow takes.
_HEADERS = (
    (re.compile(rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0", re.DOTALL), "BMP"),
    (re.compile(rb"P[1-6]\s+(#|\d+\s+(#|\d))"), "PPM"),
)
_BOXED: dict[str, Callable[[memoryview, int], Image]] = {"AVIF": open_avif, "HEIF": open_heic}


class Oriented(NamedTuple):
    """Decoded pixels, not turned yet, of an image with an EXIF orientation from 2 to 8."""

    pixels: Pixels
    orientation: int


class _Opened(NamedTuple):
    source: Source  # the JPEG's bytes, or decoded pixels for other formats
    width: int
    height: int
    orientation: int | None  # None: still to be read from the JPEG's header

    @property
    def turned(self) -> int:
        return jpeg_orientation(self.source) if self.orientation is None else self.orientation


def decode_image(data: Source, *, max_pixels: int = MAX_PIXELS, strict: bool = True) -> Pixels:
    """Decode an image to an array (height, width, 3) of RGB uint8, as Pillow's convert("RGB") makes it.

    Args:
        data: the file's bytes, in anything with the buffer protocol.
        max_pixels: the largest width x height that is decoded.
        strict: see the module.

    Raises:
        DecodeError: not an image of a known format, damaged, or too large.
    """
    source, width, height = open_image(data, max_pixels, strict)
    return _whole(source, width, height, max_pixels, strict)


def decode_pil(data: Source, *, exif: bool = False) -> Image:
    """Decode an image to a PIL image in RGB, for transforms that take one; torchvision's default loader.

    Its `info` has the EXIF orientation, for `ImageOps.exif_transpose`, and nothing else: no ICC profile.

    Args:
        exif: apply the EXIF orientation. torchvision does not, hence the default.

    Raises:
        DecodeError: as `decode_image`.
    """
    from PIL import Image, ImageOps

    opened = _open(data, MAX_PIXELS, True)
    image = Image.fromarray(_whole(*opened[:3], MAX_PIXELS, True))
    orientation = opened.turned
    if orientation != 1:
        image.info["exif"] = exif_of(orientation)
    return ImageOps.exif_transpose(image) if exif else image


def decode_resized(data: Source, short_side: int) -> Pixels:
    """Decode an image and resize its shorter side to `short_side`, never up; (height, width, 3) RGB uint8.

    The longer side is rounded down, as torchvision's Resize does; the filter is antialiased bilinear.
    """
    smaller = open_smaller(data, short_side)
    out = np.empty(smaller.shape, np.uint8)
    smaller.draw(out)
    return out


class Smaller(NamedTuple):
    """An image that is opened, and neither decoded nor resized.

    Attributes:
        shape: (height, width, 3) of the resized image.
        orientation: EXIF's, 1 to 8.
        draw: decodes and resizes it into an array of this shape. Raises `DecodeError`.
    """

    shape: tuple[int, int, int]
    orientation: int
    draw: Callable[[Pixels], None]


def open_smaller(data: Source, short_side: int) -> Smaller:
    """Open what `decode_resized` decodes, with the EXIF orientation: the form that caches keep.

    Raises:
        DecodeError: not an image of a known format, a damaged header, or too large.
    """
    opened = _open(data, MAX_PIXELS, True)
    shape = _resized_shape(opened, short_side)
    return Smaller(shape, opened.turned, lambda out: _draw_resized(opened, out))


def _resized_shape(opened: _Opened, short_side: int) -> tuple[int, int, int]:
    width, height = opened.width, opened.height
    if min(width, height) > short_side:
        width, height = resized_size(width, height, short_side)
    return height, width, 3


def _draw_resized(opened: _Opened, out: Pixels) -> None:
    source, width, height, _ = opened
    if out.shape[:2] != (height, width):
        item = (0, source, 0.0, 0.0, float(width), float(height), False)
        for _, reason in active().crop_resize(out[None], [item], True, True, MAX_PIXELS, True):
            raise DecodeError(reason)
    elif is_pixels(source):
        out[:] = source
    else:
        _decode_into(source, out, MAX_PIXELS, True)


def shrink(data: Source, short_side: int, quality: int) -> bytes:
    """Re-encode an image as a JPEG (4:2:0) whose shorter side is `short_side`, with its EXIF orientation.

    A JPEG that is not larger comes back unchanged: a second encoding would cost quality and gain little. Then
    only its header and its end marker are checked.
    """
    opened = _open(data, MAX_PIXELS, True)
    if not is_pixels(opened.source) and min(opened.width, opened.height) <= short_side:
        return bytes(opened.source)
    height, width, _ = shape = _resized_shape(opened, short_side)
    if max(height, width) > _LONGEST_JPEG:
        raise DecodeError(
            f"its copy in a cache of mode 'shrunk' would be a JPEG of {width} x {height} pixels, and "
            f"none has more than {_LONGEST_JPEG} on a side: use mode 'auto', 'raw' or 'decoded'"
        )
    pixels = np.empty(shape, np.uint8)
    _draw_resized(opened, pixels)
    encoded: bytes = simplejpeg.encode_jpeg(pixels, quality, "RGB", "420", fastdct=False)
    orientation = opened.turned
    return encoded if orientation == 1 else with_orientation(encoded, orientation)


def resized_size(width: int, height: int, short_side: int) -> tuple[int, int]:
    """Return (width, height) after torchvision's Resize(short_side): the longer side is rounded down."""
    if width <= height:
        return short_side, int(short_side * height / width)
    return int(short_side * width / height), short_side


def open_image(image: Source, max_pixels: int, strict: bool) -> tuple[Source, int, int]:
    """Return (source, width, height) of an image: a JPEG stays encoded, others are decoded to HWC uint8.

    Raises:
        DecodeError: as `decode_image`.
    """
    return _open(image, max_pixels, strict)[:3]


def _open(image: Source, max_pixels: int, strict: bool) -> _Opened:
    pixels, orientation = image if isinstance(image, Oriented) else (image, 1)
    if is_pixels(pixels):
        pixels = _check_pixels(pixels)
        return _Opened(pixels, pixels.shape[1], pixels.shape[0], orientation)
    data, name = find_format(image)
    if name == "JPEG":
        try:
            width, height = active().jpeg_size(data, max_pixels, strict)
        except ValueError as error:
            raise DecodeError(str(error)) from error
        return _Opened(data, width, height, None)
    pixels, orientation = decode_other(data, name, max_pixels)
    return _Opened(pixels, pixels.shape[1], pixels.shape[0], orientation)


def is_pixels(image: Source) -> bool:
    """Return whether this is decoded pixels, not the bytes of a file."""
    return isinstance(image, np.ndarray) and image.ndim != 1


def _check_pixels(image: np.ndarray[Any, Any]) -> Pixels:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise DecodeError(
            f"an array of shape {image.shape} and dtype {image.dtype} is not an image: "
            "pass (height, width, 3) uint8, or the bytes of an image file"
        )
    return image if image.strides[1:] == (3, 1) else np.ascontiguousarray(image)


def find_format(image: Source) -> tuple[memoryview, str]:
    """Return (bytes of an image file, Pillow's name of its format by its first bytes).

    Raises:
        DecodeError: it is no image of a known format.
    """
    data = _as_bytes(image)
    return data, _sniff(data)


def _as_bytes(image: Source) -> memoryview:
    """Return one-dimensional view of an image file in memory."""
    try:
        data = memoryview(image)
    except TypeError:
        raise DecodeError(
            f"{type(image).__name__} is not an image: "
            "pass the bytes of an image file, or (height, width, 3) uint8"
        ) from None
    if not data.c_contiguous:
        return memoryview(data.tobytes())
    return data.cast("B") if data.nbytes else memoryview(b"")


def is_image(data: Source) -> bool:
    """Return whether bytes begin like an image of a format that is decoded here."""
    try:
        return bool(_sniff(_as_bytes(data)))
    except DecodeError:
        return False


def _sniff(data: memoryview) -> str:
    """Return Pillow's name of the format, from the first bytes."""
    head = bytes(data[:32])
    for signature, name in _SIGNATURES:
        if head.startswith(signature):
            return name
    for header, name in _HEADERS:
        if header.match(head):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    boxed = sniff_boxes(data)
    if boxed is not None:
        return boxed
    if not head:
        raise DecodeError("0 bytes are not an image")
    if head.lstrip()[:1] == b"<":
        raise DecodeError(
            "this is HTML or XML, not an image: perhaps an error page that was saved under the image's name"
        )
    raise DecodeError(
        "not a JPEG, PNG, WebP, AVIF, HEIC, GIF, BMP, TIFF or PPM image: "
        f"its {len(data)} bytes start with {head[:8].hex(' ')}"
    )


def _whole(source: Source, width: int, height: int, max_pixels: int, strict: bool) -> Pixels:
    """Return all pixels of an opened image."""
    if is_pixels(source):
        pixels: Pixels = source
        return pixels
    out = np.empty((height, width, 3), np.uint8)
    _decode_into(source, out, max_pixels, strict)
    return out


def _decode_into(data: Source, out: Pixels, max_pixels: int, strict: bool) -> None:
    try:
        active().decode(data, out, 1, max_pixels, strict)
    except ValueError as error:
        raise DecodeError(str(error)) from error


def _rgb(image: Image) -> Pixels:
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        # The same colours. Converting straight to RGB, Pillow would warn about every such image.
        return np.array(image.convert("RGBA").convert("RGB"))
    return np.array(image.convert("RGB"))


def decode_other(
    data: memoryview, name: str, max_pixels: int, pixels_of: Callable[[Image], Pixels] = _rgb
) -> tuple[Pixels, int]:
    """Return (pixels, EXIF orientation) of an image of another format than JPEG, by Pillow.

    Args:
        name: Pillow's, of the format.
        pixels_of: an opened image -> its pixels.
    """
    why = why_not(name)
    if why is not None:
        raise DecodeError(why)
    from PIL import Image

    try:
        if name in _BOXED:
            opened = _BOXED[name](data, max_pixels)
        else:
            opened = Image.open(BytesIO(data), formats=[name])
        with opened as image:
            check_size(image.width, image.height, max_pixels)
            return pixels_of(image), _orientation_of(image)
    except DecodeError:  # of `pixels_of`, or of a file that TorchCodec cannot be given
        raise
    except Exception as error:  # on hostile bytes, Pillow's plugins raise exceptions of any type
        raise DecodeError(f"{name}: {error}") from error


def why_not(name: str) -> str | None:
    """Return None where images of this format can be decoded here; else the reason and the remedy."""
    from PIL import features

    if name == "WEBP" and not features.check("webp"):
        return (
            "this build of Pillow has no WebP: pip uninstall -y pillow-simd, then "
            "pip install --force-reinstall pillow"
        )
    return {"AVIF": why_no_avif, "HEIF": why_no_heic}[name]() if name in _BOXED else None


def _orientation_of(image: Image) -> int:
    """Return the orientation, read once the pixels are loaded: by then Pillow has applied that of a TIFF."""
    try:
        orientation = image.getexif().get(0x0112)
    except Exception:  # broken EXIF data does not spoil an image that decodes
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def has_records() -> bool:
    """Return whether this process reads and writes records: the kernel does, its fallback does not."""
    return record_writer() is not None


def to_dct(data: Source) -> bytes:
    """Return the record of an image file, or the file's own bytes where there is none.

    There is none for formats other than JPEG, for damaged files, for a few rare kinds of JPEG (several scans
    with more than 10 blocks an MCU; progressive files without their last scans), and without the kernel.
    """
    write = record_writer()
    try:
        file, name = find_format(data)
        if name == "JPEG" and write is not None:
            return write(file, jpeg_orientation(file), MAX_PIXELS)
    except (DecodeError, ValueError):
        pass  # the decode says what is wrong with it
    return bytes(data)


def with_rows(data: Source) -> Any:
    """Return an image file behind the index of its rows, or the file itself where there is none.

    There is none for formats other than JPEG, for damaged files, for those of several scans or with
    arithmetic codes, and without the kernel.
    """
    index = row_index(data, MAX_PIXELS)
    return data if index is None else b"".join((index, data))


class Unindexed(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a file that is on its way into a cache, which is to have the index of its rows too.

    The first crop makes the index on the way, at a quarter of the time that reading through the file takes.
    So the file is written after it: whoever is handed such an array calls `keep` once it has made its sample.
    """

    _index: bytearray | None = None
    _write: Callable[[Any], object] | None = None
    _give_up: Callable[[], object] | None = None

    @classmethod
    def of(cls, file: Source) -> Unindexed:
        """Return a view of these bytes."""
        return np.frombuffer(file, np.uint8).view(cls)

    def bind(self, write: Callable[[Any], object], give_up: Callable[[], object]) -> None:
        """Set what `keep` calls with this file, and what is called if nobody ever calls `keep`."""
        self._write, self._give_up = write, give_up

    def index_room(self, height: int) -> bytearray:
        """Return memory for the index of an image of that height, which a crop makes; see `kernel.Item`."""
        self._index = bytearray(index_size(-(-height // 8)))
        return self._index

    def index(self) -> bytes:
        """Return the index of its rows; empty where it has none."""
        made = None if self._index is None else used_index(memoryview(self._index))
        return row_index(self.data, MAX_PIXELS) or b"" if made is None else bytes(made)

    def keep(self) -> None:
        """Write it, unless that was done; then it leads no more to the cache, whose queue may hold it."""
        write, self._write, self._give_up = self._write, None, None
        if write is not None:
            write(self)

    def __del__(self) -> None:
        if self._give_up is not None:
            self._give_up()
