"""A dataset as the loader reads it: a `View`, read ahead, and written into the batch where that can be.

    StoreView        one over a store, in `fastload.datasets.store_view`: it reads ahead and writes rows
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
from typing import Any, NoReturn, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.datasets.protocols import (
    Allocate,
    EncodedRows,
    RowErrors,
    RowRequests,
    StreamDataset,
)
from fastload.errors import ArgumentError
from fastload.images.rng import mix_all, sample_seeds
from fastload.metrics.counters import Counters
from fastload.order.sampler import indexed_length
from fastload.store.budget import RequestBudget

ONE = np.uint64(1)  # so that sample 0 is not mixed into 0

Reach = NDArray[np.int64] | None  # indices of samples; None: it may be any of them
MadeSample = Callable[[], Any]  # makes one sample, or raises its error


class Leaf(Protocol):
    """A dataset that reads and writes rows.

    Attributes:
        counters: of this process; "get.ahead" counts the samples that were prefetched before they were used.
    """

    counters: Counters


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

    def leaves(self) -> Iterator[Leaf]:
        """The datasets that read and write the rows."""
        for part in self.parts:
            yield from part.leaves()

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        """The datasets at the bottom, each with its samples that these samples are made of."""
        for part in self.parts:
            yield from part.reached(None)

    def made_by_kernel(self) -> bool:
        """Whether only fastload's own code makes the samples, and none of the user."""
        return bool(self.parts) and all(part.made_by_kernel() for part in self.parts)

    def writes(self) -> bool:
        """Whether there are rows in it that fastload writes, with the transforms that are set now."""
        return any(part.writes() for part in self.parts)

    def start_epoch(self, epoch: int) -> None:
        """From now on, samples are of this epoch: for transforms that go by it."""
        for part in self.parts:
            part.start_epoch(epoch)

    @abstractmethod
    def prefetch(self, indices: list[Any]) -> None:
        """Start reading these samples, in the order in which they will be used. Does not block."""

    @abstractmethod
    def cancel(self, indices: list[Any]) -> None:
        """These prefetched samples will not be used."""

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

    def listed(self) -> tuple[str, str] | None:
        """Digests of (keys, versions) of the objects that were listed; None: there are none."""
        return None

    def changes_since(self, keys: str, versions: str) -> str:
        """What was added, removed and changed since the listing with these digests, in words; "" if nothing
        was, or if that listing is not known any more."""
        return ""

    def budget(self) -> RequestBudget | None:
        """What was asked of its store, by all processes of this trainer; None: it has none, or several."""
        return None

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
        """An empty collated batch of `n` rows, or None if the dataset has to be read sample by sample.

        Args:
            allocate: memory for its tensors. `columns.ordinary_memory` says that each row will be taken out
                by `sample`, so that values of several lengths need no column.
        """
        return None

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        """Write the samples into their rows. Returns the errors; the rows of these are undefined."""
        raise NotImplementedError

    def sample(self, batch: Any, row: int) -> Any:
        """The sample in a row, as `__getitem__` would return it."""
        raise NotImplementedError

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        """Make row `target` equal to row `source`."""
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
