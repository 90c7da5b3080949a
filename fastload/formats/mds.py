"""MDS, the shards of MosaicML Streaming; and what LitData's chunks share with them.

    shard    uint32 n | uint32 offsets[n + 1] | JSON | samples
    sample   uint32 size of each column without a fixed one | the columns, in the order of index.json

Little-endian. The offsets count from the start of the file; the last one is its end. The encodings are those
of streaming 0.13 (streaming/base/format/mds/encodings.py). Sizes are compared with the bytes at hand before
anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fastload.errors import DecodeError
from fastload.formats.pieces import Offsets, Record, Splitter
from fastload.formats.values import (
    Open,
    as_array,
    as_json,
    as_pil,
    as_text,
    open_list,
    pil_from_raw,
    unpickle,
)


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


IMAGES = ("jpeg", "png")
_COMPRESSIONS = ("zstd", "gz", "bz2")


class MDSColumn(NamedTuple):
    """A column; `size` is None where it differs from sample to sample."""

    name: str
    encoding: str
    size: int | None


class MDSShard(NamedTuple):
    """One entry of index.json.

    name: of the file that is read. bytes: its size. raw_bytes: what it inflates to. compressed: whether it
    is.
    """

    name: Any
    bytes: int
    raw_bytes: int
    samples: int
    compressed: bool
    columns: tuple[MDSColumn, ...]


def parse_shard(entry: Any) -> MDSShard:
    """Return one entry of the list "shards" of index.json.

    Raises:
        DecodeError: it is not of MDS version 2, or is compressed by what is not read here.
    """
    try:
        version, form = entry["version"], entry["format"]
        if (version, form) != (2, "mds"):
            raise DecodeError(
                f"shards of format {form!r}, version {version!r}, are not read: write them with "
                "streaming.MDSWriter"
            )
        compression = entry["compression"]
        if compression and compression.partition(":")[0] not in _COMPRESSIONS:
            raise DecodeError(
                f"shards compressed by {compression!r} are not read: write them with compression='zstd', "
                "'gz', 'bz2' or None"
            )
        columns = tuple(
            MDSColumn(str(name), str(encoding), int(size) if size else None)
            for name, encoding, size in zip(
                entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True
            )
        )
        raw, samples = entry["raw_data"], int(entry["samples"])
        read = entry["zip_data"] if compression else raw
        found = MDSShard(
            read["basename"], int(read["bytes"]), int(raw["bytes"]), samples, bool(compression), columns
        )
    except DecodeError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DecodeError(f"not an entry of MDS: {type(error).__name__} {error}") from None
    if min(found.bytes, found.raw_bytes, found.samples) < 0 or any((c.size or 0) < 0 for c in columns):
        raise DecodeError("not an entry of MDS: a size in it is negative")
    return found


def opener(encoding: str, *, unsafe: bool) -> Open | None:
    """Return a function of a column's bytes, as streaming.StreamingDataset has it; None: it is not opened.

    Args:
        encoding: as in index.json.
        unsafe: unpickle "pkl".
    """
    name, _, arguments = encoding.partition(":")
    if name == "ndarray":
        return _ndarray_opener(arguments)
    if name == "pkl":
        return unpickle if unsafe else None
    if name == "jpeg":
        arguments = ""  # the quality, which only a writer needs
    return None if arguments else _OPENERS.get(name)


def encodings() -> list[str]:
    """Return the encodings that are known."""
    return sorted({*_OPENERS, "ndarray"})


# --- values

_VALUE_DTYPES = {
    8: "<u1", 9: "<i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8",
    65: "<i8", 66: "<f8",
}  # fmt: skip
_NAMED = {np.dtype(text).name: text for text in _VALUE_DTYPES.values()}
_SHAPE_DTYPES = ("<u1", "<u2", "<u4", "<u8")


def _ndarray_opener(arguments: str) -> Open | None:
    dtype, _, shape = arguments.partition(":")
    try:
        sizes = tuple(int(size) for size in shape.split(",")) if shape else None
    except ValueError:
        return None
    if (dtype and dtype not in _NAMED) or (sizes is not None and min(sizes) < 1):
        return None
    return partial(_open_ndarray, dtype=_NAMED.get(dtype), shape=sizes)


def _open_ndarray(value: Any, *, dtype: str | None, shape: tuple[int, ...] | None) -> Any:
    """Open an array. Its dtype and its shape lie before the values, unless the column fixes them."""
    data = memoryview(value)
    at = 0
    if dtype is None:
        dtype, at = _VALUE_DTYPES[data[0]], 1
    if shape is None:
        axes, kind = data[at] >> 2, np.dtype(_SHAPE_DTYPES[data[at] & 3])
        shape = tuple(np.frombuffer(data, kind, axes, at + 1).tolist())
        at += 1 + axes * kind.itemsize
    return as_array(data[at:], np.dtype(dtype), shape)


def _open_scalar(value: Any, *, dtype: str) -> Any:
    (number,) = np.frombuffer(value, dtype)
    return number


def _open_int(value: Any) -> int:
    if len(value) != 8:
        raise ValueError(f"{len(value)} bytes")
    return int.from_bytes(value, "little", signed=True)


def _open_decimal(value: Any) -> Decimal:
    try:
        return Decimal(_short_text(value))
    except ArithmeticError:
        raise ValueError("not a decimal number") from None


def _short_text(value: Any) -> str:
    if len(value) > 4300:  # Python's own limit of digits
        raise ValueError(f"{len(value)} digits")
    return as_text(value)


def _open_str_int(value: Any) -> int:
    return int(_short_text(value))


def _open_str_float(value: Any) -> float:
    return float(_short_text(value))


_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_OPENERS: dict[str, Open] = {
    "bytes": bytes,
    "str": as_text,
    "int": _open_int,
    **{
        name: partial(_open_scalar, dtype=_NAMED[name])
        for name in (*_SCALARS, "float16", "float32", "float64")
    },
    "str_int": _open_str_int,
    "str_float": _open_str_float,
    "str_decimal": _open_decimal,
    "pil": pil_from_raw,
    "jpeg": as_pil,
    "png": as_pil,
    "jpeg_array": partial(open_list, open_one=as_pil, start=0),
    "jpegarray": partial(open_list, open_one=as_pil, start=0),
    "list[pil]": partial(open_list, open_one=pil_from_raw, start=4),
    "list[jpeg]": partial(open_list, open_one=as_pil, start=4),
    "list[png]": partial(open_list, open_one=as_pil, start=4),
    "json": as_json,
}
