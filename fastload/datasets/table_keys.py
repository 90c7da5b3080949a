"""The keys of the objects that the columns of a table name, and the URL that they are relative to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fastload.datasets.table_fields import pattern_parts
from fastload.errors import ArgumentError
from fastload.store.failures import redacted
from fastload.store.open import check_protocol


def object_keys(patterns: Sequence[str], table: Any, url: str, read_from: str = "") -> tuple[str, list[str]]:
    """(URL, keys relative to it) of the objects that `patterns` name in each row, one row after the other.

    Keys may begin with the URL. Where `url` is "", they must be URLs or absolute paths that a file may name:
    then it is the deepest that all share.

    Args:
        patterns: columns, or texts with columns in braces; see `File`.
        table: a `pyarrow.Table` with their columns.
        read_from: the URL or path of the table's file; "": it was in memory. One in a store may not name
            files of this machine.

    Raises:
        ArgumentError: a key is null or empty, or is no text; or the keys share no URL.
    """
    columns = [_keys(pattern, table) for pattern in patterns]
    root = url or _shared_root(patterns, columns)
    if not url and _is_local(root) and not _is_local(read_from):
        raise ArgumentError(
            f"the table {redacted(read_from)!r} names files of this machine, in {root!r}: if you know them, "
            "pass that as url="
        )
    prefix = f"{root.rstrip('/')}/"
    keys = [[key.removeprefix(prefix) for key in column.to_pylist()] for column in columns]
    return root, [key for row in zip(*keys, strict=True) for key in row]


def _is_local(url: str) -> bool:
    protocol, separator, _ = url.partition("://")
    return not separator or protocol.lower() in ("file", "local")


def _keys(pattern: str, table: Any) -> Any:
    """The keys of one pattern as an Arrow array, one for each row."""
    pieces = []
    for text, name in pattern_parts(pattern):
        if text:
            pieces.append(pa.scalar(text, pa.large_string()))
        if name is not None:
            pieces.append(_texts(name, table[name]))
    return pc.binary_join_element_wise(*pieces, pa.scalar("", pa.large_string()))


def _texts(name: str, column: Any) -> Any:
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    types = pa.types
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    if not text and not types.is_integer(kind):
        raise ArgumentError(
            f"column {name!r} of the table is {kind}, and File needs keys of objects, as text"
        )
    column = column.cast(pa.large_string())
    empty = pc.fill_null(pc.equal(column, ""), True)
    row = pc.index(empty, True).as_py()
    if row >= 0:
        raise ArgumentError(f"column {name!r} of the table has no key in row {row:,}: drop such rows")
    return column


def _shared_root(patterns: Sequence[str], columns: Sequence[Any]) -> str:
    """The deepest directory or prefix of all keys, which are URLs or absolute paths."""
    ends = [pc.min_max(column).as_py() for column in columns]
    values = [end[name] for end in ends for name in ("min", "max")]  # what these share, all others do
    for pattern, value in zip(patterns, values[::2], strict=True):
        if "://" not in value and not value.startswith("/"):
            raise ArgumentError(
                f"column {pattern!r} of the table has keys such as {value!r}: pass what they are relative "
                "to, as in url='s3://bucket/train'"
            )
    for value in values:
        check_protocol(value, "the table", f"pass url={value.partition('://')[0] + '://...'!r}")
    root = os.path.commonprefix(values).rpartition("/")[0]  # noqa: RUF071 - `commonpath` breaks "://"
    if "://" in values[0] and root.count("/") < 2:
        raise ArgumentError(
            f"the table names objects of several buckets, {min(values)!r} and {max(values)!r}: make one "
            "dataset for each, and join them with torch.utils.data.ConcatDataset"
        )
    return root or "/"
