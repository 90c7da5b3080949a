"""Rows of Parquet files: read row group by row group, one at random, and their columns as fields.

    store ─ footer ─▶ ranges of the wanted columns, side by side ─▶ pyarrow ─▶ values ─▶ one record per row

The thread that gets the last range decodes the row group, while the rows of others are used.

Hugging Face's `datasets` keeps an image, and a sound, as a struct {"bytes": binary, "path": string}: such a
column counts as its bytes.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa

from fastload.datasets.arrow import is_numeric, to_python, why_not_number
from fastload.datasets.sample_fields import Shape
from fastload.datasets.sample_transforms import FieldTransforms
from fastload.errors import DecodeError
from fastload.fetch.reads import plan_ranges
from fastload.fetch.threads import ReadPool
from fastload.formats.parquet import Ranges, column_ranges, leaf_columns, parse_footer, read_row_group
from fastload.formats.pieces import Record
from fastload.formats.sample import dump, load, own_bytes
from fastload.images.decode import decode_pil, is_image
from fastload.shards.catalog import ShardList
from fastload.shards.index import RecordId
from fastload.shards.parquet_files import Numbers, ParquetFiles
from fastload.shards.reader import PIECES, naming
from fastload.shards.record_fields import NAME_IT, Column, ColumnFields
from fastload.shards.stream import Span
from fastload.store.failures import Wait

_log = logging.getLogger("fastload")

_FOOTERS = 32 << 20  # bytes of footers that a process keeps
_RECENT = 128 << 20  # bytes of row groups that a process keeps of which single rows were asked for
_FILE = {"bytes", "path"}


class Rows:
    """The samples [first, ...) of a file that lie in one row group."""

    def __init__(self, first: int, positions: list[int], columns: Mapping[str, list[Any]]) -> None:
        self._first = first
        self._positions = positions  # of the samples, in the row group
        self._columns = columns

    @property
    def ordinals(self) -> range:
        return range(self._first, self._first + len(self._positions))

    def record(self, ordinal: int) -> memoryview:
        at = self._positions[ordinal - self._first]
        return dump({name: values[at] for name, values in self._columns.items()})


class RowGroups:
    """The row groups of a dataset, in one process. See `RecordBlocks`.

    Args:
        shards, files: what to read.
    """

    def __init__(self, shards: ShardList, files: ParquetFiles) -> None:
        self.key = files.digest
        self._shards = shards
        self._files = files
        self._footers: dict[int, tuple[Any, int]] = {}  # shard -> metadata, bytes
        self._reading: dict[int, threading.Lock] = {}  # by shard
        self._lock = threading.Lock()  # of both
        self._decoding = threading.Lock()
        self._read_once: set[tuple[int, int]] = set()  # for a row alone
        self._damaged: dict[tuple[int, int], str] = {}  # of these, why; each process looks once
        self._warned = False
        self._recent: dict[tuple[int, int], Rows] = {}  # (shard, row group), of which a row alone was read
        self._recent_lock = threading.Lock()

    def spans(self) -> list[Span]:
        return self._files.row_groups()

    def size(self, span: Span) -> int:
        sizes = self._files.files[span.shard].sizes  # inflated
        part = sizes[self.group_of(span.shard, span.first)] / max(1, sizes.sum())
        return int(self._shards[span.shard].size * part)

    def most_open(self, most_bytes: int) -> int:
        # As many are read ahead, and one that is decoded takes its bytes twice.
        return max(1, most_bytes // (4 * max(1, self._files.largest())))

    def open_reader(self, span: Span, ordinal: int, offset: int, pool: ReadPool) -> RowGroupReader:
        return RowGroupReader(self, span, ordinal, offset, pool)

    def read_one(self, shard: int, ordinal: int, wait: Wait) -> tuple[Rows, bool]:
        """Return the rows of the row group in which a row lies, and whether they were read now.

        The last ones are kept. One row group at a time is read, however many threads ask: each may be
        hundreds of megabytes. The prefetcher counts the row as one request.
        """
        group = self.group_of(shard, ordinal)
        with self._recent_lock:
            rows = self._recent.get((shard, group))
            if rows is not None:
                return rows, False
            if (shard, group) in self._damaged:
                raise DecodeError(self._damaged[shard, group])
            self._make_room(int(self._files.files[shard].sizes[group]))
            self._warn_of_rereads(shard, group)
            try:
                rows = self.rows(shard, group, self.read(shard, group, wait))
            except DecodeError as error:
                self._damaged[shard, group] = error.message
                raise
            self._recent[shard, group] = rows
            return rows, True

    def _make_room(self, size: int) -> None:
        """Let go of the row groups that were read first, until one of `size` bytes fits."""
        held = {kept: int(self._files.files[kept[0]].sizes[kept[1]]) for kept in self._recent}
        while self._recent and sum(held.values()) + size > _RECENT:
            first = next(iter(self._recent))
            del self._recent[first], held[first]

    def _warn_of_rereads(self, shard: int, group: int) -> None:
        if (shard, group) in self._read_once and not self._warned:
            self._warned = True
            _log.warning(
                "rows of %r are read at random, and row group %d is read again for one of them (%.0f MB): "
                "fill the cache first, by iterating over the whole dataset once, or write smaller row groups",
                self._shards[shard].key,
                group,
                self._files.files[shard].sizes[group] / 1e6,
            )
        self._read_once.add((shard, group))

    def row_size(self, shard: int, ordinal: int) -> int:
        """Return the bytes that a row counts as. Streams are ordered by them, so they are the index's."""
        return int(self._files.files[shard].row_sizes()[self.group_of(shard, ordinal)])

    def group_of(self, shard: int, ordinal: int) -> int:
        return int(np.searchsorted(self._files.files[shard].stops(), ordinal, side="right"))

    def where(self, record: int) -> tuple[int, int]:
        """Return the file and the row group of a sample, given its packed `RecordId`."""
        shard, ordinal = RecordId.unpack(record)
        return shard, self.group_of(shard, ordinal)

    def rows_of(self, shard: int, group: int) -> int:
        """Return the number of rows of a row group, samples or not."""
        return int(self._files.files[shard].rows[group])

    def firsts_of(self, records: Numbers) -> Numbers:
        """Return the first sample in the row group of each of these, all as packed `RecordId`s."""
        return self._firsts[np.searchsorted(self._firsts, records, side="right") - 1]

    @functools.cached_property
    def _firsts(self) -> Numbers:
        return np.array([RecordId(span.shard, span.first).pack() for span in self.spans()], np.int64)

    def numbers(self, shard: int, first: int, stop: int) -> list[int]:
        """Return the numbers of the rows in their file, of the samples [first, stop)."""
        chosen = self._files.files[shard].chosen
        return list(range(first, stop)) if chosen is None else chosen[first:stop].tolist()

    def ranges(self, shard: int, group: int, wait: Wait) -> Ranges:
        """Return the bytes of a row group to read, in pieces."""
        file, size = self._files.files[shard], self._shards[shard].size
        metadata = self._metadata(shard, wait)
        leaves = leaf_columns(metadata, self._files.columns)
        whole, _ = column_ranges(metadata, group, leaves, size, file.footer)
        return [
            (start + first, start + last)
            for start, stop in whole
            for first, last in plan_ranges(stop - start, PIECES.usual)
        ]

    def read_range(self, shard: int, wait: Wait, start: int, stop: int) -> Any:
        """Return a range of a file, of the version that was listed."""
        file = self._shards[shard]
        with naming(file.key):
            return self._shards.store.read_range(file.key, start, stop, file.version, wait=wait)

    def read(self, shard: int, group: int, wait: Wait) -> Any:
        """Read a row group, range by range, as `decode` returns it."""
        ranges = self.ranges(shard, group, wait)
        pieces = [(start, self.read_range(shard, wait, start, stop)) for start, stop in ranges]
        return self.decode(shard, group, pieces, wait)

    def decode(self, shard: int, group: int, pieces: list[tuple[int, Any]], wait: Wait) -> Any:
        """Return all rows of a row group as a `pyarrow.Table`.

        Raises:
            DecodeError: it is damaged.
        """
        metadata, file = self._metadata(shard, wait), self._files.files[shard]
        with self._decoding:
            most = self._shards.store.reading.max_inflated
            size = self._shards[shard].size
            table = read_row_group(metadata, group, self._files.columns, pieces, size, most)
        if len(table) != file.rows[group]:
            raise DecodeError(f"row group {group} has {len(table):,} rows, not {file.rows[group]:,}")
        return table

    def rows(self, shard: int, group: int, table: Any) -> Rows:
        """Return the samples among all rows of a row group."""
        first, places = self.places(shard, group)
        return Rows(first, places.tolist(), row_columns(table))

    def places(self, shard: int, group: int) -> tuple[int, Numbers]:
        """Return the samples of a row group: the number of the first one in its file, and their places in the
        row group.
        """
        file = self._files.files[shard]
        stop = int(file.row_stops()[group])
        first = stop - int(file.rows[group])
        if file.chosen is None:
            return first, np.arange(stop - first)
        begin, end = np.searchsorted(file.chosen, [first, stop])
        return int(begin), file.chosen[begin:end] - first

    def _metadata(self, shard: int, wait: Wait) -> Any:
        """Return the metadata of a file, read once by this process unless it has dropped it."""
        with self._lock:
            found, reading = self._footers.get(shard), self._reading.setdefault(shard, threading.Lock())
        if found is None:
            with reading:  # by one thread, while the others that want it wait
                with self._lock:
                    found = self._footers.get(shard)
                if found is None:
                    size, footer = self._shards[shard].size, self._files.files[shard].footer
                    found = parse_footer(self.read_range(shard, wait, size - footer, size)), footer
                    self._keep_footer(shard, found)
        return found[0]

    def _keep_footer(self, shard: int, found: tuple[Any, int]) -> None:
        with self._lock:
            while self._footers and sum(used for _, used in self._footers.values()) + found[1] > _FOOTERS:
                del self._footers[next(iter(self._footers))]
            self._footers[shard] = found


