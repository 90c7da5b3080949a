"""What all datasets over a store share: one prefetcher in each process, the cache, samples, rows of batches.

    index ─▶ record ─▶ prefetcher (cache, store) ─▶ payload ─▶ value ─▶ sample or row of a batch

A record is the number of a sample for its layout: a position in the listing, a row of a table, a record of a
shard. A subclass is a layout: it supplies the record of an index, the objects that are read for it, their
source and the keys of the cache. `StoreView` is the dataset as the loader reads it.
"""

from __future__ import annotations

import inspect
import operator
import os
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fastload.cache import Cache
from fastload.cache.codecs import Raw
from fastload.cache.index import KeyTable
from fastload.cache.listings import Listings
from fastload.checks import check_function, check_one_of
from fastload.datasets.cache_forecast import Forecaster
from fastload.datasets.payloads import ObjectPayloads, keep, settled
from fastload.datasets.sample_transforms import Transform
from fastload.datasets.samples import SampleBuilder
from fastload.datasets.views import (
    FLUSH_SECONDS,
    StreamDataset,
    current_reader,
    note_prefetch,
    overriding_method,
)
from fastload.datasets.warm import Filling, ToRead, Warmed, find_missing
from fastload.distributed.frameworks import warn_of_trainer
from fastload.errors import ArgumentError, FastloadError
from fastload.fetch.prefetcher import Prefetcher
from fastload.fetch.reads import Source
from fastload.metrics.counters import Counters
from fastload.store.budget import RequestBudget
from fastload.store.manifest import Manifest
from fastload.store.node import ProcessLocal

if TYPE_CHECKING:
    from fastload.datasets.columns import ColumnSource

_SOME = 256  # records that stand for all


# Arguments that a dataset holds a reference to anyway; others, as tables and keys, may be long or be used up.
_HELD = ("cache", "storage_options", "decode", "transform", "target_transform")
_LONGEST = 1000  # entries of a list


def _is_kept(name: str, value: Any) -> bool:
    if name in _HELD or isinstance(value, str | int | float | type(None) | type | os.PathLike | np.dtype):
        return True
    return name in ("url", "fields", "filters", "classes") and (
        not hasattr(value, "__len__") or len(value) <= _LONGEST
    )


def arguments_of(dataset: StoreDataset) -> dict[str, Any]:
    """Return the arguments that a dataset was made with. What is long is ... (an ellipsis)."""
    arguments: dict[str, Any] = dataset.__dict__.get("_arguments", {})
    return arguments


