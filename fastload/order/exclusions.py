"""What a loader does not deliver: excluded samples, and skipped steps.

    exclude    from the next batch on that is delivered, in all epochs: another sample stands in its place
    skip       steps of one epoch are not delivered

A skipped step is kept as a range of the epoch's samples, in the order that all ranks read together. So the
same samples stay away with another number of ranks or another batch size:

    step s of a segment    samples [first + (s - its first step) * per step, ... + per step)

A segment is a part of an epoch that was read with one number of ranks and one batch size.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastload.errors import ArgumentError

Range = tuple[int, int]  # [first, end)
Samples = dict[str, list[Range]]  # source of a mixture, else "" -> positions in it


class Reading(NamedTuple):
    """How one rank reads an epoch.

    Attributes:
        epoch: the loader's count.
        sources: gives source of a mixture, else "" -> its number of samples, in the order of their indices.
        number: index -> its number in the dataset, from 0; of a mixture without the pass.
        substitutes: (index, excluded numbers) -> the samples that may stand in its place.
        substitute: (index, excluded numbers) -> the one that does, where its size matters; None: the first.
        choices: of the former, how many a worker may try where the sample is bad.
        auto_collation: an index batch is a list of indices.
        column, ranks: this rank reads the samples `column`, `column + ranks`, ... of each segment. `ranks` is
            0 where a batch counts as one sample.
        samples: of the epoch, over all ranks; None where the sampler does not say.
        segments: of the epoch.
    """

    epoch: int
    sources: Callable[[], Mapping[str, int]]
    number: Callable[[int], int]
    substitutes: Callable[[Any, Container[int]], Iterator[int]]
    substitute: Callable[[Any, Container[int]], int] | None = None
    choices: int = 0
    auto_collation: bool = True
    column: int = 0
    ranks: int = 1
    samples: int | None = None
    segments: Sequence[Segment] = ()


class Edited(NamedTuple):
    """An index batch as it is given to a worker.

    Attributes:
        index: with the substitutes.
        replaced: row -> (the substitute, the index in whose place it stands).
    """

    index: Any
    replaced: dict[int, tuple[int, Any]]


class Segment(NamedTuple):
    """A part of an epoch, until the number of ranks or the batch size changes.

    Attributes:
        step: its first step.
        sample: its first sample, over all ranks.
        per_step: samples of a step, over all ranks. 1 where batches have no fixed size: nothing that gives
            such batches can go on with another size.
    """

    step: int
    sample: int
    per_step: int

    def start(self, step: int) -> int:
        """Return the first sample of a step."""
        return self.sample + (step - self.step) * self.per_step


@dataclass(frozen=True)
class _Exclusion:
    """Samples that are left out from a step on, except in later steps (`ahead`) delivered before."""

    epoch: int
    step: int
    ahead: list[int]
    samples: Samples


@dataclass(frozen=True)
class _Skips:
    """The ranges of an epoch's samples that are skipped."""

    epoch: int
    samples: list[Range]


@dataclass(frozen=True)
class ExclusionsState:
    """Exclusions in a state."""

    excluded: list[_Exclusion] = field(default_factory=list)
    skipped: list[_Skips] = field(default_factory=list)


