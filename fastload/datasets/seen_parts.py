"""The rows of datasets that are made of several: `ConcatDataset` and `StackDataset`. See `wrappers`."""

from __future__ import annotations

import bisect
import contextlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.datasets.columns import ordinary_memory
from fastload.datasets.protocols import Allocate, RowErrors, RowRequests, StreamDataset
from fastload.datasets.seeds import SampleSeeds, digest
from fastload.datasets.seen_rows import MadeSample, Reach, Rows, located, reraise
from fastload.images.rng import mix_all

__all__ = ["ConcatRows", "StackRows", "seeds_of"]


class ConcatRows(Rows):
    """Rows of several parts, one after the other. They fill one batch if all make the same kind of batch.

    Args:
        parts: in their order.
        ends: of each part, the index of the sample after its last one; as `cumulative_sizes` of torch.

    A subclass may deal indices to the parts in another way: it overrides `locate`.
    """

    def __init__(self, parts: Sequence[Rows], ends: Sequence[int]) -> None:
        self._take_over(parts)
        self.bulk = False  # torch's ConcatDataset asks its parts for one sample at a time
        self._ends = ends

    def locate(self, index: Any) -> tuple[int, Any]:
        """(number of the part, index of the sample there).

        Raises:
            IndexError, ValueError: there is none; of the type that torch's ConcatDataset raises.
        """
        index = operator.index(index)
        total = self._ends[-1]
        if index < -total:
            raise ValueError(f"index {index} is out of range for {total} samples of a ConcatDataset")
        if index >= total:
            raise IndexError(f"index {index} is out of range for {total} samples of a ConcatDataset")
        index %= total
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        for start, stop, part in zip([0, *self._ends], self._ends, self.inner, strict=False):
            chosen = None if indices is None else indices[(start <= indices) & (indices < stop)] - start
            yield from part.reached(chosen)

    def streams(self) -> StreamDataset | None:
        """None. Raises `ArgumentError` if the samples of a part are not indexed yet."""
        self._check_indexed("a ConcatDataset")
        return None

    def prefetch(self, indices: list[Any]) -> None:
        for part, requests in self._dealt(list(enumerate(map(self.locate, indices)))):
            self.inner[part].prefetch([index for _, index in requests])

    def cancel(self, indices: list[Any]) -> None:
        for part, requests in self._dealt(list(enumerate(map(self.locate, indices)))):
            self.inner[part].cancel([index for _, index in requests])

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        errors, found = located(list(enumerate(indices)), self.locate)
        made: dict[int, MadeSample] = {row: partial(reraise, error) for row, error in errors}
        for part, requests in self._dealt(found):
            with seeds_of(part):
                inner = self.inner[part].prepare([index for _, index in requests], digest(seed, part), epoch)
            made |= {row: one for (row, _), one in zip(requests, inner, strict=True)}
        return [made[row] for row in range(len(indices))]

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        found: dict[str, list[int]] = {}
        for start, part in zip([0, *self._ends], self.inner, strict=False):
            inside = part.find(keys)
            if inside is None:
                return None
            for key, ats in inside.items():
                found.setdefault(key, []).extend(start + at for at in ats)
        return found

    def key(self, index: Any) -> str | None:
        part, index = self.locate(index)
        return self.inner[part].key(index)

    def witnesses(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        found = np.empty(len(indices), np.uint64)
        for part, requests in self._dealt(list(enumerate(map(self.locate, indices)))):
            rows, inner = zip(*requests, strict=True)
            own = self.inner[part].witnesses(list(inner), digest(seed, part), epoch, seeded=seeded)
            found[list(rows)] = mix_all(own + np.uint64(part))  # two parts may both have an index 3
        return found

    def form(self) -> Any:
        forms = [part.form() for part in self.inner]
        return forms[0] if all(form == forms[0] for form in forms) else None

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        if self.own is not None or self.form() is None:
            return None
        kinds = [_describe(part.new_batch(1, ordinary_memory)) for part in self.inner]
        if kinds[0] is None or any(kind != kinds[0] for kind in kinds):
            return None
        return self.inner[0].new_batch(n, allocate)

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        errors, found = located(todo, self.locate)
        for part, requests in self._dealt(found):
            with seeds_of(part):
                errors += self.inner[part].fill(batch, requests, digest(seed, part), epoch)
        return errors

    def sample(self, batch: Any, row: int) -> Any:
        return self.inner[0].sample(batch, row)

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        self.inner[0].copy_row(batch, target, source)

    def finish_batch(self, batch: Any) -> Any:
        return self.inner[0].finish_batch(batch)

    @staticmethod
    def _dealt(found: list[tuple[int, tuple[int, Any]]]) -> Iterable[tuple[int, RowRequests]]:
        """(part, its requests), the part that is asked first first."""
        dealt: dict[int, RowRequests] = {}
        for row, (part, index) in found:
            dealt.setdefault(part, []).append((row, index))
        return dealt.items()


class StackRows(Rows):
    """Samples that are made of one sample of each part; a sample fails if one of these does.

    Args:
        parts: a list, or a dict by name.
    """

    def __init__(self, parts: Sequence[Rows] | Mapping[str, Rows]) -> None:
        self._names = list(parts) if isinstance(parts, Mapping) else None
        self._take_over(list(parts.values() if isinstance(parts, Mapping) else parts))

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        for part in self.inner:
            yield from part.reached(indices)

    def streams(self) -> StreamDataset | None:
        """None. Raises `ArgumentError` if the samples of a part are not indexed yet."""
        self._check_indexed("a StackDataset")
        return None

    def prefetch(self, indices: list[Any]) -> None:
        for part in self.inner:
            part.prefetch(indices)

    def cancel(self, indices: list[Any]) -> None:
        for part in self.inner:
            part.cancel(indices)

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        made = []
        for number, part in enumerate(self.inner):
            with seeds_of(number):
                made.append(part.prepare(indices, digest(seed, number), epoch))
        return [partial(self._join_made, several) for several in zip(*made, strict=True)]

    def _join_made(self, several: Sequence[MadeSample]) -> Any:
        return self._joined([one() for one in several])

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        return self.inner[0].find(keys) or None  # a sample has the key of the first part that has keys

    def key(self, index: Any) -> str | None:
        """Of the first part that has keys."""
        return next((key for part in self.inner if (key := part.key(index)) is not None), None)

    def witnesses(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        found = np.zeros(len(indices), np.uint64)
        for number, part in enumerate(self.inner):
            found += part.witnesses(indices, digest(seed, number), epoch, seeded=seeded)
            mix_all(found)
        return found

    def form(self) -> Any:
        forms = tuple(part.form() for part in self.inner)
        return None if None in forms else (self._names and tuple(self._names), forms)

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        if self.own is not None or self.form() is None:
            return None
        batches = [part.new_batch(n, allocate) for part in self.inner]
        if any(batch is None for batch in batches):
            return None
        leaves = [id(leaf) for leaf in self.leaves()]
        if len(set(leaves)) < len(leaves) and any(_describe(batch) is None for batch in batches):
            return None  # one dataset twice, and it may keep what belongs to the batch that it fills
        return batches if self._names is None else dict(zip(self._names, batches, strict=True))

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        errors: dict[int, Exception] = {}
        for number, (part, own) in enumerate(self._with(batch)):
            with seeds_of(number):
                for row, error in part.fill(own, todo, digest(seed, number), epoch):
                    errors.setdefault(row, error)
        return sorted(errors.items(), key=operator.itemgetter(0))

    def sample(self, batch: Any, row: int) -> Any:
        return self._joined([part.sample(own, row) for part, own in self._with(batch)])

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        for part, own in self._with(batch):
            part.copy_row(own, target, source)

    def finish_batch(self, batch: Any) -> Any:
        made = [part.finish_batch(own) for part, own in self._with(batch)]
        return made if self._names is None else dict(zip(self._names, made, strict=True))

    def _with(self, batch: Any) -> Iterator[tuple[Rows, Any]]:
        """Each part with its own batch."""
        return zip(self.inner, batch if self._names is None else batch.values(), strict=True)

    def _joined(self, parts: list[Any]) -> Any:
        return tuple(parts) if self._names is None else dict(zip(self._names, parts, strict=True))


@contextlib.contextmanager
def seeds_of(part: int) -> Iterator[None]:
    """Functions of the user's that run beside rows get random numbers of this part too."""
    seeds = SampleSeeds.current()
    with contextlib.nullcontext() if seeds is None else seeds.within(part):
        yield


def _describe(batch: Any) -> Any:
    """The structure, shapes and dtypes of a batch; None for one that has more to it than that."""
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.dtype
    if type(batch) is dict and batch:
        parts = {name: _describe(part) for name, part in batch.items()}
        return None if None in parts.values() else tuple(parts.items())
    if type(batch) in (list, tuple) and batch:
        if all(item is None for item in batch):
            return "values"
        items = [_describe(item) for item in batch]
        return None if None in items else (type(batch), *items)
    return None