def row_columns(table: Any) -> dict[str, list[Any]]:
    """Return the values of a table by column. Raises `DecodeError` for a text that is not UTF-8."""
    columns = {}
    for name in table.column_names:
        try:
            columns[name] = column_values(table[name])
        except UnicodeDecodeError as error:  # Arrow does not look into texts
            raise DecodeError(
                f"column {name!r} has a text that is not UTF-8 ({error}), in its row group: write it as "
                "binary, or leave it out with fields="
            ) from error
    return columns


class RowGroupReader:
    """The rows of a part of one row group, in order, out of the store. See `Reader`.

    Args:
        groups: reads and decodes.
        span: the samples of the row group, or some of them.
        ordinal, offset: of the first one to give.
        pool: the threads that read; get.* are added to its counters.
    """

    ready = False
    compressed = True  # to read one record again costs its row group
    all_requested = True

    def __init__(
        self,
        groups: RowGroups,
        span: Span,
        ordinal: int,
        offset: int,
        pool: ReadPool,
    ) -> None:
        self.ordinal, self.offset = ordinal, offset
        self._groups = groups
        self._shard, self._first, self._stop = span.shard, ordinal, span.stop or 0
        self._pool = pool
        self._rows: Rows | DecodeError | None = None
        self._done: Future[Rows] = Future()
        self._lock = threading.Lock()
        self._missing = 0
        self._closed = False
        self._numbers: list[int] = []
        self._size = 0  # of each row
        if ordinal < self._stop:
            pool.submit(functools.partial(self._try, self._begin))

    def next(self) -> Record | None:
        """Return the next row as a record, or None at the end. Blocks until its row group is here.

        Raises:
            StoreError: it cannot be read. Damage is an error of each of its rows.
        """
        if self.ordinal >= self._stop:
            return None
        if self._rows is None:
            try:
                self._rows = self._pool.wait(self._done)
            except DecodeError as error:
                self._rows = error
            self._numbers = self._groups.numbers(self._shard, self._first, self._stop)
            self._size = self._groups.row_size(self._shard, self._first)
        ordinal, offset = self.ordinal, self._numbers[self.ordinal - self._first]
        self.ordinal, self.offset = ordinal + 1, offset + 1
        if isinstance(self._rows, DecodeError):
            return Record(offset, self._size, None, DecodeError(self._rows.message))
        assert self._rows is not None
        return Record(offset, self._size, self._rows.record(ordinal))

    def close(self) -> None:
        """Let go of the row group."""
        self._closed = True
        self._stop = self.ordinal
        self._rows = None

    # --- in the threads of the pool

    def _try(self, work: Callable[[], None]) -> None:
        """Do a part of the reading; its error is that of the row group."""
        if self._closed or self._done.done():
            return
        try:
            work()
        except BaseException as error:
            with self._lock:
                if not self._done.done():
                    self._done.set_exception(error)

    def _begin(self) -> None:
        group = self._groups.group_of(self._shard, self._first)
        ranges = self._groups.ranges(self._shard, group, self._pool.pause)
        pieces: list[tuple[int, Any]] = [(start, b"") for start, _ in ranges]
        self._missing = len(ranges)
        for number in range(len(ranges)):
            read = functools.partial(self._read, group, pieces, number, *ranges[number])
            self._pool.submit(functools.partial(self._try, read))
        if not ranges:
            self._decode(group, pieces)

    def _read(self, group: int, pieces: list[tuple[int, Any]], number: int, start: int, stop: int) -> None:
        self._pool.counters.add("get.requests")
        pieces[number] = start, self._groups.read_range(self._shard, self._pool.pause, start, stop)
        self._pool.counters.add("get.bytes", stop - start)
        with self._lock:
            self._missing -= 1
            last = not self._missing
        if last:
            self._decode(group, pieces)

    def _decode(self, group: int, pieces: list[tuple[int, Any]]) -> None:
        table = self._groups.decode(self._shard, group, pieces, self._pool.pause)
        rows = self._groups.rows(self._shard, group, table)
        with self._lock:
            if not self._done.done():
                self._done.set_result(rows)


