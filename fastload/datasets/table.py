"""A dataset whose samples are the rows of a table: its values, and the objects that it names.

    row ─▶ values of the columns, from memory that all workers share ─────────┐
     └───▶ objects ─▶ prefetcher (cache, store) ─▶ payloads ─▶ prepare steps ─┴─▶ sample or row of a batch

An object is a number for the prefetcher: row * files of a sample + file.
"""

from __future__ import annotations

import operator
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.cache import Cache, as_cache
from fastload.cache.listings import Listings
from fastload.datasets.base import SOME, check_on_change, kept
from fastload.datasets.cache_forecast import Forecaster
from fastload.datasets.columns import copy_value, ordinary_memory
from fastload.datasets.fields_dataset import FieldsDataset
from fastload.datasets.prepare import PrepareStep
from fastload.datasets.prepare_files import FilePrepareStep, Picture
from fastload.datasets.protocols import Allocate, RowErrors, RowRequests, current_reader, note_prefetch
from fastload.datasets.samples import SampleMaker
from fastload.datasets.shape import Shape
from fastload.datasets.table_fields import File, FileLeaf, Row, RowFields
from fastload.datasets.warm import ToRead, Warmed, find_missing, warm
from fastload.errors import ArgumentError, FastloadError
from fastload.fetch.prefetcher import Prefetcher
from fastload.fetch.reads import ObjectSource
from fastload.images.crop import is_fused
from fastload.images.rng import mix_all
from fastload.store import open_store, with_budget
from fastload.store.budget import RequestBudget
from fastload.store.listing import Keys, ListingQuery
from fastload.store.manifest import Manifest

if TYPE_CHECKING:
    from fastload.datasets.table_columns import TableColumns  # needs pyarrow


Transform = Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None


