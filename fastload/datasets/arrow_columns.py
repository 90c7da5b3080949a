"""Arrow columns as `batches="columns"` takes them: which form a column has, and arrays of many rows.

bool, int, float                       a tensor (rows,): bool, int64, float64, as `default_collate` gives them
string; binary                         a list of str; of bytes
list of fixed size, tensor             a tensor (rows, size, ...) of the column's dtype
list                                   `Jagged`: values and offsets
dictionary, extension                  as what it stands for

Lists have numbers, or lists of fixed size of numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from fastload.datasets.arrow import check_type, decoded, is_list, is_number, is_text_or_bytes, offset_list
from fastload.datasets.columns import STEP, Array, Chunk, Fault, Form, Forms, Rows
from fastload.errors import ArgumentError, DecodeError

_MOST = np.iinfo(np.int64).max
_NULL, _NULL_IN_LIST = "is null", "has a null in its list"
_TOO_LARGE = "is beyond torch's int64"

Bad = NDArray[np.bool_] | None  # rows that no batch can hold; None: there are none
Reasons = list[tuple[Bad, str]]


def column_form(name: str, kind: Any) -> Form:
    """Return the form of a column of this `pyarrow.DataType`.

    Raises:
        ArgumentError: no column of a batch can hold its values.
    """
    check_type(name, kind)
    plain = _plain(kind)
    if is_number(plain):
        if pa.types.is_boolean(plain):
            return Form(torch.bool)
        return Form(torch.float64 if pa.types.is_floating(plain) else torch.int64)
    if is_text_or_bytes(plain):
        return Form(None)
    fixed = _fixed(plain)
    if fixed is not None:
        return Form(_torch_dtype(fixed[0]), fixed[1])
    items = _fixed(_plain(plain.value_type)) if is_list(plain) else None
    if items is not None:
        return Form(_torch_dtype(items[0]), items[1], jagged=True)
    raise ArgumentError(
        f"column {name!r} is {kind}, which batches='columns' has no tensor for: it takes numbers, texts, and "
        "lists of numbers or of fixed size lists of numbers. Leave it out with fields=, write it as one of "
        "these (pyarrow: table.flatten() for a struct), or use batches='rows'"
    )


def check_column(name: str, column: Any) -> None:
    """Raise DecodeError for a `pyarrow.Array` with a text that is not UTF-8, or whose memory is damaged."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DecodeError(
            f"column {name!r} is damaged, or has a text that is not UTF-8 ({error}): write it as binary, "
            "or leave it out with fields="
        ) from None


def make_chunk(columns: Mapping[str, Any], forms: Mapping[str, Form], *, packed: bool) -> Chunk:
    """Return rows by column.

    Args:
        columns: `pyarrow.Array`s that `check_column` takes.
        forms: of the columns, by name.
        packed: numbers of one dtype are laid row by row, in new memory: many columns of many rows are taken
            so in a fraction of the time.
    """
    chunk = Chunk([], {}, {}, {}, [], 0)
    nbytes = 0
    for name, form in forms.items():
        column = decoded(columns[name])
        if form.dtype is None:
            chunk.texts[name] = column
            nbytes += column.nbytes
            continue
        if form.jagged:
            values, offsets, reasons = _jagged(column)
            chunk.lists[name] = values, offsets
            nbytes += offsets.nbytes
        else:
            values, reasons = _stacked(column, form)
            chunk.arrays[name] = values
        nbytes += values.nbytes
        chunk.faults.extend(Fault(rows, name, why) for rows, why in reasons if rows is not None)
    if packed:
        _pack(chunk, forms)
    return chunk._replace(nbytes=nbytes)


def _pack(chunk: Chunk, forms: Mapping[str, Form]) -> None:
    names: dict[Any, list[str]] = {}
    for name, values in chunk.arrays.items():
        if not forms[name].shape:
            names.setdefault(values.dtype, []).append(name)
    for same in names.values():
        columns = [chunk.arrays.pop(name) for name in same]
        table = np.empty((len(columns[0]), len(columns)), columns[0].dtype)
        for start in range(0, len(table), STEP):
            rows = slice(start, start + STEP)
            for position, column in enumerate(columns):
                table[rows, position] = column[rows]
        chunk.packed.append((same, table))


