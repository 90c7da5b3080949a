"""The files of a ParquetDataset as their footers tell them, from its construction on, and `filters=`.

footer ─▶ schema, row groups ─▶ (filters: their columns are read) ─▶ rows ─▶ kept in the cache's directory
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastload.datasets.arrow import check_type
from fastload.errors import ArgumentError, CacheError, DecodeError, FastloadError
from fastload.formats.parquet import (
    TAIL,
    column_ranges,
    footer_size,
    leaf_columns,
    parse_footer,
    read_row_group,
    statistics,
)
from fastload.order.permutations import Blocks
from fastload.shards.catalog import ShardList
from fastload.shards.epoch_streams import StreamOptions
from fastload.shards.index import RecordOffsets, ShardIndex, digest_of, seal, unseal
from fastload.shards.reader import Shard, naming
from fastload.shards.stream import Span
from fastload.store import Store
from fastload.store.node import open_kept, save_kept

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
        """Return whether rows of a row group may pass. `statistics`: column -> least, greatest; or None."""
        return any(all(_may_hold(one, statistics(one[0])) for one in group) for group in self._groups)

    def mask(self, table: pa.Table) -> Any:
        """Return a boolean for each row of a table, as a numpy array.

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
            values = list(value)
            if pa.types.is_integer(kind):  # Arrow would cut a float
                floats = float | np.floating
                values = [one for one in values if not isinstance(one, floats) or one.is_integer()]
            found = pc.is_in(column.cast(kind), value_set=pa.array(values, kind))
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
    if isinstance(least, Decimal):
        values = value if operator in _MEMBER else [value]
        if not all(isinstance(one, Decimal | int) for one in values):
            return True  # Arrow compares decimals with floats as doubles, to which it rounds both
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


_log = logging.getLogger("fastload")

_READS = 64  # files at once
_HUGE = 1 << 30
_MOST_ROWS = 1 << 32  # of a file: see `RecordId`
_ROWS_A_BYTE, _FEW_ROWS = 64, 1 << 26  # columns of one value need few bytes; a damaged footer may tell of any
_LEAST_ROW = 64  # bytes of a row in memory: a column of one value takes next to none in its file
_VERSION = "parquet rows 1"

Numbers = NDArray[np.int64]


