"""The one place that sees through datasets that wrap others, and into those that hold others.

    Subset, random_split     chooses samples of its dataset
    ConcatDataset            deals indices to its parts
    StackDataset             a sample is a tuple or dict of the samples of its parts
    fastload.map             a function of the sample
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
from collections import deque
from collections.abc import Container, Iterator
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

from fastload.datasets.composed import ConcatView, StackView, SubsetView
from fastload.datasets.protocols import CacheFilling, overriding_method
from fastload.datasets.seeds import digest
from fastload.datasets.store_dataset import StoreDataset
from fastload.datasets.store_view import StoreView
from fastload.datasets.views import AnnouncedView, OverriddenView, PlainView, View

_TORCH = (Subset, ConcatDataset, StackDataset)
# From then on the samples are tried one after the other: almost all are left out, or there is only one.
_DRAWS = 1000
_MOST_INSIDE = 1000  # datasets that are looked at, and items of a list among their attributes


def view_of(dataset: Any) -> View:
    """The view of any map-style dataset, as far as it can be seen into."""
    if isinstance(dataset, StoreDataset):
        return StoreView(dataset)
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
    """The class that says what a dataset is made of: one of torch's, or one with a `_view`."""
    return next((cls for cls in kind.__mro__ if cls in _TORCH or "_view" in vars(cls)), None)


def _overriding_method(dataset: Any, home: type) -> str | None:
    """The method of a subclass of `home` that is obeyed in its place; None where it overrides none."""
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
    """Whether a dataset has a method `prefetch(indices)`. With another signature it is something else."""
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
    """The datasets of fastload that `dataset` holds, at any depth, but not `dataset` itself.

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
        elif asks is None and type(view_of(holder)) in (PlainView, StoreView):  # it is not seen through
            path, asks = "", holder
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
    """`dataset` itself if it is one of fastload's, and those that it holds."""
    own = [dataset] if isinstance(dataset, CacheFilling) else []
    found = [*own, *view_of(dataset).leaves(), *(inner.dataset for inner in inner_datasets(dataset))]
    return list({id(one): one for one in found}.values())


def start_epoch(datasets: list[Any], epoch: int) -> None:
    """Tell each dataset over a store the epoch of the next samples."""
    for dataset in datasets:
        if isinstance(dataset, StoreDataset):
            StoreView(dataset).start_epoch(epoch)


def _is_dataset(value: Any) -> bool:
    """Whether it is a dataset, or an object with attributes that looks like one of map style."""
    kind = type(value)
    if issubclass(kind, Dataset):
        return True
    if kind in (list, tuple, dict, str, bytes) or issubclass(kind, np.ndarray | torch.Tensor):
        return False
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__")


def _contents(holder: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of its attributes, and of the items of short lists, tuples and dicts among them."""
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
    """The samples that may stand in the place of `index`, the first choice first; there is no end of them.

    They are a function of (seed, epoch, index), and of `left_out` only in that those samples are passed over.
    So one more sample that is left out changes no choice but the choice of that sample. A sample stands in
    its own place only where there is no other.

    Args:
        left_out: indices of the dataset, of a `Mixture` without the pass; not all of them.
    """
    view, length = view_of(dataset), len(dataset)
    number = passed = 0
    for attempt in itertools.count():
        number = digest(seed, epoch, index, attempt) if passed < _DRAWS else number + 1
        other = view.replacement(index, number, length)
        if view.position(other, length) in left_out or (other == index and passed < _DRAWS):
            passed += 1
        else:
            passed = 0
            yield other
