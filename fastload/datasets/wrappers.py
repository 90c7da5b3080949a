"""The one place that sees through datasets that wrap others: what is inside is read ahead and writes rows.

    Subset, random_split     chooses samples of its dataset
    ConcatDataset            deals indices to its parts
    StackDataset             a sample is a tuple or dict of the samples of its parts
    fastload.map             a function of the sample
    `prefetch(indices)`      a dataset of the user's that announces samples to those that it holds

`see` makes a tree of `Rows` of them, nested in any order. A class of fastload's that wraps others has a
method `see_through()`, which returns its rows. A subclass that overrides `__getitem__` or `__getitems__`
makes its samples itself, and what its base holds is still read ahead.

Randomness: the samples of each part of a ConcatDataset or StackDataset have a seed of their own. Otherwise
equal positions in two parts would be cut alike, and two views of one image would be the same view.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import ConcatDataset, IterableDataset, StackDataset, Subset

from fastload.datasets.protocols import EncodedRows, RowDataset, StreamDataset
from fastload.datasets.seen_parts import ConcatRows, StackRows
from fastload.datasets.seen_rows import AnnouncedRows, LeafRows, OwnRows, PlainRows, Rows, SubsetRows

__all__ = ["as_encoded_rows", "as_rows", "as_streams", "key_of", "see"]

_OBEYED = ("__getitem__", "__getitems__")  # of a subclass
_TORCH = (Subset, ConcatDataset, StackDataset)


def see(dataset: Any) -> Rows:
    """The rows of any map-style dataset, as far as it can be seen into."""
    if isinstance(dataset, RowDataset):
        return LeafRows(dataset)
    home = _home(type(dataset))
    own = None if home is None else _own_method(dataset, home)
    if home is None or own == "prefetch":
        return AnnouncedRows(dataset) if _offers_prefetch(dataset) else PlainRows(dataset)
    if own is None:
        return _rows_of(dataset, home)
    try:
        return OwnRows(dataset, _rows_of(dataset, home), own)
    except AttributeError:  # it has not called the constructor of its base
        return PlainRows(dataset)


def as_rows(dataset: Any) -> Rows | None:
    """The rows of a dataset; None where nothing in it can be read ahead."""
    rows = see(dataset)
    return rows if rows.ahead else None


def as_streams(dataset: Any) -> StreamDataset | None:
    """The dataset that is read as streams in place of this one; None where there is none.

    Raises:
        ArgumentError: a `Subset` of a dataset whose samples are not indexed yet.
    """
    return see(dataset).streams()


def as_encoded_rows(dataset: Any) -> EncodedRows | None:
    """The dataset as `EncodedRows`, through torch's `Subset` too; None where it is not that."""
    return see(dataset).encoded()


def key_of(dataset: Any, index: Any) -> str | None:
    """The key of a sample; None where no dataset in it has keys."""
    return see(dataset).key(index)


def _home(kind: type) -> type | None:
    """The class that says what a dataset is made of: one of torch's, or one with a `see_through`."""
    return next((cls for cls in kind.__mro__ if cls in _TORCH or "see_through" in vars(cls)), None)


def _own_method(dataset: Any, home: type) -> str | None:
    """The method of a subclass of `home` that is obeyed in its place; None where it overrides none."""
    if getattr(dataset, "__dict__", {}).get("__getitems__"):
        return "__getitems__ of the dataset itself"
    mro = type(dataset).__mro__
    own = mro[: mro.index(home)]
    if any("prefetch" in vars(cls) for cls in own) and _offers_prefetch(dataset):
        return "prefetch"
    makes = [f"{cls.__name__}.{name}" for cls in own for name in _OBEYED if name in vars(cls)]
    return makes[0] if makes else None


def _rows_of(dataset: Any, home: type) -> Rows:
    if home is Subset:
        return SubsetRows(see(dataset.dataset), dataset.indices)
    if home is ConcatDataset:
        return ConcatRows([see(part) for part in dataset.datasets], dataset.cumulative_sizes)
    if home is StackDataset:
        parts = dataset.datasets
        if isinstance(parts, dict):
            return StackRows({name: see(part) for name, part in parts.items()})
        return StackRows([see(part) for part in parts])
    return dataset.see_through()  # type: ignore[no-any-return]


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
