"""Samples behind a table of their offsets, as in MDS shards and LitData chunks, and the values inside.

    uint32 n | uint32 offsets[n + 1] | ... | records

Little-endian. The offsets count from the start of the file; the last one is its end. Sizes are checked before
memory is allocated.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.errors import ArgumentError, DecodeError
from fastload.formats.pieces import Offsets, Record, Splitter

if TYPE_CHECKING:
    from PIL.Image import Image


def table_size(count: int) -> int:
    """Return the bytes of a table of so many records."""
    return 4 * (count + 2)


def parse_table(table: memoryview, count: int, size: int | None) -> Offsets:
    """Return the offset and size of each record.

    Args:
        table: the first `table_size(count)` bytes of the file.
        count: of records, as the dataset's index.json says.
        size: of the file; None where it is not known.

    Raises:
        DecodeError: it is no such table, or the file was cut.
    """
    found = int.from_bytes(table[:4], "little")
    if found != count:
        raise DecodeError(
            f"the file begins with {found:,} for its number of samples, and index.json says {count:,}: it is "
            "of another kind or of another dataset; copy it again"
        )
    edges = np.frombuffer(table, "<u4", count + 1, 4).astype(np.uint64)
    if edges[0] < table_size(count) or not (edges[1:] > edges[:-1]).all():
        raise DecodeError("the offsets of its samples do not grow: the file is damaged; copy it again")
    if size is not None and edges[-1] != size:
        raise DecodeError(
            f"its samples end at byte {int(edges[-1]):,} of {size:,}: the file was cut; copy it again"
        )
    return np.stack([edges[:-1], edges[1:] - edges[:-1]], axis=1)


class OffsetSplitter(Splitter):
    """See `Splitter`: records whose offsets are known. Damage costs one record.

    Args:
        offset, end: see `Splitter`.
        offsets: of all records of the shard; each begins at the end of the one before or later.
        unwrap: the bytes of a record -> its payload. Raises DecodeError.
    """

    def __init__(
        self, offset: int, end: int | None, offsets: Offsets, unwrap: Callable[[memoryview], memoryview]
    ) -> None:
        super().__init__(offset, end)
        self._offsets = offsets
        self._unwrap = unwrap
        self._at = int(np.searchsorted(offsets[:, 0], offset))

    def next(self) -> Record | None:
        self.over = self.over or self._at == len(self._offsets)
        if self.over:
            return None
        pieces = self._pieces
        offset, size = self._offsets[self._at].tolist()
        pieces.skip(min(offset - pieces.offset, pieces.available))
        record = pieces.peek(size) if pieces.offset == offset else None
        if record is None:
            return (
                self._last(DecodeError("the shard was cut: it ends before this sample"))
                if pieces.closed
                else None
            )
        self._at += 1
        pieces.skip(size)
        try:
            return Record(offset, size, self._unwrap(record))
        except DecodeError as error:
            return Record(offset, size, None, error)


Open = Callable[[Any], Any]  # makes a value of its bytes

_MOST_PIXELS = 2 * 89_478_485  # as in images.decode
_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
# Pillow's mode -> bytes of a pixel; of "1", a row is padded to whole bytes.
_MODES = {
    "1": 0, "L": 1, "P": 1, "LA": 2, "La": 2, "PA": 2, "RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3, "RGBA": 4,
    "RGBa": 4, "RGBX": 4, "CMYK": 4, "I": 4, "F": 4, "I;16": 2, "I;16B": 2, "I;16L": 2,
}  # fmt: skip


def split_values(payload: memoryview, sizes: Sequence[tuple[str, int | None]]) -> dict[str, memoryview]:
    """Return the bytes of each value of a sample: uint32 size of each value without a fixed one | the values.

    Args:
        sizes: (name, fixed size) of each value; None where it differs from sample to sample.

    Raises:
        DecodeError: the sizes do not fill the sample.
    """
    free = sum(size is None for _, size in sizes)
    at = 4 * free
    told = iter(np.frombuffer(payload, "<u4", free).tolist() if at <= len(payload) else [len(payload)] * free)
    values = {}
    for name, fixed in sizes:
        size = next(told) if fixed is None else fixed
        values[name] = payload[at : at + size]
        at += size
    if at != len(payload):
        raise DecodeError(
            f"the sizes of its {len(sizes)} values add up to {at:,} bytes, but the sample has "
            f"{len(payload):,}: the shard is damaged; copy it again"
        )
    return values


def as_text(value: Any) -> str:
    """Return the text of UTF-8."""
    return str(value, "utf-8")


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
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ArgumentError("images as PIL images need Pillow: pip install pillow") from None
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


def cut_list(value: Any, start: int) -> list[memoryview]:
    """Return the parts of: `start` bytes | uint32 n | uint32 size of each part | the parts.

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
        parts.append(data[at : at + size])
        at += size
    if at != len(data):
        raise ValueError(f"a list of {at:,} bytes in {len(data):,}")
    return parts


def unpickle(value: Any) -> Any:
    """Return the object of a pickle, which can run any code: only where the user asked for it."""
    return pickle.loads(value)
