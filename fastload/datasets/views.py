"""A dataset as the loader reads it: a `View`, read ahead, and written into the batch where that can be.

    StoreView        a `RowDataset`: it reads ahead and writes its rows
    PlainView        any other dataset: it has only `__getitem__`
    AnnouncedView    one of the user's with a `prefetch(indices)`
    OverriddenView   a wrapper whose subclass makes the samples itself

Views of several parts are in `fastload.datasets.composed`. `wrappers.view_of` makes the view of a dataset.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.datasets.columns import ordinary_memory
from fastload.datasets.protocols import (
    Allocate,
    EncodedRows,
    RowDataset,
    RowErrors,
    RowRequests,
    StreamDataset,
    announce,
    own_samples,
)
from fastload.errors import ArgumentError
from fastload.images.rng import mix_all, sample_seeds
from fastload.order.sampler import indexed_length

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

    def leaves(self) -> Iterator[RowDataset]:
        """The datasets that read and write the rows."""
        for part in self.parts:
            yield from part.leaves()

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        """The datasets at the bottom, each with its samples that these samples are made of."""
        for part in self.parts:
            yield from part.reached(None)

    def writes(self) -> bool:
        """Whether there are rows in it that fastload writes, with the transforms that are set now."""
        return any(part.writes() for part in self.parts)

    def made_by_kernel(self) -> bool:
        """Return whether the kernel makes all samples, and no code of the user's runs for any."""
        return bool(self.parts) and self.override is None and all(map(_made_by_kernel, self.parts))

    @abstractmethod
    def prefetch(self, indices: list[Any]) -> None:
        """See `RowDataset`."""

    @abstractmethod
    def cancel(self, indices: list[Any]) -> None:
        """See `RowDataset`."""

    @abstractmethod
    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        """For each index a function that makes its sample. Rows are filled now, all of a dataset at once.

        Raises:
            Exception: one that ends the batch, such as MemoryError.
        """

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        """Key -> indices of the samples that have it; None where only a look at the keys of all tells."""
        return None

    def key(self, index: Any) -> str | None:
        """The key of a sample; None where it has none."""
        return None

    def streams(self) -> StreamDataset | None:
        """The dataset that can be read as streams in place of this one."""
        return None

    def encoded(self) -> EncodedRows | None:
        """The dataset whose images may leave the worker encoded in place of this one's."""
        return None

    def fingerprints(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        """A number for each sample: which one it is, and the random numbers that it was made with.

        Where nothing more is known of a sample than its index, that is which one it is.

        Args:
            seeded: all that draws gets random numbers of (seed, epoch, index); else only fused transforms do.
        """
        numbers = numbers_of(indices)
        if not seeded:
            return mix_all(numbers.view(np.uint64) + ONE)
        return mix_all(numbers.view(np.uint64) ^ sample_seeds(seed, epoch, numbers))

    # --- what an index says; that of a mixture says the pass too

    def lengths(self, length: int) -> dict[str, int]:
        """Source -> its samples; {"": `length`, that of the dataset} where there are no sources."""
        return {"": length}

    def position(self, index: int, length: int) -> int:
        """The position of a sample in a dataset of `length` samples."""
        return index + length if index < 0 else index

    def replacement(self, index: int, number: int, length: int) -> int:
        """The index of another sample that may stand in the place of one, by a random number.

        Args:
            length: of the dataset.
        """
        return number % length

    def sample_name(self, index: Any) -> str:
        """A sample in error messages."""
        return f"sample {index!r}"

    # --- rows straight into the batch

    def form(self) -> Any:
        """What two parts must have in common to fill one batch; None where nothing does."""
        return None

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        """See `RowDataset`."""
        return None

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        """See `RowDataset`."""
        raise NotImplementedError

    def sample(self, batch: Any, row: int) -> Any:
        """See `RowDataset`."""
        raise NotImplementedError

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        """See `RowDataset`."""
        raise NotImplementedError

    def finish_batch(self, batch: Any) -> Any:
        """A batch with all rows filled, as it is handed out."""
        return batch


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
        return [partial(operator.getitem, self.dataset, index) for index in indices]


class AnnouncedView(PlainView):
    """Samples of a dataset of the user's that offers `prefetch(indices)`."""

    reads_ahead = True
    uses_all = False

    def prefetch(self, indices: list[Any]) -> None:
        self.dataset.prefetch(indices)


class StoreView(PlainView):
    """The rows of a `RowDataset`."""

    reads_ahead = True

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.override = own_samples(dataset)
        self.uses_all = self.override is None

    def leaves(self) -> Iterator[RowDataset]:
        yield self.dataset

    def made_by_kernel(self) -> bool:
        return self.override is None and bool(getattr(self.dataset, "made_by_kernel", False))

    def writes(self) -> bool:
        return self.override is None and self.new_batch(1, ordinary_memory) is not None

    def prefetch(self, indices: list[Any]) -> None:
        announce(self.dataset, indices)

    def cancel(self, indices: list[Any]) -> None:
        self.dataset.cancel(indices)

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        batch = None if self.override is not None else self.new_batch(len(indices), ordinary_memory)
        if batch is None:
            return super().prepare(indices, seed, epoch)
        failed = dict(self.fill(batch, list(enumerate(indices)), seed, epoch))
        # Now, as the dataset may know this batch only until it makes the next one.
        return [
            partial(reraise, failed[row]) if row in failed else partial(_as_it_is, self.sample(batch, row))
            for row in range(len(indices))
        ]

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        kind = type(self.dataset)
        own_key = not getattr(getattr(kind, "key", None), "__module__", "").startswith("fastload.")
        return None if own_key or not hasattr(kind, "find") else self.dataset.find(keys)

    def key(self, index: Any) -> str | None:
        return str(self.dataset.key(index)) if hasattr(self.dataset, "key") else None

    def fingerprints(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        dataset = self.dataset
        if self.override is not None or not hasattr(dataset, "identities"):
            return super().fingerprints(indices, seed, epoch, seeded=seeded)
        records = dataset.records(indices)
        numbers = dataset.identities(records)
        numbers = numbers ^ np.uint64(dataset.cut)
        if seeded or dataset.draws:
            numbers = numbers ^ sample_seeds(seed, epoch, records)
        return mix_all(numbers + ONE)

    def encoded(self) -> EncodedRows | None:
        return self.dataset if isinstance(self.dataset, EncodedRows) else None

    def form(self) -> Any:
        kind = type(self.dataset)
        return tuple(getattr(kind, name, None) for name in ("sample", "copy_row", "finish_batch"))

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        return self.dataset.new_batch(n, allocate)

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        return self.dataset.fill(batch, todo, seed, epoch)  # type: ignore[no-any-return]

    def sample(self, batch: Any, row: int) -> Any:
        return self.dataset.sample(batch, row)

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        self.dataset.copy_row(batch, target, source)

    def finish_batch(self, batch: Any) -> Any:
        """The result of the dataset's `finish_batch`, if any. That method is not part of the protocol."""
        finish = getattr(self.dataset, "finish_batch", None)
        return batch if finish is None else finish(batch)


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


def check_indexed(views: Sequence[View], kind: str) -> None:
    """Raise `ArgumentError` if one has no samples by index yet; its `len()` may be a hint."""
    for view in views:
        dataset = view.streams()
        if dataset is not None:
            try:
                indexed_length(dataset)
            except TypeError as error:
                raise ArgumentError(f"{kind} chooses samples by index: {error}") from error


def numbers_of(indices: Sequence[Any]) -> NDArray[np.int64]:
    """Indices as numbers; of what is no number, such as a text, a digest."""
    try:
        return np.fromiter(map(operator.index, indices), np.int64, len(indices))
    except (TypeError, OverflowError):
        digests = [xxhash.xxh3_64_intdigest(repr(index).encode("utf-8", "replace")) for index in indices]
        return np.array(digests, np.uint64).view(np.int64)


def reraise(error: Exception) -> NoReturn:
    """Raise an error that was found before."""
    raise error


def _made_by_kernel(view: View) -> bool:
    return view.made_by_kernel()


def _as_it_is(sample: Any) -> Any:
    return sample
