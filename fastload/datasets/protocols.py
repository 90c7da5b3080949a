"""What a dataset may offer beside `__getitem__`.

It may be read ahead, be written row by row into the batch, and be read as streams while its samples are not
numbered yet.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MemberDescriptorType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from fastload.errors import ArgumentError
from fastload.metrics.counters import Counters

__all__ = [
    "Allocate",
    "CacheFilling",
    "EncodedRows",
    "InnerDataset",
    "RowDataset",
    "RowErrors",
    "RowRequests",
    "SampleStream",
    "StreamDataset",
    "as_encoded_rows",
    "as_filling",
    "as_rows",
    "as_streams",
    "bulk_getter",
    "check_dataset",
    "current_reader",
    "finish_batch",
    "inner_datasets",
    "key_of",
    "own_samples",
    "start_epoch",
]

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
RowRequests = list[tuple[int, Any]]  # rows to be filled: (row of the batch, index of the sample)
RowErrors = list[tuple[int, Exception]]  # (row of the batch, what went wrong)

# Whose samples `prefetch` announces, by any object: two iterations over one dataset are two readers.
current_reader: ContextVar[object] = ContextVar("current_reader", default=None)


@runtime_checkable
class CacheFilling(Protocol):
    """A dataset that fills a cache in the background."""

    def flush_cache(self) -> None:
        """Wait until what was read so far can be found in the cache, by other processes too."""

    def close_cache(self) -> None:
        """Flush, and let go of what this process holds of the cache and the store."""


@runtime_checkable
class RowDataset(Protocol):
    """A map-style dataset that can be read ahead and be filled row by row.

    Attributes:
        counters: of this process; "get.ahead" counts the samples asked for that were prefetched.
    """

    counters: Counters

    def prefetch(self, indices: Iterable[int]) -> None:
        """Start reading these samples; they will be asked for in this order. Does not block."""

    def cancel(self, indices: Iterable[int]) -> None:
        """These prefetched samples will not be asked for."""

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        """An empty collated batch of `n` rows, or None where this dataset has to be read sample by sample."""

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        """Write the samples into their rows; the rows of the failures returned are undefined."""

    def sample(self, batch: Any, row: int) -> Any:
        """The sample in a row, as `__getitem__` would return it."""

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        """Make row `target` equal to row `source`."""


class SampleStream(Protocol):
    """One of the streams of an epoch, in the process that reads it."""

    def take(self, n: int) -> list[int]:
        """The ids of the next `n` samples: fewer at the end, none when it is over.

        Their bytes are here when this returns, and stay until `fill()` or `[]` of the dataset has used them.
        An id is the sample's own in every epoch and process, for example shard << 32 | ordinal.

        Raises:
            What stops all reading: a store that is down or refuses us. After that the stream is not asked
            again. Damage in a shard is no such thing: where a record should begin and none does, its id is
            handed out, `fill()` or `[]` raises, so that `on_error` covers it, and the stream goes on with the
            next shard.
        """

    def state(self) -> dict[str, Any]:
        """Where it is, a few kilobytes of JSON: a stream opened from it goes on with the very next sample.

        It is asked for after each batch, and must not change once it was returned.
        """

    def close(self) -> None:
        """Stop reading ahead, and let go of what was read. Harmless if repeated."""


@runtime_checkable
class StreamDataset(Protocol):
    """A map-style dataset whose samples may not be numbered yet; until then an epoch is read as streams.

    Once `must_stream()` is False it is like any other map-style dataset. Until they are numbered, `len()` and
    `[index]` raise TypeError with a sentence that says so; `[id]` answers for ids that a stream of this
    process has handed out, and so do the methods of `RowDataset`, where it is one.
    """

    def must_stream(self) -> bool:
        """Whether the epoch that begins has to be read as streams.

        Looks again, cheaply, for places that were learned since it was asked last, by other processes too.
        False is for ever.
        """

    def plan_streams(
        self, count: int, *, seed: int, epoch: int, shuffle: bool, rank: int, ranks: int
    ) -> list[dict[str, Any]]:
        """The starting states of `count` streams of this rank, as `SampleStream.state()` would give them.

        With those of the other ranks, planned from the same arguments, they cover every sample exactly once.
        Streams may be empty. Called in the trainer's process, which a native client must not be used in.
        """

    def open_stream(self, state: dict[str, Any]) -> SampleStream:
        """The stream from `state` on. Called in the process that reads it, several may be open there."""

    def known_indexes(self) -> dict[int, bytes]:
        """Shard -> its index in bytes, of all shards that are indexed; to be sent to other ranks."""

    def learn_indexes(self, indexes: Mapping[int, bytes]) -> None:
        """Take over indexes of other ranks. They are kept where the workers of this node find them too."""


def as_streams(dataset: Any) -> StreamDataset | None:
    """The dataset as a `StreamDataset`; None where it is not one, and has numbers like any other.

    Raises:
        ArgumentError: a `Subset` of a dataset whose samples are not numbered yet.
    """
    if type(dataset) is not Subset:
        return dataset if isinstance(dataset, StreamDataset) else None
    inner = _chosen_from(dataset)
    if isinstance(inner, StreamDataset):
        try:
            len(inner)  # type: ignore[arg-type]
        except TypeError as error:
            raise ArgumentError(f"a Subset chooses samples by number: {error}") from error
    return None


def start_epoch(dataset: Any, epoch: int) -> None:
    """Tell a `RowDataset` that has a `start_epoch` which epoch the next samples are of; through `Subset` too.

    Not of the protocol, since few need it; and not for other datasets, where the name may mean anything.
    """
    dataset = _chosen_from(dataset)
    if isinstance(dataset, RowDataset) and hasattr(dataset, "start_epoch"):
        dataset.start_epoch(epoch)


def finish_batch(dataset: Any, batch: Any) -> Any:
    """The batch with all its rows filled, as it is handed out: a `RowDataset` may have a `finish_batch`.

    Not of the protocol, as `start_epoch`.
    """
    finish = getattr(_chosen_from(dataset), "finish_batch", None)
    return batch if finish is None else finish(batch)


def own_samples(dataset: Any) -> str | None:
    """The method that makes the samples in place of the rows, as text; None where rows are those samples.

    Rows are written by the rule of the class that wrote `new_batch`: where a class that comes before it in
    the method resolution order has a `__getitem__` or `__getitems__`, that method makes the samples.

    So a class that writes both is fast, whoever wrote it, and one that overrides neither stays fast. A
    `__getitems__` of the object itself counts, as torch looks for it there. So does a method that was put
    into the class later: it was written elsewhere.
    """
    dataset = _chosen_from(dataset)
    if getattr(dataset, "__dict__", {}).get("__getitems__"):
        return "__getitems__ of the dataset itself"
    for cls in type(dataset).__mro__:
        written = vars(cls)
        writes_rows = written.get("new_batch")
        for name in ("__getitem__", "__getitems__"):
            method = written.get(name)
            if method is not None and (writes_rows is None or not _written_together(method, writes_rows)):
                return f"{cls.__name__}.{name}"
        if writes_rows is not None:
            break
    return None


def _written_together(method: Any, other: Any) -> bool:
    """Whether two functions stand in the body of one class."""
    places = [
        (getattr(each, "__module__", None), getattr(each, "__qualname__", "").rpartition(".")[0])
        for each in (method, other)
    ]
    return places[0] == places[1] and not hasattr(method, "__wrapped__")


def check_dataset(dataset: Any) -> None:
    """Raise `ArgumentError` for a class where one of its instances is meant."""
    if isinstance(dataset, type) and not hasattr(type(dataset), "__getitem__"):
        raise ArgumentError(
            f"dataset is the class {dataset.__name__}: make an instance of it first, as in "
            f"{dataset.__name__}(...)"
        )


@runtime_checkable
class EncodedRows(Protocol):
    """A `RowDataset` whose images can leave the worker encoded, to be decoded on the device."""

    def why_not_encoded(self) -> str | None:
        """None where that works as this dataset is set up; otherwise what stands in the way."""

    def new_encoded_batch(self, n: int, allocate: Allocate) -> Any:
        """As `new_batch`, with an `EncodedBatch` in the place of the images; `fill` takes both."""

    def finish_encoded_batch(self, batch: Any) -> Any:
        """The batch with all its rows filled, and `EncodedImages` in that place."""


def as_encoded_rows(dataset: Any) -> EncodedRows | None:
    """The dataset as `EncodedRows`, through torch's `Subset` too; None where it is not that."""
    dataset = _chosen_from(dataset)
    return dataset if isinstance(dataset, EncodedRows) else None


