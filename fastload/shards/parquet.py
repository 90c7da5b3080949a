"""Parquet files as a dataset."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fastload.cache import Cache, as_cache
from fastload.cache.codecs import Raw
from fastload.datasets.columns import ColumnSource
from fastload.datasets.sample_fields import Shape
from fastload.datasets.store_dataset import check_batches
from fastload.errors import FastloadError, shorten_errors
from fastload.fetch.prefetcher import Prefetcher
from fastload.fetch.reads import Source
from fastload.order.permutations import Blocks
from fastload.shards.catalog import ShardList
from fastload.shards.dataset import ShardDataset
from fastload.shards.epoch_streams import StreamOptions
from fastload.shards.formats import PARQUET
from fastload.shards.index import RecordId, digest_of
from fastload.shards.records import IndexedShards, RecordBlocks, RecordSource
from fastload.store.base import Buffer
from fastload.store.failures import Wait
from fastload.store.node import ProcessLocal

if TYPE_CHECKING:
    from fastload.shards.row_groups import RowGroups, Rows

_PATIENCE = 1.0  # seconds to wait for the cache's writer: a row that is missing costs a row group later
_COLUMNS = "columns-2"  # in the cache keys: raise it when the same row group is kept as something else


class _RowSource(RecordSource):
    """A sample is a row, read with its row group.

    Args:
        shards: see `RecordSource`.
        groups: reads the rows.
        cache: takes the other rows of a row group too, as they are read; or None.
    """

    def __init__(self, shards: IndexedShards, groups: RowGroups, cache: Cache | None) -> None:
        super().__init__(shards)
        self._groups = groups
        self._cache = cache
        self._encode = shards.encode

    def read(self, index: int, wait: Wait) -> Buffer:
        shard, ordinal = RecordId.unpack(index)
        try:
            rows, new = self._groups.read_one(shard, ordinal, wait)
        except FastloadError as error:
            error.key = self.name(index)
            raise
        if new and self._cache is not None:
            self._keep_others(self._cache, rows, shard, ordinal)
        return rows.record(ordinal)

    def _keep_others(self, cache: Cache, rows: Rows, shard: int, ordinal: int) -> None:
        patience = 0.0 if cache._is_rebuilding else _PATIENCE
        for other in rows.ordinals:
            if other == ordinal:
                continue
            row = rows.record(other)
            try:
                payload = row if self._encode is None else self._encode(row)
            except FastloadError:  # of that row, for whoever asks for it
                continue
            if not cache.write(self.cache_key(RecordId(shard, other).pack()), payload, patience):
                break  # the cache is full, or its disk too slow


class ParquetDataset(ShardDataset):
    """The rows of Parquet files, for example of a dataset of Hugging Face's hub (`hf://datasets/ORG/NAME/...`).

    A sample has the columns that `fields` names, in its structure: ("image", "label") gives tuples as
    torchvision's datasets do, {"x": "image", "y": "label"} dicts. Without it, a sample is a dict of all
    columns.

    ====================================  ==============================================================
    column                                in a sample
    ====================================  ==============================================================
    bool, integers, floats                bool, int, float; a null is an error of its row
    string                                str, or None
    list of numbers, nested too           a numpy array of their dtype; ragged lists of lists: of arrays
    list of anything else, struct         a list, a dict
    binary that begins like an image      a `PIL.Image` in RGB
    struct of bytes and path              as its bytes; Hugging Face keeps images and sounds like that
    binary                                bytes, or None
    dictionary                            as its values
    timestamp, date, decimal, map         refused: leave it out, or cast it
    ====================================  ==============================================================

    Example::

        from fastload import DataLoader, ParquetDataset, RandomResizedCrop

        dataset = ParquetDataset(
            "s3://bucket/parquet/train-*.parquet",
            fields=("image", "label"),
            transform=RandomResizedCrop(224, flip=0.5),
            cache="/ssd/cache",
        )
        for images, labels in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            images, labels  # uint8 (256, 3, 224, 224), int64 (256,)

    The footers are read here, so `len()` is known from the start, and few files feed many workers and ranks.
    Parquet can be read by row groups only. So an epoch is streamed as long as the cache lacks a row: row
    groups in random order, several open at once, and their rows shuffled in blocks. Once the cache has all
    rows, samples are read at random from it, with an exact shuffle. Without a cache every epoch is streamed.
    Streamed with `shuffle=False`, each worker reads its part of the rows in the order of the files, and the
    batches of the workers alternate: with one worker, or none, that is the order of the files.

    The workers of a rank have `cycle_length` row groups open together, or fewer where these are large: a
    worker opens as many as a quarter of 256 MiB holds, and one at least. For each, another one is read ahead,
    and decoding doubles both. `dataset[i]`, `Subset` and the like read a whole row group for a row that the
    cache does not have; a cache in mode "auto", "raw" or "dct" then keeps all its rows.

    Args:
        url: a prefix, one file, `{000..099}`, a glob, a list of these: any fsspec URL or path. Below a
            prefix, files and folders whose names begin with "." or "_" are left out, as in pyarrow.
        fields: the columns and their structure: a column, a tuple, a dict, or these nested; None: all.
        decode: a dict {column: function of its value} that replaces the built-in decoding; or a function from
            the dict of the fields, encoded, to the sample. Deterministic.
        transform: a fused transform, which takes the one image of a sample; a dict {field: function or fused
            transform}; or any callable on the sample. Fused transforms write their images into the batch.
        filters: conditions that rows must fulfil, in pyarrow's form: tuples (column, operator, value) with
            =, !=, <, <=, >, >=, in, not in; of a list of such lists, one must hold as a whole. Row groups are
            skipped by their statistics. Of the others the columns named here are read at construction,
            once if there is a cache.
        cycle_length: row groups open at once, by all workers of a rank together.
        shuffle_buffer: size of a shuffled block per worker: samples as int, or bytes as text ("64MB"),
            counted uncompressed, as the footers say.
        batches: "rows", or "columns": the loader makes a batch without a Python object for each row. It is
            the same batch, with a `Jagged` for a column of lists. Without decode= and transform=.
        cache, storage_options, listing_max_age: see `TarDataset`.

    With `batches="columns"` an epoch is never streamed, and its order is known in advance, with the same
    samples for any number of workers. `shuffle=True` shuffles the row groups, and their rows within a window
    of `cycle_length` row groups, or fewer where these are larger than `shuffle_buffer`, and two at least. The
    cache keeps row groups in Arrow's form, uncompressed. Refused are structs, files such as images, and lists
    of lists of any length.

    Raises:
        ArgumentError: a column is missing, or of a type that no sample or batch can have; files differ; or
            pyarrow is not installed.
        DecodeError: a file is not Parquet, was cut, or is encrypted.
        NotFoundError, AccessDeniedError, StoreError: within 10 s, before any worker starts.
    """

    _computed: ClassVar[dict[str, str]] = {"batches": "make a new dataset with batches="}

    @shorten_errors
    def __init__(
        self,
        url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        fields: Any = None,
        *,
        decode: Mapping[str, Callable[[Any], Any]] | Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        filters: Sequence[Any] | None = None,
        batches: str = "rows",
        cycle_length: int = 32,
        shuffle_buffer: int | str = "64MB",
        cache: Cache | str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
    ) -> None:
        # These import pyarrow; the first one says so where it is missing.
        import fastload.datasets.arrow  # noqa: F401
        from fastload.shards.parquet_files import ParquetFiles, RowFilter
        from fastload.shards.row_groups import ParquetFields

        check_batches(batches, {"decode": decode, "transform": transform})
        shape = None if fields is None else Shape(fields)
        row_filter = None if filters is None else RowFilter(filters)
        streams = StreamOptions.of(cycle_length, shuffle_buffer)
        kept_in = as_cache(cache)
        shards = ShardList(url, PARQUET, kept_in, listing_max_age, storage_options)
        wanted = None if shape is None else list(shape.leaves.values())
        self._files = ParquetFiles(shards, wanted, row_filter, shards.kept_in)
        columns_read = digest_of(repr(sorted(self._files.columns)))
        self._batches = batches
        self._named_fields = named = ParquetFields(self._files.schema, shape, decode)
        columns = batches == "columns"
        if columns:
            from fastload.shards.column_groups import forms_of

            self._forms = forms_of(self._files.schema, named.columns)
        super().__init__(
            url,
            dataclasses.replace(PARQUET, code=f"{PARQUET.code} {columns_read}", can_stream=not columns),
            shards,
            named,
            decode=decode,
            transform=transform,
            streams=streams,
            cache=kept_in,
            read_index=self._files.index_rows,
        )
        if columns:  # whatever the cache's mode does with images
            self._set_payloads([self._payloads.with_codec(Raw())])

    def close(self) -> None:
        super().close()
        self._groups.drop()

    def _numbering(self) -> str:
        return super()._numbering() + self._files.digest

    def _blocks(self) -> RecordBlocks:
        return self._groups.get()

    @cached_property
    def _groups(self) -> ProcessLocal[RowGroups]:
        from fastload.shards.row_groups import RowGroups

        return ProcessLocal(partial(RowGroups, self._shards, self._files))

    # --- what is read, and kept in the cache: a row; of columns its row group, by the id of any of its rows

    def _source(self) -> Source:
        if self._batches == "columns":
            from fastload.shards.column_groups import GroupSource

            return GroupSource(self._shards, self._files, self._groups.get(), self._cache_key)
        # Of modes that take more work a row than to read it, the other rows come when they are asked for.
        cache = self.cache if self._payloads.codec.lossless else None
        return _RowSource(self._indexed(), self._groups.get(), cache)

    def _new_prefetcher(self) -> Prefetcher:
        if self._batches == "rows":
            return super()._new_prefetcher()
        from fastload.shards.column_groups import ColumnGroups

        return ColumnGroups(
            self._source(),
            self.cache,
            counters=self.counters,
            groups=self._groups.get(),
            index=self._index,
            schema=self._files.schema,
            forms=self._forms,
            fields=self._named_fields.columns,
            most_bytes=self._files.blocks(self._options).window * self._files.largest(),
        )

    def _cache_key(self, record: int) -> bytes:
        if self._batches == "rows":
            return super()._cache_key(record)
        shard, group = self._groups.get().where(record)
        return self._cache_key_at(shard, f"{_COLUMNS} {group}")

    def _objects_of(self, indices: Iterable[int]) -> Iterable[int]:
        if self._batches == "rows":
            return super()._objects_of(indices)
        records = self._index.record_ids(np.fromiter(indices, np.int64))
        return dict.fromkeys(self._groups.get().firsts_of(records).tolist())

    def _column_source(self) -> ColumnSource:
        return self._prefetchers.get()  # type: ignore[return-value]

    def _shuffle_blocks(self) -> Blocks | None:
        """See `fastload.order.permutations.blocks_of`."""
        return None if self._batches == "rows" else self._files.blocks(self._options)
