"""What a dataset may offer beside `__getitem__`, and how its reading ahead is noted.

Its samples may be read as streams while they are not indexed yet, and fill a cache. `fastload.datasets.views`
says how samples are read ahead and written into batches.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import torch

from fastload.errors import ArgumentError
from fastload.store.failures import redacted

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
RowRequests = list[tuple[int, Any]]  # rows to be filled: (row of the batch, index of the sample)
RowErrors = list[tuple[int, Exception]]  # (row of the batch, what went wrong)

# The reader for which `prefetch` reads ahead, any object: two iterations over one dataset are two readers.
current_reader: ContextVar[object] = ContextVar("current_reader", default=None)

Prefetches = list[tuple[Any, list[Any]]]  # (dataset, indices that it was told to prefetch)

_prefetches: ContextVar[Prefetches | None] = ContextVar("prefetches", default=None)


@contextlib.contextmanager
def noted_prefetches(notes: Prefetches) -> Iterator[None]:
    """Inside, each `prefetch` of a `StoreDataset` is added to `notes`, also if the user's code calls it."""
    before = _prefetches.set(notes)
    try:
        yield
    finally:
        _prefetches.reset(before)


def note_prefetch(dataset: Any, indices: list[Any]) -> None:
    """Called by the `prefetch` of a dataset: whoever reads ahead may have to cancel these."""
    notes = _prefetches.get()
    if notes is not None:
        notes.append((dataset, indices))


@runtime_checkable
class CacheFilling(Protocol):
    """A dataset that fills a cache in the background."""

    def _flush_cache(self) -> None:
        """Wait until all samples that were read are in the cache, for other processes too."""

    def close(self) -> None:
        """Write, and close this process's part of the cache and the store."""


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
    of this process has handed out, and so do the methods of its view.
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


def overriding_method(dataset: Any, home: type) -> str | None:
    """Return the method that makes samples in place of those of a class, as text; None: there is none.

    It is the `__getitem__` or `__getitems__` of a subclass of `home`, or of the object itself, as torch looks
    for it there; or one that was put into `home` later: its code stands elsewhere.
    """
    if getattr(dataset, "__dict__", {}).get("__getitems__"):
        return "__getitems__ of the dataset itself"
    mro = type(dataset).__mro__
    for cls in mro[: mro.index(home)]:
        for name in ("__getitem__", "__getitems__"):
            if name in vars(cls):
                return f"{cls.__name__}.{name}"
    for name in ("__getitem__", "__getitems__"):
        method = vars(home).get(name)
        if method is not None and not _written_in(method, home):
            return f"{home.__name__}.{name}"
    return None


def _written_in(method: Any, cls: type) -> bool:
    """Whether a function stands in the body of a class."""
    place = getattr(method, "__module__", None), getattr(method, "__qualname__", "").rpartition(".")[0]
    return place == (cls.__module__, cls.__qualname__) and not hasattr(method, "__wrapped__")


def check_dataset(dataset: Any) -> None:
    """Raise `ArgumentError` for a class in place of its instance, and for the place of the data."""
    if isinstance(dataset, str | os.PathLike):
        place = redacted(os.fspath(dataset))
        raise ArgumentError(f"dataset is {place!r}: make a dataset of it first, as in ImageFolder({place!r})")
    if isinstance(dataset, type) and not hasattr(type(dataset), "__getitem__"):
        raise ArgumentError(
            f"dataset is the class {dataset.__name__}: make an instance of it first, as in "
            f"{dataset.__name__}(...)"
        )


class EncodedRows(Protocol):
    """A view whose images can leave the worker encoded, to be decoded on the device."""

    def why_not_encoded(self, decode: str = "") -> str | None:
        """None if that works as this dataset is set up; otherwise the reason why it does not.

        Args:
            decode: the loader's decoder; "": one that was already found to take what the cache keeps.
        """

    def keep_raw(self) -> None:
        """Let a cache in mode "auto" keep files, which the device decodes. What was read ahead is dropped."""

    def new_encoded_batch(self, n: int, allocate: Allocate) -> Any:
        """As `View.new_batch`, with an `EncodedBatch` in the place of the images; `fill` takes both."""

    def finish_encoded_batch(self, batch: Any) -> Any:
        """The batch with all its rows filled, and `EncodedImages` in that place."""
