"""What a dataset may offer beside `__getitem__`.

Its samples may be read ahead, be written row by row into the batch, and be read as streams while they are not
indexed yet.
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

from fastload.distributed.sampler import indexed_length
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

# The reader for which `prefetch` reads ahead, any object: two iterations over one dataset are two readers.
current_reader: ContextVar[object] = ContextVar("current_reader", default=None)


@runtime_checkable
class CacheFilling(Protocol):
    """A dataset that fills a cache in the background."""

    def flush_cache(self) -> None:
        """Wait until all samples that were read are in the cache, for other processes too."""

    def close_cache(self) -> None:
        """Flush, and close this process's part of the cache and the store."""


@runtime_checkable
class RowDataset(Protocol):
    """A map-style dataset that can be read ahead and be filled row by row.

    Attributes:
        counters: of this process; "get.ahead" counts the samples that were prefetched before they were used.
    """

    counters: Counters

    def prefetch(self, indices: Iterable[int]) -> None:
        """Start reading these samples, in the order in which they will be used. Does not block."""

    def cancel(self, indices: Iterable[int]) -> None:
        """These prefetched samples will not be used."""

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        """An empty collated batch of `n` rows, or None if this dataset has to be read sample by sample."""

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        """Write the samples into their rows. Returns the errors; the rows of these are undefined."""

    def sample(self, batch: Any, row: int) -> Any:
        """The sample in a row, as `__getitem__` would return it."""

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        """Make row `target` equal to row `source`."""


class SampleStream(Protocol):
    """One of the streams of an epoch, in the process that reads it."""

    def take(self, n: int) -> list[int]:
        """The ids of the next `n` samples; fewer at the end, none after it.

        Their bytes are here when this returns, and stay until `fill()` or `[]` of the dataset has used them.
        A sample has one id in every epoch and process, for example shard << 32 | ordinal.

        Raises:
            StoreError: the store is down or refuses us. The stream is not used after that. Damage in a shard
                raises nothing here. The id of the damaged record is handed out, and `fill()` or `[]` raises
                for it, so that `on_error` covers it; the stream goes on with the next shard.
        """

    def state(self) -> dict[str, Any]:
        """Its position, a few kilobytes of JSON: a stream opened from it goes on with the very next sample.

        It is read after each batch, and must not change once it was returned.
        """

    def close(self) -> None:
        """Stop reading ahead, and drop what was read. Harmless if repeated."""


@runtime_checkable
class StreamDataset(Protocol):
    """A map-style dataset whose samples may not be indexed yet; until then an epoch is read as streams.

    Once `must_stream()` is False it is like any other map-style dataset. Until its samples are indexed,
    `len()` and `[index]` raise TypeError with a sentence that says so. `[id]` works for the ids that a stream
    of this process has handed out, and so do the methods of `RowDataset`.
    """

    def must_stream(self) -> bool:
        """Whether the epoch that begins has to be read as streams.

        Looks, cheaply, for record offsets that were learned since the last call, by other processes too. Once
        it is False it stays False.
        """

    def plan_streams(
        self, count: int, *, seed: int, epoch: int, shuffle: bool, rank: int, ranks: int
    ) -> list[dict[str, Any]]:
        """The first states of `count` streams of this rank, as `SampleStream.state()` would give them.

        With the streams of the other ranks, planned from the same arguments, they cover every sample exactly
        once. Streams may be empty. Called in the trainer's process, which must not use a native client.
        """

    def open_stream(self, state: dict[str, Any]) -> SampleStream:
        """The stream from `state` on. Called in the process that reads it; several may be open there."""

    def known_indexes(self) -> dict[int, bytes]:
        """Shard -> its index in bytes, of all shards that are indexed; to be sent to other ranks."""

    def learn_indexes(self, indexes: Mapping[int, bytes]) -> None:
        """Take over indexes of other ranks. They are kept where the workers of this node find them too."""


def as_streams(dataset: Any) -> StreamDataset | None:
    """The dataset as a `StreamDataset`; None if it is none, and its samples have numbers as any other's.

    Raises:
        ArgumentError: a `Subset` of a dataset whose samples are not indexed yet.
    """
    if type(dataset) is not Subset:
        return dataset if isinstance(dataset, StreamDataset) else None
    inner = _chosen_from(dataset)
    if isinstance(inner, StreamDataset):
        try:
            indexed_length(inner)
        except TypeError as error:
            raise ArgumentError(f"a Subset chooses samples by index: {error}") from error
    return None


def start_epoch(dataset: Any, epoch: int) -> None:
    """Tell a `RowDataset`, through `Subset` too, the epoch of the next samples by its `start_epoch`, if any.

    That method is not part of the protocol, since few need it. Other datasets are left alone: there the name
    may mean anything.
    """
    dataset = _chosen_from(dataset)
    if isinstance(dataset, RowDataset) and hasattr(dataset, "start_epoch"):
        dataset.start_epoch(epoch)


def finish_batch(dataset: Any, batch: Any) -> Any:
    """A batch with all rows filled, as it is handed out: the result of the dataset's `finish_batch`, if any.

    That method is not part of the protocol.
    """
    finish = getattr(_chosen_from(dataset), "finish_batch", None)
    return batch if finish is None else finish(batch)


def own_samples(dataset: Any) -> str | None:
    """The method that makes the samples in place of the rows, as text; None if the rows are the samples.

    The rows are the samples of the class that defines `new_batch`. If a class before it in the method
    resolution order defines `__getitem__` or `__getitems__`, that method makes the samples.

    So a class that defines both is fast, and one that overrides neither stays fast. A `__getitems__` of the
    object itself counts, as torch looks for it there. A method that was put into the class later counts too:
    its code stands elsewhere.
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
        """None if that works as this dataset is set up; otherwise the reason why it does not."""

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
