"""Arrow columns: their values as samples have them, and in memory that all workers share.

bool, int, float                       bool, int, float
string; binary                         str; bytes
list of numbers                        a numpy array
list of lists of numbers               an array (a, b) if the lists have one length, else a list of arrays
list of fixed size lists of numbers    an array (a, b), also with a = 0
list of anything else                  a list
struct                                 a dict
dictionary; extension                  as what it stands for
null                                   None, which a column of numbers cannot hold: see `why_not_number`

Times, decimals and maps have no one form in a tensor, and are refused: `check_type` says to cast them.

The columns of a table lie in one Arrow file, of which each process maps the pages. A worker has no Python
object of a row that it does not read. Millions of rows take the bytes of their values, once for all processes
of a node.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from fastload.errors import ArgumentError
from fastload.formats.sample import dump
from fastload.images.rng import mix_all
from fastload.store.node import SharedFile

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as error:
    raise ArgumentError(
        f"Arrow columns need the package pyarrow: pip install 'torch-fastload[parquet]' ({error})"
    ) from None


def check_type(name: str, kind: Any) -> None:
    """Raise ArgumentError for a column whose values no sample can have; `kind` is its `pyarrow.DataType`."""
    if pa.types.is_struct(kind):
        for field in kind:
            check_type(f"{name}.{field.name}", field.type)
        return
    inner = _inner(kind)
    if inner is not None:
        check_type(name, inner)
    elif not (is_number(kind) or is_text_or_bytes(kind) or pa.types.is_null(kind)):
        raise ArgumentError(
            f"column {name!r} is {kind}, which has no one form in a tensor: leave it out with fields=, or "
            "write it as a number or text (pyarrow: table[name].cast('int64'))"
        )


def is_numeric(kind: Any) -> bool:
    """Return whether values of this type are numbers or arrays of numbers, so that a batch has them as a
    tensor.
    """
    inner = _inner(kind)
    return is_number(kind) if inner is None else is_numeric(inner)


def why_not_number(value: Any) -> str | None:
    """Return why a value of a numeric column can be no number or array; None where it is one."""
    if value is None:
        return "is null"
    if type(value) is list and any(why_not_number(one) for one in value):
        return "has a null in its list"
    return None


def to_python(column: Any, *, views: bool = False) -> list[Any]:
    """Return the values of a `pyarrow.Array` or `ChunkedArray`, one for each row.

    Args:
        views: binary values are read-only memoryviews of the column's memory in place of bytes.
    """
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in to_python(chunk, views=views)]
    column = decoded(column)
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensors(column)
    if pa.types.is_struct(kind):
        return _structs(column, views)
    if is_list(kind):
        return _lists(column)
    if views and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        return _views(column)
    found: list[Any] = column.to_pylist()
    return found


def decoded(column: Any) -> Any:
    """Return a dictionary or extension column as what it stands for; tensors and others as they are."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return decoded(column.dictionary_decode())
    if not isinstance(kind, pa.BaseExtensionType) or isinstance(kind, pa.FixedShapeTensorType):
        return column
    if kind.extension_name == "arrow.bool8":
        return column.storage.cast(pa.bool_())
    return decoded(column.storage)


def _tensors(column: Any) -> list[Any]:
    """Return arrays of the shape that the type has. They are stored flat, perhaps with the axes in another
    order.
    """
    kind = column.type
    axes = kind.permutation or range(len(kind.shape))
    return [
        row.reshape(kind.shape).transpose(axes) if type(row) is np.ndarray else row
        for row in to_python(column.storage)
    ]


def _structs(column: Any, views: bool) -> list[Any]:
    names = [field.name for field in column.type]
    # `field` gives the child as it lies, `flatten` with the nulls of the struct itself.
    values = [to_python(child, views=views) for child in column.flatten()]
    columns = zip(*values, strict=True) if values else [()] * len(column)
    rows = [dict(zip(names, row, strict=True)) for row in columns]
    return _masked(rows, column)


def _lists(column: Any) -> list[Any]:
    """Return one list or array for each row."""
    column = offset_list(column)
    offsets = column.offsets.to_numpy().tolist()
    first, last = offsets[0], offsets[-1]
    inner = decoded(column.values.slice(first, last - first))
    bounds = [(start - first, stop - first) for start, stop in itertools.pairwise(offsets)]
    if is_number(inner.type):
        return _masked(_number_rows(inner, bounds), column)
    block = _block(inner)
    if block is not None:
        return _masked([block[start:stop].copy() for start, stop in bounds], column)
    return _masked(_item_rows(inner, bounds), column)


def offset_list(column: Any) -> Any:
    """Return a column of lists of any kind as one with offsets."""
    wanted = pa.large_list(column.type.value_type)
    if pa.types.is_fixed_size_list(column.type):  # its offsets are not stored, and null rows have values too
        return column.cast(wanted)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return column
    return pa.array(column.to_pylist(), wanted)  # a list view, whose rows may lie in any order


def _block(inner: Any) -> np.ndarray[Any, Any] | None:
    """Return fixed size lists of numbers, without nulls, as one array (rows, size); None for others."""
    kind = inner.type
    if not pa.types.is_fixed_size_list(kind) or not is_number(kind.value_type) or inner.null_count:
        return None
    numbers = inner.flatten()
    if numbers.null_count:
        return None
    block: np.ndarray[Any, Any] = numbers.to_numpy(zero_copy_only=False).reshape(len(inner), kind.list_size)
    return block


