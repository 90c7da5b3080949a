"""Columns of a table in memory that all workers share: one Arrow file, of which each process maps the pages.

A worker has no Python object of a row that it does not read. Millions of rows take the bytes of their values,
once for all processes of a node.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash
from numpy.typing import NDArray

from fastload.datasets.arrow_values import check_type, decoded, to_python
from fastload.datasets.protocols import Allocate
from fastload.datasets.table_fields import pattern_parts
from fastload.errors import ArgumentError
from fastload.formats.sample import dump
from fastload.store.failures import redacted
from fastload.store.open import check_protocol
from fastload.store.process import SharedFile


class TableColumns:
    """The values of a table by row and column. Immutable; copies and workers share them.

    Args:
        file: as `TableColumns.of` wrote it.

    See `ValueColumns`: regular are the columns without lists, tensors and structs.
    """

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        table = mapped_table(file)
        self._count: int = table.num_rows
        self._columns = {name: table[name].chunk(0) for name in table.column_names}
        self._value_of = {name: _reader(column) for name, column in self._columns.items()}
        # Of rows that were asked for. Forked processes share them, and each is computed once for all.
        shared = mmap.mmap(-1, max(1, 8 * self._count))
        self._identities: NDArray[np.uint64] = np.frombuffer(shared, np.uint64, self._count)
        self.names = list(self._columns)
        self.regular = frozenset(name for name in self.names if not _has_parts(self._columns[name].type))

    @classmethod
    def of(cls, table: Any) -> TableColumns:
        """The columns of a `pyarrow.Table` that has rows, under the names that they have there.

        Raises:
            ArgumentError: a column has nulls, or values that no sample can have.
        """
        stored = pa.table({name: _storable(name, table[name]) for name in table.column_names})
        return cls(SharedFile.written("fastload-table", lambda file: write_table(file, stored)))

    def __len__(self) -> int:
        return self._count

    def row(self, row: int) -> dict[str, Any]:
        """The values of a row, as `arrow_values.to_python` makes them."""
        return {name: value_of(row) for name, value_of in self._value_of.items()}

    def identities(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        """A number for the values of each of these rows."""
        found = self._identities[rows]
        if not found.all():
            for at in np.flatnonzero(found == 0).tolist():
                found[at] = xxhash.xxh3_64_intdigest(dump(self.row(int(rows[at]))))
            self._identities[rows] = found
        return found

    def new_column(self, name: str, n: int, allocate: Allocate) -> Any:
        """An empty column of a batch of `n` rows: a tensor for numbers, else a list."""
        dtype = _dtype(self._columns[name].type)
        return [None] * n if dtype is None else allocate((n,), dtype)

    def fill(self, columns: Mapping[str, Any], rows: list[int], records: list[int]) -> None:
        """Write rows of the table into rows of columns of a batch."""
        chosen = pa.array(records, pa.int64())
        for name, target in columns.items():
            values = self._columns[name].take(chosen)
            if isinstance(target, list):
                for row, value in zip(rows, values.to_pylist(), strict=True):
                    target[row] = value
            else:
                target.numpy()[rows] = values.to_numpy(zero_copy_only=False)

    def __fingerprint__(self) -> bytes:
        return bytes(self._file.map)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableColumns:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return TableColumns, (self._file,)


def _dtype(kind: Any) -> torch.dtype | None:
    """That of `default_collate` for values of this type; None if it makes no tensor of them."""
    types = pa.types
    if types.is_boolean(kind):
        return torch.bool
    if types.is_floating(kind):
        return torch.float64
    return torch.int64 if types.is_integer(kind) else None


def write_table(descriptor: int, table: Any) -> None:
    """Write a `pyarrow.Table` to an empty file, open for writing, in Arrow's IPC format."""
    with os.fdopen(descriptor, "wb", closefd=False) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def mapped_table(file: SharedFile) -> Any:
    """The table in a file that `write_table` wrote: the pages of the file are its memory."""
    return pa.ipc.open_file(pa.py_buffer(file.map)).read_all()


def _has_parts(kind: Any) -> bool:
    """Whether a value is a list, an array or a dict."""
    return pa.types.is_nested(kind) or isinstance(kind, pa.FixedShapeTensorType)


def _reader(column: Any) -> Callable[[int], Any]:
    """Row -> value."""
    if _has_parts(column.type):
        return lambda row: to_python(column.slice(row, 1))[0]
    return lambda row: column[row].as_py()  # a tenth of the time


def _storable(name: str, column: Any) -> Any:
    """The column as one array without nulls."""
    check_type(name, column.type)
    column = pa.chunked_array([decoded(chunk) for chunk in column.chunks])
    row = _null_row(column)
    if row is not None:
        raise ArgumentError(
            f"column {name!r} of the table is null in row {row:,}: drop such rows, or fill them (pandas: "
            "frame.dropna(), frame.fillna(0); Arrow: table.drop_null())"
        )
    kind = column.type
    # One array has at most 2 GiB of text, unless its offsets have 64 bits.
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        column = column.cast(pa.large_string())
    elif pa.types.is_uint64(kind):
        column = _signed(name, column)
    elif pa.types.is_binary(kind) or pa.types.is_binary_view(kind):
        column = column.cast(pa.large_binary())
    whole = pa.concat_arrays(column.chunks)
    return _regular(whole)


def _signed(name: str, column: Any) -> Any:
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise ArgumentError(
            f"column {name!r} of the table has numbers that torch's int64 cannot hold: write them as text "
            f"({error})"
        ) from None


def _null_row(column: Any) -> int | None:
    """The first row that is null, or has a null in its list or struct."""
    if not _has_nulls(column):
        return None
    if column.null_count:
        return int(pc.index(pc.is_null(column), True).as_py())
    return next(row for row in range(len(column)) if _has_nulls(column.slice(row, 1)))


def _has_nulls(column: Any) -> bool:
    if column.null_count:
        return True
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    kind = column.type
    if pa.types.is_struct(kind):
        return any(_has_nulls(field) for chunk in chunks for field in chunk.flatten())
    if isinstance(kind, pa.FixedShapeTensorType):
        return any(_has_nulls(chunk.storage) for chunk in chunks)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return any(_has_nulls(chunk.flatten()) for chunk in chunks)
    return False


def _regular(column: Any) -> Any:
    """Lists of lists of one length, such as boxes, with that length: a row without any is (0, 4) then."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return column
    inner = kind.value_type
    if not (pa.types.is_list(inner) or pa.types.is_large_list(inner)) or pa.types.is_nested(inner.value_type):
        return column
    lengths = pc.min_max(pc.list_value_length(column.flatten())).as_py()
    if lengths["min"] is None or lengths["min"] != lengths["max"]:
        return column
    return column.cast(pa.large_list(pa.list_(inner.value_type, lengths["min"])))


# --- the objects that columns name


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
    columns = [_keys_of(pattern, table) for pattern in patterns]
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


def _keys_of(pattern: str, table: Any) -> Any:
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