def as_filling(dataset: Any) -> CacheFilling | None:
    """The dataset as a `CacheFilling`, through torch's `Subset` too; None where it is not one."""
    dataset = _chosen_from(dataset)
    return dataset if isinstance(dataset, CacheFilling) else None


def bulk_getter(dataset: Any) -> Callable[[Any], Any] | None:
    """The dataset's `__getitems__`, where it has one of its own: that of `Subset` only loops."""
    own = getattr(_chosen_from(dataset), "__getitems__", None)
    return dataset.__getitems__ if own else None


def key_of(dataset: Any, index: Any) -> str | None:
    """The key of a sample, through `Subset` too; None where the dataset is no `RowDataset` that has keys."""
    while type(dataset) is Subset:
        dataset, index = dataset.dataset, dataset.indices[index]
    if isinstance(dataset, RowDataset) and hasattr(dataset, "key"):
        return str(dataset.key(index))
    return None


def as_rows(dataset: Any) -> RowDataset | None:
    """The dataset as a `RowDataset`, through torch's `Subset` too; None where it is not one."""
    if type(dataset) is Subset:
        inner = as_rows(dataset.dataset)
        return None if inner is None else _SubsetRows(inner, dataset.indices)
    return dataset if isinstance(dataset, RowDataset) else None


