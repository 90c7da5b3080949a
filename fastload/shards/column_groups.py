"""Row groups as columns: read ahead as a whole, kept in the cache as Arrow's memory, and held while in use.

    rows of a batch ─▶ their row groups ─▶ prefetcher: cache, or store ─▶ pyarrow ─▶ Arrow's IPC stream
                                                                  cache, and `Chunk` that is held ◀┘

The cache keeps all rows of a row group, whatever `filters=` leaves out, and only the columns that are read.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from fastload.cache import Cache
from fastload.datasets.arrow_columns import check_column, column_form, make_chunk
from fastload.datasets.columns import Chunk, Fault, Form, Forms, Rows
from fastload.errors import ArgumentError, DecodeError, FastloadError
from fastload.fetch.prefetcher import Prefetcher
from fastload.fetch.reads import Source
from fastload.formats.sample import dump
from fastload.metrics.counters import Counters
from fastload.shards.catalog import ShardList
from fastload.shards.index import ShardIndex
from fastload.shards.parquet_files import ParquetFiles
from fastload.shards.row_groups import RowGroups, is_file, row_columns
from fastload.store.base import Buffer
from fastload.store.failures import Wait

_log = logging.getLogger("fastload")


def forms_of(schema: Any, fields: Mapping[str, str]) -> Forms:
    """Return the form of each field.

    Args:
        schema: of the columns that are read.
        fields: name -> column.

    Raises:
        ArgumentError: no batch can hold a column.
    """
    for column in fields.values():
        if is_file(schema.field(column).type):
            raise ArgumentError(
                f"column {column!r} has files, such as images, which batches='columns' does not decode: "
                "leave it out with fields=, or use batches='rows'"
            )
    return {name: column_form(column, schema.field(column).type) for name, column in fields.items()}


class GroupSource(Source):
    """A sample of this source is a row group, asked for by the packed `RecordId` of any sample in it.

    Args:
        shards, files: of the dataset.
        groups: reads row groups.
        key: `RecordId` -> cache key of the row group.
    """

    def __init__(
        self, shards: ShardList, files: ParquetFiles, groups: RowGroups, key: Callable[[int], bytes]
    ) -> None:
        self.store = shards.store
        self._shards, self._files, self._groups, self._key = shards, files, groups, key

    def name(self, index: int) -> str:
        shard, group = self._groups.where(index)
        return f"{self._shards[shard].key}, row group {group}"

    def size(self, index: int) -> int:
        shard, group = self._groups.where(index)
        return int(self._files.files[shard].sizes[group])

    def cache_key(self, index: int) -> bytes:
        return self._key(index)

    def read(self, index: int, wait: Wait) -> Buffer:
        shard, group = self._groups.where(index)
        try:
            return _dumped(self._groups.read(shard, group, wait).select(self._files.columns))
        except FastloadError as error:
            error.key = self.name(index)
            raise


class ColumnGroups(Prefetcher):
    """The prefetcher of row groups, which holds those that batches are made of. See `ColumnSource`.

    A chunk is the samples of a row group, and its number the packed `RecordId` of the first of them.

    Args:
        source, cache, counters: as of `Prefetcher`.
        groups: of the dataset.
        index: of its samples.
        schema: of the columns that are read.
        forms: of the fields.
        fields: name -> column.
        most_bytes: what a window of row groups takes: twice as much is held.
    """

    def __init__(
        self,
        source: Source,
        cache: Cache | None,
        *,
        counters: Counters,
        groups: RowGroups,
        index: ShardIndex,
        schema: Any,
        forms: Mapping[str, Form],
        fields: Mapping[str, str],
        most_bytes: int,
    ) -> None:
        super().__init__(source, cache, prepare=None, counters=counters)
        self.forms = forms
        self._groups, self._index, self._schema, self._fields = groups, index, schema, fields
        self._most_bytes = 2 * most_bytes
        # For all that follows. The lock of the base is for its reads, and its `cancel` never waits for it.
        self._own_lock = threading.Lock()
        self._loading = threading.Lock()
        self._held: dict[int, Chunk] = {}  # the one that was used last comes last
        self._damaged: dict[int, str] = {}  # why. An error would hold all that it was raised through
        self._requested: set[int] = set()
        self._dropped: set[int] = set()
        self._warned = False
        self._table: tuple[int, Any] | None = None  # of which single rows were asked for

    def request(self, indices: Iterable[int], reader: object = None) -> None:
        with self._own_lock:
            known = self._requested.union(self._damaged, self._held)
            missing = [number for number in indices if number not in known]
            self._requested.update(missing)
        if missing:
            super().request(missing, reader)

    def cancel(self, indices: Iterable[int]) -> None:
        unwanted = self._requested.intersection(indices)
        self._requested -= unwanted
        super().cancel(unwanted)

    def locate(self, rows: Rows) -> tuple[Rows, Rows]:
        records = self._index.record_ids(rows)
        firsts = self._groups.firsts_of(records)
        return firsts, records - firsts

    def chunk(self, number: int) -> Chunk:
        with self._loading:
            with self._own_lock:
                chunk = self._held.pop(number, None)
                if chunk is not None:
                    self._held[number] = chunk
                    return chunk
                if number in self._damaged:
                    raise DecodeError(self._damaged[number])
            try:
                table = self._read(number)
                columns = {name: table[column].combine_chunks() for name, column in self._fields.items()}
                chunk = make_chunk(columns, self.forms, packed=True)
                self._hold(number, chunk)
            except DecodeError as error:
                self._damaged[number] = error.message
                raise
            finally:
                self._requested.discard(number)
            return chunk

    def _get(self, index: int) -> memoryview:
        """Return a sample alone, as a record of `batches="rows"`."""
        first = int(self._groups.firsts_of(np.array([index]))[0])
        with self._loading:
            if self._table is None or self._table[0] != first:
                self._table = first, self._read(first)
                self._requested.discard(first)
            row = self._table[1].slice(index - first, 1)
        return dump({name: values[0] for name, values in row_columns(row).items()})

    def why_not(self, fault: Fault) -> str:
        return (
            f"column {self._fields[fault.name]!r} {fault.why}, which no batch of numbers can hold: leave "
            "such rows out with filters=, or the column with fields="
        )

    def _read(self, number: int) -> Any:
        """Return the samples of a row group as a table."""
        shard, group = self._groups.where(number)
        table = _loaded(super()._get(number), self._schema, self._groups.rows_of(shard, group))
        _, places = self._groups.places(shard, group)
        return table if len(places) == len(table) else table.take(pa.array(places))

    def _hold(self, number: int, chunk: Chunk) -> None:
        with self._own_lock:
            size = chunk.nbytes
            while self._held and sum(held.nbytes for held in self._held.values()) + size > self._most_bytes:
                first = next(iter(self._held))
                del self._held[first]
                self._dropped.add(first)
            self._held[number] = chunk
            again = number in self._dropped
            self._dropped.discard(number)
        if again and not self._warned and len(self._held) < len(self._groups.spans()):
            self._warn(number)

    def _warn(self, number: int) -> None:
        self._warned = True
        _log.warning(
            "%s is read again soon after it was used: the order of the loader asks for rows of more row "
            "groups than %.0f MB hold. Leave the order to fastload.DataLoader(shuffle=True) or "
            "fastload.ShardSampler, or raise shuffle_buffer=",
            self._source.name(number),
            self._most_bytes / 1e6,
        )


def _dumped(table: Any) -> memoryview:
    """Return a table as Arrow's IPC stream, of one batch without dictionaries."""
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata(None).cast(_plain(table.schema)).combine_chunks()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return memoryview(sink.getvalue())