def _stacked(column: Any, form: Form) -> tuple[Array, Reasons]:
    """Return (array, why rows cannot be held) of a column whose rows have one shape."""
    values, null, inside = _dense(column)
    reasons: Reasons = [(null, _NULL), (inside, _NULL_IN_LIST)]
    if not form.shape and values.dtype == np.uint64:
        large = values > _MOST
        reasons.append((large if large.any() else None, _TOO_LARGE))
    return values, reasons


def _jagged(column: Any) -> tuple[Array, Rows, Reasons]:
    column = offset_list(column)
    offsets = column.offsets.to_numpy().astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    values, null, inside = _dense(decoded(column.values.slice(first, last - first)))
    offsets -= first
    reasons: Reasons = [(_nulls(column), _NULL)]
    holes = _either(null, inside)
    if holes is not None:
        counts = np.concatenate([[0], np.cumsum(holes)])
        reasons.append((counts[offsets[1:]] > counts[offsets[:-1]], _NULL_IN_LIST))
    return values, offsets, reasons


def _dense(column: Any) -> tuple[Array, Bad, Bad]:
    """Return (array (rows, *shape), null rows, rows with a null inside) of values of one shape."""
    kind = column.type
    dtype, shape = _fixed(kind) or (None, ())
    null = _nulls(column)
    if is_number(kind):
        if null is not None:
            column = column.fill_null(pa.scalar(0).cast(kind))
        return column.to_numpy(zero_copy_only=False), null, None
    if null is not None:
        if null.all():
            return np.zeros((len(column), *shape), dtype), null, None
        column = column.take(pa.array(np.where(null, np.argmin(null), np.arange(len(column)))))
    if isinstance(kind, pa.FixedShapeTensorType):
        flat, _, inside = _dense(column.storage)
        axes = kind.permutation or range(len(kind.shape))
        return (
            flat.reshape(len(column), *kind.shape).transpose(0, *(1 + axis for axis in axes)),
            null,
            inside,
        )
    values, missing, deeper = _dense(decoded(column.flatten()))
    holes = _either(missing, deeper)
    inside = None if holes is None else np.any(holes.reshape(len(column), -1), axis=1)
    return values.reshape(len(column), *shape), null, inside


def _nulls(column: Any) -> Bad:
    return column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None


def _either(one: Bad, other: Bad) -> Bad:
    return one if other is None else other if one is None else one | other


def _plain(kind: Any) -> Any:
    """Return the type that `decoded` gives a column."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if not isinstance(kind, pa.BaseExtensionType) or isinstance(kind, pa.FixedShapeTensorType):
        return kind
    return pa.bool_() if kind.extension_name == "arrow.bool8" else _plain(kind.storage_type)


def _fixed(kind: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return (dtype, shape) of numbers, or of lists of fixed size of these; None of other types."""
    kind = _plain(kind)
    if is_number(kind):
        return np.dtype(kind.to_pandas_dtype()), ()
    if isinstance(kind, pa.FixedShapeTensorType):
        axes = kind.permutation or range(len(kind.shape))
        return np.dtype(kind.value_type.to_pandas_dtype()), tuple(kind.shape[axis] for axis in axes)
    if not pa.types.is_fixed_size_list(kind):
        return None
    items = _fixed(kind.value_type)
    return None if items is None else (items[0], (kind.list_size, *items[1]))


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class OneChunk:
    """Columns in memory: all rows are one chunk. See `ColumnSource`.

    Args:
        columns: `pyarrow.Array`s by name.

    Raises:
        ArgumentError: no batch can hold a column.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.forms: Forms = {name: column_form(name, column.type) for name, column in columns.items()}
        self._columns = columns

    def locate(self, rows: Rows) -> tuple[Rows, Rows]:
        return np.zeros(len(rows), np.int64), rows

    def chunk(self, number: int) -> Chunk:
        return self._chunk

    @functools.cached_property
    def _chunk(self) -> Chunk:
        for name, column in self._columns.items():
            check_column(name, column)
        return make_chunk(self._columns, self.forms, packed=False)

    def why_not(self, fault: Fault) -> str:
        return f"column {fault.name!r} of the table {fault.why}"
