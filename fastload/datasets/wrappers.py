"""Datasets that wrap others: fastload's own, `map` and `cached`; and the one place that sees through all.

    Subset, random_split     chooses samples of its dataset
    ConcatDataset            deals indices to its parts
    StackDataset             a sample is a tuple or dict of the samples of its parts
    fastload.map             a function of the sample
    fastload.cached          keeps the samples of any map-style dataset on local SSD
    `prefetch(indices)`      a dataset of the user's that announces samples to those that it holds

`view_of` makes a `View` of them, nested in any order. A class of fastload's that wraps others has a method
`_view()`, which returns its own. A subclass that overrides `__getitem__` or `__getitems__` makes its samples
itself, and what its base holds is still read ahead.

`inner_datasets` finds the datasets of fastload that a dataset holds in any other way: for counters, caches,
epochs and a warning.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
from collections import deque
from collections.abc import Callable, Container, Iterator
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

from fastload.cache import Cache, as_cache
from fastload.checks import check_function, check_index
from fastload.datasets.composed import ConcatView, MapView, StackView, SubsetView
from fastload.datasets.fingerprint import describe, own_text
from fastload.datasets.store_dataset import StoreDataset
from fastload.datasets.store_view import ColumnsView, StoreView
from fastload.datasets.views import (
    FLUSH_SECONDS,
    AnnouncedView,
    CacheFilling,
    OverriddenView,
    PlainView,
    View,
    check_dataset,
    overriding_method,
)
from fastload.errors import ArgumentError, DecodeError
from fastload.formats.sample import dump, load
from fastload.images.rng import digest, plain_index
from fastload.metrics.counters import Counters
from fastload.order.sampler import indexed_length


def map(dataset: Dataset[Any], function: Callable[[Any], Any]) -> MapDataset:
    """A dataset of the results of `function`, one for each sample of `dataset`.

    The loader reads `dataset` ahead, and fastload's fused transforms still decode whole batches. `function`
    gets one sample at a time, as `dataset[index]` returns it, in the process that makes the batch. Its
    results are collated as the samples of any dataset.

    Example::

        import fastload
        from fastload import DataLoader, ImageFolder, RandomResizedCrop

        def named(sample):
            image, label = sample
            return {"image": image, "label": label, "bright": image.float().mean()}

        dataset = fastload.map(ImageFolder("s3://bucket/train", RandomResizedCrop(224)), named)
        for batch in DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8):
            batch["image"].shape  # (256, 3, 224, 224), uint8

    Args:
        dataset: map-style; one of fastload's, one of the user's, or a wrapper of these. A shard dataset may
            still be without an index.
        function: sample -> sample. With `seed=` of the loader its random numbers are those of the sample.

    Raises:
        ArgumentError: `dataset` is not map-style, or `function` cannot be called.
    """
    check_dataset(dataset)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ArgumentError(
            f"dataset of map must be map-style, found {type(dataset).__name__}: apply the function in its "
            "__iter__, or in collate_fn of the loader"
        )
    if function is None or not callable(function):
        raise ArgumentError(f"function must be a function of one sample, found {function!r}")
    check_function("function", function)
    return MapDataset(dataset, function)


class MapDataset(Dataset[Any]):
    """What `map` returns: a map-style dataset with the length of `dataset`.

    Attributes:
        dataset, function: as they were given.
    """

    def __init__(self, dataset: Any, function: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.function = function

    def __len__(self) -> int:
        return len(self.dataset)

    def _indexed_length(self) -> int:
        """See `fastload.order.sampler.indexed_length`."""
        return indexed_length(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.function(self.dataset[index])

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        if many is None or type(self).__getitem__ is not MapDataset.__getitem__:
            return [self[index] for index in indices]
        return [self.function(sample) for sample in many(indices)]

    def __repr__(self) -> str:
        return f"map({self.dataset!r}, {getattr(self.function, '__qualname__', self.function)})"

    def prefetch(self, indices: list[Any]) -> None:
        """Start reading these samples: for the `prefetch(indices)` of a dataset that holds this one."""
        view_of(self.dataset).prefetch(list(indices))

    def _view(self) -> MapView:
        """See `fastload.datasets.wrappers`."""
        return MapView(view_of(self.dataset), self.function)


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
    if not kept_in._codec.keeps_samples:
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
                self.cache._forget(key)  # a miss: the sample is made and written again
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
        checked = [self._checked(index) for index in indices]
        absent = [index for index in checked if not self.cache.has(self._key(index))]
        if absent:
            view.prefetch(absent)

    def _checked(self, index: Any) -> int:
        return check_index(index, len(self), "samples")

    def _key(self, index: int) -> bytes:
        return self.cache.key("cached", self.fingerprint, str(index))

    def _cache_keys(self, index: int) -> list[bytes]:
        """Return the key under which the cache has a sample, as of a `StoreDataset`."""
        return [self._key(self._checked(index))]

    def _flush_cache(self, timeout: float = FLUSH_SECONDS) -> None:
        """See `CacheFilling`."""
        self.cache._flush_epoch(timeout)

    def close(self) -> None:
        """Write the cache and close it; the next access opens it again."""
        self.cache.close()

    @property
    def counters(self) -> Counters:
        """The cache's counters in this process."""
        return self.cache.counters


