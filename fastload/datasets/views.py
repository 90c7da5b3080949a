"""A dataset as the loader reads it: a `View`, read ahead, and written into the batch where that can be.

    StoreView        one over a store, in `fastload.datasets.store_view`: it reads ahead and writes rows
    PlainView        any other dataset: it has only `__getitem__`
    AnnouncedView    one of the user's with a `prefetch(indices)`
    OverriddenView   a wrapper whose subclass makes the samples itself

Views of several parts are in `fastload.datasets.composed`. `wrappers.view_of` makes the view of a dataset.

What a dataset may offer beside `__getitem__` is a protocol here: its samples may be read as streams while
they are not indexed yet (`StreamDataset`), and fill a cache (`CacheFilling`).
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from fastload.errors import ArgumentError
from fastload.images.rng import SampleSeeds, mix_all, sample_seeds
from fastload.order.sampler import indexed_length
from fastload.store.budget import RequestBudget
from fastload.store.failures import redacted

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
RowRequests = list[tuple[int, Any]]  # rows to be filled: (row of the batch, index of the sample)
RowErrors = list[tuple[int, Exception]]  # (row of the batch, what went wrong)

# The reader for which `prefetch` reads ahead, any object: two iterations over one dataset are two readers.
current_reader: ContextVar[object] = ContextVar("current_reader", default=None)

# Set while rows are filled by another thread than the one that wants them: whether it wants them no more.
stopping: ContextVar[threading.Event | None] = ContextVar("stopping", default=None)

FLUSH_SECONDS = 60.0  # to wait for the writer of a cache

Prefetches = list[tuple[Any, list[Any]]]  # (dataset, indices that it was told to prefetch)

_prefetches: ContextVar[Prefetches | None] = ContextVar("prefetches", default=None)


@contextlib.contextmanager
def noted_prefetches(notes: Prefetches) -> Iterator[None]:
    """Add each `prefetch` of a `StoreDataset` inside to `notes`, also if the user's code calls it."""
    before = _prefetches.set(notes)
    try:
        yield
    finally:
        _prefetches.reset(before)


def note_prefetch(dataset: Any, indices: list[Any]) -> None:
    """Note what the `prefetch` of a dataset was told: whoever reads ahead may have to cancel these."""
    notes = _prefetches.get()
    if notes is not None:
        notes.append((dataset, indices))


