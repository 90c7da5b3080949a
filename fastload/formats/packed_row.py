"""A row of a table as one record, with its large binary values last, so that they are read without a copy.

    head: (values, binaries) in the format of `sample`  |  binary values  |  u32 size of the head

`values` maps each name to its value, in order, and to None for those in `binaries`, which maps their names to
their sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from fastload.errors import DecodeError
from fastload.formats.sample import dump, load

__all__ = ["dump_row", "load_row"]

_SIZE = struct.Struct("<I")


def dump_row(values: Mapping[str, Any]) -> memoryview:
    """The row as one record. Its memoryviews come last; all other values are those of `sample.dump`."""
    binaries = {name: value for name, value in values.items() if isinstance(value, memoryview)}
    plain = {name: None if name in binaries else value for name, value in values.items()}
    head = dump((plain, {name: len(value) for name, value in binaries.items()}))
    return memoryview(b"".join((head, *binaries.values(), _SIZE.pack(len(head)))))


def load_row(record: Any) -> dict[str, Any]:
    """The values of a row; those that were memoryviews are views of the record.

    Raises:
        DecodeError: the record was not made by `dump_row`.
    """
    memory = memoryview(record)
    at = len(memory) - _SIZE.size
    (stop,) = _SIZE.unpack_from(memory, at) if at >= 0 else (len(memory),)
    if stop > at:
        raise DecodeError("not a cached row: it is too short")
    head = load(memory[:stop])
    if not (isinstance(head, tuple) and len(head) == 2 and all(type(part) is dict for part in head)):
        raise DecodeError("not a cached row: its head has no values and sizes")
    values: dict[str, Any] = head[0]
    for name, size in head[1].items():
        if not isinstance(size, int) or not 0 <= size <= at - stop:
            raise DecodeError(f"not a cached row: a value of {size!r:.60} bytes")
        values[name] = memory[stop : stop + size]
        stop += size
    if stop != at:
        raise DecodeError("not a cached row: its values do not fill it")
    return values