def _number_rows(inner: Any, bounds: list[tuple[int, int]]) -> list[Any]:
    """Arrays; a list with None where a row has a null."""
    if not inner.null_count:
        values = inner.to_numpy(zero_copy_only=False)
        return [values[start:stop].copy() for start, stop in bounds]
    values = inner.fill_null(pa.scalar(0).cast(inner.type)).to_numpy(zero_copy_only=False)
    valid = inner.is_valid().to_numpy(zero_copy_only=False)
    return [
        values[start:stop].copy() if valid[start:stop].all() else inner[start:stop].to_pylist()
        for start, stop in bounds
    ]


def _item_rows(inner: Any, bounds: list[tuple[int, int]]) -> list[Any]:
    items = to_python(inner)
    join = _joined if is_numeric(inner.type) else list
    return [join(items[start:stop]) for start, stop in bounds]


def _masked(rows: list[Any], column: Any) -> list[Any]:
    """Return the rows, with None for each that is null."""
    if not column.null_count:
        return rows
    return [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]


def _joined(items: list[Any]) -> Any:
    """Return arrays of one shape as one array; others, and what has nulls, as the list."""
    arrays = all(type(item) is np.ndarray for item in items)
    if items and arrays and len({item.shape for item in items}) == 1:
        return np.stack(items)
    return items


def _views(column: Any) -> list[Any]:
    dtype = np.dtype(np.int64 if pa.types.is_large_binary(column.type) else np.int32)
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, dtype, len(column) + 1, column.offset * dtype.itemsize)
    memory = memoryview(b"" if data is None else data).toreadonly()
    rows: list[Any] = [memory[start:stop] for start, stop in itertools.pairwise(bounds.tolist())]
    return _masked(rows, column)


def _inner(kind: Any) -> Any:
    """Return the type that a list, dictionary or extension type holds; None for other types."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_dictionary(kind) or is_list(kind):
        return kind.value_type
    return None


def is_list(kind: Any) -> bool:
    """Return whether values of this type are lists, of any or of fixed size."""
    types = pa.types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists or types.is_list_view(kind) or types.is_large_list_view(kind))


def is_number(kind: Any) -> bool:
    """Return whether values of this type are bools, ints or floats."""
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def is_text(kind: Any) -> bool:
    """Return whether values of this type are str."""
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_text_or_bytes(kind: Any) -> bool:
    """Return whether values of this type are str or bytes."""
    types = pa.types
    plain = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return bool(is_text(kind) or plain or types.is_fixed_size_binary(kind))


class TableColumns:
    """The values of a table by row and column. Immutable; copies and workers share them.

    Args:
        file: as `TableColumns.of` wrote it.

    See `ValueColumns`: columns without lists, tensors and structs are written for many samples at once.
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
        kinds = {name: column.type for name, column in self._columns.items()}
        self.dtypes = {name: _dtype(kind) for name, kind in kinds.items() if not _has_parts(kind)}

    @classmethod
    def of(cls, table: Any) -> TableColumns:
        """Return the columns of a `pyarrow.Table` that has rows, under the names that they have there.

        Raises:
            ArgumentError: a column has nulls, or values that no sample can have.
        """
        stored = pa.table({name: _storable(name, table[name]) for name in table.column_names})
        return cls(SharedFile.written("fastload-table", lambda file: write_table(file, stored)))

    def __len__(self) -> int:
        return self._count

    def row(self, row: int) -> dict[str, Any]:
        """Return the values of a row, as `to_python` makes them."""
        return {name: value_of(row) for name, value_of in self._value_of.items()}

    def identities(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return a number for the values of each of these rows."""
        found = self._identities[rows]
        if not found.all():
            for at in np.flatnonzero(found == 0).tolist():
                found[at] = xxhash.xxh3_64_intdigest(dump(self.row(int(rows[at]))))
            self._identities[rows] = found
        return found

    def places(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return a number for the place of each of these rows in a table of this content."""
        return mix_all(rows.view(np.uint64) + self._digest)

    @functools.cached_property
    def _digest(self) -> np.uint64:
        return np.uint64(xxhash.xxh3_64_intdigest(self._file.map))

    @property
    def arrays(self) -> Mapping[str, Any]:
        """The columns, as `pyarrow.Array`s."""
        return self._columns

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
    """Return that of `default_collate` for values of this type; None if it makes no tensor of them."""
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
    """Return the table in a file that `write_table` wrote: the pages of the file are its memory."""
    return pa.ipc.open_file(pa.py_buffer(file.map)).read_all()


def _has_parts(kind: Any) -> bool:
    """Return whether a value is a list, an array or a dict."""
    return pa.types.is_nested(kind) or isinstance(kind, pa.FixedShapeTensorType)


def _reader(column: Any) -> Callable[[int], Any]:
    """Return row -> value."""
    if _has_parts(column.type):
        return lambda row: to_python(column.slice(row, 1))[0]
    return lambda row: column[row].as_py()  # a tenth of the time


def _storable(name: str, column: Any) -> Any:
    """Return the column as one array without nulls."""
    check_type(name, column.type)
    column = pa.chunked_array([decoded(chunk) for chunk in column.chunks])
    row = _null_row(column)
    if row is not None:
        raise ArgumentError(
            f"column {name!r} of the table is null in row {row:,}, counted from 0: drop such rows, or fill "
            "them (pandas: frame.dropna(), frame.fillna(0); Arrow: table.drop_null())"
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
    """Return the first row that is null, or has a null in its list or struct."""
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
    if is_list(kind):
        return any(_has_nulls(chunk.flatten()) for chunk in chunks)
    return False


def _regular(column: Any) -> Any:
    """Give lists of lists of one length, such as boxes, that length: a row without any is (0, 4) then."""
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
