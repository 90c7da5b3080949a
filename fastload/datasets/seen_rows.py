"""A dataset as the loader reads it: `Rows`, of one dataset or of one that holds one other. See `wrappers`."""

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
from fastload.distributed.sampler import indexed_length
from fastload.errors import ArgumentError
from fastload.images.rng import mix_all, sample_seeds

__all__ = [
    "AnnouncedRows",
    "LeafRows",
    "MadeSample",
    "MapRows",
    "OwnRows",
    "PlainRows",
    "Reach",
    "Rows",
    "SubsetRows",
    "located",
    "numbers_of",
    "reraise",
]

ONE = np.uint64(1)  # so that sample 0 is not mixed into 0

Reach = NDArray[np.int64] | None  # indices of samples; None: it may be any of them
MadeSample = Callable[[], Any]  # makes one sample, or raises its error


class Rows(ABC):
    """A dataset as the loader reads it: read ahead, and written into the batch where that can be.

    Attributes:
        inner: the parts that it is made of.
        ahead: something in it can be read ahead.
        own: the method of a subclass that makes samples in place of the rows, as text; None if there is none.
        certain: its samples ask for all that was read ahead for them.
        bulk: torch's loader would call the `__getitems__` of the user's that is in it.
    """

    inner: Sequence[Rows] = ()
    ahead = False
    own: str | None = None
    certain = True
    bulk = False

    def _take_over(self, inner: Sequence[Rows]) -> None:
        self.inner = inner
        self.ahead = any(one.ahead for one in inner)
        self.own = next((one.own for one in inner if one.own is not None), None)
        self.certain = all(one.certain for one in inner)
        self.bulk = any(one.bulk for one in inner)

    def _check_indexed(self, kind: str) -> None:
        """Raise `ArgumentError` if a part has no samples by index yet; its `len()` may be a hint."""
        for one in self.inner:
            inner = one.streams()
            if inner is not None:
                try:
                    indexed_length(inner)
                except TypeError as error:
                    raise ArgumentError(f"{kind} chooses samples by index: {error}") from error

    def leaves(self) -> Iterator[RowDataset]:
        """The datasets that read and write the rows."""
        for one in self.inner:
            yield from one.leaves()

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        """The datasets at the bottom, each with its samples that these samples are made of."""
        for one in self.inner:
            yield from one.reached(None)

    def writes(self) -> bool:
        """Whether there are rows in it that fastload writes, with the transforms that are set now."""
        return any(one.writes() for one in self.inner)

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

    def witnesses(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        """A number for each sample: which one it is, and the random numbers that it was made with.

        Where nothing more is known of a sample than its index, that is which one it is.

        Args:
            seeded: all that draws gets random numbers of (seed, epoch, index); else only fused transforms do.
        """
        numbers = numbers_of(indices)
        if not seeded:
            return mix_all(numbers.view(np.uint64) + ONE)
        return mix_all(numbers.view(np.uint64) ^ sample_seeds(seed, epoch, numbers))

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


class PlainRows(Rows):
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


class AnnouncedRows(PlainRows):
    """Samples of a dataset of the user's that offers `prefetch(indices)`."""

    ahead = True
    certain = False

    def prefetch(self, indices: list[Any]) -> None:
        self.dataset.prefetch(indices)


class LeafRows(Rows):
    """The rows of a `RowDataset`."""

    ahead = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.own = own_samples(dataset)
        self.certain = self.own is None
        self.bulk = bool(getattr(dataset, "__getitems__", None))

    def leaves(self) -> Iterator[RowDataset]:
        yield self.dataset

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        yield self.dataset, indices

    def writes(self) -> bool:
        return self.own is None and self.new_batch(1, ordinary_memory) is not None

    def prefetch(self, indices: list[Any]) -> None:
        announce(self.dataset, indices)

    def cancel(self, indices: list[Any]) -> None:
        self.dataset.cancel(indices)

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        batch = None if self.own is not None else self.new_batch(len(indices), ordinary_memory)
        if batch is None:
            return [partial(operator.getitem, self.dataset, index) for index in indices]
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

    def witnesses(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        dataset = self.dataset
        if self.own is not None or not hasattr(dataset, "identities"):
            return super().witnesses(indices, seed, epoch, seeded=seeded)
        records = dataset.records(indices)
        numbers = dataset.identities(records)
        numbers = numbers ^ np.uint64(dataset.cut)
        if seeded or dataset.draws:
            numbers = numbers ^ sample_seeds(seed, epoch, records)
        return mix_all(numbers + ONE)

    def streams(self) -> StreamDataset | None:
        return self.dataset if isinstance(self.dataset, StreamDataset) else None

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


class _Through(Rows):
    """The rows of a dataset that holds one other."""

    def __init__(self, rows: Rows) -> None:
        self._take_over((rows,))
        self._rows = rows

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        return self._rows.reached(indices)

    def prefetch(self, indices: list[Any]) -> None:
        self._rows.prefetch(indices)

    def cancel(self, indices: list[Any]) -> None:
        self._rows.cancel(indices)

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        return self._rows.find(keys)

    def key(self, index: Any) -> str | None:
        return self._rows.key(index)

    def witnesses(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        return self._rows.witnesses(indices, seed, epoch, seeded=seeded)

    def streams(self) -> StreamDataset | None:
        return self._rows.streams()


class OwnRows(_Through):
    """Samples of a wrapper's subclass that makes them itself.

    Args:
        rows: what the class that it derives from would read.
        own: the method that makes the samples.
    """

    def __init__(self, dataset: Any, rows: Rows, own: str) -> None:
        super().__init__(rows)
        self._dataset = dataset
        self.own = own
        self.certain = False
        self.bulk = rows.bulk or bool(getattr(dataset, "__getitems__", None))

    def writes(self) -> bool:
        return False

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        return self._rows.reached(None)  # the method may read another sample

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        return [partial(operator.getitem, self._dataset, index) for index in indices]

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        return {}  # see `key`

    def key(self, index: Any) -> str | None:
        return None  # the method may read another sample

    def witnesses(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        return Rows.witnesses(self, indices, seed, epoch, seeded=seeded)


class MapRows(_Through):
    """`function` of each sample. The rows inside are filled first, a batch at a time."""

    def __init__(self, rows: Rows, function: Callable[[Any], Any]) -> None:
        super().__init__(rows)
        self._function = function

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        return [partial(self._apply, one) for one in self._rows.prepare(indices, seed, epoch)]

    def _apply(self, made: MadeSample) -> Any:
        return self._function(made())


class SubsetRows(_Through):
    """Some samples of a dataset."""

    def __init__(self, rows: Rows, indices: Sequence[Any]) -> None:
        super().__init__(rows)
        self._indices = indices

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        chosen = np.fromiter(map(operator.index, self._indices), np.int64)
        return self._rows.reached(chosen if indices is None else chosen[indices])

    def prefetch(self, indices: list[Any]) -> None:
        self._rows.prefetch([self._indices[index] for index in indices])

    def cancel(self, indices: list[Any]) -> None:
        self._rows.cancel([self._indices[index] for index in indices])

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        errors, found = located(list(enumerate(indices)), self._indices.__getitem__)
        made = {row: partial(reraise, error) for row, error in errors}
        inner = self._rows.prepare([at for _, at in found], seed, epoch)
        made |= {row: one for (row, _), one in zip(found, inner, strict=True)}
        return [made[row] for row in range(len(indices))]

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        inside = self._rows.find(keys)
        if inside is None:
            return None
        key_of = {at: key for key, ats in inside.items() for at in ats}
        found: dict[str, list[int]] = {}
        for index, at in enumerate(map(operator.index, self._indices)):
            if at in key_of:
                found.setdefault(key_of[at], []).append(index)
        return found

    def key(self, index: Any) -> str | None:
        return self._rows.key(self._indices[index])

    def witnesses(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        inner = [self._indices[index] for index in indices]
        return self._rows.witnesses(inner, seed, epoch, seeded=seeded)

    def streams(self) -> StreamDataset | None:
        """None. Raises `ArgumentError` if the samples are not indexed yet."""
        self._check_indexed("a Subset")
        return None

    def encoded(self) -> EncodedRows | None:
        return self._rows.encoded()

    def form(self) -> Any:
        return self._rows.form()

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        return self._rows.new_batch(n, allocate)

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        errors, requests = located(todo, self._indices.__getitem__)
        return errors + self._rows.fill(batch, requests, seed, epoch)

    def sample(self, batch: Any, row: int) -> Any:
        return self._rows.sample(batch, row)

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        self._rows.copy_row(batch, target, source)

    def finish_batch(self, batch: Any) -> Any:
        return self._rows.finish_batch(batch)


def located(todo: Sequence[tuple[int, Any]], locate: Callable[[Any], Any]) -> tuple[RowErrors, list[Any]]:
    """(errors of the indices that have no sample, (row, result of `locate`) of the others)."""
    errors: RowErrors = []
    found = []
    for row, index in todo:
        try:
            found.append((row, locate(index)))
        except (IndexError, KeyError, ValueError) as error:
            errors.append((row, error))
    return errors, found


def numbers_of(indices: Sequence[Any]) -> NDArray[np.int64]:
    """Indices as numbers; of what is no number, such as a text, a digest."""
    try:
        return np.fromiter(map(operator.index, indices), np.int64, len(indices))
    except (TypeError, OverflowError):
        digests = [xxhash.xxh3_64_intdigest(repr(index).encode("utf-8", "replace")) for index in indices]
        return np.array(digests, np.uint64).view(np.int64)


def _as_it_is(sample: Any) -> Any:
    return sample


def reraise(error: Exception) -> NoReturn:
    raise error