_TORCH = (Subset, ConcatDataset, StackDataset)
# From then on the samples are tried one after the other: almost all are left out, or there is only one.
_DRAWS = 1000
_MOST_INSIDE = 1000  # datasets that are looked at, and items of a list among their attributes


def view_of(dataset: Any) -> View:
    """Return the view of any map-style dataset, as far as it can be seen into."""
    if isinstance(dataset, StoreDataset):
        return StoreView(dataset) if dataset._batches == "rows" else ColumnsView(dataset)
    home = _home(type(dataset))
    override = None if home is None else _overriding_method(dataset, home)
    if home is None or override == "prefetch":
        return AnnouncedView(dataset) if _offers_prefetch(dataset) else PlainView(dataset)
    if override is None:
        return _view_by(home, dataset)
    try:
        return OverriddenView(dataset, _view_by(home, dataset), override)
    except AttributeError:  # it has not called the constructor of its base
        return PlainView(dataset)


def _home(kind: type) -> type | None:
    """Return the class that says what a dataset is made of: one of torch's, or one with a `_view`."""
    return next((cls for cls in kind.__mro__ if cls in _TORCH or "_view" in vars(cls)), None)


def _overriding_method(dataset: Any, home: type) -> str | None:
    """Return the method of a subclass of `home` that is obeyed in its place; None where it overrides none."""
    mro = type(dataset).__mro__
    if any("prefetch" in vars(cls) for cls in mro[: mro.index(home)]) and _offers_prefetch(dataset):
        return "prefetch"
    return overriding_method(dataset, home)


def _view_by(home: type, dataset: Any) -> View:
    if home is Subset:
        return SubsetView(view_of(dataset.dataset), dataset.indices)
    if home is ConcatDataset:
        return ConcatView([view_of(part) for part in dataset.datasets], dataset.cumulative_sizes)
    if home is StackDataset:
        parts = dataset.datasets
        if isinstance(parts, dict):
            return StackView({name: view_of(part) for name, part in parts.items()})
        return StackView([view_of(part) for part in parts])
    return dataset._view()  # type: ignore[no-any-return]


def _offers_prefetch(dataset: Any) -> bool:
    """Return whether a dataset has a method `prefetch(indices)`; another signature is something else."""
    method = getattr(type(dataset), "prefetch", None)
    if not callable(method) or isinstance(dataset, IterableDataset):
        return False
    try:
        names = list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return False
    return names[-1:] == ["indices"] and len(names) <= 2


class InnerDataset(NamedTuple):
    """A dataset of fastload that another dataset holds.

    Args:
        where: the attribute that holds it, such as "dataset" or "datasets[0]"; of `asks`, if there is one.
        dataset: it could be read ahead, where it is over a store.
        asks: the holder that asks for one sample at a time and announces none; None where there is none.
    """

    where: str
    dataset: Any
    asks: Any


