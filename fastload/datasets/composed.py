"""Views of datasets that are made of others: each sample is one sample of one part, or one of each part.

    MapView       a function of each sample of a dataset            fastload.map
    SubsetView    some samples of a dataset                         torch's Subset, random_split
    ConcatView    samples of several parts, one after the other     torch's ConcatDataset; Mixture
    StackView     a tuple or dict of one sample of each part        torch's StackDataset

Randomness: the samples of each part have a seed of their own. Otherwise equal positions in two parts would be
cut alike, and two views of one image would be the same view.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.datasets.sample_fields import ordinary_memory
from fastload.datasets.samples import RowBatch
from fastload.datasets.views import (
    Allocate,
    MadeSample,
    Reach,
    RowErrors,
    RowRequests,
    StreamDataset,
    View,
    reraise,
)
from fastload.images.rng import SampleSeeds, digest, mix_all

# (number of the part, its randomness: a number for each part on the way to it, index of the sample there)
Location = tuple[int, tuple[int, ...], Any]


class ChoosingView(View):
    """Each sample is one sample of one part: `locate` says which.

    Args:
        parts: views.
        kind: "a Subset", for errors.
    """

    def __init__(self, parts: Sequence[View], kind: str) -> None:
        self._take_over(parts)
        self._kind = kind

    @abstractmethod
    def locate(self, index: Any) -> Location:
        """Return where a sample is.

        Raises:
            IndexError, KeyError, ValueError: there is none; as torch's class raises.
        """

    def prefetch(self, indices: list[Any]) -> None:
        for part, _, requests in _deal(list(enumerate(indices)), self.locate):
            self.parts[part].prefetch([index for _, index in requests])

    def cancel(self, indices: list[Any]) -> None:
        for part, _, requests in _deal(list(enumerate(indices)), self.locate):
            self.parts[part].cancel([index for _, index in requests])

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        errors: RowErrors = []
        dealt = _deal(list(enumerate(indices)), self.locate, errors)
        made: dict[int, MadeSample] = {row: partial(reraise, error) for row, error in errors}
        for part, path, requests in dealt:
            with seed_of(path, seed) as own_seed:
                samples = self.parts[part].prepare([index for _, index in requests], own_seed, epoch)
            made |= {row: make for (row, _), make in zip(requests, samples, strict=True)}
        return [made[row] for row in range(len(indices))]

    def key(self, index: Any) -> str | None:
        part, _, index = self.locate(index)
        return self.parts[part].key(index)

    def fingerprints(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        numbers = np.empty(len(indices), np.uint64)
        for part, path, requests in _deal(list(enumerate(indices)), self.locate):
            rows, chosen = zip(*requests, strict=True)
            own_seed = _seed_below(path, seed)
            own = self.parts[part].fingerprints(list(chosen), own_seed, epoch, seeded=seeded)
            # Two parts may both have an index 3.
            numbers[list(rows)] = mix_all(own + np.uint64(path[-1])) if path else own
        return numbers

    def form(self) -> Any:
        forms = [part.form() for part in self.parts]
        return forms[0] if all(form == forms[0] for form in forms) else None

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        return self.parts[0].new_batch(n, allocate)

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        errors: RowErrors = []
        for part, path, requests in _deal(todo, self.locate, errors):
            with seed_of(path, seed) as own_seed:
                errors += self.parts[part].fill(batch, requests, own_seed, epoch)
        return errors

    def sample(self, batch: Any, row: int) -> Any:
        return self.parts[0].sample(batch, row)

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        self.parts[0].copy_row(batch, target, source)

    def finish_batch(self, batch: Any) -> Any:
        return self.parts[0].finish_batch(batch)


class MapView(ChoosingView):
    """`function` of each sample. The rows inside are filled first, a batch at a time."""

    def __init__(self, view: View, function: Callable[[Any], Any]) -> None:
        super().__init__((view,), "a map")
        self._view = view
        self._function = function

    def locate(self, index: Any) -> Location:
        return 0, (), index

    def streams(self) -> StreamDataset | None:
        return self._view.streams()

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        return self._view.reached(indices)

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        return self._view.find(keys)

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        return [partial(self._apply, make) for make in self._view.prepare(indices, seed, epoch)]

    def _apply(self, make: MadeSample) -> Any:
        return self._function(make())

    def made_by_kernel(self) -> bool:
        return False

    def form(self) -> Any:
        return None  # the function takes samples, not rows

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        return None


class SubsetView(ChoosingView):
    """Some samples of a dataset, with the randomness that they have there."""

    def __init__(self, view: View, indices: Sequence[Any]) -> None:
        super().__init__((view,), "a Subset")
        self._view = view
        self._indices = indices

    def locate(self, index: Any) -> Location:
        if isinstance(index, list):  # a whole batch by one index, as torch's Subset takes it
            return 0, (), [self._indices[number] for number in index]
        return 0, (), self._indices[index]

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        chosen = np.fromiter(map(operator.index, self._indices), np.int64)
        return self._view.reached(chosen if indices is None else chosen[indices])

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        inside = self._view.find(keys)
        if inside is None:
            return None
        key_of = {index: key for key, indices in inside.items() for index in indices}
        indices_of: dict[str, list[int]] = {}
        for index, inner_index in enumerate(map(operator.index, self._indices)):
            if inner_index in key_of:
                indices_of.setdefault(key_of[inner_index], []).append(index)
        return indices_of

    def encoded(self) -> View | None:
        return self._view.encoded()


class ConcatView(ChoosingView):
    """Samples of several parts, one after the other. They fill one batch if all make the same kind of batch.

    Args:
        parts: views, in their order.
        ends: of each part, the index of the sample after its last one; as `cumulative_sizes` of torch.
    """

    def __init__(self, parts: Sequence[View], ends: Sequence[int]) -> None:
        super().__init__(parts, "a ConcatDataset")
        self.ask_alone()  # as torch's ConcatDataset does
        self._starts, self._ends = [0, *ends[:-1]], ends

    def locate(self, index: Any) -> Location:
        index = operator.index(index)
        total = self._ends[-1]
        if index < -total:
            raise ValueError(f"index {index} is out of range for {total} samples of a ConcatDataset")
        if index >= total:
            raise IndexError(f"index {index} is out of range for {total} samples of a ConcatDataset")
        index %= total
        part = bisect.bisect_right(self._ends, index)
        return part, (part,), index - self._starts[part]

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        for start, stop, part in zip(self._starts, self._ends, self.parts, strict=True):
            chosen = None if indices is None else indices[(start <= indices) & (indices < stop)] - start
            yield from part.reached(chosen)

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        indices_of: dict[str, list[int]] = {}
        for start, part in zip(self._starts, self.parts, strict=True):
            inside = part.find(keys)
            if inside is None:
                return None
            for key, indices in inside.items():
                indices_of.setdefault(key, []).extend(start + index for index in indices)
        return indices_of

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        if self.override is not None or self.form() is None:
            return None
        structures = [_structure_of(part.new_batch(1, ordinary_memory)) for part in self.parts]
        if structures[0] is None or any(structure != structures[0] for structure in structures):
            return None
        return super().new_batch(n, allocate)


class StackView(View):
    """Samples that are made of one sample of each part; a sample fails if one of these does.

    Args:
        parts: views: a list, or a dict by name.
    """

    _kind = "a StackDataset"

    def __init__(self, parts: Sequence[View] | Mapping[str, View]) -> None:
        self._names = list(parts) if isinstance(parts, Mapping) else None
        self._take_over(list(parts.values() if isinstance(parts, Mapping) else parts))

    def reached(self, indices: Reach) -> Iterator[tuple[Any, Reach]]:
        for part in self.parts:
            yield from part.reached(indices)

    def prefetch(self, indices: list[Any]) -> None:
        for part in self.parts:
            part.prefetch(indices)

    def cancel(self, indices: list[Any]) -> None:
        for part in self.parts:
            part.cancel(indices)

    def prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        made = []
        for number, part in enumerate(self.parts):
            with seed_of((number,), seed) as own_seed:
                made.append(part.prepare(indices, own_seed, epoch))
        return [partial(self._join_made, several) for several in zip(*made, strict=True)]

    def _join_made(self, several: Sequence[MadeSample]) -> Any:
        return self._join([make() for make in several])

    def find(self, keys: Set[str]) -> dict[str, list[int]] | None:
        return self.parts[0].find(keys) or None  # a sample has the key of the first part that has keys

    def key(self, index: Any) -> str | None:
        """Return that of the first part that has keys."""
        return next((key for part in self.parts if (key := part.key(index)) is not None), None)

    def fingerprints(self, indices: list[Any], seed: int, epoch: int, *, seeded: bool) -> NDArray[np.uint64]:
        numbers = np.zeros(len(indices), np.uint64)
        for number, part in enumerate(self.parts):
            numbers += part.fingerprints(indices, digest(seed, number), epoch, seeded=seeded)
            mix_all(numbers)
        return numbers

    def form(self) -> Any:
        forms = tuple(part.form() for part in self.parts)
        return None if None in forms else (self._names and tuple(self._names), forms)

    def new_batch(self, n: int, allocate: Allocate) -> Any | None:
        if self.override is not None or self.form() is None:
            return None
        batches = [part.new_batch(n, allocate) for part in self.parts]
        if any(batch is None for batch in batches):
            return None
        return batches if self._names is None else dict(zip(self._names, batches, strict=True))

    def fill(self, batch: Any, todo: RowRequests, seed: int, epoch: int) -> RowErrors:
        errors: dict[int, Exception] = {}
        for number, (part, part_batch) in enumerate(self._with(batch)):
            with seed_of((number,), seed) as own_seed:
                for row, error in part.fill(part_batch, todo, own_seed, epoch):
                    errors.setdefault(row, error)
        return sorted(errors.items(), key=operator.itemgetter(0))

    def sample(self, batch: Any, row: int) -> Any:
        return self._join([part.sample(part_batch, row) for part, part_batch in self._with(batch)])

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        for part, part_batch in self._with(batch):
            part.copy_row(part_batch, target, source)

    def finish_batch(self, batch: Any) -> Any:
        made = [part.finish_batch(part_batch) for part, part_batch in self._with(batch)]
        return made if self._names is None else dict(zip(self._names, made, strict=True))

    def _with(self, batch: Any) -> Iterator[tuple[View, Any]]:
        """Return each part with its own batch."""
        return zip(self.parts, batch if self._names is None else batch.values(), strict=True)

    def _join(self, samples: list[Any]) -> Any:
        return tuple(samples) if self._names is None else dict(zip(self._names, samples, strict=True))


@contextlib.contextmanager
def seed_of(path: tuple[int, ...], seed: int) -> Iterator[int]:
    """Return the seed of the rows of a part. Inside, functions of the user's get random numbers of that part
    too.
    """
    seeds = SampleSeeds.current()
    with contextlib.ExitStack() as within:
        if seeds is not None:
            for number in path:
                within.enter_context(seeds.within(number))
        yield _seed_below(path, seed)


def _seed_below(path: tuple[int, ...], seed: int) -> int:
    for number in path:
        seed = digest(seed, number)
    return seed


def _deal(
    todo: RowRequests, locate: Callable[[Any], Location], errors: RowErrors | None = None
) -> list[tuple[int, tuple[int, ...], RowRequests]]:
    """Return (part, its path, its requests), the part that is asked first first.

    Args:
        errors: gets those of the indices that have no sample; None: they are raised.
    """
    dealt: dict[tuple[int, tuple[int, ...]], RowRequests] = {}
    for row, index in todo:
        try:
            part, path, inner_index = locate(index)
        except (IndexError, KeyError, ValueError) as error:
            if errors is None:
                raise
            errors.append((row, error))
        else:
            dealt.setdefault((part, path), []).append((row, inner_index))
    return [(part, path, requests) for (part, path), requests in dealt.items()]


def _structure_of(batch: Any) -> Any:
    """Return the structure, shapes and dtypes of a batch; None for one that has more to it than that."""
    if isinstance(batch, RowBatch):
        return _structure_of(batch.columns) if batch.is_complete else None
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.dtype
    if type(batch) is dict and batch:
        fields = {name: _structure_of(part) for name, part in batch.items()}
        return None if None in fields.values() else tuple(fields.items())
    if type(batch) in (list, tuple) and batch:
        if all(item is None for item in batch):
            return "values"
        items = [_structure_of(item) for item in batch]
        return None if None in items else (type(batch), *items)
    return None