class TableDataset(FieldsDataset):
    """A map-style dataset with one sample for each row of a table.

    `fields` has the shape of a sample: a tuple gives tuples, a mapping gives dicts, nested or not. Each leaf
    is the name of a column, or a `File` for an object whose key stands in the table.

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
        listing_max_age: how old a listing that the cache keeps may be, to be used in place of a new one: text
            such as "12h" or "7d", or seconds. 0: every job lists again; its ranks share that listing.
        on_change: as in `ObjectDataset`.

    Raises:
        ArgumentError: a column is missing or has nulls; the table is of another kind than its name; pyarrow
            is not installed.
        NotFoundError: there is no table, or a key has no object.
        AccessDeniedError, StoreError: as in `ObjectDataset`.
    """

    settled: ClassVar[frozenset[str]] = FieldsDataset.settled | {"fields"}

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
    ) -> None:
        check_on_change(on_change)
        if not isinstance(url, str | os.PathLike):
            raise ArgumentError(
                f"url must be a str or pathlib.Path, found {url!r}: the order is "
                "TableDataset(table, fields, url=URL)"
            )
        super().__init__(os.fspath(url), None)
        self.fields = fields
        self.on_change = on_change
        kept_in = as_cache(cache)
        self._shape = Shape(fields, (str, File), _name_of)
        self._files = [
            FileLeaf(
                name, leaf, FilePrepareStep(kept_in, leaf.decode, leaf.fingerprint, _of(name, transform))
            )
            for name, leaf in self._shape.leaves.items()
            if isinstance(leaf, File)
        ]
        of_objects = {"url": self.url, "cache": kept_in}
        if not isinstance(table, str | os.PathLike):
            of_objects["storage_options"] = storage_options
        given = [name for name, value in of_objects.items() if value]
        if given and not self._files:
            raise ArgumentError(
                f"{given[0]}= is for objects, and fields has none: write File('image') for the objects that "
                "the column 'image' names"
            )
        self.transform = transform
        options = with_budget(storage_options)
        self._budget: RequestBudget = options["budget"]
        self._read(table, options, Listings.of(kept_in, listing_max_age))
        kept = self._files and not self._manifest.why_not_cached(self._store)  # a warning has said why
        self.cache = kept_in if kept else None
        if self._files:
            self._settle_mode(self._total_bytes)

    def _read(self, table: Any, options: dict[str, Any], listings: Listings) -> None:
        """Read the columns of the table, and look up the objects that it names."""
        if find_spec("pyarrow") is None:
            raise ArgumentError(
                "TableDataset needs the package pyarrow: pip install 'torch-fastload[parquet]'"
            )
        from fastload.datasets.table_columns import TableColumns
        from fastload.datasets.table_files import read_table
        from fastload.datasets.table_keys import object_keys

        values = {name: leaf for name, leaf in self._shape.leaves.items() if isinstance(leaf, str)}
        named = {column for leaf in self._files for column in leaf.file.columns}
        table_is_remote = isinstance(table, str) and "://" in table
        of_table = options if table_is_remote or not self._files else {}
        found = read_table(table, sorted(named | set(values.values())), named, of_table)
        if not found.num_rows:
            raise ArgumentError("the table has no rows")
        self._count: int = found.num_rows
        self._columns = None
        if values:
            self._columns = TableColumns.of(found.select(list(values.values())).rename_columns(list(values)))
        if self._files:
            read_from = os.fspath(table) if isinstance(table, str | os.PathLike) else ""
            root, keys = object_keys([leaf.file.column for leaf in self._files], found, self.url, read_from)
            self._store = open_store(root, **({} if table_is_remote and "://" not in root else options))
            self._distinct = len(set(keys))
            self._manifest = listings.open(self._store, ListingQuery(keys=Keys(keys)))
            self._listings = listings

    def _listed(self) -> tuple[Listings, Manifest] | None:
        return (self._listings, self._manifest) if self._files else None

    def __fingerprint__(self) -> dict[str, Any]:
        """No sample depends on what the maker remembers, or on requests: see `datasets.fingerprint`."""
        passing = ("_maker", "_budget")
        return {name: value for name, value in self.__getstate__().items() if name not in passing}

    @property
    def budget(self) -> RequestBudget | None:
        return self._budget

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        where = f"{self._store.url!r}, " if self._files else ""
        cache = "" if self.cache is None else f", cache={self.cache!r}"
        return f"{type(self).__name__}({where}{self._count:,} samples, fields={self.fields!r}{cache})"

    def key(self, index: int) -> str:
        """The key of a sample's first object, relative to `url`; of a sample without objects "row N"."""
        return super().key(index)

    def payload(self, index: int) -> list[Any]:
        """The bytes of a sample's objects as the cache keeps them. It raises what `dataset[index]` raises."""
        return kept(self._get(self._record(index)))

    def cache_key(self, index: int) -> bytes:
        """The key under which the cache has a sample's first object.

        Raises:
            ArgumentError: the dataset has no cache.
        """
        return super().cache_key(index)

    def cache_keys(self, index: int) -> list[bytes]:
        self.cache_key(index)  # raises where there is no cache
        return [self._object_key(one) for one in self._objects(self._record(index))]

    def warm(self, indices: Iterable[int]) -> Iterator[Warmed]:
        """As `ObjectDataset.warm`, with an outcome for each object of a sample."""
        cache = self._cache_to_fill()
        source = ObjectSource(self._store, self._manifest, key=self._object_key)
        prefetcher = Prefetcher(source, None, prepare=self._preparer(), counters=self.counters)
        objects = (one for index in indices for one in self._objects(self._record(index)))
        outcomes = warm(objects, cache, prefetcher, key=self._object_key, size=self._manifest.size)
        return (outcome._replace(sample=outcome.sample // len(self._files)) for outcome in outcomes)

    def left_to_warm(self, indices: Iterable[int]) -> ToRead:
        """Return what `warm` has to read for these samples. Raises as `warm`."""
        objects = (one for index in indices for one in self._objects(self._record(index)))
        source = ObjectSource(self._store, self._manifest, key=self._object_key)
        return find_missing(objects, self._cache_to_fill(), source)

    def outstanding(self) -> int:
        return -(-super().outstanding() // max(1, len(self._files)))

    def find(self, keys: Iterable[str]) -> dict[str, list[int]]:
        """Key -> indices of the samples that have it, as `key` gives it."""
        if not self._files:
            numbers = {key: key.removeprefix("row ") for key in keys if key.startswith("row ")}
            return {
                key: [int(number)]
                for key, number in numbers.items()
                if number.isdecimal() and key == f"row {int(number)}" and int(number) < self._count
            }
        count = len(self._files)
        found = self._manifest.find(keys)
        firsts = {key: [one // count for one in ones if one % count == 0] for key, ones in found.items()}
        return {key: rows for key, rows in firsts.items() if rows}

    # --- RowDataset

    def prefetch(self, indices: Iterable[int]) -> None:
        indices = list(indices)
        objects = [one for index in indices for one in self._objects(self._record(index))]
        if objects:
            note_prefetch(self, indices)
            self._prefetchers.get().request(objects, current_reader.get())

    def cancel(self, indices: Iterable[int]) -> None:
        prefetcher = self._prefetchers.peek()
        if prefetcher is not None:  # else nothing is under way
            prefetcher.cancel([one for index in indices for one in self._objects(self._record(index))])

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        if self._flat is None:
            return super().new_batch(n, allocate)
        return None if allocate is ordinary_memory else self._flat.new_batch(n, allocate)

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        if self._flat is None:
            return super().fill(batch, todo, seed, epoch)
        self._flat.fill(batch, [row for row, _ in todo], [self._record(index) for _, index in todo])
        self.counters.add("decode.samples", len(todo))
        return []

    def sample(self, batch: Any, row: int) -> Any:
        if self._flat is None:
            return super().sample(batch, row)
        values = {name: column[row] for name, column in batch.items()}
        numbers = {name: one.item() for name, one in values.items() if isinstance(one, torch.Tensor)}
        return self._shape.sample(values | numbers)

    def finish_batch(self, batch: Any) -> Any:
        """See `fastload.datasets.protocols.finish_batch`."""
        return super().finish_batch(batch) if self._flat is None else self._shape.batch(batch)

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        if self._flat is None:
            super().copy_row(batch, target, source)
            return
        for column in batch.values():
            copy_value(column, target, source)

    # --- which samples these are

    def identities(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Of its objects and their versions, and of its values in the table."""
        found = np.zeros(len(records), np.uint64)
        if self._columns is not None:
            found += self._columns.identities(records)
        for file in range(len(self._files)):
            mix_all(found)
            found += self._manifest.identities(records * len(self._files) + file)
        return found

    # --- what `StoreDataset` and `FieldsDataset` ask for

    def _new_maker(self, transform: Transform) -> SampleMaker:
        maker = SampleMaker(RowFields(), False, transform, self._shape)
        self._check_transform(transform)
        return maker

    def _source(self) -> ObjectSource:
        return ObjectSource(self._store, self._manifest, key=self._object_key, on_change=self.on_change)

    def _record(self, index: int) -> int:
        """The row of an index."""
        index = operator.index(index)  # two tensors of one number are not one key
        if not -self._count <= index < self._count:
            raise IndexError(f"index {index} is out of range for the {self._count:,} rows of the table")
        return index % self._count

    def _name(self, record: int) -> str:
        return self._manifest.key(self._objects(record)[0]) if self._files else f"row {record}"

    def _cache_key(self, record: int) -> bytes:
        return self._object_key(self._objects(record)[0])

    def _new_prefetcher(self) -> Prefetcher:
        prepare, cache = self._preparer(), self.cache
        if cache is not None:
            n, distinct = len(self._manifest), self._distinct
            modes = [leaf.step.mode for leaf in self._files]
            forecaster = Forecaster(
                cache,
                distinct,
                self._total_bytes,
                lambda number: cache.has(self._object_key(number * n // distinct)),
                next((mode for mode in modes if mode != "raw"), "raw"),
            )
            prepare = forecaster.watch(prepare)
        return Prefetcher(self._source(), cache, prepare=prepare, counters=self.counters)

    def _preparer(self) -> Callable[[Any, int], Any] | None:
        steps = [leaf.step.prepare for leaf in self._files]
        if not any(steps):
            return None

        def prepare(payload: Any, one: int) -> Any:
            step = steps[one % len(steps)]
            return payload if step is None else step(payload, self._manifest.key(one))

        return prepare

    def _get(self, record: int) -> list[Any]:
        """The payloads of a row's objects."""
        payloads: list[Any] = []
        objects = self._objects(record)
        for one in objects:
            try:
                payloads.append(self._prefetchers.get().get(one))
            except BaseException as error:
                self._prefetchers.get().cancel(range(one + 1, objects.stop))
                if isinstance(error, FastloadError):
                    error.key = self._object_name(one)
                raise
        return payloads

    def _is_here(self, record: int) -> bool:
        return all(map(self._prefetchers.get().is_here, self._objects(record)))

    def _restore(self, record: int, payload: Any, *, readonly: bool = False) -> Row:
        """A row's payloads, and its values in the table -> the fields of a sample."""
        row = Row({} if self._columns is None else self._columns.row(record))
        for one, leaf, content in zip(self._objects(record), self._files, payload, strict=True):
            try:
                value = leaf.step.restore(content, self._manifest.key(one), readonly=readonly)
            except FastloadError as error:
                error.key = self._object_name(one)
                raise
            if type(value) is Picture:
                row.images.append(leaf.name)
                value = value.source
            row[leaf.name] = value
        return row

    @property
    def _flat(self) -> TableColumns | None:
        """The columns, where they alone make the samples: a batch is then written column by column."""
        flat = (
            not self._files and self._transform is None and self._columns is not None and self._columns.flat
        )
        return self._columns if flat else None

    # --- objects

    def _objects(self, row: int) -> range:
        """The objects of a row, in the order of the fields."""
        return range(row * len(self._files), (row + 1) * len(self._files))

    def _object_key(self, one: int, version: str | None = None) -> bytes:
        """The cache key of an object: that of an `ObjectDataset` with the same `url` and `decode`."""
        assert self.cache is not None
        manifest, step = self._manifest, self._files[one % len(self._files)].step
        version = manifest.version(one) if version is None else version
        return self.cache.key(self._store.identity, manifest.key(one), version, *step.key, mode=step.key_mode)

    @property
    def _total_bytes(self) -> int:
        """Of the objects that differ."""
        return self._manifest.total_bytes * self._distinct // max(1, len(self._manifest))

    @property
    def _steps(self) -> list[PrepareStep]:
        return [leaf.step for leaf in self._files]

    def _set_steps(self, steps: list[Any]) -> None:
        self._files = [leaf._replace(step=step) for leaf, step in zip(self._files, steps, strict=True)]
        self._prefetchers.drop()

    def _some_records(self) -> list[int]:
        return random.Random(0).sample(range(self._count), min(SOME, self._count))

    def _object_name(self, one: int) -> str:
        """An object in error messages."""
        row, number = divmod(one, len(self._files))
        return f"{self._manifest.key(one)} ({self._files[number].name} of row {row})"

    def _check_transform(self, transform: Transform) -> None:
        """Refuse a transform that names what no sample has, a fused one without an image of its own, and one
        that needs more of an image than the cache keeps.

        Raises:
            ArgumentError: it does.
        """
        names = list(self._shape.leaves)
        images = [leaf.name for leaf in self._files if leaf.file.decode is None]
        if isinstance(transform, Mapping):
            for name, part in transform.items():
                if name not in names:
                    raise ArgumentError(
                        f"transform names {name!r}, and the values of a sample are {', '.join(names)}"
                    )
                if is_fused(part) and not isinstance(self._shape.leaves[name], File):
                    raise ArgumentError(f"transform[{name!r}] takes an image: write File({name!r}) in fields")
        elif is_fused(transform) and not images:
            raise ArgumentError(
                "transform takes an image, and fields has none: write File('image') for the objects that the "
                "column 'image' names. Images inside a Parquet file are for fastload.ParquetDataset"
            )
        elif is_fused(transform) and len(images) > 1:
            raise ArgumentError(
                f"transform takes one image, and fields has {len(images)} objects without decode=: name the "
                f"image, as in transform={{{images[0]!r}: RandomResizedCrop(224)}}"
            )
        for leaf in self._files:
            leaf.step.check_transform(_of(leaf.name, transform))


def _name_of(leaf: str | File) -> str:
    return leaf if isinstance(leaf, str) else leaf.columns[-1]


def _of(name: str, transform: Transform) -> Callable[[Any], Any] | None:
    """The transform of one value; that of the whole sample is the one of its image too."""
    return transform.get(name) if isinstance(transform, Mapping) else transform
