"""`filters=` of ParquetDataset: which row groups may have rows that pass, and which rows do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fastload.errors import ArgumentError

__all__ = ["RowFilter"]

Condition = tuple[str, str, Any]

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_MEMBER = ("in", "not in")


class RowFilter:
    """Conditions in pyarrow's form: tuples (column, operator, value), all of which must hold.

    A list of such lists asks for all conditions of any one of them. A comparison with null is false, but a
    null is "not in" values without it.

    Raises:
        ArgumentError: it has another form, or an unknown operator.
    """

    def __init__(self, filters: Any) -> None:
        given = list(filters) if isinstance(filters, list | tuple) else []
        groups = given if given and all(isinstance(one, list) for one in given) else [given]
        if not all(groups) or not all(_is_condition(one) for group in groups for one in group):
            raise ArgumentError(
                "filters must be a list of tuples (column, operator, value), such as "
                f"[('width', '>=', 224), ('split', '=', 'train')], or a list of such lists, found {filters!r}"
            )
        self._groups: list[list[Condition]] = [[tuple(one) for one in group] for group in groups]
        for column, operator, value in self._conditions():
            if operator not in (*_COMPARE, *_MEMBER):
                raise ArgumentError(
                    f"filters has the operator {operator!r} for column {column!r}: "
                    f"use one of {', '.join((*_COMPARE, *_MEMBER))}"
                )
            if operator in _MEMBER and not isinstance(value, list | tuple | set | frozenset):
                raise ArgumentError(
                    f"filters asks for {column!r} {operator} {value!r}: give a list, tuple or set of values"
                )

    @property
    def columns(self) -> list[str]:
        """The columns that it names."""
        return sorted({column for column, _, _ in self._conditions()})

    @property
    def key(self) -> str:
        """A text that differs where other rows may pass."""
        return repr(
            [
                [
                    (name, how, sorted(value, key=repr) if how in _MEMBER else value)
                    for name, how, value in group
                ]
                for group in self._groups
            ]
        )

    def may_pass(self, statistics: Callable[[str], tuple[Any, Any] | None]) -> bool:
        """Whether a row group may have rows that pass: column -> its least and greatest value, or None."""
        return any(all(_may_hold(one, statistics(one[0])) for one in group) for group in self._groups)

    def mask(self, table: pa.Table) -> Any:
        """A boolean for each row of a table, as a numpy array.

        Raises:
            ArgumentError: a column cannot be compared with its value.
        """
        found: Any = None
        for group in self._groups:
            passing: Any = None
            for condition in group:
                one = _holds(condition, table[condition[0]])
                passing = one if passing is None else pc.and_(passing, one)
            found = passing if found is None else pc.or_(found, passing)
        return found.to_numpy(zero_copy_only=False) if isinstance(found, pa.Array) else found.to_numpy()

    def _conditions(self) -> Iterator[Condition]:
        return (condition for group in self._groups for condition in group)


def _is_condition(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and all(isinstance(one, str) for one in value[:2])


def _holds(condition: Condition, column: Any) -> Any:
    name, operator, value = condition
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        if operator in _MEMBER:
            # A float32 is compared as a double, as `=` and the statistics of a row group have it.
            kind = pa.float64() if pa.types.is_floating(column.type) else column.type
            found = pc.is_in(column.cast(kind), value_set=pa.array(list(value), kind))
            return found if operator == "in" else pc.invert(found)
        # Arrow takes an int for an int64, and would cast a column of uint64 to it.
        unsigned = pa.types.is_uint64(column.type) and type(value) is int and value >= 0
        scalar = pa.scalar(value, column.type if unsigned else None)
        return pc.fill_null(_COMPARE[operator](column, scalar), False)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"filters compares column {name!r}, which is {column.type}, with {value!r}: {error}"
        ) from error


def _may_hold(condition: Condition, statistics: tuple[Any, Any] | None) -> bool:
    if statistics is None:
        return True
    _, operator, value = condition
    least, most = statistics
    try:
        if operator in ("=", "=="):
            return bool(least <= value <= most)
        if operator == "in":
            return any(least <= one <= most or one != one for one in value)  # statistics leave NaN out
        if operator in ("<", "<="):
            return bool(least < value or (operator == "<=" and least == value))
        if operator in (">", ">="):
            return bool(most > value or (operator == ">=" and most == value))
    except (TypeError, ValueError):  # compared as Arrow does, once the rows are read
        pass
    return True
