"""The values of an Arrow column as samples have them.

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
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from fastload.errors import ArgumentError

try:
    import pyarrow as pa
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
    elif not (_is_number(kind) or _is_text(kind) or _is_binary(kind) or pa.types.is_null(kind)):
        raise ArgumentError(
            f"column {name!r} is {kind}, which has no one form in a tensor: leave it out with fields=, or "
            "write it as a number or text (pyarrow: table[name].cast('int64'))"
        )


def is_numeric(kind: Any) -> bool:
    """Whether values of this type are numbers or arrays of numbers, so that a batch has them as a tensor."""
    inner = _inner(kind)
    return _is_number(kind) if inner is None else is_numeric(inner)


def why_not_number(value: Any) -> str | None:
    """Why a value of a numeric column can be no number or array; None where it is one."""
    if value is None:
        return "is null"
    if type(value) is list and any(why_not_number(one) for one in value):
        return "has a null in its list"
    return None


def to_python(column: Any, *, views: bool = False) -> list[Any]:
    """The values of a `pyarrow.Array` or `ChunkedArray`, one for each row.

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
    if _is_list(kind):
        return _lists(column)
    if views and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        return _views(column)
    found: list[Any] = column.to_pylist()
    return found


def decoded(column: Any) -> Any:
    """A dictionary or extension column as what it stands for; tensors and others as they are."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return decoded(column.dictionary_decode())
    if not isinstance(kind, pa.BaseExtensionType) or isinstance(kind, pa.FixedShapeTensorType):
        return column
    if kind.extension_name == "arrow.bool8":
        return column.storage.cast(pa.bool_())
    return decoded(column.storage)


def _tensors(column: Any) -> list[Any]:
    """Arrays of the shape that the type has. They are stored flat, perhaps with the axes in another order."""
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
    """One list or array for each row."""
    wanted = pa.large_list(column.type.value_type)
    if pa.types.is_fixed_size_list(column.type):  # its offsets are not stored, and null rows have values too
        column = column.cast(wanted)
    elif not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        column = pa.array(column.to_pylist(), wanted)  # a list view, whose rows may lie in any order
    offsets = column.offsets.to_numpy().tolist()
    first, last = offsets[0], offsets[-1]
    inner = decoded(column.values.slice(first, last - first))
    bounds = [(start - first, stop - first) for start, stop in itertools.pairwise(offsets)]
    if _is_number(inner.type):
        return _masked(_number_rows(inner, bounds), column)
    block = _block(inner)
    if block is not None:
        return _masked([block[start:stop].copy() for start, stop in bounds], column)
    return _masked(_item_rows(inner, bounds), column)


def _block(inner: Any) -> np.ndarray[Any, Any] | None:
    """Fixed size lists of numbers, without nulls, as one array (rows, size); None for others."""
    kind = inner.type
    if not pa.types.is_fixed_size_list(kind) or not _is_number(kind.value_type) or inner.null_count:
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
    """The rows, with None for each that is null."""
    if not column.null_count:
        return rows
    return [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]


def _joined(items: list[Any]) -> Any:
    """Arrays of one shape as one array; others, and what has nulls, as the list."""
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
    """The type that a list, dictionary or extension type holds; None for other types."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_dictionary(kind) or _is_list(kind):
        return kind.value_type
    return None


def _is_list(kind: Any) -> bool:
    types = pa.types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists or types.is_list_view(kind) or types.is_large_list_view(kind))


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_text(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_binary(kind: Any) -> bool:
    types = pa.types
    plain = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return bool(plain or types.is_fixed_size_binary(kind))
