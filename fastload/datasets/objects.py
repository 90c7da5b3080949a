"""One sample per object under a URL."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.cache import Cache, as_cache
from fastload.datasets.base import StoreDataset, check_function
from fastload.datasets.cache_forecast import announcing
from fastload.datasets.prepare import PrepareStep
from fastload.datasets.protocols import Allocate, RowErrors, RowRequests, current_reader, own_samples
from fastload.datasets.warm import Warmed, warm
from fastload.errors import ArgumentError, DecodeError, FastloadError
from fastload.fetch.prefetcher import Prefetcher
from fastload.fetch.source import ObjectSource
from fastload.images.by_epoch import ByEpoch, all_transforms, current_transform
from fastload.images.decode import Oriented
from fastload.images.encoded import EncodedBatch
from fastload.images.rng import sample_seed
from fastload.images.transforms import Crop
from fastload.metrics.counters import Counters
from fastload.store import open_store
from fastload.store.manifest import Manifest

__all__ = ["ObjectDataset", "decode_into"]

# Samples decoded by one call of the kernel: enough to make the call itself free, few enough that decoding
# starts while the rest of the batch is still on its way.
_CHUNK = 8


class ObjectDataset(StoreDataset):
    """A map-style dataset with one sample per object under `url`.

    A subclass may override `__getitem__` or `__getitems__`: a loader then calls that method for every sample,
    as torch's loader does, and still reads ahead. `transform` may be changed at any time.

    Args:
        url: any fsspec URL or path: `s3://bucket/prefix`, `gs://`, `az://`, `file://`, `memory://`, ...
        decode: bytes -> object; deterministic. Default: the bytes as they are, or whatever `transform` needs.
        transform: one of fastload's fused transforms (the object must then be an image; the sample is a uint8
            tensor), or any callable on what `decode` returns; or a `ByEpoch` of these.
        fingerprint: text that identifies `decode` in the keys of cache mode "decoded", so that another
            `decode` gets other keys. Default: a description of all that `decode` holds (its code, arguments,
            closure, attributes, the globals it uses).
        cache: a `Cache`, or the path of one in mode "raw"; filled during the first epoch. If the store
            gives no versions of its objects, nothing is cached and a warning says so.
        storage_options: for `open_store`.
        refresh: list the URL again where the cache holds an earlier listing.
        on_change: what to do with an object that is no longer the one that was listed: "error", or "refresh",
            to read the one that is there now. `stats()` counts these as `get.refreshed`.

    Raises:
        ArgumentError, NotFoundError, AccessDeniedError, StoreError: within 10 s, before any worker starts.
    """

    def __init__(
        self,
        url: str,
        decode: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        fingerprint: str | None = None,
        cache: Cache | str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        refresh: bool = False,
        on_change: str = "error",
    ) -> None:
        if on_change not in ("error", "refresh"):
            raise ArgumentError(f"on_change must be 'error' or 'refresh', found {on_change!r}")
        self.on_change = on_change
        check_function("decode", decode)
        check_function("transform", transform)
        self.url = url
        self.decode = decode
        self.transform = transform
        kept_in = as_cache(cache)
        self.counters = Counters()
        self._prefix = PrepareStep(kept_in, decode, fingerprint)
        self._store = open_store(url, **(storage_options or {}))
        if kept_in is not None and self._store.holds(kept_in.path):
            raise ArgumentError(
                f"cache {kept_in.path!r} lies within {url!r}, and its files would be taken for samples: "
                "give a directory beside it"
            )
        self._manifest = self._list(None if kept_in is None else kept_in.manifests, refresh)
        self.cache = None if self._manifest.why_not_cached(self._store) else kept_in  # a warning has said why
        self._window: tuple[int, Prefetcher] | None = None  # (process id, window)

    def __len__(self) -> int:
        return len(self._manifest)

    def __getitem__(self, index: int) -> Any:
        index = self._checked(index)
        return self._finish(index, self._take(index))

    def __repr__(self) -> str:
        cache = "" if self.cache is None else f", cache={self.cache!r}"
        return f"{type(self).__name__}({self._store.url!r}, {len(self):,} samples{cache})"

    def key(self, index: int) -> str:
        """The object key of a sample, relative to `url`."""
        return str(self._manifest.key(self._checked(index)))

    def warm(self, indices: Iterable[int]) -> Iterator[Warmed]:
        """Read these samples into the cache, as training would, and say of each what became of it.

        What the cache has is not read again, and what another run is reading is left to it. A bad object is
        an outcome, not an error. Once the iterator has ended or was closed, all that it read is written.

        Raises:
            ArgumentError: the dataset has no cache. StoreError: the store is down, or refuses us.
            CacheError: the cache cannot be written.
        """
        if self.cache is None:
            raise ArgumentError(
                "warm() fills a cache: give the dataset one with cache= (none is kept where a warning said "
                "that nothing is cached)"
            )
        source = ObjectSource(self._store, self._manifest, key=self._cache_key)
        window = Prefetcher(source, None, prepare=self._prefix.prepare, counters=self.counters)
        indices = (self._checked(index) for index in indices)
        return warm(indices, self.cache, window, key=self._cache_key, size=self._manifest.size)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_window": None}

    def start_epoch(self, epoch: int) -> None:
        if isinstance(self.transform, ByEpoch):
            self.transform.start_epoch(epoch)

    # --- RowDataset: read ahead, and written straight into the batch

    def prefetch(self, indices: Iterable[int]) -> None:
        self._open_window().request((self._checked(index) for index in indices), current_reader.get())

    def cancel(self, indices: Iterable[int]) -> None:
        if self._window is not None and self._window[0] == os.getpid():  # else nothing is under way
            self._window[1].cancel(self._checked(index) for index in indices)

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        if self._fused is None:
            return None
        return allocate((n, *self._fused.sample_shape), torch.uint8)

    def new_encoded_batch(self, n: int, allocate: Allocate) -> Any:
        assert self._fused is not None
        return EncodedBatch(self._fused, n, allocate)

    def finish_encoded_batch(self, batch: Any) -> Any:
        return batch.finish()

    def why_not_encoded(self) -> str | None:
        own = own_samples(self)
        if own is not None:
            return f"samples are made by {own}, in the workers: use decode='cpu'"
        fused = all(isinstance(transform, Crop) for transform in all_transforms(self.transform))
        if self.decode is not None or not fused:
            return (
                "the dataset's transform has to be fastload's RandomResizedCrop or CenterCrop, without any "
                f"decode=; found transform={self.transform!r}, decode={self.decode!r}"
            )
        if self._prefix.mode == "decoded":
            return "a cache in mode 'decoded' keeps pixels: use mode 'raw' or 'shrunk', or decode='cpu'"
        return None

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        failures: RowErrors = []
        for start in range(0, len(todo), _CHUNK):
            rows, payloads, indices = [], [], []
            for row, index in todo[start : start + _CHUNK]:
                try:
                    index = self._checked(index)
                    payloads.append(self._prefix.restore(self._take(index), readonly=True))
                    rows.append(row)
                    indices.append(index)
                except (FastloadError, IndexError) as error:
                    failures.append((row, error))
            failures += self._fill_rows(batch, rows, indices, payloads, seed, epoch)
        self.counters.add("decode.samples", len(todo))
        return failures

    def sample(self, batch: Any, row: int) -> Any:
        return batch[row]

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        images = self._images_of(batch)
        if isinstance(images, EncodedBatch):
            images.copy_row(target, source)
        else:
            images[target].copy_(images[source])

    # --- CacheFilling

    def flush_cache(self) -> None:
        if self.cache is not None:
            self.cache.flush()
            self.counters.merge(self.cache.counters.drain())

    def close_cache(self) -> None:
        self.close()

    def close(self) -> None:
        """End this process's reader threads, write out and close the cache. The next access opens it anew."""
        if self._window is not None and self._window[0] == os.getpid():
            self._window[1].close()
            self._window = None

    # --- what the steps are made of

    def _list(self, directory: Path | None, refresh: bool) -> Manifest:
        return Manifest.open(self._store, directory=directory, refresh=refresh)

    @property
    def _fused(self) -> Crop | None:
        transform = current_transform(self.transform)
        return transform if self.decode is None and isinstance(transform, Crop) else None

    def _images_of(self, batch: Any) -> torch.Tensor | EncodedBatch:
        return batch  # type: ignore[no-any-return]

    def _fill_rows(
        self, batch: Any, rows: list[int], indices: list[int], payloads: list[Any], seed: int, epoch: int
    ) -> RowErrors:
        if not rows:
            return []
        images = self._images_of(batch)
        seeds = [sample_seed(seed, epoch, index) for index in indices]
        with self.counters.timed("decode"):
            if isinstance(images, EncodedBatch):
                keys = [self._manifest.key(index) for index in indices]
                failures = images.fill(rows, payloads, seeds, keys)
            else:
                assert self._fused is not None
                failures = decode_into(self._fused, images.numpy(), rows, payloads, seeds)
        for position, error in failures:
            error.key = self._manifest.key(indices[position])
        return [(rows[position], error) for position, error in failures]

    def _take(self, index: int) -> Any:
        """What the window has of a sample; an error of reading or preparing it carries its key."""
        try:
            return self._open_window().get(index)
        except FastloadError as error:
            if error.key is None:
                error.key = self._manifest.key(index)
            raise

    def _finish(self, index: int, payload: Any) -> Any:
        """What the window hands out -> sample."""
        try:
            value = self._open(self._prefix.restore(payload))
            return value if self.transform is None else self.transform(value)
        except FastloadError as error:
            if error.key is None:
                error.key = self._manifest.key(index)
            raise

    def _open(self, value: Any) -> Any:
        """What the prefix gives -> what the transform takes."""
        if isinstance(value, Oriented):
            return value.pixels
        as_they_are = self.decode is None and self._prefix.mode != "decoded" and self._fused is None
        return bytes(value) if as_they_are else value  # a client's buffer is not what a user expects

    def _checked(self, index: int) -> int:
        index = operator.index(index)  # two tensors of one number are not one key
        n = len(self._manifest)
        if not -n <= index < n:
            raise IndexError(f"index {index} is out of range for {n} samples of {self.url}")
        return index % n

    def _cache_key(self, index: int, version: str | None = None) -> bytes:
        assert self.cache is not None
        manifest = self._manifest
        version = manifest.version(index) if version is None else version
        return self.cache.key(self._store.identity, manifest.key(index), version, *self._prefix.key)

    def _open_window(self) -> Prefetcher:
        """The window of this process: after a fork the parent's threads and clients are of no use here."""
        if self._window is None or self._window[0] != os.getpid():
            source = ObjectSource(self._store, self._manifest, key=self._cache_key, on_change=self.on_change)
            prepare = announcing(self, self._prefix.prepare)
            window = Prefetcher(source, self.cache, prepare=prepare, counters=self.counters)
            self._window = (os.getpid(), window)
        return self._window[1]


def decode_into(
    crop: Crop, images: NDArray[np.uint8], rows: list[int], payloads: list[Any], seeds: list[int]
) -> list[tuple[int, DecodeError]]:
    """Transform encoded images into these rows of a batch; (position in `rows`, error) of the failed."""
    if not rows:
        return []
    adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
    out = images[rows[0] : rows[0] + len(rows)] if adjacent else images[rows]
    failures = crop.fill(out, payloads, seeds)
    if not adjacent:
        images[rows] = out
    return failures
