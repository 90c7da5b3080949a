"""FFCV's .beton: its header, its fields, and the parts of a sample.

    header | descriptor of each field | metadata, one row per sample | pages | allocation table

A row holds numbers, and for images, bytes and arrays the offset of a part in a page. The allocation table has
(sample, offset, size) of every part. All of a sample's parts lie in one page. Numbers are little-endian; the
layout is that of ffcv 1.0 (ffcv/types.py, version 2).

A record here is the row of a sample, followed by the bytes from its first part to the end of its last one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import DecodeError
from fastload.formats.pieces import hint
from fastload.formats.values import as_array

_VERSION = 2
_HEADER = np.dtype(
    [("version", "<u2"), ("fields", "<u2"), ("page", "<u4"), ("samples", "<u8"), ("allocation", "<u8")],
    align=True,
)
HEADER = _HEADER.itemsize
_DESCRIPTOR = np.dtype([("kind", "u1"), ("name", "u1", 16), ("arguments", "u1", 1024)])
_ALLOCATED = np.dtype([("sample", "<u8"), ("offset", "<u8"), ("size", "<u8")])
_ARRAY_ARGUMENTS = np.dtype([("shape", "<u8", 32), ("length", "<u8")])
_KINDS = ("float", "int", "image", "bytes", "array", "json", "tensor")
_IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("offset", "<u8")])
_BYTES = np.dtype([("offset", "<u8"), ("size", "<u8")])
_ROW_TYPES: dict[str, Any] = {
    "float": "<f8", "int": "<i8", "image": _IMAGE, "bytes": _BYTES, "json": _BYTES, "array": "<u8",
    "tensor": "<u8",
}  # fmt: skip
_JPEG, _RAW = 0, 1


class BetonHeader(NamedTuple):
    """fields: their number. page: the bytes of a page. allocation: the offset of the allocation table."""

    fields: int
    page: int
    samples: int
    allocation: int

    @property
    def rows(self) -> int:
        """The offset of the metadata."""
        return HEADER + self.fields * _DESCRIPTOR.itemsize


class BetonField(NamedTuple):
    """A field; dtype and shape are those of arrays."""

    name: str
    kind: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]


def parse_header(head: memoryview, size: int) -> BetonHeader:
    """Return the header of a file of that size.

    Raises:
        DecodeError: it is no .beton, or was cut.
    """
    if len(head) < HEADER:
        raise DecodeError(f"a .beton has at least {HEADER} bytes, found {len(head)}")
    version, fields, page, samples, allocation = np.frombuffer(head, _HEADER, 1)[0].item()
    if version != _VERSION or not fields:
        raise DecodeError(
            f"not a .beton of FFCV: its version is {version}, and {_VERSION} is read{hint(head)}"
        )
    found = BetonHeader(fields, page, samples, allocation)
    if not found.rows + samples * 8 <= allocation <= size:
        raise DecodeError(
            f"the allocation table of the .beton would begin at byte {allocation:,} of {size:,}: the file "
            "was cut, or its writer did not finish; write it again"
        )
    return found


def parse_fields(descriptors: memoryview) -> list[BetonField]:
    """Return the fields.

    Raises:
        DecodeError: one of them is of the user's own kind, or damaged.
    """
    found = []
    for descriptor in np.frombuffer(descriptors, _DESCRIPTOR):
        name = descriptor["name"].tobytes().partition(b"\0")[0].decode("ascii", "replace")
        kind = int(descriptor["kind"])
        if kind >= len(_KINDS):
            raise DecodeError(
                f"field {name!r} is of kind {kind}, one of the author's own classes, whose rows only that "
                "class knows: write the file with FFCV's own fields"
            )
        dtype: np.dtype[Any] | None = None
        shape: tuple[int, ...] = ()
        if _KINDS[kind] in ("array", "tensor"):
            dtype, shape = _array_of(name, descriptor["arguments"])
        found.append(BetonField(name, _KINDS[kind], dtype, shape))
    if len({field.name for field in found}) < len(found):
        raise DecodeError("two fields of the .beton have one name")
    return found


def _array_of(name: str, arguments: NDArray[np.uint8]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    told = np.frombuffer(arguments, _ARRAY_ARGUMENTS, 1)[0]
    text = arguments[_ARRAY_ARGUMENTS.itemsize :][: int(told["length"])].tobytes()
    shape: list[int] = told["shape"].tolist()
    while shape and not shape[-1]:
        shape.pop()
    try:
        ((_, code),) = json.loads(text)
        dtype = np.dtype(str(code))
    except (ValueError, TypeError, SyntaxError) as error:
        raise DecodeError(f"field {name!r} has a dtype that is not read: {error}") from None
    if dtype.kind not in "biufcSU" or not dtype.itemsize or 0 in shape:
        raise DecodeError(
            f"field {name!r} is an array of {dtype} and shape {tuple(shape)}, which is not read"
        )
    return dtype, tuple(shape)


def row_type(fields: list[BetonField]) -> np.dtype[Any]:
    """Return the dtype of a row of the metadata."""
    return np.dtype([("", _ROW_TYPES[field.kind]) for field in fields], align=True)


def parts_of(header: BetonHeader, row_bytes: int, allocated: memoryview) -> NDArray[np.uint64]:
    """Return the offset and size of each sample's parts together: uint64 (n, 2).

    A sample without parts has the offset of its row and no bytes.

    Raises:
        DecodeError: the allocation table points outside of the pages, over several pages for one sample, or
            to one place for two of them.
    """
    table = np.frombuffer(allocated, _ALLOCATED, len(allocated) // _ALLOCATED.itemsize)
    table = table[table["size"] > 0]  # an empty part has the offset of the next sample's
    samples, starts, sizes = table["sample"], table["offset"], table["size"]
    first = header.rows + header.samples * row_bytes
    last = np.uint64(header.allocation)
    good = (samples < header.samples) & (starts >= first) & (starts <= last) & (sizes <= last)
    if not (good.all() and (starts + sizes <= last).all()):
        raise DecodeError(
            "the allocation table of the .beton points outside of its pages: the file is damaged"
        )
    begin = np.full(header.samples, last, np.uint64)
    end = np.zeros(header.samples, np.uint64)
    np.minimum.at(begin, samples.astype(np.int64), starts)
    np.maximum.at(end, samples.astype(np.int64), starts + sizes)
    none = end == 0
    begin[none] = end[none] = header.rows + np.flatnonzero(none).astype(np.uint64) * np.uint64(row_bytes)
    if len(np.unique(begin)) < len(begin):  # a cache knows a sample by its offset
        raise DecodeError("two samples of the .beton begin at one offset: the file is damaged")
    if len(table) and int((end - begin).max()) > header.page:
        raise DecodeError("the parts of a sample lie in several pages of the .beton: the file is damaged")
    return np.stack([begin, end - begin], axis=1)


class BetonRecords:
    """Splits records into the values of their fields; JPEGs stay encoded, raw images are (H, W, 3) pixels."""

    def __init__(self, fields: list[BetonField]) -> None:
        self._fields = fields
        self._row = row_type(fields)

    def __call__(self, payload: memoryview) -> dict[str, Any]:
        """Return the bytes of each field, or its number.

        Raises:
            DecodeError: a part lies outside of the record.
        """
        size = self._row.itemsize
        row = np.frombuffer(payload, self._row, 1)[0].item() if len(payload) >= size else ()
        if not row:
            raise DecodeError("the record is shorter than a row of the .beton")
        starts = [_start(field, value) for field, value in zip(self._fields, row, strict=True)]
        base = min((start for start in starts if start is not None), default=0)
        parts, found = payload[size:], {}
        edges = sorted({start - base for start in starts if start is not None} | {len(parts)})
        for field, value, start in zip(self._fields, row, starts, strict=True):
            if start is None:
                found[field.name] = value if field.kind in ("int", "float") else memoryview(b"")
                continue
            at = start - base
            end = at + _size(field, value, next((edge for edge in edges if edge > at), at) - at)
            if not at <= end <= len(parts):
                raise DecodeError(f"field {field.name!r} ends outside of its sample: the .beton is damaged")
            part = parts[at:end]
            found[field.name] = _pixels(part, value) if field.kind == "image" and value[0] == _RAW else part
        return found


def _start(field: BetonField, value: Any) -> int | None:
    """Return the offset of a field's part in the file; None: it has none."""
    if field.kind in ("int", "float"):
        return None
    if field.kind == "image":
        return int(value[3])
    if field.kind in ("bytes", "json"):
        return int(value[0]) if value[1] else None
    return int(value)