def is_file(kind: Any) -> bool:
    """Return whether a column has encoded files, such as images, with their paths."""
    if not pa.types.is_struct(kind) or {field.name for field in kind} != _FILE:
        return False
    return bool(_is_binary(kind.field("bytes").type) or pa.types.is_null(kind.field("bytes").type))


def _is_binary(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def column_values(column: Any) -> list[Any]:
    """Return the values of a column: views of binary ones; of a file its bytes, or else its path."""
    if not is_file(column.type):
        return to_python(column, views=True)
    values = []
    for chunk in column.chunks:
        parts = dict(zip([field.name for field in chunk.type], chunk.flatten(), strict=True))
        bodies = to_python(parts["bytes"], views=True)
        if parts["bytes"].null_count:
            paths = to_python(parts["path"])
            bodies = [path if body is None else body for body, path in zip(bodies, paths, strict=True)]
        values += bodies
    return values


class ParquetFields(ColumnFields):
    """The columns of a row, of which its values say whether they are images.

    Args:
        schema: of the columns that are read.
        shape, decode: as of `ColumnFields`.
    """

    def __init__(self, schema: Any, shape: Shape | None, decode: Any) -> None:
        kinds = {field.name: field.type for field in schema}
        columns = {
            name: Column(str(kind), own_bytes, may_be_image=is_file(kind) or _is_binary(kind))
            for name, kind in kinds.items()
        }
        split = functools.partial(_split_row, [name for name, kind in kinds.items() if is_file(kind)])
        super().__init__(columns, split, decode_pil, shape, decode, None, [])
        self._numeric = {name for name, kind in kinds.items() if is_numeric(kind)}
        self._sure = _hugging_face_images(schema.metadata or {})  # whatever their bytes look like

    @property
    def key(self) -> str:
        return repr((None if self.shape is None else self.columns, self._decoded))

    def check(self, transform: Any) -> None:
        images = (self._possible or [])[:1]
        FieldTransforms(transform).check(list(self.columns), images, NAME_IT)

    def images(self, fields: Mapping[str, Any]) -> list[str]:
        return [name for name in self._possible or [] if self._is_image(name, fields[name])]

    def open(self, name: str, value: Any) -> Any:
        column = self.columns[name]
        if column in self._numeric and column not in self._decoded and (why := why_not_number(value)):
            raise DecodeError(
                f"column {column!r} {why}, which no batch of numbers can hold: give decode={{{column!r}: a "
                "function that makes a number of it}, or leave such rows out with filters="
            )
        return super().open(name, value)

    def _is_image(self, name: str, value: Any) -> bool:
        if value is None:
            return False
        return (
            self.columns[name] in self._sure or not isinstance(value, bytes | memoryview) or is_image(value)
        )


def _split_row(files: list[str], payload: memoryview) -> dict[str, Any]:
    """Return the values of a record by column. Raises `DecodeError` where one of `files` is only a path."""
    row = load(payload)
    if not isinstance(row, dict):
        raise DecodeError("not a cached row")
    for column in files:
        if isinstance(row[column], str):
            raise DecodeError(
                f"column {column!r} has only the path {row[column]!r} of its file, and no bytes: write the "
                "table again with the files in it (Hugging Face: push_to_hub, or "
                "datasets.table.embed_table_storage)"
            )
    return row


def _hugging_face_images(metadata: Mapping[bytes, bytes]) -> set[str]:
    """Return the columns that Hugging Face's `datasets` has written down as images."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name for name, feature in features.items() if feature.get("_type") == "Image"}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return set()