def inner_datasets(dataset: Any) -> list[InnerDataset]:
    """Return the datasets of fastload that `dataset` holds, at any depth, but not `dataset` itself.

    Looks at the attributes of datasets, and at the items of lists, tuples and dicts among these. It runs no
    code of the user: properties are left alone. What is no dataset is not looked into.
    """
    found: list[InnerDataset] = []
    seen = {id(dataset)}
    holders = deque([("", dataset, None)])
    while holders:
        path, holder, asks = holders.popleft()
        if type(holder).__module__.startswith("fastload.") and _home(type(holder)) is None:
            asks = None
        elif asks is None and (isinstance(view := view_of(holder), StoreView) or type(view) is PlainView):
            path, asks = "", holder  # it is not seen through
        for where, value in _contents(holder):
            if id(value) in seen or len(seen) > _MOST_INSIDE or not _is_dataset(value):
                continue
            seen.add(id(value))
            holders.append((f"{path}{where}.", value, asks))
            if isinstance(value, CacheFilling):
                lone = asks if isinstance(value, StoreDataset) else None
                found.append(InnerDataset(path + where, value, lone))
    return found


def fastload_datasets(dataset: Any) -> list[Any]:
    """Return `dataset` itself if it is one of fastload's, and those that it holds."""
    own = [dataset] if isinstance(dataset, CacheFilling) else []
    found = [*own, *view_of(dataset).leaves(), *(inner.dataset for inner in inner_datasets(dataset))]
    return list({id(one): one for one in found}.values())


def by_epoch(datasets: list[Any]) -> list[Any]:
    """Return the datasets over a store that have a transform which depends on the epoch."""
    stores = [dataset for dataset in datasets if isinstance(dataset, StoreDataset)]
    return [dataset for dataset in stores if dataset._builder.transforms.by_epoch]


def start_epoch(datasets: list[Any], epoch: int) -> None:
    """Tell each dataset over a store the epoch of the next samples."""
    for dataset in datasets:
        if isinstance(dataset, StoreDataset):
            dataset._builder.start_epoch(epoch)


def _is_dataset(value: Any) -> bool:
    """Return whether it is a dataset, or an object with attributes that looks like one of map style."""
    kind = type(value)
    if issubclass(kind, Dataset):
        return True
    if kind in (list, tuple, dict, str, bytes) or issubclass(kind, np.ndarray | torch.Tensor):
        return False
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__")


def _contents(holder: Any) -> Iterator[tuple[str, Any]]:
    """Return (name, value) of its attributes, and of the items of short lists, tuples and dicts in them."""
    attributes: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):  # a class with __slots__ alone
        attributes |= object.__getattribute__(holder, "__dict__")
    for kind in type(holder).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # a slot that was not filled
                    attributes[name] = member.__get__(holder)
    for name, value in attributes.items():
        yield name, value
        if type(value) in (list, tuple, dict) and len(value) <= _MOST_INSIDE:
            items = value.items() if type(value) is dict else enumerate(value)
            yield from ((f"{name}[{key!r}]", item) for key, item in items)


def substitutes(dataset: Any, seed: int, epoch: int, index: Any, left_out: Container[int]) -> Iterator[int]:
    """Return the samples that may stand in the place of `index`, the first choice first; there is no end of
    them.

    They are a function of (seed, epoch, index), and of `left_out` only in that those samples are passed over.
    So one more sample that is left out changes no choice but the choice of that sample. A sample stands in
    its own place only where there is no other.

    Args:
        left_out: indices of the dataset, of a `Mixture` without the pass; not all of them.
    """
    view, length, index = view_of(dataset), len(dataset), plain_index(index)
    number = passed = 0
    for attempt in itertools.count():
        number = digest(seed, epoch, index, attempt) if passed < _DRAWS else number + 1
        other = view.replacement(index, number, length)
        if view.position(other, length) in left_out or (other == index and passed < _DRAWS):
            passed += 1
        else:
            passed = 0
            yield other
