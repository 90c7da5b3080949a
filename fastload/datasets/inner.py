"""The datasets of fastload that a dataset holds: for counters, caches, epochs and a warning."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from fastload.datasets.protocols import CacheFilling, RowDataset
from fastload.datasets.seen_rows import LeafRows, PlainRows
from fastload.datasets.wrappers import see

__all__ = ["InnerDataset", "fastload_datasets", "inner_datasets", "start_epoch"]


class InnerDataset(NamedTuple):
    """A dataset of fastload that another dataset holds.

    Args:
        where: the attribute that holds it, such as "dataset" or "datasets[0]"; of `asks`, if there is one.
        dataset: it could be read ahead, where it is a `RowDataset`.
        asks: the holder that asks for one sample at a time and announces none; None where there is none.
    """

    where: str
    dataset: Any
    asks: Any


_MOST_INSIDE = 1000  # datasets that are looked at, and items of a list among their attributes


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
        if type(holder).__module__.startswith("fastload.") and not hasattr(holder, "see_through"):
            asks = None
        elif asks is None and type(see(holder)) in (PlainRows, LeafRows):  # it is not seen through
            path, asks = "", holder
        for where, value in _contents(holder):
            if id(value) in seen or len(seen) > _MOST_INSIDE or not _is_dataset(value):
                continue
            seen.add(id(value))
            holders.append((f"{path}{where}.", value, asks))
            if isinstance(value, RowDataset | CacheFilling):
                lone = asks if isinstance(value, RowDataset) else None
                found.append(InnerDataset(path + where, value, lone))
    return found


def fastload_datasets(dataset: Any) -> list[Any]:
    """`dataset` itself if it is one of fastload's, and those that it holds."""
    own = [dataset] if isinstance(dataset, RowDataset | CacheFilling) else []
    found = [*own, *see(dataset).leaves(), *(inner.dataset for inner in inner_datasets(dataset))]
    return list({id(one): one for one in found}.values())


def start_epoch(datasets: list[Any], epoch: int) -> None:
    """Tell each `RowDataset` the epoch of the next samples by its `start_epoch`, if any.

    That method is not part of the protocol, since few need it. Other datasets are left alone: there the name
    may mean anything.
    """
    for dataset in datasets:
        if isinstance(dataset, RowDataset) and hasattr(dataset, "start_epoch"):
            dataset.start_epoch(epoch)


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
