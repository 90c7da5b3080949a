"""The objects that columns of a table name, with their ranges: one of each `File` a row, or a list of them.

A column of a `File` may hold lists: of keys, of starts and stops, or of what stands in a pattern. In one row
all lists of a `File` have one length, and what is no list goes with each of their values.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastload.datasets.arrow import is_list, is_text, offset_list
from fastload.datasets.row_objects import FileForm, Numbers, RowObjects
from fastload.datasets.sample_files import File, pattern_parts
from fastload.errors import ArgumentError
from fastload.store.failures import redacted
from fastload.store.open import check_protocol


def table_objects(
    files: Sequence[File], table: Any, url: str, read_from: str = ""
) -> tuple[str, list[str], RowObjects]:
    """Return the objects that `files` are in each row: (URL of all, keys relative to it by number, numbers).

    Keys may begin with the URL. Where `url` is "", they must be URLs or absolute paths that a file may name:
    then it is the deepest that all share.

    Args:
        table: a `pyarrow.Table` with their columns.
        read_from: the URL or path of the table's file; "": it was in memory. One in a store may not name
            files of this machine.

    Raises:
        ArgumentError: a key is null or empty, or is no text; the keys share no URL; a range is none; or lists
            of one row differ in length.
    """
    columns = [_FileColumns(file, table) for file in files]
    if not any(len(each.keys) for each in columns):
        raise ArgumentError(f"{files[0]!r} names no object: the list of each row is empty")
    named = [(file.column, each.keys) for file, each in zip(files, columns, strict=True) if len(each.keys)]
    root = url or _shared_root([pattern for pattern, _ in named], [keys for _, keys in named])
    if not url and _is_local(root) and not _is_local(read_from):
        raise ArgumentError(
            f"the table {redacted(read_from)!r} names files of this machine, in {root!r}: if you know them, "
            "pass that as url="
        )
    prefix = f"{root.rstrip('/')}/"
    edges = np.zeros(len(files) * table.num_rows + 1, np.int64)
    np.cumsum(np.stack([each.lengths for each in columns], 1).ravel(), out=edges[1:])
    keys = np.empty(edges[-1], object)
    parts = np.zeros((2, edges[-1]), np.int64) if any(file.range for file in files) else None
    for number, each in enumerate(columns):
        # Those of one list follow each other; between the lists lie the other files of the rows.
        moved = edges[number : -1 : len(files)] - (np.cumsum(each.lengths) - each.lengths)
        items = np.repeat(moved, each.lengths) + np.arange(len(each.keys))
        keys[items] = [key.removeprefix(prefix) for key in each.keys.to_pylist()]
        if parts is not None and each.parts is not None:
            parts[:, items] = each.parts
    forms = [FileForm(each.is_list, each.parts is not None) for each in columns]
    has_lists = any(form.is_list for form in forms)
    rows = RowObjects(table.num_rows, forms, edges if has_lists else None, parts)
    return root, keys.tolist(), rows


class _FileColumns:
    """The objects that the columns of one `File` name.

    Attributes:
        lengths: int64, shape (rows,), how many objects each row has.
        keys: an Arrow array of text, of all rows in turn.
        parts: int64, shape (2, n), their starts and stops; None: they are read whole.
        is_list: whether a sample has a list of them.
    """

    def __init__(self, file: File, table: Any) -> None:
        names = list(dict.fromkeys([*file.columns, *file.range_columns]))
        flat = {name: _combined(table[name]) for name in names}
        self.lengths: Numbers = np.ones(table.num_rows, np.int64)
        lists = [name for name in names if is_list(flat[name].type)]
        self.is_list = bool(lists)
        for name in lists:
            flat[name], lengths = _flat(name, flat[name])
            _check_lengths(lists[0], self.lengths, name, lengths, name != lists[0])
            self.lengths = lengths
        self._rows = np.repeat(np.arange(table.num_rows), self.lengths) if lists else None
        for scalar in set(names) - set(lists) if lists else ():
            flat[scalar] = flat[scalar].take(pa.array(self._rows))
        pieces = []
        for text, column in pattern_parts(file.column):
            if text:
                pieces.append(pa.scalar(text, pa.large_string()))
            if column is not None:
                pieces.append(self._texts(column, flat[column]))
        self.keys = pc.binary_join_element_wise(*pieces, pa.scalar("", pa.large_string()))
        self.parts: Numbers | None = None
        if file.range is not None:
            self.parts = np.stack([self._numbers(edge, flat) for edge in file.range])
            self._check_parts(file)

    def _texts(self, name: str, column: Any) -> Any:
        types, kind = pa.types, column.type
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not is_text(kind) and not types.is_integer(kind) and not types.is_null(kind):
            raise ArgumentError(
                f"column {name!r} of the table is {column.type}, and File needs keys of objects, as text"
            )
        column = column.cast(pa.large_string())
        item = pc.index(pc.fill_null(pc.equal(column, ""), True), True).as_py()
        if item >= 0:
            where = self._place(item)
            raise ArgumentError(f"column {name!r} of the table has no key in {where}: drop such rows")
        return column

    def _numbers(self, edge: int | str, flat: dict[str, Any]) -> Numbers:
        if isinstance(edge, int):
            return np.full(len(self.keys), edge, np.int64)
        column = flat[edge]
        item = pc.index(column.is_null(nan_is_null=pa.types.is_floating(column.type)), True).as_py()
        if item >= 0:
            raise ArgumentError(
                f"column {edge!r} of the table has no number in {self._place(item)}: a range has a start and "
                "a stop, in bytes; drop such rows"
            )
        if not pa.types.is_integer(column.type) and len(column):
            fraction = [number for number, value in enumerate(column.to_pylist()) if value != _whole(value)]
            item = fraction[0] if fraction else 0
            raise ArgumentError(
                f"column {edge!r} of the table is {column.type}, {column[item].as_py()!r} in "
                f"{self._place(item)}: starts and stops are whole numbers of bytes (pandas: "
                f"frame[{edge!r}].astype('int64'))"
            )
        numbers: Numbers = column.cast(pa.int64(), safe=False).to_numpy()  # beyond int64: negative
        return numbers

    def _check_parts(self, file: File) -> None:
        assert self.parts is not None
        starts, stops = self.parts
        wrong = (starts < 0) | (stops <= starts)
        if wrong.any():
            item = int(wrong.argmax())
            raise ArgumentError(
                f"{self._place(item)} of the table: {file.range_text} is the bytes [{starts[item]:,}, "
                f"{stops[item]:,}) of {self.keys[item].as_py()!r}: 0 <= start < stop must hold. Mend the "
                "table, or drop such rows"
            )

    def _place(self, item: int) -> str:
        if self._rows is None:
            return f"row {item:,}"
        row = int(self._rows[item])
        return f"row {row:,}, place {item - int(self.lengths[:row].sum())} of its list"


def _combined(column: Any) -> Any:
    """Return a column as one array. That of text has offsets of 64 bits: one of 32 holds 2 GiB at most."""
    kind, types = column.type, pa.types
    if types.is_string(kind) or types.is_string_view(kind):
        column = column.cast(pa.large_string())
    elif types.is_list(kind) and types.is_string(kind.value_type):
        column = column.cast(pa.large_list(pa.large_string()))
    return column.combine_chunks()


def _flat(name: str, column: Any) -> tuple[Any, Numbers]:
    """Return the values of all lists in turn, and the length of each list."""
    row = pc.index(column.is_null(), True).as_py()
    if row >= 0:
        raise ArgumentError(
            f"column {name!r} of the table has no list in row {row:,}: drop such rows, or write an empty list"
        )
    column = offset_list(column)
    values = column.flatten()
    if is_list(values.type):
        raise ArgumentError(
            f"column {name!r} of the table has lists of lists, and File takes one list a row: flatten them"
        )
    return values, column.value_lengths().cast(pa.int64()).to_numpy()


def _check_lengths(first: str, before: Numbers, name: str, lengths: Numbers, differ: bool) -> None:
    if differ and (before != lengths).any():
        row = int((before != lengths).argmax())
        raise ArgumentError(
            f"row {row:,} of the table has {before[row]:,} values in {first!r} and {lengths[row]:,} in "
            f"{name!r}: the lists of one File have one length in a row"
        )


def _whole(value: Any) -> Any:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _is_local(url: str) -> bool:
    protocol, separator, _ = url.partition("://")
    return not separator or protocol.lower() in ("file", "local")


def _shared_root(patterns: Sequence[str], columns: Sequence[Any]) -> str:
    """Return the deepest directory or prefix of all keys, which are URLs or absolute paths."""
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
