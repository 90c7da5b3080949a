"""One sample per object under a URL."""

from __future__ import annotations

import operator
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.cache import Cache, as_cache
from fastload.cache.keys import Mode
from fastload.cache.listings import Listings
from fastload.datasets.base import SOME, StoreDataset, check_function, check_on_change
from fastload.datasets.cache_forecast import Forecaster
from fastload.datasets.prepare import PrepareStep
from fastload.datasets.protocols import Allocate, RowErrors, own_samples
from fastload.datasets.warm import ToRead, Warmed, find_missing, warm
from fastload.errors import ArgumentError
from fastload.fetch.prefetcher import Prefetcher
from fastload.fetch.reads import ObjectSource
from fastload.images.by_epoch import ByEpoch, all_transforms, current_transform
from fastload.images.crop import Crop
from fastload.images.decode import Oriented
from fastload.images.encoded import EncodedBatch
from fastload.images.rng import sample_seed
from fastload.store.base import Store
from fastload.store.budget import RequestBudget
from fastload.store.listing import Keys, ListingQuery, as_keys
from fastload.store.manifest import Manifest
from fastload.store.open import checked_options, open_store


class ObjectDataset(StoreDataset):
    """A map-style dataset with one sample per object under `url`.

    A subclass may override `__getitem__` or `__getitems__`: a loader then calls that method for every sample,
    as torch's loader does, and still reads ahead. `transform` may be set again at any time.

    Example::

        import numpy as np
        from fastload import DataLoader, ObjectDataset

        def spectrum(data):
            return np.frombuffer(data, np.float32)

        dataset = ObjectDataset("s3://bucket/spectra", decode=spectrum, cache="/ssd/cache")
        for batch in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            batch.shape  # (256, 32), float32

    Args:
        url: any fsspec URL or path: `s3://bucket/prefix`, `gs://`, `az://`, `file://`, `memory://`, ...
        decode: bytes -> object; deterministic. A function with a parameter `key` (without default) also gets
            the object's key: `def decode(data, key)`. Default: none; `transform` gets the bytes.
        transform: one of fastload's fused transforms (the object must then be an image; the sample is a uint8
            tensor), or any callable on the result of `decode`; or a `ByEpoch` of these.
        keys: the samples: keys of objects, relative to `url`, in this order; one may be there twice. A list,
            a numpy or Arrow array, or a column of a data frame. None: all objects below `url`, in the order
            of their keys.
        fingerprint: text that identifies `decode` in the keys of cache mode "decoded", so that another
            `decode` gets other keys. Default: a description of all that `decode` holds (its code, arguments,
            closure, attributes, the globals it uses).
        cache: a `Cache`, or a directory for one in mode "auto"; filled during the first epoch. If the store
            gives no versions of its objects, nothing is cached and a warning says so.
        storage_options: for `open_store`.
        listing_max_age: how old a listing that the cache keeps may be, to be used in place of a new one: text
            such as "12h" or "7d", or seconds. 0: every job lists again; its ranks share that listing.
        on_change: what to do if an object changed since it was listed: "error", or "refresh" to read the new
            version. `stats()` counts these as `get.refreshed`.

    Raises:
        ArgumentError, NotFoundError, AccessDeniedError, StoreError: within 10 s, before any worker starts. A
            key without an object is a NotFoundError.
    """

    def __init__(
        self,
        url: str,
        decode: Callable[..., Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        keys: Iterable[str] | None = None,
        fingerprint: str | None = None,
        cache: Cache | str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        listing_max_age: float | str = 0,
        on_change: str = "error",
    ) -> None:
        check_on_change(on_change)
        super().__init__(url, decode)
        self.on_change = on_change
        check_function("transform", transform)
        self.transform = transform
        kept_in = as_cache(cache)
        self._step = PrepareStep(kept_in, decode, fingerprint, images=self._known_images(transform))
        self._step.check_transform(transform)
        self._store = open_store(url, **checked_options(storage_options))
        if kept_in is not None and self._store.holds(kept_in.path):
            raise ArgumentError(
                f"cache {kept_in.path!r} lies within {url!r}, and its files would be read as samples: "
                "give a directory outside it"
            )
        given = None if keys is None else as_keys(keys)
        self.keys_given = given is not None
        self._listings = Listings.of(kept_in, listing_max_age)
        self._manifest = self._list(given)
        self.cache = None if self._manifest.why_not_cached(self._store) else kept_in  # a warning has said why
        self._settle_mode(self._manifest.total_bytes)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "transform" and "_step" in self.__dict__:
            self._step.check_transform(value)
            mode = self._step.mode
            if mode in ("dct", "auto") and mode not in self._known_images(value):
                raise ArgumentError(
                    f"a cache in mode {mode!r} keeps these images for transforms that decode them, and "
                    f"this one takes their files: make a new dataset with transform={value!r}"
                )
        super().__setattr__(name, value)

    @property
    def budget(self) -> RequestBudget | None:
        return self._store.budget

    def __len__(self) -> int:
        return len(self._manifest)

    def __repr__(self) -> str:
        cache = "" if self.cache is None else f", cache={self.cache!r}"
        return f"{type(self).__name__}({self._store.url!r}, {len(self):,} samples{cache})"

    def store(self) -> Store:
        """The opened `url`."""
        return self._store

    def listing(self) -> Manifest:
        """The objects as they were listed: key, size and version of each sample."""
        return self._manifest

    def warm(self, indices: Iterable[int]) -> Iterator[Warmed]:
        """Read these samples into the cache, as training would, and yield the outcome of each.

        Samples that are in the cache, or that another run is reading, are not read. A bad object is an
        outcome, not an error. When the iterator has ended or was closed, everything that it read is written.

        Raises:
            ArgumentError: the dataset has no cache.
            StoreError: the store is down, or refuses the request.
            CacheError: the cache cannot be written.
        """
        cache = self._cache_to_fill()
        source = self._warming_source()
        prefetcher = Prefetcher(source, None, prepare=self._preparer(), counters=self.counters)
        records = (self._record(index) for index in indices)
        return warm(records, cache, prefetcher, key=self._cache_key, size=self._manifest.size)

    def left_to_warm(self, indices: Iterable[int]) -> ToRead:
        """What `warm` has to read for these samples. Raises as `warm`."""
        records = (self._record(index) for index in indices)
        return find_missing(records, self._cache_to_fill(), self._warming_source())

    def _warming_source(self) -> ObjectSource:
        return ObjectSource(self._store, self._manifest, key=self._cache_key)

    def start_epoch(self, epoch: int) -> None:
        if isinstance(self.transform, ByEpoch):
            self.transform.start_epoch(epoch)

    # --- RowDataset

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        if self._fused is None:
            return None
        return allocate((n, *self._fused.sample_shape), self._fused.dtype)

    def sample(self, batch: Any, row: int) -> Any:
        assert self._fused is not None
        return self._fused.as_sample(batch[row])

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        images = self._images_of(batch)
        if isinstance(images, EncodedBatch):
            images.copy_row(target, source)
        else:
            images[target].copy_(images[source])

    def identities(self, records: NDArray[np.int64]) -> NDArray[np.uint64]:
        return self._manifest.identities(records)

    @property
    def draws(self) -> bool:
        return self._fused is not None and self._fused.draws

    @property
    def cut(self) -> int:
        return 0 if self._fused is None else self._fused.number

    # --- EncodedRows

    def keep_raw(self) -> None:
        if self._step.mode == "auto":
            self.close()
            self._step = self._step.as_raw()

    def new_encoded_batch(self, n: int, allocate: Allocate) -> Any:
        assert self._fused is not None
        return EncodedBatch(self._fused, n, allocate, records=self._step.mode == "dct")

    def finish_encoded_batch(self, batch: Any) -> Any:
        return batch.finish()

    def why_not_encoded(self, decode: str = "") -> str | None:
        own = own_samples(self)
        if own is not None:
            return f"samples are made by {own}, in the workers: use decode='cpu'"
        fused = all(isinstance(transform, Crop) for transform in all_transforms(self.transform))
        if self.decode is not None or not fused:
            return (
                "the dataset's transform has to be fastload's RandomResizedCrop or CenterCrop, without any "
                f"decode=; found transform={self.transform!r}, decode={self.decode!r}"
            )
        if not all(transform.runs_on_device for transform in all_transforms(self.transform)):
            return (
                "the device makes RGB by interpolation='bilinear', of RandomResizedCrop and CenterCrop "
                f"themselves, with Normalize as batch_transform=; found transform={self.transform!r}"
            )
        if self._step.mode == "decoded":
            return "a cache in mode 'decoded' keeps pixels: use mode 'raw' or 'shrunk', or decode='cpu'"
        if decode == "torch" and self._step.mode != "dct":
            return "torch decodes what a cache in mode 'dct' keeps: use Cache(path, 'dct'), or decode='cpu'"
        if decode not in ("", "torch") and self._step.mode == "dct":
            return (
                "a cache in mode 'dct' keeps what only fastload decodes: use mode 'raw', decode='torch' or "
                "decode='cpu'"
            )
        return None

    def find(self, keys: Iterable[str]) -> dict[str, list[int]]:
        """Key -> indices of the samples that have it; keys that no sample has are left out."""
        return self._manifest.find(keys)

    # --- what `StoreDataset` asks for

    def _source(self) -> ObjectSource:
        return ObjectSource(self._store, self._manifest, key=self._cache_key, on_change=self.on_change)

    def _record(self, index: int) -> int:
        index = operator.index(index)  # two tensors of one number are not one key
        n = len(self._manifest)
        if not -n <= index < n:
            raise IndexError(f"index {index} is out of range for {n} samples of {self.url}")
        return index % n

    def _name(self, record: int) -> str:
        return str(self._manifest.key(record))

    def _cache_key(self, record: int, version: str | None = None) -> bytes:
        assert self.cache is not None
        manifest = self._manifest
        version = manifest.version(record) if version is None else version
        step = self._step
        return self.cache.key(
            self._store.identity, manifest.key(record), version, *step.key, mode=step.key_mode
        )

    def _some_records(self) -> list[int]:
        n = len(self._manifest)
        return random.Random(0).sample(range(n), min(SOME, n))

    def _new_prefetcher(self) -> Prefetcher:
        prepare, manifest = self._preparer(), self._manifest
        if self.cache is not None and len(manifest):
            forecaster = Forecaster(
                self.cache, len(manifest), manifest.total_bytes, self.contains, self._step.mode
            )
            prepare = forecaster.watch(prepare)
        return Prefetcher(self._source(), self.cache, prepare=prepare, counters=self.counters)

    def _sample(self, value: Any) -> Any:
        image = self._open(value)
        return image if self.transform is None else self.transform(image)

    def _fill_rows(
        self, batch: Any, rows: list[int], records: list[int], values: list[Any], seed: int, epoch: int
    ) -> RowErrors:
        images = self._images_of(batch)
        seeds = [sample_seed(seed, epoch, record) for record in records]
        with self.counters.timed("decode"):
            if isinstance(images, EncodedBatch):
                keys = [self._name(record) for record in records]
                errors = images.fill(rows, values, seeds, keys)
            else:
                assert self._fused is not None
                errors = self._fused.fill_rows(images.numpy(), rows, values, seeds)
        return [(rows[at], self._named(error, records[at])) for at, error in errors]

    # --- what differs for a folder of images

    def _listed(self) -> tuple[Listings, Manifest]:
        return self._listings, self._manifest

    def _list(self, keys: list[str] | None) -> Manifest:
        return self._listings.open(self._store, ListingQuery(keys=None if keys is None else Keys(keys)))

    def _known_images(self, transform: Any) -> tuple[Mode, ...]:
        """The cache modes, of "dct" and "auto", in which all objects are known to be images."""
        fused = all(isinstance(one, Crop) and not one.own_values for one in all_transforms(transform))
        return self._unless_own_samples() if fused and self.decode is None else ()

    def _unless_own_samples(self) -> tuple[Mode, ...]:
        # A method of the user may want the bytes: "dct" is of someone who knows that it does not.
        return ("dct", "auto") if own_samples(self) is None else ("dct",)

    @property
    def _fused(self) -> Crop | None:
        transform = current_transform(self.transform)
        fused = self.decode is None and isinstance(transform, Crop) and transform.fills_rows
        return transform if fused else None

    @property
    def _takes_encoded(self) -> bool:
        """Whether the transform decodes the image itself."""
        return self.decode is None and isinstance(current_transform(self.transform), Crop)

    def _images_of(self, batch: Any) -> torch.Tensor | EncodedBatch:
        return batch  # type: ignore[no-any-return]

    def _open(self, value: Any) -> Any:
        """The result of the prepare step -> the input of the transform."""
        if isinstance(value, Oriented):
            return value.pixels
        as_they_are = self.decode is None and self._step.mode != "decoded" and not self._takes_encoded
        return bytes(value) if as_they_are else value  # a client's buffer is not what a user expects