class Filter:
    """What is left out of an epoch, as it holds at one step. Every index batch passes through it.

    Args:
        exclusions: of the loader.
        reading: of the epoch.
        step: of the epoch.
        per_step: the step is one of other ranks: the whole epoch is read with so many samples a step.

    Attributes:
        samples: that are excluded, as ranges.
    """

    def __init__(
        self, exclusions: Exclusions, reading: Reading, step: int, per_step: int | None = None
    ) -> None:
        self._exclusions = exclusions
        self._version = exclusions.version
        self._reading = reading
        self._segments = reading.segments
        if per_step is not None:
            sample, whole = step * per_step, Segment(0, 0, per_step)
            own = next((segment for segment in reversed(self._segments) if segment.sample <= sample), whole)
            step = own.step + (sample - own.sample) // own.per_step
            self._segments = [whole]
        self.samples = exclusions.samples_at(reading.epoch, step)
        self._skipped = list(exclusions.skipped(reading.epoch))

    def __bool__(self) -> bool:
        return bool(self.samples or self._skipped)

    def __call__(self, step: int, index: Any) -> Edited | None:
        """Return the index batch of a step, a substitute for each excluded sample; None: it is skipped.

        Raises:
            ArgumentError: an index is no whole number, so that it cannot be known what it is.
        """
        if not self:
            return Edited(index, {})
        reading, (first, end) = self._reading, self._samples_of(step)
        partly = any(start < end and first < stop for start, stop in self._skipped)
        if partly and self._skips(first, end):
            return None
        if not partly and not self.excluded:
            return Edited(index, {})
        single = not reading.auto_collation and not isinstance(index, list)
        indices, replaced = [index] if single else list(index), {}
        for row, number in enumerate(map(reading.number, _whole(indices))):
            sample = first + row * reading.ranks + reading.column
            if number in self.excluded or (partly and self._skips(sample, sample + 1)):
                replaced[row] = (self._substitute(indices[row]), indices[row])
                indices[row] = replaced[row][0]
        if not replaced:
            return Edited(index, {})
        return Edited(indices[0] if single else indices, replaced)

    def _substitute(self, index: Any) -> int:
        reading = self._reading
        if reading.substitute is not None:
            return reading.substitute(index, self.excluded)
        return next(reading.substitutes(index, self.excluded))

    @functools.cached_property
    def excluded(self) -> frozenset[int]:
        """Return the excluded samples, by their numbers in the dataset."""
        numbers: set[int] = set()
        for source, first, length in _positions(self._reading.sources()):
            ranges = self.samples.get(source, [])  # a state may have any numbers
            inside = {
                position for start, end in ranges for position in range(max(0, start), min(end, length))
            }
            if inside and len(inside) == length:
                raise ArgumentError(
                    f"the state leaves out all {length:,} samples, so that none can stand in: load another "
                    "state"
                )
            numbers |= {first + position for position in inside}
        return frozenset(numbers)

    @property
    def withheld(self) -> frozenset[int]:
        """Return the samples that a worker must not choose in the place of a bad one."""
        return self.excluded if self._reading.choices else frozenset()

    @property
    def changed(self) -> bool:
        """Return whether samples or steps were left out since."""
        return self._exclusions.version != self._version

    def newer(self, step: int) -> Filter:
        """Return what holds now, from this step on."""
        return Filter(self._exclusions, self._reading, step)

    def may_choose(self, edited: Edited, before: frozenset[int]) -> bool:
        """Return whether a worker may have put a sample that is withheld now in the place of a bad one.

        Args:
            before: the samples that were withheld then.
        """
        new, reading = self.withheld - before, self._reading
        indices = edited.index if reading.auto_collation else [edited.index]
        return bool(new) and any(
            reading.number(other) in new
            for index in indices
            for other in itertools.islice(reading.substitutes(index, before), reading.choices)
        )

    def _samples_of(self, step: int) -> Range:
        """Return the samples of a step, over all ranks."""
        segment = next(
            (earlier for earlier in reversed(self._segments) if earlier.step <= step), Segment(0, 0, 1)
        )
        first, samples = segment.start(step), self._reading.samples
        end = first + segment.per_step
        return first, end if samples is None or first >= samples else min(end, samples)  # padding follows

    def _skips(self, first: int, end: int) -> bool:
        return any(start <= first and end <= stop for start, stop in self._skipped)


