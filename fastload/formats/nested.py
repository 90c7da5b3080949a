"""LitData's nested values: lists and dicts of texts and numbers, as a tag of one byte and a content.

    0  u32 size, JSON                       5   u32 n, n x (text, value)        dict
    1  u32 n, n x text                      6   u32 n, u32 keys, the keys, n x keys x (tag, content): records
    2  u32 n, n x int64                     7   text     8  int64    9  float64    10  bool    11  None
    3  u32 n, n x float64                   in records: 16 None, 17 text, 18 int64, 19 float64, 20 bool
    4  u32 n, n x bool                      any other tag: the whole value is JSON, as older versions wrote it

A text is u32 size, UTF-8. Numbers are little-endian. A count is never larger than the bytes that are left.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

__all__ = ["loads"]

_MOST_DEPTH = 64
_UINT32, _INT64, _FLOAT64 = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")
_ARRAYS = {2: "<i8", 3: "<f8", 4: "?"}
_PLAIN = {16: 11, 17: 7, 18: 8, 19: 9, 20: 10}  # tags in records -> the same elsewhere


def loads(value: Any) -> Any:
    """The value.

    Raises:
        ValueError, IndexError, struct.error: it is damaged.
    """
    data = bytes(value)
    if not data or data[0] > 11:
        return json.loads(data)
    found, _ = _read(data, 0, 0)
    return found


def _read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    if depth > _MOST_DEPTH:
        raise ValueError(f"nested deeper than {_MOST_DEPTH}")
    tag, at = data[at], at + 1
    if tag in _ARRAYS:
        count, at = _count(data, at)
        dtype = np.dtype(_ARRAYS[tag])
        return np.frombuffer(data, dtype, count, at).tolist(), at + count * dtype.itemsize
    if tag == 0:
        size, at = _count(data, at)
        return json.loads(data[at : at + size]), at + size
    if tag == 1:
        count, at = _count(data, at)
        texts = []
        for _ in range(count):
            text, at = _text(data, at)
            texts.append(text)
        return texts, at
    if tag == 5:
        count, at = _count(data, at)
        found: dict[str, Any] = {}
        for _ in range(count):
            key, at = _text(data, at)
            found[key], at = _read(data, at, depth + 1)
        return found, at
    return _records(data, at) if tag == 6 else _scalar(data, tag, at)


def _records(data: bytes, at: int) -> tuple[list[dict[str, Any]], int]:
    count, at = _count(data, at)
    width, at = _count(data, at)
    keys = []
    for _ in range(width):
        key, at = _text(data, at)
        keys.append(key)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        row = {}
        for key in keys:
            row[key], at = _scalar(data, _PLAIN.get(data[at], -1), at + 1)
        rows.append(row)
    return rows, at


def _scalar(data: bytes, tag: int, at: int) -> tuple[Any, int]:
    if tag == 7:
        return _text(data, at)
    if tag in (8, 9):
        return (_INT64 if tag == 8 else _FLOAT64).unpack_from(data, at)[0], at + 8
    if tag == 10:
        return bool(data[at]), at + 1
    if tag == 11:
        return None, at
    raise ValueError(f"unknown tag before byte {at}")


def _text(data: bytes, at: int) -> tuple[str, int]:
    size, at = _count(data, at)
    return data[at : at + size].decode(), at + size


def _count(data: bytes, at: int) -> tuple[int, int]:
    (count,) = _UINT32.unpack_from(data, at)
    if count > len(data) - at - 4:
        raise ValueError(f"a count of {count:,} in {len(data) - at:,} bytes")
    return count, at + 4
