"""`cached`: any map-style torch dataset, its samples kept on local SSD from the first epoch on."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from fastload.cache import Cache, as_cache
from fastload.checks import check_index
from fastload.datasets.fingerprint import describe, own_text
from fastload.datasets.protocols import check_dataset
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError, DecodeError
from fastload.formats.sample import dump, load
from fastload.metrics.counters import Counters
from fastload.order.sampler import indexed_length


def cached(dataset: Dataset[Any], cache: Cache | str | os.PathLike[str]) -> CachedDataset:
    """Keep the samples of a deterministic map-style dataset in `cache`.

    Apply random augmentation after the cache; otherwise every epoch repeats the first one.

    Example::

        import torch
        from fastload import Cache, DataLoader, cached

        class Squares(torch.utils.data.Dataset):
            def __len__(self):
                return 1000

            def __getitem__(self, index):
                return torch.tensor(index) ** 2

        dataset = cached(Squares(), Cache("/ssd/cache", "decoded"))
        for batch in DataLoader(dataset, batch_size=256, num_workers=2):
            batch.shape  # (256,)

    Args:
        dataset: its samples may be None, bool, int, float, str, bytes, numpy arrays, torch tensors, and
            lists, tuples and dicts of these. They are stored in a fixed binary layout, without pickle, under
            keys that describe all that the dataset holds: its class, the code of its methods, its length and
            attributes, nested datasets and transforms, arrays and tensors by content. A path counts as text:
            its file is not read. If it has an attribute `__fingerprint__`, a text, that stands for all of
            it: the same text and index then mean the same sample.
        cache: a `Cache`, or the path of one. Its mode is part of the keys, no more, and "auto" is "raw"; only
            "dct" is refused.

    Raises:
        ArgumentError: the cache's mode is "dct"; the dataset has no length; or it holds an object that cannot
            be described, such as an open file or a lock, and has no `__fingerprint__`. When read: a sample
            cannot be stored.
    """
    kept_in = as_cache(cache)
    if kept_in is None:
        raise ArgumentError("cache must be a fastload.Cache or the path of a directory, found None")
    if not kept_in.codec.keeps_samples:
        raise ArgumentError(
            f"cache mode {kept_in.mode!r} is for the encoded images of fastload's datasets, and cached() "
            "keeps samples: leave mode= out, or give 'raw'"
        )
    check_dataset(dataset)
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not map_style or isinstance(dataset, IterableDataset):
        raise ArgumentError(
            f"dataset must be map-style (__getitem__ and __len__), found {type(dataset).__name__}"
        )
    fingerprint = own_text(dataset, "dataset")
    if fingerprint is None:
        fingerprint = f"{indexed_length(dataset)} {describe(dataset, 'dataset')}"
    return CachedDataset(dataset, kept_in, fingerprint)


class CachedDataset(Dataset[Any]):
    """What `cached` returns: a map-style dataset over `dataset`, with the same length."""

    def __init__(self, dataset: Dataset[Any], cache: Cache, fingerprint: str) -> None:
        self.dataset = dataset
        self.cache = cache
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        index = self._checked(index)
        key = self._key(index)
        with self.counters.timed("cache"):
            record = self.cache.read(key)
        if record is not None:
            try:
                return load(record)
            except DecodeError:
                self.cache.counters.add("cache.corrupt")  # a miss: the sample is made and written again
        sample = self.dataset[index]
        try:
            self.cache.write(key, dump(sample))
        except ArgumentError as error:
            error.key = index
            raise
        return sample

    def prefetch(self, indices: list[int]) -> None:
        """Start reading what `dataset` needs for those samples that the cache does not have."""
        view = view_of(self.dataset)
        if not view.reads_ahead:
            return
        absent = [at for at in map(self._checked, indices) if not self.cache.has(self._key(at))]
        if absent:
            view.prefetch(absent)

    def _checked(self, index: Any) -> int:
        return check_index(index, len(self), "samples")

    def _key(self, index: int) -> bytes:
        return self.cache.key("cached", self.fingerprint, str(index))

    def _cache_keys(self, index: int) -> list[bytes]:
        """The key under which the cache has a sample, as of a `StoreDataset`."""
        return [self._key(self._checked(index))]

    def _flush_cache(self) -> None:
        """See `CacheFilling`."""
        self.cache.flush()

    def close(self) -> None:
        """Write the cache and close it; the next access opens it again."""
        self.cache.close()

    @property
    def counters(self) -> Counters:
        """The cache's counters in this process."""
        return self.cache.counters
