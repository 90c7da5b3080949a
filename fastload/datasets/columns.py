"""Columns of a batch, written row by row. The batch equals the one of torch's `default_collate`.

bool, int, float, numpy scalars    a tensor (n,): bool, int64, float64, the scalar's
arrays and tensors                 a tensor (n, *shape)
dict, list, tuple                  the same of columns
str, bytes, everything else        a list of n
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fastload.datasets.protocols import Allocate
from fastload.errors import DecodeError

__all__ = [
    "collate_column",
    "copy_value",
    "new_column",
    "number_view",
    "ordinary_memory",
    "put_value",
]

_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


def ordinary_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for the rows of a batch that is taken apart into samples, for the user's `collate_fn`.

    Values that differ in length from row to row need no column there.
    """
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def new_column(value: Any, n: int, allocate: Allocate) -> Any:
    """An empty column of `n` rows for values like this one."""
    dtype = _DTYPES.get(type(value))
    if dtype is not None:
        return allocate((n,), dtype)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "SUOVMm":
        tensor = torch.from_numpy(np.asarray(value))
        return allocate((n, *tensor.shape), tensor.dtype)
    if isinstance(value, torch.Tensor):
        return allocate((n, *value.shape), value.dtype)
    if isinstance(value, Mapping):
        return {name: new_column(one, n, allocate) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return _Columns(new_column(one, n, allocate) for one in value)
    return [None] * n


def number_view(column: Any, value: Any) -> tuple[type, np.ndarray[Any, Any]] | None:
    """(type, the column as an array), if values of that type can be written into the array as they are.

    That costs a tenth of writing a number into a tensor. None for other columns.
    """
    if isinstance(column, torch.Tensor) and column.ndim == 1 and type(value) in _DTYPES:
        return type(value), column.numpy()
    return None


class _Columns(list[Any]):
    """The columns of a list of values; a plain list is one column."""

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def collate_column(values: list[Any]) -> Any:
    """The column that `default_collate` makes of these values. Raises what that raises."""
    made = default_collate(values)
    return _Columns(made) if type(made) is list and isinstance(values[0], list | tuple) else made


def put_value(column: Any, row: int, value: Any, path: str) -> None:
    """Write one value into its row.

    Raises:
        DecodeError: the value is unlike the one that the column was made for. `path` names it.
    """
    if isinstance(column, dict):
        if not isinstance(value, Mapping) or column.keys() != value.keys():
            found = sorted(map(str, value)) if isinstance(value, Mapping) else _kind(value)
            raise DecodeError(f"{path} is {found}, others in the batch have {sorted(map(str, column))}")
        for name, part in column.items():
            put_value(part, row, value[name], f"{path}[{name!r}]")
    elif isinstance(column, _Columns):
        if not isinstance(value, list | tuple) or len(value) != len(column):
            raise DecodeError(
                f"{path} is {_kind(value)}, others in the batch have {len(column)} items: they cannot be one "
                "column. Pad them, or pass a collate_fn"
            )
        for position, part in enumerate(column):
            put_value(part, row, value[position], f"{path}[{position}]")
    elif isinstance(column, list):
        column[row] = value
    else:
        _put_number(column, row, value, path)


def _put_number(column: torch.Tensor, row: int, value: Any, path: str) -> None:
    try:
        given = torch.as_tensor(value, dtype=_DTYPES.get(type(value)), device="cpu")
        if given.shape != column.shape[1:] or given.dtype != column.dtype:
            raise ValueError
        column[row] = given
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise DecodeError(
            f"{path} is {_kind(value)}, others in the batch are {column.dtype} of shape "
            f"{tuple(column.shape[1:])}: they cannot be one tensor. Pad them, or pass a collate_fn"
        ) from None


def copy_value(column: Any, target: int, source: int) -> None:
    """Make row `target` equal to row `source`."""
    if isinstance(column, dict | _Columns):
        for part in column.values() if isinstance(column, dict) else column:
            copy_value(part, target, source)
    else:
        column[target] = column[source]


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