class InnerDataset(NamedTuple):
    """A dataset of fastload that another dataset holds.

    Args:
        where: the attribute that holds it, such as "dataset" or "datasets[0]".
        dataset: it could be read ahead, where it is a `RowDataset`.
        alone: whether its holder is the user's or torch's, and therefore asks for one sample at a time.
    """

    where: str
    dataset: Any
    alone: bool


_MOST_INSIDE = 1000  # datasets that are looked at, and items of a list among their attributes


def inner_datasets(dataset: Any) -> list[InnerDataset]:
    """The datasets of fastload that `dataset` holds, at any depth, but not `dataset` itself.

    Looks at the attributes of datasets, and at the items of lists, tuples and dicts among these. It runs no
    code of the user: properties are left alone. What is no dataset is not looked into.
    """
    found: list[InnerDataset] = []
    dataset = _chosen_from(dataset)
    seen = {id(dataset)}
    holders = deque([("", dataset, True)])
    while holders:
        path, holder, alone = holders.popleft()
        alone = alone and not type(holder).__module__.startswith("fastload.")
        for where, value in _contents(holder):
            if id(value) in seen or len(seen) > _MOST_INSIDE or not _is_dataset(value):
                continue
            seen.add(id(value))
            holders.append((f"{path}{where}.", value, alone))
            if isinstance(value, RowDataset | CacheFilling):
                found.append(InnerDataset(path + where, value, alone and isinstance(value, RowDataset)))
    return found


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


def _chosen_from(dataset: Any) -> Any:
    """What a `Subset`, perhaps of another one, chooses its samples from; any other dataset as it is."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


class _SubsetRows:
    """Some samples of a `RowDataset`, by torch's `Subset`."""

    def __init__(self, inner: RowDataset, indices: Sequence[int]) -> None:
        self._inner = inner
        self._indices = indices
        self.counters = inner.counters
        self.new_batch = inner.new_batch
        self.sample = inner.sample
        self.copy_row = inner.copy_row

    def prefetch(self, indices: Iterable[int]) -> None:
        self._inner.prefetch([self._indices[index] for index in indices])

    def cancel(self, indices: Iterable[int]) -> None:
        self._inner.cancel([self._indices[index] for index in indices])

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        return self._inner.fill(batch, [(row, self._indices[index]) for row, index in todo], seed, epoch)
