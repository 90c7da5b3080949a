"""MDS, the shards of MosaicML Streaming: their index.json, and the values of a sample.

    shard    table of offsets (`formats.packed`) | JSON | samples
    sample   uint32 size of each column without a fixed one | the columns, in the order of index.json

The encodings are those of streaming 0.13 (streaming/base/format/mds/encodings.py). Sizes inside a value are
compared with its bytes before anything is allocated.
"""

from __future__ import annotations

import json
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fastload.errors import DecodeError
from fastload.formats.packed import Open, as_array, as_pil, as_text, cut_list, pil_from_raw, unpickle

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


def _open_json(value: Any) -> Any:
    return json.loads(bytes(value))


def _open_list(value: Any, *, open_one: Open, start: int) -> list[Any]:
    return [open_one(one) for one in cut_list(value, start)]


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
    "jpeg_array": partial(_open_list, open_one=as_pil, start=0),
    "jpegarray": partial(_open_list, open_one=as_pil, start=0),
    "list[pil]": partial(_open_list, open_one=pil_from_raw, start=4),
    "list[jpeg]": partial(_open_list, open_one=as_pil, start=4),
    "list[png]": partial(_open_list, open_one=as_pil, start=4),
    "json": _open_json,
}
