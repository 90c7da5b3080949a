"""What a dataset may offer beside `__getitem__`.

It may be read ahead, be written row by row into the batch, and be read as streams while its samples are not
numbered yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import Subset

from fastload.errors import ArgumentError
from fastload.stats import Counters

__all__ = [
    "Allocate",
    "CacheFilling",
    "EncodedRows",
    "Failures",
    "RowDataset",
    "SampleStream",
    "StreamDataset",
    "Todo",
    "as_encoded_rows",
    "as_filling",
    "as_rows",
    "as_streams",
    "current_reader",
    "start_epoch",
]

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
Todo = list[tuple[int, Any]]  # rows to be filled: (row of the batch, index of the sample)
Failures = list[tuple[int, Exception]]  # (row of the batch, what went wrong)

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
    """A map-style dataset that can be read ahead and be filled row by row."""

    counters: Counters

    def prefetch(self, indices: Iterable[int]) -> None:
        """Start reading these samples; they will be asked for in this order. Does not block."""

    def cancel(self, indices: Iterable[int]) -> None:
        """These prefetched samples will not be asked for."""

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        """An empty collated batch of `n` rows, or None where this dataset has to be read sample by sample."""

    def fill(self, batch: Any, todo: Todo, seed: int, epoch: int) -> Failures:
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

    def known_places(self) -> dict[int, bytes]:
        """Where the samples of each shard are, as far as known: shard -> table, to be sent to other ranks."""

    def learn_places(self, places: Mapping[int, bytes]) -> None:
        """Tables from other ranks. They are kept where the workers of this node find them too."""


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


def as_rows(dataset: Any) -> RowDataset | None:
    """The dataset as a `RowDataset`, through torch's `Subset` too; None where it is not one."""
    if type(dataset) is Subset:
        inner = as_rows(dataset.dataset)
        return None if inner is None else _SubsetRows(inner, dataset.indices)
    return dataset if isinstance(dataset, RowDataset) else None


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

    def fill(self, batch: Any, todo: Todo, seed: int, epoch: int) -> Failures:
        return self._inner.fill(batch, [(row, self._indices[index]) for row, index in todo], seed, epoch)