class Exclusions:
    """What one loader leaves out. Plain data: it outlives the loader's iterators, and pickles with it.

    Args:
        samples: left out from the beginning.

    Attributes:
        version: another number after each change.
    """

    def __init__(self, samples: Samples | None = None) -> None:
        self.version = 0
        self._exclusions = [_Exclusion(0, 0, [], samples)] if samples else []
        self._skipped: dict[int, list[Range]] = {}

    def skipped(self, epoch: int) -> list[Range]:
        """Return the ranges of an epoch's samples that are skipped."""
        return self._skipped.get(epoch, [])

    def samples_at(self, epoch: int, step: int) -> Samples:
        """Return the excluded samples, as they hold or held for a step of an epoch."""
        excluded: Samples = {}
        for exclusion in self._exclusions:
            delivered_before = exclusion.epoch == epoch and step in exclusion.ahead
            if (exclusion.epoch, exclusion.step) <= (epoch, step) and not delivered_before:
                for source, ranges in exclusion.samples.items():
                    excluded[source] = _merged([*excluded.get(source, []), *ranges])
        return excluded

    def exclude(
        self, sources: Mapping[str, int], numbers: Iterable[int], epoch: int, step: int, ahead: list[int]
    ) -> None:
        """Leave samples out from a step on.

        Args:
            sources: as `Reading.sources` gives them.
            numbers: of the samples in the dataset.
            ahead: later steps that were delivered already.

        Raises:
            ArgumentError: nothing is left.
        """
        ordered = sorted(set(numbers))
        samples: Samples = {}
        for source, first, length in _positions(sources):
            inside = [position - first for position in ordered if first <= position < first + length]
            if inside:
                samples[source] = _merged((position, position + 1) for position in inside)
            before = [pair for exclusion in self._exclusions for pair in exclusion.samples.get(source, [])]
            if _merged([*samples.get(source, []), *before]) == [(0, length)]:
                of = f" of source {source!r}" if source else ""
                advice = "give it the weight 0" if source else "leave some in"
                raise ArgumentError(
                    f"samples excludes all {length:,} samples{of}, so that none can stand in: {advice}"
                )
        if samples:
            self._exclusions.append(_Exclusion(epoch, step, list(ahead), samples))
            self.version += 1

    def skip(self, epoch: int, segment: Segment, steps: Iterable[int]) -> None:
        """Leave out steps of an epoch, in the segment in which they will be read."""
        starts = map(segment.start, steps)
        added = [(start, start + segment.per_step) for start in starts]
        self._skipped[epoch] = _merged([*self.skipped(epoch), *added])
        self.version += 1

    def state(self) -> ExclusionsState:
        """Return all of it."""
        skipped = [_Skips(epoch, ranges) for epoch, ranges in sorted(self._skipped.items())]
        return ExclusionsState(self._exclusions, skipped)

    def load(self, state: ExclusionsState) -> None:
        """Take up what `state` gave, in place of what is left out here.

        To keep both was rejected: a state has what its run left out, and resuming it must give that run.
        """
        before = self._excluded()
        self._exclusions = list(state.excluded)
        self._skipped = {skips.epoch: skips.samples for skips in state.skipped}
        self.version += 1
        now = self.samples_at(1 << 64, 0)
        lost = [position for source, position in before if not _holds(now.get(source, []), position)]
        if lost:
            warnings.warn(
                f"load_state_dict replaces what is left out: {len(lost):,} excluded samples are not in the "
                "state, and are used again. To go on without them, call exclude() after it",
                stacklevel=3,
            )

    def _excluded(self) -> set[tuple[str, int]]:
        """Return (source, position) of all samples that are excluded now."""
        ranges = self.samples_at(1 << 64, 0).items()
        return {
            (source, position)
            for source, pairs in ranges
            for start, end in pairs
            for position in range(start, end)
        }


def _positions(sources: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield (source, its first number in the dataset, its number of samples).

    A mixture may be resumed with other sources before these, which moves their numbers.
    """
    first = 0
    for source, length in sources.items():
        yield source, first, length
        first += length


def _whole(indices: list[Any]) -> list[int]:
    try:
        return [operator.index(index) for index in indices]
    except TypeError as error:
        other = next(index for index in indices if not hasattr(index, "__index__"))
        raise ArgumentError(
            f"exclude and skip need samples that have an index, a whole number, and the sampler gives "
            f"{other!r}: leave the samples out in the sampler"
        ) from error


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges in order, none of which touch."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _holds(merged: Sequence[Range], position: int) -> bool:
    number = bisect.bisect_right(merged, (position, math.inf)) - 1
    return number >= 0 and position < merged[number][1]
