"""What all datasets over a store share: one prefetcher in each process, one prepare step, the cache.

    index ─▶ record ─▶ prefetcher (cache, store) ─▶ payload ─▶ prepare step ─▶ sample or row of a batch

A record is the number of a sample for its source: a position in the listing, or a record of a shard. A
subclass supplies the source, the record of an index, and the way from a value to a sample.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fastload.cache import Cache
from fastload.cache.listings import Listings
from fastload.datasets.cache_choice import AutoChoice
from fastload.datasets.prepare import LOSSLESS, PrepareStep
from fastload.datasets.protocols import RowErrors, RowRequests, current_reader, note_prefetch
from fastload.errors import ArgumentError, FastloadError, refuse_class
from fastload.fetch.prefetcher import Prefetcher
from fastload.fetch.reads import Source
from fastload.images.dct import Unindexed, with_rows
from fastload.metrics.counters import Counters
from fastload.store.budget import RequestBudget
from fastload.store.manifest import Manifest
from fastload.store.process import ProcessLocal

SOME = 256  # records that stand for all

# Samples decoded by one call of the kernel. While others are still on their way: few enough that decoding
# starts meanwhile. Of those that are here, as many as stay in the processor's caches: decoding seems to throw
# the interpreter's code out of these, and Python then takes twice as long for the next samples.
_CHUNK, _CHUNK_BYTES = 8, 3 << 20


class StoreDataset(Dataset[Any]):
    """A dataset whose transforms may be set at any time. Reads and cache keys depend on its other arguments.

    Attributes:
        settled: attributes that are set once, by the constructor.
        computed: attributes that are never set -> what to do instead.
        cache: what the samples are kept in, or None.
        counters: of this process.
    """

    settled: ClassVar[frozenset[str]] = frozenset({"url", "decode", "cache", "on_change"})
    computed: ClassVar[dict[str, str]] = {}

    # Errors of a sample, for `on_error` to decide on. All others, such as MemoryError, are raised.
    _row_errors: ClassVar[tuple[type[Exception], ...]] = (FastloadError, IndexError)

    cache: Cache | None
    _step: PrepareStep

    def __init__(self, url: Any, decode: Callable[..., Any] | None) -> None:
        check_function("decode", decode)
        self.url = url
        self.decode = decode
        self.counters = Counters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.computed:
            raise ArgumentError(f"{name} of {type(self).__name__} cannot be set: {self.computed[name]}")
        if name in self.settled and name in self.__dict__:
            raise ArgumentError(
                f"{name} of {type(self).__name__} cannot be set again: reads and cache keys depend on it. "
                f"To change it, make a new dataset with {name}="
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, ProcessLocal)}

    def __getitem__(self, index: int) -> Any:
        record = self._record(index)
        return self._finish(record, self._get(record))

    @property
    def budget(self) -> RequestBudget | None:
        """What was asked of the store, by all processes of this trainer; None: it is a directory."""
        return None

    def key(self, index: int) -> str:
        """The object key of a sample, relative to `url`; of a record in a shard with its offset there."""
        return self._name(self._record(index))

    def payload(self, index: int) -> Any:
        """The bytes of a sample as the cache keeps them, before `decode` and `transform`.

        It raises what `dataset[index]` raises.
        """
        return kept([self._get(self._record(index))])[0]

    def cache_key(self, index: int) -> bytes:
        """The key under which the cache has a sample.

        Raises:
            ArgumentError: the dataset has no cache.
        """
        if self.cache is None:
            raise ArgumentError("the dataset has no cache: give it one with cache=")
        return self._cache_key(self._record(index))

    def cache_keys(self, index: int) -> list[bytes]:
        """The keys of all that the cache has of a sample: of each object of a `TableDataset`. Raises as
        `cache_key`."""
        return [self.cache_key(index)]

    def contains(self, index: int) -> bool:
        """Whether the cache has all of a sample. Does not count as a miss. Raises as `cache_key`."""
        keys = self.cache_keys(index)
        assert self.cache is not None  # `cache_key` says so
        return all(map(self.cache.has, keys))

    def listed(self) -> tuple[str, str] | None:
        """Digests of (keys, versions) of the objects that were listed; None: there are none."""
        found = self._listed()
        return None if found is None else found[1].digests

    def changes_since(self, keys: str, versions: str) -> str:
        """What was added, removed and changed since the listing with these digests, in words; "" if nothing
        was, or if the cache does not keep that listing any more."""
        found = self._listed()
        if found is None or found[1].digests == (keys, versions):
            return ""
        before = found[0].holding(keys, versions)
        return "" if before is None else found[1].changes_since(before)

    def outstanding(self) -> int:
        """How many samples this process has read ahead, or is reading, that were not used yet."""
        prefetcher = self._prefetchers.peek()
        return 0 if prefetcher is None else prefetcher.outstanding().samples

    # --- RowDataset: read ahead, and written straight into the batch

    def prefetch(self, indices: Iterable[int]) -> None:
        indices = list(indices)
        records = [self._record(index) for index in indices]
        if records:
            note_prefetch(self, indices)
            self._prefetchers.get().request(records, current_reader.get())

    def cancel(self, indices: Iterable[int]) -> None:
        prefetcher = self._prefetchers.peek()
        if prefetcher is not None:  # else nothing is under way
            prefetcher.cancel([self._record(index) for index in indices])

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        errors: RowErrors = []
        at = 0
        while at < len(todo):
            rows: list[int] = []
            records: list[int] = []
            payloads: list[Any] = []
            values: list[Any] = []
            held = 0
            while at < len(todo):
                row, index = todo[at]
                record = None
                try:
                    record = self._record(index)
                    if held >= _CHUNK_BYTES or (len(rows) >= _CHUNK and not self._is_here(record)):
                        break
                    payload = self._get(record)
                    payloads.append(payload)
                    values.append(self._restore(record, payload, readonly=True))
                except self._row_errors as error:
                    errors.append((row, self._named(error, record)))
                else:
                    rows.append(row)
                    records.append(record)
                    held += _bytes_of(payload)
                at += 1
            if rows:
                errors += self._fill_rows(batch, rows, records, values, seed, epoch)
            for payload in payloads:
                _keep(payload)
        self.counters.add("decode.samples", len(todo))
        return errors

    # --- which samples these are, see `workers.witness`

    def records(self, indices: Iterable[int]) -> NDArray[np.int64]:
        """The number by which each sample draws its random numbers: the same, whatever its index is."""
        records = np.fromiter(map(operator.index, indices), np.int64)
        records %= len(self)  # type: ignore[arg-type]
        return records

    def identities(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        """A number for each sample: of its key and version, wherever it is stored or cached."""
        raise NotImplementedError

    @property
    def draws(self) -> bool:
        """Whether a fused transform draws random numbers from (seed, epoch, record), in this epoch."""
        return False

    @property
    def cut(self) -> int:
        """The number of what fused transforms do in this epoch; 0: there are none."""
        return 0

    # --- CacheFilling

    def flush_cache(self) -> None:
        if self.cache is not None:
            self.cache.flush()
            self.counters.merge(self.cache.counters.drain())

    def close_cache(self) -> None:
        self.close()

    def close(self) -> None:
        """End this process's reader threads; write and close the cache. The next access opens it again."""
        prefetcher = self._prefetchers.drop()
        if prefetcher is not None:
            prefetcher.close()

    # --- what a subclass supplies

    @abstractmethod
    def _source(self) -> Source:
        """Where records come from."""

    def _listed(self) -> tuple[Listings, Manifest] | None:
        """What was listed, and where that is kept; None: nothing is, or shards are."""
        return None

    @abstractmethod
    def _record(self, index: int) -> int:
        """The record of an index. Raises `IndexError` where there is none."""

    @abstractmethod
    def _name(self, record: int) -> str:
        """A record in error messages."""

    @abstractmethod
    def _cache_key(self, record: int) -> bytes:
        """The cache key of a record."""

    @abstractmethod
    def _sample(self, value: Any) -> Any:
        """What the prepare step restored -> sample."""

    @abstractmethod
    def _fill_rows(
        self, batch: Any, rows: list[int], records: list[int], values: list[Any], seed: int, epoch: int
    ) -> RowErrors:
        """Write the results of the prepare step into rows of a batch."""

    # --- cache modes "dct" and "auto"

    @property
    def _steps(self) -> list[PrepareStep]:
        return [self._step]

    def _set_steps(self, steps: list[Any]) -> None:
        """Replace the prepare steps; called before anything is read."""
        (self._step,) = steps
        self._prefetchers.drop()

    def _settle_mode(self, total_bytes: int) -> None:
        """The end of a constructor: which way the cache's mode "dct" or "auto" goes for this dataset.

        A cache that was filled in mode "raw" goes on in that mode under "auto", the default: nothing is read
        again. Without a cache there is nothing to be gained.
        """
        steps = self._steps
        if not any(step.mode in ("dct", "auto") for step in steps):
            return
        if self.cache is None:
            self._set_steps([step.as_raw() if step.mode in LOSSLESS else step for step in steps])
        elif any(step.mode == "auto" for step in steps):
            was_open = self.cache.is_open  # by another dataset, which may be reading
            kept = self._share_kept()
            self._set_steps([step.as_raw() for step in steps])
            kept_raw = self._share_kept()
            if not was_open:
                self.cache.close()
            if kept_raw > kept:
                return
            choice = ProcessLocal(partial(AutoChoice, self.cache, total_bytes, self._share_kept))
            for step in steps:
                step.choice = choice if step.mode == "auto" else None
            self._set_steps(steps)

    def _share_kept(self) -> float:
        """The share of the samples that the cache has, estimated from a few: the same each time."""
        assert self.cache is not None
        if not self.cache.exists():
            return 0.0
        some = self._some_records()
        return sum(self.cache.has(self._cache_key(record)) for record in some) / max(1, len(some))

    @abstractmethod
    def _some_records(self) -> list[int]:
        """A few records whose cache keys are known."""

    # --- what the steps are made of

    @cached_property
    def _prefetchers(self) -> ProcessLocal[Prefetcher]:
        return ProcessLocal(self._new_prefetcher)

    def _new_prefetcher(self) -> Prefetcher:
        return Prefetcher(self._source(), self.cache, prepare=self._preparer(), counters=self.counters)

    def _cache_to_fill(self) -> Cache:
        """The cache that `warm` fills.

        Raises:
            ArgumentError: there is none.
        """
        if self.cache is None:
            raise ArgumentError(
                "warm() fills a cache: give the dataset one with cache= (it has none if a warning said that "
                "nothing is cached)"
            )
        return self.cache

    def _preparer(self) -> Callable[[Any, int], Any] | None:
        """(bytes, record) -> what the cache keeps; None if it is the bytes themselves."""
        prepare = self._step.prepare
        if prepare is None:
            return None
        if self._step.asks_for_key:
            return lambda payload, record: prepare(payload, self._name(record))
        return lambda payload, record: prepare(payload)

    def _get(self, record: int) -> Any:
        """What the prefetcher has of a record; an error of reading or preparing it carries its name."""
        try:
            return self._prefetchers.get().get(record)
        except FastloadError as error:
            self._named(error, record)
            raise

    def _is_here(self, record: int) -> bool:
        """Whether `_get` will not wait for the store."""
        prefetcher = self._prefetchers.peek()  # a stream's records come without one
        return prefetcher is not None and prefetcher.is_here(record)

    def _finish(self, record: int, payload: Any) -> Any:
        """What the prefetcher hands out -> sample."""
        try:
            return self._sample(self._restore(record, payload))
        except FastloadError as error:
            self._named(error, record)
            raise
        finally:
            _keep(payload)

    def _restore(self, record: int, payload: Any, *, readonly: bool = False) -> Any:
        """What the prefetcher hands out -> what the sample is made of; see `PrepareStep.restore`."""
        key = self._name(record) if self._step.asks_for_key else None
        return self._step.restore(payload, key, readonly=readonly)

    def _named(self, error: Exception, record: int | None) -> Exception:
        """The error, with the name of its record if it has none yet."""
        if isinstance(error, FastloadError) and error.key is None and record is not None:
            error.key = self._name(record)
        return error


def kept(payloads: list[Any]) -> list[Any]:
    """The payloads as the cache keeps them, now that no sample is made of them."""
    _keep(payloads)
    return [with_rows(one.data) if isinstance(one, Unindexed) else one for one in payloads]


def _keep(payload: Any) -> None:
    """Write what was waiting for its first decode, of a payload or of those of several objects."""
    for one in payload if isinstance(payload, list) else [payload]:
        if isinstance(one, Unindexed):
            one.keep()


def _bytes_of(payload: Any) -> int:
    """Of a payload, or of those of several objects."""
    return sum(map(len, payload)) if isinstance(payload, list) else len(payload)


def check_function(name: str, value: Any) -> None:
    """An argument that is a function or None.

    Raises:
        ArgumentError: it cannot be called, or is a class where one of its instances is meant.
    """
    refuse_class(name, value)
    if value is not None and not callable(value):
        raise ArgumentError(f"{name} must be callable or None, found {value!r}")


def check_on_change(value: Any) -> None:
    """The argument `on_change` of datasets of objects.

    Raises:
        ArgumentError: it is none of the two.
    """
    if value not in ("error", "refresh"):
        raise ArgumentError(f"on_change must be 'error' or 'refresh', found {value!r}")