def _loaded(payload: Any, schema: Any, rows: int) -> Any:
    """Return what `_dumped` wrote, over the same memory.

    Anybody may have published it, and pyarrow follows offsets wherever they lead: nothing is inflated, joined
    or used before it was checked.

    Raises:
        DecodeError: it is of other columns or rows, or damaged; or a text is not UTF-8.
    """
    try:
        messages = list(pa.ipc.MessageReader.open_stream(pa.py_buffer(payload)))
        types = [message.type for message in messages]
        if types != ["schema", "record batch"] or _is_compressed(messages[1]):
            raise DecodeError("a row group in the cache is not one plain batch, as fastload writes it")
        own_schema = pa.ipc.read_schema(messages[0])
        if _types(own_schema) != _types(_plain(schema)):
            raise DecodeError(f"a row group in the cache has the columns {own_schema.names}")
        batch = pa.ipc.read_record_batch(messages[1], own_schema)
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        raise DecodeError(f"a row group in the cache cannot be read: {error}") from error
    if batch.num_rows != rows:
        raise DecodeError(f"a row group in the cache has {batch.num_rows:,} rows, not {rows:,}")
    for name, column in zip(own_schema.names, batch.columns, strict=True):
        check_column(name, column)
    return pa.Table.from_batches([batch])


def _plain(schema: Any) -> Any:
    """Return a schema with dictionaries as what they stand for."""
    return pa.schema(
        [
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
            for field in schema
        ]
    )


def _types(schema: Any) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in schema]


def _is_compressed(batch: Any) -> bool:
    """Return whether a message has compressed buffers, which pyarrow would inflate to any size."""
    data = memoryview(batch.metadata)

    def place_of(table: int, field: int) -> int:  # in a table of flatbuffers; 0: it has no such field
        (back,), entry = struct.unpack_from("<i", data, table), 4 + 2 * field
        (entries,) = struct.unpack_from("<H", data, table - back)
        (offset,) = struct.unpack_from("<H", data, table - back + entry) if entry < entries else (0,)
        return table + offset if offset else 0

    (message,) = struct.unpack_from("<I", data)
    header = place_of(message, 2)  # Message.header
    (start,) = struct.unpack_from("<I", data, header)
    return place_of(header + start, 3) > 0  # RecordBatch.compression
