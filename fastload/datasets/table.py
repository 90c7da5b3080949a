"""A dataset whose samples are the rows of a table: its values, and the objects that it names.

    row ─▶ values of the columns, from memory that all workers share ─────────┐
     └───▶ objects ─▶ prefetcher (cache, store) ─▶ payloads ─▶ values ────────┴─▶ sample or row of a batch

An object is a number for the prefetcher, see `RowObjects`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fastload.cache import Cache, as_cache
from fastload.cache.listings import Listings
from fastload.checks import check_index, check_one_of
from fastload.datasets.payloads import settled
from fastload.datasets.row_objects import RowObjects
from fastload.datasets.sample_fields import Shape
from fastload.datasets.sample_files import File, FileLeaf, FilePayloads, Picture, Row, RowFields, transform_of
from fastload.datasets.sample_transforms import Transform
from fastload.datasets.samples import SampleBuilder
from fastload.datasets.store_dataset import StoreDataset, check_batches, some_of
from fastload.errors import ArgumentError, FastloadError, shorten_errors
from fastload.fetch.reads import ObjectSource, RangeSource, record_name, split_name
from fastload.store import open_store, with_budget
from fastload.store.listing import Keys, ListingQuery
from fastload.store.manifest import Manifest
from fastload.store.node import ProcessLocal

if TYPE_CHECKING:
    from fastload.datasets.arrow import TableColumns  # both need pyarrow
    from fastload.datasets.arrow_columns import OneChunk

_NO_IMAGE = (
    "write File('image') for the objects that the column 'image' names. Images inside a Parquet file are for "
    "fastload.ParquetDataset"
)
_NAME_LISTS = "name the list of images that it is for, as in transform={'images': CenterCrop(224)}"


class TableDataset(StoreDataset):
    """A map-style dataset with one sample for each row of a table.

    `fields` has the shape of a sample: a tuple gives tuples, a mapping gives dicts, nested or not. Each leaf
    is the name of a column, or a `File` for an object whose key stands in the table. Every table needs
    pyarrow, the extra `parquet`.

    Example::

        from fastload import DataLoader, File, RandomResizedCrop, TableDataset

        dataset = TableDataset(
            "s3://bucket/labels.csv",  # image,label
            (File("image"), "label"),
            url="s3://bucket/train",
            transform=RandomResizedCrop(224, flip=0.5),
            cache="/ssd/cache",
        )
        for images, labels in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            images.shape, labels.shape  # (256, 3, 224, 224) uint8, (256,) int64

    The values of a column are bool, int, float, str or bytes. A list of numbers is a numpy array of the
    column's dtype, and lists of lists of one length are one array, such as boxes (k, 4). Columns stay in
    memory that all workers share. Only objects are cached, each under its own key, as in `ObjectDataset`.

    Args:
        table: the path or URL of a CSV, JSON lines or Parquet file; an Arrow table; a data frame of pandas,
            polars or another library that speaks Arrow; a list of dicts; or a dict of columns.
        fields: the shape of a sample.
        url: what the keys of the objects are relative to. "": the keys are full URLs, of s3, gs, az, http(s),
            file or memory, or absolute paths; a table in a store may not name files of this machine then.
        transform: a fused transform, for the one image of a sample; a dict {name: fused transform, or
            function of that value}; or a function of the whole sample. A value's name is its key in a
            mapping, else its column (the last one of a pattern). Of two with one name, the second is
            "name (2)".
        cache: a `Cache`, or a directory for one in mode "auto"; filled during the first epoch. An object that
            several rows name is kept once.
        storage_options: for `open_store`: of `url`, and of a `table` that is a URL.
        listing_max_age, on_change: as in `ObjectDataset`.
        batches: "rows", or "columns": as of `ParquetDataset`. Without `File` and transform=; the whole table
            is shuffled.

    Raises:
        ArgumentError: a column is missing or has nulls; the table is of another kind than its name; pyarrow
            is not installed.
        NotFoundError: there is no table, or a key has no object.
        AccessDeniedError, StoreError: as in `ObjectDataset`.
    """

    _settled: ClassVar[frozenset[str]] = StoreDataset._settled | {"fields"}
    _computed: ClassVar[dict[str, str]] = {"batches": "make a new dataset with batches="}

    @shorten_errors
    def __init__(
        self,
        table: Any,
        fields: Any,
        *,
        url: str | os.PathLike[str] = "",
        transform: Transform = None,
        cache: Cache | str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
        on_change: str = "error",
        batches: str = "rows",
    ) -> None:
        check_one_of("on_change", on_change, ("error", "refresh"))
        check_batches(batches, {"transform": transform})
        if not isinstance(url, str | os.PathLike):
            raise ArgumentError(
                f"url must be a str or pathlib.Path, found {url!r}: the order is "
                "TableDataset(table, fields, url=URL)"
            )
        super().__init__(os.fspath(url), None)
        self.fields = fields
        self.on_change = on_change
        self._batches = batches
        kept_in = as_cache(cache)
        self._shape = Shape(fields, (str, File), _name_of)
        self._files = [
            FileLeaf(
                name,
                leaf,
                FilePayloads(kept_in, leaf.decode, transform_of(name, transform), whole=leaf.range is None),
            )
            for name, leaf in self._shape.leaves.items()
            if isinstance(leaf, File)
        ]
        if self._files and batches == "columns":
            raise ArgumentError(
                "batches='columns' makes no samples, and fields names files of samples "
                f"({self._files[0].name!r}): leave them out, or leave out batches="
            )
        self._has_ranges = any(leaf.file.range is not None for leaf in self._files)
        if self._has_ranges and on_change != "error":
            raise ArgumentError(
                "on_change='refresh' reads the new version of an object, and ranges are those of the version "
                "that was indexed: leave it out, and make the index again when objects change"
            )
        of_objects = {"url": self.url, "cache": kept_in}
        if not isinstance(table, str | os.PathLike):
            of_objects["storage_options"] = storage_options
        passed = [name for name, value in of_objects.items() if value]
        if passed and not self._files:
            raise ArgumentError(
                f"{passed[0]}= is for objects, and fields has none: write File('image') for the objects that "
                "the column 'image' names"
            )
        options = with_budget(storage_options)
        self._budget = options["budget"]
        self._read(table, options, Listings.of(kept_in, listing_max_age))
        self.transform = transform
        self._check_transform(transform)
        kept = self._files and not self._manifest.why_not_cached(self._store)  # a warning has said why
        self.cache = kept_in if kept else None
        if self._files:
            self._settle_mode(self._total_bytes, self._distinct)

    def _read(self, table: Any, options: dict[str, Any], listings: Listings) -> None:
        """Read the columns of the table, and look up the objects that it names."""
        if find_spec("pyarrow") is None:
            raise ArgumentError(
                "TableDataset needs the package pyarrow: pip install 'torch-fastload[parquet]'"
            )
        from fastload.datasets.arrow import TableColumns
        from fastload.datasets.table_files import read_table
        from fastload.datasets.table_objects import table_objects

        values = {name: leaf for name, leaf in self._shape.leaves.items() if isinstance(leaf, str)}
        files = [leaf.file for leaf in self._files]
        named = {column for file in files for column in file.columns}
        edges = {column for file in files for column in file.range_columns}
        table_is_remote = isinstance(table, str) and "://" in table
        of_table = options if table_is_remote or not self._files else {}
        columns = sorted(named | edges | set(values.values()))
        chosen = read_table(table, columns, named - edges, of_table)
        if not chosen.num_rows:
            raise ArgumentError("the table has no rows")
        self._count: int = chosen.num_rows
        self._columns: TableColumns | None = None
        self._rows = RowObjects(self._count, ())
        if values:
            self._columns = TableColumns.of(chosen.select(list(values.values())).rename_columns(list(values)))
            if self._batches == "columns":
                self._column_source()  # refuses columns that no batch can hold
        if self._files:
            read_from = os.fspath(table) if isinstance(table, str | os.PathLike) else ""
            root, keys, self._rows = table_objects(files, chosen, self.url, read_from)
            self._store = open_store(root, **({} if table_is_remote and "://" not in root else options))
            self._manifest = listings.open(self._store, ListingQuery(keys=Keys(keys)))
            self._listings = listings
            self._rows.check_ends(files, self._manifest)
            self._distinct = self._rows.count_distinct(keys)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        where = f"{self._store.url!r}, " if self._files else ""
        cache = "" if self.cache is None else f", cache={self.cache!r}"
        return f"{type(self).__name__}({where}{self._count:,} samples, fields={self.fields!r}{cache})"

    def key(self, index: int) -> str:
        """Return the key of a sample's first object, relative to `url`; without objects "row N"."""
        return super().key(index)

    def _payload(self, index: int) -> list[Any]:
        return settled(self._get(self._record(index)))

    def find(self, keys: Iterable[str]) -> dict[str, list[int]]:
        """Return key -> indices of the samples that have it, as `key` gives it."""
        rows = {key: self._numbered_row(key) for key in keys}
        if self._files:
            named = {key: split_name(key)[0] if self._has_ranges else key for key in rows}
            objects = self._manifest.find(list(named.values()))
            for key, name in named.items():
                found = dict.fromkeys(self._rows.place(item).row for item in objects.get(name, ()))
                rows[key] += [row for row in found if self._name(row) == key]
        return {key: numbers for key, numbers in rows.items() if numbers}

    def _numbered_row(self, key: str) -> list[int]:
        """Return the row that has no object, and is named "row N"; none for another name."""
        number = key.removeprefix("row ")
        is_row = number.isdecimal() and key == f"row {int(number)}" and int(number) < self._count
        return [int(number)] if is_row and not self._objects(int(number)) else []

    # --- the layout

    @property
    def _objects_of_sample(self) -> int:  # type: ignore[override]
        return max(1, -(-len(self._rows) // self._count)) if self._files else 1

    def _record_of(self, item: int) -> int:
        return self._rows.place(item).row

    def _listed(self) -> tuple[Listings, Manifest] | None:
        return (self._listings, self._manifest) if self._files else None

    def _identities(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return that of its objects and their versions, and of its values in the table."""
        numbers = np.zeros(len(records), np.uint64)
        if self._columns is not None:
            identify = self._columns.identities if self._batches == "rows" else self._columns.places
            numbers += identify(records)
        if self._files:
            self._rows.mix(numbers, records, self._manifest)
        return numbers

    def prefetch(self, indices: Iterable[int]) -> None:
        if self._files:
            super().prefetch(indices)

    def _column_source(self) -> OneChunk:
        return self._chunks.get()

    @cached_property
    def _chunks(self) -> ProcessLocal[OneChunk]:
        from fastload.datasets.arrow_columns import OneChunk

        assert self._columns is not None
        return ProcessLocal(partial(OneChunk, self._columns.arrays))

    def _source(self) -> ObjectSource:
        if self._has_ranges:
            return RangeSource(self._store, self._manifest, key=self._cache_key, range_of=self._rows.range_of)
        return ObjectSource(self._store, self._manifest, key=self._cache_key, on_change=self.on_change)

    def _record(self, index: int) -> int:
        """Return the row of an index."""
        return check_index(index, self._count, "rows of the table")

    def _objects(self, record: int) -> range:
        """Return the objects of a row, in the order of the fields."""
        return self._rows.of_row(record)

    def _name(self, record: int) -> str:
        objects = self._objects(record)
        return self._key_of(objects[0]) if objects else f"row {record}"

    def _key_of(self, item: int) -> str:
        """Return the key of an object, with the offset of the range of it that is read."""
        part = self._rows.range_of(item)
        return record_name(self._manifest.key(item), None if part is None else part[0])

    def _cache_key(self, item: int, version: str | None = None) -> bytes:
        """Return the cache key of an object: that of an `ObjectDataset` with the same `url` and `decode`."""
        assert self.cache is not None
        manifest, file = self._manifest, self._rows.place(item).file
        payloads, part = self._files[file].payloads, self._rows.range_of(item)
        version = manifest.version(item) if version is None else version
        parts = () if part is None else (f"bytes={part[0]}-{part[1]}",)
        return self.cache.key(
            self._store.identity, manifest.key(item), version, *parts, *payloads.key, codec=payloads.codec
        )

    def _some_keys(self) -> list[bytes]:
        n, distinct = len(self._manifest), self._distinct
        return [self._cache_key(number * n // distinct) for number in some_of(distinct)]

    @property
    def _total_bytes(self) -> int:
        """Of the objects that differ."""
        total = int(self._rows.sizes(self._manifest).sum())
        return total * self._distinct // max(1, len(self._manifest))

    @property
    def _all_payloads(self) -> list[Any]:
        return [leaf.payloads for leaf in self._files]

    def _set_payloads(self, payloads: list[Any]) -> None:
        self._files = [leaf._replace(payloads=item) for leaf, item in zip(self._files, payloads, strict=True)]
        self._prefetchers.drop()

    def _encoder(self) -> Callable[[Any, int], Any] | None:
        encoders = [leaf.payloads.encode for leaf in self._files]
        if not any(encoders):
            return None

        def encode(payload: Any, item: int) -> Any:
            encoder = encoders[self._rows.place(item).file]
            return payload if encoder is None else encoder(payload, self._manifest.key(item))

        return encode

    def _get(self, record: int) -> list[Any]:
        """Return the payloads of a row's objects."""
        payloads: list[Any] = []
        objects = self._objects(record)
        for item in objects:
            try:
                payloads.append(self._prefetchers.get().get(item))
            except BaseException as error:
                self._prefetchers.get().cancel(range(item + 1, objects.stop))
                if isinstance(error, FastloadError):
                    error.key = self._object_name(item)
                raise
        return payloads

    def _restore(self, record: int, payload: Any, *, readonly: bool = False) -> Row:
        """Return a row's payloads -> the fields of a sample that are objects."""
        row, left = Row(), iter(payload)
        for file, (leaf, form) in enumerate(zip(self._files, self._rows.forms, strict=True)):
            items = self._rows.of_file(record, file)
            values = [self._opened(leaf, item, next(left), readonly=readonly) for item in items]
            if form.is_list:
                row[leaf.name] = list(map(self._with_name, values, items))
            elif type(values[0]) is Picture:
                row.images.append(leaf.name)
                row[leaf.name] = values[0].source
            else:
                row[leaf.name] = values[0]
        return row

    def _opened(self, leaf: FileLeaf, item: int, content: Any, *, readonly: bool) -> Any:
        try:
            return leaf.payloads.open(content, self._manifest.key(item), readonly=readonly)
        except FastloadError as error:
            error.key = self._object_name(item)
            raise

    def _with_name(self, value: Any, item: int) -> Any:
        return value._replace(name=self._object_name(item)) if type(value) is Picture else value

    def _object_name(self, item: int) -> str:
        """Return an object in error messages."""
        row, file, position = self._rows.place(item)
        place = f"[{position}]" if self._rows.forms[file].is_list else ""
        return f"{self._key_of(item)} ({self._files[file].name}{place} of row {row})"

    def _new_builder(self, transform: Transform) -> SampleBuilder:
        image = None if self._files else ""
        forms = zip(self._files, self._rows.forms, strict=True)
        lists = [leaf.name for leaf, form in forms if form.is_list]
        builder = SampleBuilder(
            RowFields(lists), transform, self._shape, values=self._columns, image=image, lists=lists
        )
        files = [leaf.name for leaf in self._files]
        images = [leaf.name for leaf in self._files if leaf.file.decode is None and leaf.name not in lists]
        way_out = _NAME_LISTS if lists else _NO_IMAGE
        builder.transforms.check(list(self._shape.leaves), images, way_out, named=files)
        return builder

    def _check_transform(self, transform: Transform) -> None:
        for leaf in self._files:
            leaf.payloads.check_transform(transform_of(leaf.name, transform))


def _name_of(leaf: str | File) -> str:
    return leaf if isinstance(leaf, str) else leaf.columns[-1]