@runtime_checkable
class CacheFilling(Protocol):
    """A dataset that fills a cache in the background."""

    def _flush_cache(self, timeout: float = FLUSH_SECONDS) -> None:
        """Wait until all samples that were read are in the cache, for other processes too.

        Args:
            timeout: in seconds. An index that is being rebuilt is not waited for.
        """

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
                raises nothing here. The id of the damaged record is delivered, and `fill()` or `[]` raises
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
    of this process has delivered, and so do the methods of its view.
    """

    def must_stream(self) -> bool:
        """Return whether the epoch that begins has to be read as streams.

        Looks, cheaply, for record offsets that were learned since the last call, by other processes too. Once
        it is False it stays False.
        """

    def plan_streams(
        self, count: int, *, seed: int, epoch: int, shuffle: bool, rank: int, ranks: int
    ) -> list[dict[str, Any]]:
        """Return the first states of `count` streams of this rank, as `SampleStream.state()` would give them.

        With the streams of the other ranks, planned from the same arguments, they cover every sample exactly
        once. Streams may be empty. Called in the trainer's process, which must not use a native client.
        """

    def open_stream(self, state: dict[str, Any]) -> SampleStream:
        """Return the stream from `state` on, in the process that reads it; several may be open there."""

    def known_indexes(self) -> dict[int, bytes]:
        """Return shard -> its index in bytes, of all shards that are indexed; to be sent to other ranks."""

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
    """Return whether a function stands in the body of a class."""
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


ONE = np.uint64(1)  # so that sample 0 is not mixed into 0

Reach = NDArray[np.int64] | None  # indices of samples; None: it may be any of them
MadeSample = Callable[[], Any]  # makes one sample, or raises its error


class View(ABC):
    """A dataset as the loader reads it.

    Attributes:
        parts: the views that it is made of.
        reads_ahead: something in it can be read ahead.
        override: the method of a subclass that makes samples in place of the rows, as text, or None.
        uses_all: its samples ask for all that was read ahead for them.
        bulk: torch's loader would call the `__getitems__` of the user's that is in it.
    """

    parts: Sequence[View] = ()
    _kind = ""  # as "a Subset", in errors
    reads_ahead = False
    override: str | None = None
    uses_all = True
    bulk = False

    def _take_over(self, parts: Sequence[View]) -> None:
        self.parts = parts
        self.reads_ahead = any(part.reads_ahead for part in parts)
        self.override = next((part.override for part in parts if part.override is not None), None)
        self.uses_all = all(part.uses_all for part in parts)
        self.bulk = any(part.bulk for part in parts)

    def ask_alone(self) -> None:
        """Call the `__getitem__` of datasets that have `__getitems__` too, as torch's loader does here."""
        self.bulk = False
        for part in self.parts:
            part.ask_alone()

    def leaves(self) -> Iterator[Any]:
        """Return the datasets over a store, which read and write the rows."""
        for part in self.parts:
            yield from part.leaves()

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        """Return the datasets at the bottom, each with its samples that these samples are made of."""
        for part in self.parts:
            yield from part.reached(None)

    def made_by_kernel(self) -> bool:
        """Return whether only fastload's own code makes the samples, and none of the user."""
        return bool(self.parts) and all(part.made_by_kernel() for part in self.parts)

    def writes(self) -> bool:
        """Return whether there are rows in it that fastload writes, with the transforms that are set now."""
        return any(part.writes() for part in self.parts)

    @abstractmethod
    def prefetch(self, indices: list[Any]) -> None:
        """Start reading these samples, in the order in which they will be used. Does not block."""

    @abstractmethod
    def cancel(self, indices: list[Any]) -> None:
        """Drop these prefetched samples: they will not be used."""

    @abstractmethod
    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        """Return for each index a function that makes its sample. Rows are filled now, all of a dataset at
        once.

        Raises:
            Exception: one that ends the batch, such as MemoryError.
        """

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        """Return key -> indices of the samples that have it; None: only a look at all keys tells."""
        return None

    def key(self, index: Any) -> str | None:
        """Return the key of a sample; None where it has none."""
        return None

    def streams(self) -> StreamDataset | None:
        """Return the dataset that can be read as streams in place of this one; None: there is none.

        Raises:
            ArgumentError: the samples of a part are not indexed yet; its `len()` may be a hint.
        """
        for part in self.parts:
            dataset = part.streams()
            try:
                if dataset is not None:
                    indexed_length(dataset)
            except TypeError as error:
                raise ArgumentError(f"{self._kind} chooses samples by index: {error}") from error
        return None

    def fingerprints(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        """Return a number for each sample: which one it is, and the random numbers that it was made with.

        Where nothing more is known of a sample than its index, that is which one it is.

        Args:
            seeded: all that draws gets random numbers of (seed, epoch, index); else only fused transforms do.
        """
        numbers = numbers_of(indices)
        if not seeded:
            return mix_all(numbers.view(np.uint64) + ONE)
        return mix_all(numbers.view(np.uint64) ^ sample_seeds(seed, epoch, numbers))

    def listed(self) -> tuple[str, str] | None:
        """Return digests of (keys, versions) of the objects that were listed; None: there are none."""
        return None

    def changes_since(self, keys: str, versions: str) -> str:
        """Return what was added, removed and changed since the listing with these digests, in words; "" if
        nothing
        was, or if that listing is not known any more."""
        return ""

    def budget(self) -> RequestBudget | None:
        """Return what was asked of its store, by all processes of this trainer; None: it has none, or
        several.
        """
        return None

    # --- what an index says; that of a mixture says the pass too

    def lengths(self, length: int) -> dict[str, int]:
        """Return source -> its samples; {"": `length`, that of the dataset} where there are no sources."""
        return {"": length}

    def position(self, index: int, length: int) -> int:
        """Return the position of a sample in a dataset of `length` samples."""
        return index + length if index < 0 else index

    def replacement(self, index: int, number: int, length: int) -> int:
        """Return the index of another sample that may stand in the place of one, by a random number.

        Args:
            length: of the dataset.
        """
        return number % length

    def sample_name(self, index: Any) -> str:
        """Return a sample in error messages."""
        return f"sample {index!r}"

    # --- rows straight into the batch

    def form(self) -> Any:
        """Return what two parts must have in common to fill one batch; None where nothing does."""
        return None

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        """Return an empty collated batch of `n` rows, or None if the dataset has to be read sample by sample.

        Args:
            allocate: memory for its tensors. `ordinary_memory` says that each row will be taken out
                by `sample`, so that values of several lengths need no column.
        """
        return None

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        """Write the samples into their rows. Returns the errors; the rows of these are undefined."""
        raise NotImplementedError

    def sample(self, batch: Any, row: int) -> Any:
        """Return the sample in a row, as `__getitem__` would return it."""
        raise NotImplementedError

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        """Make row `target` equal to row `source`."""
        raise NotImplementedError

    def finish_batch(self, batch: Any) -> Any:
        """Return a batch with all rows filled, as it is delivered."""
        return batch

    # --- images that leave the worker encoded, to be decoded on the device

    def encoded(self) -> View | None:
        """Return the view whose images may do so in place of this one's; None: there is none."""
        return None

    def why_not_encoded(self, decode: str = "") -> str | None:
        """Return None if that works as this dataset is set up; otherwise the reason why it does not.

        Args:
            decode: the loader's decoder; "": one that was already found to take what the cache keeps.
        """
        raise NotImplementedError

    def keep_raw(self) -> None:
        """Let a cache in mode "auto" keep files, which the device decodes. What was read ahead is dropped."""
        raise NotImplementedError

    def new_encoded_batch(self, n: int, allocate: Allocate) -> Any:
        """As `new_batch`, with an `EncodedBatch` in the place of the images."""
        raise NotImplementedError


class PlainView(View):
    """Samples of a dataset that has only `__getitem__`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.bulk = bool(getattr(dataset, "__getitems__", None))

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        yield self.dataset, indices

    def streams(self) -> StreamDataset | None:
        return self.dataset if isinstance(self.dataset, StreamDataset) else None

    def prefetch(self, indices: list[Any]) -> None:
        pass

    def cancel(self, indices: list[Any]) -> None:
        pass

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        """As `View.prepare`. A `__getitems__` is called now; with a seed, for one sample at a time."""
        if not self.bulk:
            return [partial(operator.getitem, self.dataset, index) for index in indices]
        many = self.dataset.__getitems__
        if SampleSeeds.current() is not None:
            return [partial(_first_of, many, index) for index in indices]
        samples = list(many(indices))
        if len(samples) != len(indices):
            raise ValueError(
                f"__getitems__ of {type(self.dataset).__name__} returned {len(samples)} samples for "
                f"{len(indices)} indices: return one sample for each"
            )
        return [partial(operator.getitem, samples, row) for row in range(len(indices))]


class AnnouncedView(PlainView):
    """Samples of a dataset of the user's that offers `prefetch(indices)`."""

    reads_ahead = True
    uses_all = False

    def prefetch(self, indices: list[Any]) -> None:
        self.dataset.prefetch(indices)


class OverriddenView(PlainView):
    """Samples of a wrapper's subclass that makes them itself. What the wrapper holds is read ahead.

    Args:
        view: what the class that it derives from would read.
        override: the method that makes the samples.
    """

    def __init__(self, dataset: Any, view: View, override: str) -> None:
        super().__init__(dataset)
        own_bulk = self.bulk
        self._take_over((view,))
        self._view = view
        self.override = override
        self.uses_all = False
        self.bulk = view.bulk or own_bulk

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        return View.reached(self, indices)  # the method may read another sample

    def made_by_kernel(self) -> bool:
        return False

    def writes(self) -> bool:
        return False

    def prefetch(self, indices: list[Any]) -> None:
        self._view.prefetch(indices)

    def cancel(self, indices: list[Any]) -> None:
        self._view.cancel(indices)

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        return {}  # no sample has a key: the method may read another sample

    def streams(self) -> StreamDataset | None:
        return self._view.streams()


def numbers_of(indices: Sequence[Any]) -> NDArray[np.int64]:
    """Return indices as numbers; of what is no number, such as a text, a digest."""
    try:
        return np.fromiter(map(operator.index, indices), np.int64, len(indices))
    except (TypeError, OverflowError):
        digests = [xxhash.xxh3_64_intdigest(repr(index).encode("utf-8", "replace")) for index in indices]
        return np.array(digests, np.uint64).view(np.int64)


def _first_of(many: Callable[[list[Any]], Sequence[Any]], index: Any) -> Any:
    return many([index])[0]


def reraise(error: Exception) -> NoReturn:
    """Raise an error that was found before."""
    raise error