def _size(field: BetonField, value: Any, to_next: int) -> int:
    """Return the bytes of a field's part; that of a JPEG ends where the next part begins."""
    if field.kind == "image":
        return 3 * int(value[1]) * int(value[2]) if value[0] == _RAW else to_next
    if field.kind in ("bytes", "json"):
        return int(value[1])
    assert field.dtype is not None
    return math.prod(field.shape) * field.dtype.itemsize


def _pixels(part: memoryview, value: Any) -> NDArray[np.uint8]:
    return np.frombuffer(part, np.uint8).reshape(value[2], value[1], 3)


def opener(field: BetonField) -> Callable[[Any], Any]:
    """Return a function that makes the value of what `BetonRecords` gives."""
    if field.kind in ("array", "tensor"):
        assert field.dtype is not None
        return partial(_open_array, dtype=field.dtype, shape=field.shape, tensor=field.kind == "tensor")
    openers: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "json": _open_json}
    return openers.get(field.kind, bytes)


def _open_array(value: Any, *, dtype: np.dtype[Any], shape: tuple[int, ...], tensor: bool) -> Any:
    array = as_array(memoryview(value), dtype, shape)
    return torch.from_numpy(array) if tensor else array


def _open_json(value: Any) -> Any:
    return json.loads(bytes(value).partition(b"\0")[0])
