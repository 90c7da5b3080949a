"""`cached`: any map-style torch dataset, its samples kept on local SSD from the first epoch on."""

from __future__ import annotations

import operator
import os
from pathlib import PurePath
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from fastload.cache import Cache, as_cache
from fastload.datasets.layout import dump, load
from fastload.datasets.prefix import code_of
from fastload.errors import ArgumentError, DecodeError
from fastload.rows import check_dataset
from fastload.stats import Counters

__all__ = ["CachedDataset", "cached"]

_PRIMITIVE = (type(None), bool, int, float, str, bytes, PurePath)


def cached(
    dataset: Dataset[Any], cache: Cache | str | os.PathLike[str], *, fingerprint: str | None = None
) -> CachedDataset:
    """Keep the samples of a deterministic map-style dataset in `cache`.

    What is random (augmentation) belongs behind this, or every epoch repeats the first one.

    Args:
        dataset: its samples may be None, bool, int, float, str, bytes, numpy arrays, torch tensors, and
            lists, tuples and dicts of these. They are stored in a fixed binary layout, without pickle.
        cache: any `Cache`, or the path of one; its mode only says where entries belong.
        fingerprint: text that names the samples: same fingerprint and index, same sample. Default: the
            dataset's class, its source code, its length, and those of its attributes that are plain values.

    Raises:
        ArgumentError: a dataset without length, or of which no fingerprint can be made; at a sample that
            cannot be stored.
    """
    kept_in = as_cache(cache)
    if kept_in is None:
        raise ArgumentError("cache must be a fastload.Cache or the path of a directory, found None")
    check_dataset(dataset)
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not map_style or isinstance(dataset, IterableDataset):
        raise ArgumentError(
            f"dataset must be map-style (__getitem__ and __len__), found {type(dataset).__name__}"
        )
    if not isinstance(fingerprint, str | None):
        raise ArgumentError(f"fingerprint must be a str or None, found {fingerprint!r}")
    return CachedDataset(dataset, kept_in, fingerprint if fingerprint is not None else _fingerprint(dataset))


class CachedDataset(Dataset[Any]):
    """See `cached`."""

    def __init__(self, dataset: Dataset[Any], cache: Cache, fingerprint: str) -> None:
        self.dataset = dataset
        self.cache = cache
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        index = operator.index(index)
        n = len(self)
        if not -n <= index < n:
            raise IndexError(f"index {index} is out of range for {n} samples")
        index %= n
        key = self.cache.key("cached", self.fingerprint, str(index))
        with self.counters.timed("cache"):
            record = self.cache.read(key)
        if record is not None:
            try:
                return load(record)
            except DecodeError:
                self.cache.counters.add("cache.corrupt")  # read as a miss: made and written anew
        sample = self.dataset[index]
        try:
            self.cache.write(key, dump(sample))
        except ArgumentError as error:
            error.key = index
            raise
        return sample

    def flush_cache(self) -> None:
        """Wait until what was read so far can be found in the cache, by other processes too."""
        self.cache.flush()

    def close_cache(self) -> None:
        """Write out the cache and close it; the next access opens it anew."""
        self.cache.close()

    @property
    def counters(self) -> Counters:
        """The cache's counters in this process."""
        return self.cache.counters


def _fingerprint(dataset: Any) -> str:
    if not hasattr(dataset, "__dict__"):
        raise ArgumentError(
            f"a {type(dataset).__name__} has nothing to tell it from others by: give a fingerprint"
        )
    values = {name: value for name, value in sorted(vars(dataset).items()) if isinstance(value, _PRIMITIVE)}
    return repr((code_of(type(dataset)), len(dataset), values))
