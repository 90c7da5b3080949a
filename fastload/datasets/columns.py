"""Columns of a batch, written row by row. The batch equals the one of torch's `default_collate`.

bool, int, float, numpy scalars    a tensor (n,): bool, int64, float64, the scalar's
arrays and tensors                 a tensor (n, *shape)
dict, list, tuple                  the same of columns
str, bytes                         a list of n

A column is made for the first of its values. Values that differ in type or length from it, and those of other
classes, are left to `default_collate`: it widens numbers, and says which values make no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fastload.datasets.views import Allocate

_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


def ordinary_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for the rows of a batch that is taken apart into samples, for the user's `collate_fn`.

    Values that differ in length from row to row need no column there.
    """
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def new_column(value: Any, n: int, allocate: Allocate) -> Any:
    """An empty column of `n` rows for values like this one; None where `default_collate` has to make it."""
    dtype = _DTYPES.get(type(value))
    if dtype is not None:
        return allocate((n,), dtype)
    if isinstance(value, str | bytes):
        return [None] * n
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc" and value.dtype.isnative:
        tensor = torch.from_numpy(np.asarray(value))
        return allocate((n, *tensor.shape), tensor.dtype)
    if type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad:
        return allocate((n, *value.shape), value.dtype)
    if type(value) is dict:
        columns = {name: new_column(one, n, allocate) for name, one in value.items()}
        return None if any(column is None for column in columns.values()) else columns
    if type(value) in (list, tuple):
        parts = [new_column(one, n, allocate) for one in value]
        if any(part is None for part in parts):
            return None
        return _Columns(_Texts(part) if type(part) is list else part for part in parts)
    return None


def number_view(column: Any, value: Any) -> tuple[type, np.ndarray[Any, Any]] | None:
    """(type, the column as an array), if values of that type can be written into the array as they are.

    That costs a tenth of writing a number into a tensor. None for other columns.
    """
    if isinstance(column, torch.Tensor) and column.ndim == 1 and type(value) in _DTYPES:
        return type(value), column.numpy()
    return None


class _Columns(list[Any]):
    """The columns of a list of values; a plain list is one column."""


class _Texts(list[Any]):
    """A column of texts among those of a list of values: `default_collate` makes it a tuple."""


def collate_column(values: list[Any]) -> Any:
    """The column that `default_collate` makes of these values. Raises what that raises."""
    made = default_collate(values)
    return _Columns(made) if type(made) is list and isinstance(values[0], list | tuple) else made


def as_batch(columns: Any) -> Any:
    """The columns of a filled batch with the classes that `default_collate` gives them."""
    if isinstance(columns, dict):
        return {name: as_batch(column) for name, column in columns.items()}
    if isinstance(columns, _Texts):
        return tuple(columns)
    return [as_batch(column) for column in columns] if isinstance(columns, list) else columns


def put_value(column: Any, row: int, value: Any) -> bool:
    """Write one value into its row; False if it is unlike the one that the column was made for."""
    if isinstance(column, dict):
        same = type(value) is dict and column.keys() == value.keys()
        return same and all(put_value(part, row, value[name]) for name, part in column.items())
    if isinstance(column, _Columns):
        same = type(value) in (list, tuple) and len(value) == len(column)
        return same and all(put_value(part, row, one) for part, one in zip(column, value, strict=True))
    if isinstance(column, list):
        column[row] = value
        return isinstance(value, str | bytes)
    return _put_number(column, row, value)


def _put_number(column: torch.Tensor, row: int, value: Any) -> bool:
    dtype = _DTYPES.get(type(value))
    if dtype is None and not isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return False
    try:
        given = torch.as_tensor(value, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    if given.shape != column.shape[1:] or given.dtype != column.dtype or given.requires_grad:
        return False
    column[row] = given
    return True


def copy_value(column: Any, target: int, source: int) -> None:
    """Make row `target` equal to row `source`."""
    if isinstance(column, dict | _Columns):
        for part in column.values() if isinstance(column, dict) else column:
            copy_value(part, target, source)
    else:
        column[target] = column[source]