class StoreDataset(Dataset[Any]):
    """A dataset whose transforms may be set at any time. Reads and cache keys depend on its other arguments.

    Attributes:
        cache: what the samples are kept in, or None.
        counters: of this process.
    """

    _batches = "rows"  # or "columns": how batches are made

    # Attributes that are set once, by the constructor; and those that are never set -> what to do instead.
    _settled: ClassVar[frozenset[str]] = frozenset({"url", "decode", "cache", "on_change"})
    _computed: ClassVar[dict[str, str]] = {}
    # Attributes on which no sample depends: what reading has learned, and what follows from the others.
    _passing: ClassVar[frozenset[str]] = frozenset({"_arguments", "_budget", "_builder", "counters"})
    # Errors of a sample, for `on_error` to decide on: all, where the user's `decode` runs for a row.
    _row_errors: ClassVar[tuple[type[Exception], ...]] = (Exception,)

    cache: Cache | None
    _payloads: ObjectPayloads
    _builder: SampleBuilder
    _amount: tuple[int, int | None] = 0, None  # bytes of all samples; their number where it is known
    _budget: RequestBudget | None = None  # of all processes of this trainer; None: a directory

    def __new__(cls, *args: Any, **kwargs: Any) -> StoreDataset:
        """Make a dataset that knows its arguments (see `arguments_of`); a copy gets those of the other."""
        dataset = super().__new__(cls)
        if args or kwargs:
            with suppress(TypeError):  # which `__init__` raises too
                bound = inspect.signature(cls.__init__).bind(dataset, *args, **kwargs).arguments
                dataset.__dict__["_arguments"] = {
                    name: value if _is_kept(name, value) else ... for name, value in list(bound.items())[1:]
                }
        return dataset

    def __init__(self, url: Any, decode: Callable[..., Any] | None) -> None:
        check_function("decode", decode)
        self.url = url
        self.decode = decode
        self.counters = Counters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._computed:
            raise ArgumentError(f"{name} of {type(self).__name__} cannot be set: {self._computed[name]}")
        if name in self._settled and name in self.__dict__:
            raise ArgumentError(
                f"{name} of {type(self).__name__} cannot be set again: reads and cache keys depend on it. "
                f"To change it, make a new dataset with {name}="
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, ProcessLocal)}

    def __fingerprint__(self) -> dict[str, Any]:
        """Return what samples depend on: see `datasets.fingerprint`."""
        return {name: value for name, value in self.__getstate__().items() if name not in self._passing}

    def __getitem__(self, index: int) -> Any:
        record = self._record(index)
        return self._finish(record, self._get(record))

    @property
    def transform(self) -> Any:
        """As it was given; it may be set again."""
        return self._transform

    @transform.setter
    def transform(self, transform: Transform) -> None:
        check_batches(self._batches, {"transform": transform})
        builder = self._new_builder(transform)
        if "cache" in self.__dict__:  # not in the constructor, where payloads are made for this transform
            self._check_transform(transform)
        self._builder = builder
        self._transform = transform

    def key(self, index: int) -> str:
        """Return the object key of a sample, relative to `url`; of a record, with its offset in the shard."""
        return self._name(self._record(index))

    def find(self, keys: Iterable[str]) -> dict[str, list[int]] | None:
        """Return key -> indices of the samples that have it, as `key` gives it, without keys that no sample
        has.

        None: only a look at the keys of all samples tells.
        """
        return None

    def contains(self, index: int) -> bool:
        """Return whether the cache has all of a sample. It does not count as a miss.

        Raises:
            ArgumentError: the dataset has no cache.
        """
        return all(map(self._own_cache().has, self._cache_keys(index)))

    def warm(self, indices: Iterable[int]) -> Iterator[Warmed]:
        """Read these samples into the cache, as training would, and yield the outcome of each object.

        Samples that are in the cache, or that another run is reading, are not read. A bad object is an
        outcome, not an error. When the iterator has ended or was closed, everything that it read is written.

        Raises:
            ArgumentError: the dataset has no cache.
            StoreError: the store is down, or refuses the request.
            CacheError: the cache cannot be written.
        """
        cache, source = self._own_cache(), self._source()
        prefetcher = Prefetcher(source, None, prepare=self._encoder(), counters=self.counters)
        outcomes = Filling(cache, prefetcher, source).run(self._objects_of(indices))
        return (outcome._replace(sample=self._record_of(outcome.sample)) for outcome in outcomes)

    def prefetch(self, indices: Iterable[int]) -> None:
        """Start reading these samples, in the order in which they will be used. Does not block."""
        indices = list(indices)
        objects = list(self._objects_of(indices))
        if objects:
            note_prefetch(self, indices)
            self._prefetchers.get().request(objects, current_reader.get())

    def close(self) -> None:
        """End this process's reader threads; write and close the cache. The next access opens it again."""
        prefetcher = self._prefetchers.drop()
        if prefetcher is not None:
            prefetcher.close()

    # --- for the engine and the command line

    def _payload(self, index: int) -> Any:
        """Return the bytes of a sample as the cache keeps them; it raises what `dataset[index]` raises."""
        return settled([self._get(self._record(index))])[0]

    def _cache_keys(self, index: int) -> list[bytes]:
        """Return the keys of all that the cache has of a sample: of each object of a `TableDataset`.

        Raises:
            ArgumentError: the dataset has no cache.
        """
        self._own_cache()
        return [self._cache_key(item) for item in self._objects(self._record(index))]

    def _left_to_warm(self, indices: Iterable[int]) -> ToRead:
        """Return what `warm` has to read for these samples. Raises as `warm`."""
        return find_missing(self._objects_of(indices), self._own_cache(), self._source())

    def _cancel(self, indices: Iterable[int]) -> None:
        """Drop prefetched samples that will not be used."""
        prefetcher = self._prefetchers.peek()
        if prefetcher is not None:  # else nothing is under way
            prefetcher.cancel(self._objects_of(indices))

    def _outstanding(self) -> int:
        """Return how many samples this process has read ahead, or is reading, that were not used yet."""
        prefetcher = self._prefetchers.peek()
        return 0 if prefetcher is None else -(-prefetcher.outstanding().samples // self._objects_of_sample)

    def _flush_cache(self, timeout: float = FLUSH_SECONDS) -> None:
        """See `CacheFilling`."""
        if self.cache is not None:
            self.cache._flush_epoch(timeout)
            self.counters.merge(self.cache.counters.drain())

    def _streams(self) -> StreamDataset | None:
        """Return what reads it as streams while it is not indexed; None: it has an index from the start."""
        return None

    # --- a layout supplies

    _objects_of_sample = 1  # that are read, on average; at least 1

    @abstractmethod
    def _source(self) -> Source:
        """Return where objects come from."""

    @abstractmethod
    def _record(self, index: int) -> int:
        """Return the record of an index. Raises `IndexError` where there is none."""

    def _objects(self, record: int) -> Sequence[int]:
        """Return the objects that are read for a record, as its source numbers them."""
        return (record,)

    def _objects_of(self, indices: Iterable[int]) -> Iterable[int]:
        """Return the objects that are read for samples, in their order."""
        return (item for index in indices for item in self._objects(self._record(index)))

    def _column_source(self) -> ColumnSource:
        """Return the rows of this process; asked for with `batches="columns"`."""
        raise NotImplementedError

    def _record_of(self, item: int) -> int:
        """Return the record that an object is read for."""
        return item

    @abstractmethod
    def _name(self, record: int) -> str:
        """Return a record in error messages."""

    @abstractmethod
    def _cache_key(self, item: int) -> bytes:
        """Return the cache key of an object."""

    def _some_keys(self) -> list[bytes]:
        """Return the cache keys of a few objects: the same each time."""
        return list(map(self._cache_key, some_of(len(self))))  # type: ignore[arg-type]

    @abstractmethod
    def _new_builder(self, transform: Transform) -> SampleBuilder:
        """Return what makes samples with this transform.

        Raises:
            ArgumentError: the transform does not go with the fields.
        """

    @abstractmethod
    def _identities(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return a number for each sample: of its key and version, wherever it is stored or cached."""

    def _records(self, indices: Iterable[int]) -> NDArray[np.int64]:
        """Return the number by which each sample draws its random numbers, whatever its index is."""
        records = np.fromiter(map(operator.index, indices), np.int64)
        records %= len(self)  # type: ignore[arg-type]
        return records

    def _listed(self) -> tuple[Listings, Manifest] | None:
        """Return what was listed, and where that is kept; None: nothing is, or shards are."""
        return None

    def _digests(self) -> tuple[str, str] | None:
        """See `View.listed`."""
        listed = self._listed()
        return None if listed is None else listed[1].digests

    def _check_transform(self, transform: Any) -> None:
        """Raise `ArgumentError` for a transform that needs more of an image than the cache keeps."""
        self._payloads.check_transform(transform)

    @property
    def _crop_hash(self) -> int:
        """The number of what fused transforms do in this epoch; 0: there are none."""
        return self._builder.crop_hash

    _sends_encoded: ClassVar[bool] = False  # whether images may leave the worker encoded

    def _why_not_encoded(self, decoder: str) -> str | None:
        """See `View.why_not_encoded`."""
        raise NotImplementedError

    # --- the cache's mode

    @property
    def _all_payloads(self) -> list[Any]:
        return [self._payloads]

    def _set_payloads(self, payloads: list[Any]) -> None:
        """Replace what is kept of each object; called before anything is read."""
        (self._payloads,) = payloads
        self._prefetchers.drop()
        self._keys.drop()

    def _settle_mode(self, total_bytes: int, count: int | None = None) -> None:
        """End a constructor: decide whether a mode that is for images applies to this dataset.

        A cache that was filled in mode "raw" goes on in that mode under "auto", the default: nothing is read
        again. Without a cache there is nothing to be gained.

        Args:
            total_bytes: of all samples.
            count: their number, if it is known.
        """
        self._amount = total_bytes, count
        payloads = self._all_payloads
        if self.cache is None:
            self._set_payloads([item.with_codec(Raw()) if item.codec.lossless else item for item in payloads])
        elif any(item.codec.chooses for item in payloads):
            was_open = self.cache._is_open  # by another dataset, which may be reading
            share = self._share_kept()
            self._set_payloads([item.with_codec(item.codec.without_choice()) for item in payloads])
            raw_share = self._share_kept()
            if not was_open:
                self.cache.close()
            if raw_share <= share:
                self._set_payloads(payloads)
                for item in payloads:
                    if item.codec.chooses:
                        item.codec.choose = self._choose_form

    def _choose_form(self, image: Any) -> Any:
        return self._forecasters.get().encode(image)

    @cached_property
    def _forecasters(self) -> ProcessLocal[Forecaster]:
        return ProcessLocal(self._new_forecaster)

    def _new_forecaster(self) -> Forecaster:
        assert self.cache is not None
        codecs = [item.codec for item in self._all_payloads]
        codec = next((codec for codec in codecs if not codec.keeps_bytes), Raw())
        total_bytes, count = self._amount
        return Forecaster(self.cache, codec, total_bytes, self._share_kept, count)

    def _share_kept(self) -> float:
        """Return the share of the samples that the cache has, estimated from a few: the same each time."""
        assert self.cache is not None
        if not self.cache.exists():
            return 0.0
        keys = self._some_keys()
        return sum(map(self.cache.has, keys)) / max(1, len(keys))

    # --- from a record to a sample

    @cached_property
    def _prefetchers(self) -> ProcessLocal[Prefetcher]:
        return ProcessLocal(self._new_prefetcher)

    def _new_prefetcher(self) -> Prefetcher:
        warn_of_trainer(type(self).__name__)
        encode = self._encoder()
        if self.cache is not None and self._amount[1]:
            encode = self._forecasters.get().watch(encode)
        return Prefetcher(self._source(), self.cache, prepare=encode, counters=self.counters)

    def _own_cache(self) -> Cache:
        """Return the cache. Raises `ArgumentError` where there is none."""
        if self.cache is None:
            raise ArgumentError(
                "the dataset has no cache: give it one with cache= (if it was given one, a warning has said "
                "why nothing is cached)"
            )
        return self.cache

    @cached_property
    def _keys(self) -> ProcessLocal[KeyTable]:
        return ProcessLocal(self._new_keys)  # no lambda: a subclass may pickle all attributes

    def _new_keys(self) -> KeyTable:
        return KeyTable(len(self), self._cache_key)  # type: ignore[arg-type]

    def _encoder(self) -> Callable[[Any, int], Any] | None:
        """Return (bytes, object) -> what the cache keeps; None if it is the bytes themselves."""
        encode = self._payloads.encode
        if encode is None:
            return None
        if self._payloads.asks_for_key:
            return lambda payload, record: encode(payload, self._name(record))
        return lambda payload, record: encode(payload)

    def _get(self, record: int) -> Any:
        """Return what the prefetcher has of a record; an error carries the name of the record."""
        try:
            return self._prefetchers.get().get(record)
        except FastloadError as error:
            self._named(error, record)
            raise

    def _is_here(self, record: int) -> bool:
        """Return whether `_get` will not wait for the store."""
        prefetcher = self._prefetchers.peek()  # a stream's records come without one
        return prefetcher is not None and all(map(prefetcher.is_here, self._objects(record)))

    def _finish(self, record: int, payload: Any) -> Any:
        """Return what the prefetcher returns -> sample."""
        try:
            return self._builder.sample(self._restore(record, payload), record)
        except FastloadError as error:
            self._named(error, record)
            raise
        finally:
            keep(payload)

    def _restore(self, record: int, payload: Any, *, readonly: bool = False) -> Any:
        """Return what the prefetcher returns -> what the sample is made of; see `ObjectPayloads.open`."""
        key = self._name(record) if self._payloads.asks_for_key else None
        return self._payloads.open(payload, key, readonly=readonly)

    def _named(self, error: Exception, record: int | None) -> Exception:
        """Return the error, with the name of its record if it has none yet."""
        if isinstance(error, FastloadError) and error.key is None and record is not None:
            error.key = self._name(record)
        return error


def some_of(count: int) -> list[int]:
    """Return a few of so many numbers, which stand for all: the same each time."""
    return random.Random(0).sample(range(count), min(_SOME, count))


def override_of(dataset: Any) -> str | None:
    """Return the method that makes the samples in place of the rows, as text; None: there is none."""
    return overriding_method(dataset, StoreDataset)


def check_batches(batches: Any, functions: Mapping[str, Any]) -> None:
    """Check the argument `batches` of a dataset.

    Args:
        functions: of the user's, by argument: they take samples.

    Raises:
        ArgumentError: it is neither "rows" nor "columns", or a function would run for each row of columns.
    """
    check_one_of("batches", batches, ("rows", "columns"))
    for argument, function in functions.items():
        if batches == "columns" and function is not None:
            raise ArgumentError(
                f"{argument}= is called for each row, and batches='columns' makes no rows: give the loader "
                f"batch_transform=, a function of the whole batch, or leave out batches=; found {function!r}"
            )