class FileRows(NamedTuple):
    """What is known of one file.

    schema: of all its columns, as `pyarrow.Schema.serialize` writes it; b"" once it was compared.
    footer: bytes at its end that are no columns.
    rows, sizes: of each row group: its rows, and the bytes of the wanted columns, inflated.
    chosen: the numbers of the rows that pass the filter, in order; None: all.
    """

    schema: bytes
    footer: int
    rows: Numbers
    sizes: Numbers
    chosen: Numbers | None

    def row_stops(self) -> Numbers:
        """Return the number of the row that follows each row group."""
        return np.cumsum(self.rows)

    def stops(self) -> Numbers:
        """Return, for each row group, how many samples there are up to its end."""
        stops = self.row_stops()
        return stops if self.chosen is None else np.searchsorted(self.chosen, stops)

    def row_sizes(self) -> Numbers:
        """Return the bytes of a row of each row group, as far as the footer tells."""
        return np.maximum(_LEAST_ROW, self.sizes // np.maximum(1, self.rows))

    def offsets(self) -> NDArray[np.uint64]:
        """Return (number of the row, its bytes by `row_sizes`) of each sample."""
        sizes = np.repeat(self.row_sizes(), self.rows)
        numbers = np.arange(len(sizes)) if self.chosen is None else self.chosen
        return np.stack([numbers, sizes[numbers]], axis=1).astype(np.uint64)


class ParquetFiles:
    """The files of one dataset.

    Args:
        shards: the files.
        columns: the wanted columns; None: all.
        row_filter: which rows are samples; None: all.
        directory: where to keep what was found; None: nowhere.

    Attributes:
        schema: of the wanted columns, the same in all files.

    Raises:
        ArgumentError: a column is not there or has values that no sample can have; or files differ.
        DecodeError: a file is none of Parquet, or damaged; its `key` names it. StoreError.
    """

    def __init__(
        self,
        shards: ShardList,
        columns: Sequence[str] | None,
        row_filter: RowFilter | None,
        directory: Path | None,
    ) -> None:
        self._wanted = None if columns is None else sorted(set(columns))
        self._filter = row_filter
        with ThreadPoolExecutor(shards.store.reading.at_once(min(_READS, len(shards)))) as pool:
            look = partial(self._look, shards.store, directory)
            self.files: list[FileRows] = list(pool.map(look, (shards[at] for at in range(len(shards)))))
        self.schema = self._schema(shards)
        self.files = [file._replace(schema=b"") for file in self.files]
        self._warn_of_huge(shards)

    def __fingerprint__(self) -> Any:
        """Return what is read of the files, which `ShardList` describes: see `datasets.fingerprint`."""
        return str(self.schema.remove_metadata()), self.digest

    @property
    def columns(self) -> list[str]:
        """The columns that are read, in the order of the file."""
        return list(self.schema.names)

    @property
    def digest(self) -> str:
        """A text that differs where other rows are samples."""
        return "" if self._filter is None else digest_of(self._filter.key, 16)

    def index_rows(self, shards: ShardList, index: ShardIndex) -> None:
        """Add the samples of each file to the index; their offsets are the numbers of their rows.

        "compressed" means here too that a record alone cannot be read: its row group has to be.
        """
        for shard, file in enumerate(self.files):
            index.add(shard, RecordOffsets(file.offsets(), {}, compressed=True))

    def row_groups(self) -> list[Span]:
        """Return the samples of each row group, of all files."""
        spans = []
        for shard, file in enumerate(self.files):
            first = 0
            for stop in file.stops().tolist():
                if stop > first:
                    spans.append(Span(shard, first, stop))
                first = stop
        return spans

    def blocks(self, options: StreamOptions) -> Blocks:
        """Return what `batches="columns"` shuffles: row groups, and how many of them are open at once."""
        counts = tuple((span.stop or 0) - span.first for span in self.row_groups())
        by_bytes = options.most_bytes // max(1, self.largest())
        by_rows = options.most_records // max(1, *counts, 1)
        return Blocks(counts, max(2, min(options.cycle_length, by_bytes, by_rows)))

    def largest(self) -> int:
        """Return the bytes of the largest row group."""
        return max((int(file.sizes.max(initial=0)) for file in self.files), default=0)

    def _look(self, store: Store, directory: Path | None, shard: Shard) -> FileRows:
        """Return what is kept of a file, else what its footer says."""
        filtered = "" if self._filter is None else self._filter.key
        found = (_VERSION, store.identity, shard.key, shard.size, shard.version, self._wanted, filtered)
        identity = repr(found)
        path = (
            None if directory is None or not shard.version else directory / f"{digest_of(identity, 16)}.rows"
        )
        kept = None if path is None else _load(path, identity)
        if kept is not None:
            return kept
        with naming(shard.key):
            rows = self._read(store, shard)
        if path is not None:
            try:
                save_kept(path, seal(identity, tuple(rows)))
            except (OSError, CacheError) as error:
                _log.warning("the footers of Parquet files cannot be kept in %s: %s", path.parent, error)
        return rows

    def _read(self, store: Store, shard: Shard) -> FileRows:
        tail = store.read_range(shard.key, max(0, shard.size - TAIL), shard.size, shard.version)
        footer = footer_size(tail, shard.size)
        if footer > len(tail):
            tail = store.read_range(shard.key, shard.size - footer, shard.size, shard.version)
        metadata = parse_footer(memoryview(tail)[-footer:])
        schema = metadata.schema.to_arrow_schema()
        wanted = schema.names if self._wanted is None else self._wanted
        _check_columns(shard.key, schema, wanted, self._filter)
        count = range(metadata.num_row_groups)
        told = [metadata.row_group(group).num_rows for group in count]
        _check_rows(told, shard.size)
        rows = np.array(told, np.int64)
        leaves = leaf_columns(metadata, wanted)
        sizes = [column_ranges(metadata, group, leaves, shard.size, footer)[1] for group in count]
        chosen = None
        if self._filter is not None:
            chosen = self._choose(
                partial(_table, store, shard, metadata, footer, self._filter.columns), metadata
            )
        return FileRows(schema.serialize().to_pybytes(), footer, rows, np.array(sizes, np.int64), chosen)

    def _choose(self, read: Callable[[int], Any], metadata: Any) -> Numbers:
        """Return the numbers of the rows that pass the filter. Read the row groups that may have any."""
        assert self._filter is not None
        found, first = [np.empty(0, np.int64)], 0
        leaves = {column: leaf_columns(metadata, [column]) for column in self._filter.columns}
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            if rows and self._filter.may_pass(partial(statistics, metadata, group, leaves)):
                found.append(np.flatnonzero(self._filter.mask(read(group))) + first)
            first += rows
        return np.concatenate(found)

    def _schema(self, shards: ShardList) -> Any:
        """Return the wanted columns of the files.

        Raises:
            ArgumentError: two files differ in one of them.
        """
        first: Any = None
        seen: dict[bytes, int] = {}
        for number, file in enumerate(self.files):
            if file.schema in seen:
                continue
            seen[file.schema] = number
            whole = pa.ipc.read_schema(pa.BufferReader(file.schema))
            wanted = whole.names if self._wanted is None else self._wanted
            schema = pa.schema([whole.field(name) for name in whole.names if name in wanted], whole.metadata)
            if first is None:
                first = schema
                for field in schema:
                    check_type(field.name, field.type)
            differing = _difference(first, schema)
            if differing:
                raise ArgumentError(
                    f"{shards[0].key!r} and {shards[number].key!r} have not the same columns: {differing}. "
                    "Choose columns that all files have alike with fields=, or make a dataset of each kind "
                    "of file and join them with torch's ConcatDataset"
                )
        return first

    def _warn_of_huge(self, shards: ShardList) -> None:
        for number, file in enumerate(self.files):
            if file.sizes.max(initial=0) > _HUGE:
                _log.warning(
                    "a row group of %r has %.1f GB in %s rows, and each worker holds two: write the file "
                    "again with smaller ones, as in pyarrow.parquet.write_table(table, path, "
                    "row_group_size=1000)",
                    shards[number].key,
                    file.sizes.max() / 1e9,
                    f"{file.rows[file.sizes.argmax()]:,}",
                )
                return


def _check_columns(key: str, schema: Any, wanted: Iterable[str], row_filter: RowFilter | None) -> None:
    asked = [("fields", name) for name in wanted]
    asked += [("filters", name) for name in (row_filter.columns if row_filter is not None else [])]
    for argument, name in asked:
        if schema.names.count(name) != 1:
            found = "no column" if name not in schema.names else "two columns"
            near = difflib.get_close_matches(name, schema.names, 1) if found == "no column" else []
            raise ArgumentError(
                f"{argument} names {name!r}, and {key!r} has {found} of that name; it has "
                f"{', '.join(schema.names)}{f': did you mean {near[0]!r}?' if near else ''}"
            )


def _check_rows(rows: list[int], size: int) -> None:
    """Raise DecodeError where a file of `size` bytes cannot have that many rows in its row groups."""
    most = min(_MOST_ROWS, max(_FEW_ROWS, _ROWS_A_BYTE * size))
    if min(rows, default=0) < 0 or sum(rows) > most:
        raise DecodeError(
            f"the footer tells of {sum(rows):,} rows in {size:,} bytes, and only up to "
            f"{most:,} are read of one of that size: it is damaged, or must be written as several files"
        )


def _table(store: Store, shard: Shard, metadata: Any, footer: int, columns: Sequence[str], group: int) -> Any:
    ranges, _ = column_ranges(metadata, group, leaf_columns(metadata, columns), shard.size, footer)
    pieces = [(start, store.read_range(shard.key, start, stop, shard.version)) for start, stop in ranges]
    return read_row_group(metadata, group, columns, pieces, shard.size, store.reading.max_inflated)


def _difference(one: Any, other: Any) -> str:
    """Return what tells the columns of two schemas apart, in words; "" if nothing does."""
    for name in dict.fromkeys([*one.names, *other.names]):
        kinds = [schema.field(name).type if name in schema.names else "missing" for schema in (one, other)]
        if kinds[0] != kinds[1]:
            return f"{name!r} is {kinds[0]} in one and {kinds[1]} in the other"
    return ""


def _load(path: Path, identity: str) -> FileRows | None:
    """Return the rows that are kept for this file; None where there is nothing of use."""
    with suppress(OSError, FastloadError, ValueError, TypeError):
        with open(open_kept(path), "rb") as file:  # noqa: PTH123 - a descriptor
            rows = unseal(file.read(), identity)
        return None if rows is None else FileRows(*rows)
    return None
