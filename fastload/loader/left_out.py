"""What a loader leaves out: excluded samples, and skipped steps.

    exclude    from the next batch on that is handed out, in all epochs: another sample stands in its place
    skip       steps of one epoch are not handed out

A skipped step is kept as a range of the epoch's samples, in the order that all ranks read together. So the
same samples stay away with another number of ranks or another batch size:

    step s of a segment    samples [first + (s - its first step) * per step, ... + per step)

A segment is a part of an epoch that was read with one number of ranks and one batch size.
"""

from __future__ import annotations

import bisect
import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fastload.datasets.substitutes import substitutes
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError

Range = tuple[int, int]  # [first, end)
Samples = dict[str, list[Range]]  # source of a mixture, else "" -> positions in it


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


class Reading(NamedTuple):
    """How one rank reads an epoch.

    Attributes:
        dataset: the loader's.
        seed, epoch: of the samples' randomness.
        auto_collation: an index batch is a list of indices.
        column, ranks: this rank reads the samples `column`, `column + ranks`, ... of each segment.
        samples: of the epoch, over all ranks; None where the sampler does not say.
    """

    dataset: Any
    seed: int
    epoch: int
    auto_collation: bool = True
    column: int = 0
    ranks: int = 1
    samples: int | None = None


class Revised(NamedTuple):
    """An index batch as it is given to a worker.

    Attributes:
        index: with the substitutes.
        replaced: row -> (the substitute, the index in whose place it stands).
    """

    index: Any
    replaced: dict[int, tuple[int, Any]]


class _Exclusion(NamedTuple):
    """Samples that are left out from a batch on. `ahead`: later steps that were handed out before it."""

    epoch: int
    step: int
    ahead: list[int]
    samples: Samples


class _Epoch(NamedTuple):
    """Of one epoch: its segments, and the ranges of its samples that are skipped."""

    segments: list[Segment]
    skipped: list[Range]


class Rules:
    """What is left out of one epoch, at one time.

    Args:
        excluded: see `LeftOut`.
        segments: of the epoch.
        skipped: ranges of its samples.

    Attributes:
        samples: the excluded ones.
    """

    def __init__(self, excluded: Samples, segments: Sequence[Segment], skipped: Sequence[Range]) -> None:
        self.samples = excluded
        self._segments = segments
        self._skipped = skipped
        self._excluded: frozenset[int] | None = None

    def __bool__(self) -> bool:
        return bool(self.samples or self._skipped)

    def excluded(self, dataset: Any) -> frozenset[int]:
        """The excluded indices; of a `Mixture` without the pass."""
        if self._excluded is None:
            firsts = _firsts(dataset)
            lengths = view_of(dataset).lengths(len(dataset))
            found: set[int] = set()
            for source, ranges in self.samples.items():
                if source not in firsts:
                    continue
                length = lengths[source]  # a state may say any numbers
                inside = {at for start, end in ranges for at in range(max(0, start), min(end, length))}
                if len(inside) == length:
                    raise ArgumentError(
                        f"the state leaves out all {length:,} samples, so that none can stand in: load "
                        "another state"
                    )
                found |= {firsts[source] + at for at in inside}
            self._excluded = frozenset(found)
        return self._excluded

    def revise(self, reading: Reading, step: int, index: Any) -> Revised | None:
        """The index batch of a step, with a substitute for each excluded sample; None: the step is skipped.

        Raises:
            ArgumentError: an index is no whole number, so that it cannot be told what it is.
        """
        first, end, partly = self._place(reading, step)
        if partly and _covered(self._skipped, first, end):
            return None
        excluded = self.excluded(reading.dataset)
        if not partly and not excluded:
            return Revised(index, {})
        one = not reading.auto_collation and not isinstance(index, list)
        indices, replaced = [index] if one else list(index), {}
        numbers = _numbers(reading.dataset, indices)
        for row, number in enumerate(numbers):
            sample = first + row * reading.ranks + reading.column
            if number in excluded or (partly and _covered(self._skipped, sample, sample + 1)):
                others = substitutes(reading.dataset, reading.seed, reading.epoch, indices[row], excluded)
                replaced[row] = (next(others), indices[row])
                indices[row] = replaced[row][0]
        if not replaced:
            return Revised(index, {})
        return Revised(indices[0] if one else indices, replaced)

    def _place(self, reading: Reading, step: int) -> tuple[int, int, bool]:
        """(first sample of a step, the end, whether some of them are skipped), over all ranks."""
        segment = next((one for one in reversed(self._segments) if one.step <= step), Segment(0, 0, 1))
        first = segment.sample + (step - segment.step) * segment.per_step
        end = first + segment.per_step
        if reading.samples is not None and first < reading.samples:
            end = min(end, reading.samples)  # after it there is padding
        return first, end, any(start < end and first < stop for start, stop in self._skipped)


class LeftOut:
    """The rules of one loader. Plain data: they outlive its iterators, and pickle with it.

    Attributes:
        version: another number after each change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._exclusions: list[_Exclusion] = []
        self._epochs: dict[int, _Epoch] = {}

    def at(self, epoch: int, step: int, per_step: int | None = None) -> Rules:
        """The rules that hold, or held, for a step of an epoch.

        Args:
            per_step: the step is one of other ranks: the whole epoch is read with so many samples a step.
        """
        excluded: Samples = {}
        found = self._epochs.get(epoch, _Epoch([], []))
        segments = found.segments
        if per_step is not None:
            sample, segments = step * per_step, [Segment(0, 0, per_step)]
            own = next((one for one in reversed(found.segments) if one.sample <= sample), segments[0])
            step = own.step + (sample - own.sample) // own.per_step
        for one in self._exclusions:
            if (one.epoch, one.step) <= (epoch, step) and not (one.epoch == epoch and step in one.ahead):
                for source, ranges in one.samples.items():
                    excluded[source] = _merged([*excluded.get(source, []), *ranges])
        return Rules(excluded, segments, found.skipped)

    def exclusions_at(self, epoch: int, step: int, per_step: int | None) -> LeftOut:
        """Rules by which those samples are left out always that were left out in a step; see `at`."""
        alike = LeftOut()
        excluded = self.at(epoch, step, per_step).samples
        if excluded:
            alike._exclusions.append(_Exclusion(0, 0, [], excluded))
        return alike

    def exclude(self, dataset: Any, indices: Iterable[int], epoch: int, step: int, ahead: list[int]) -> None:
        """Leave samples out from a step on.

        Args:
            indices: of the dataset.
            ahead: later steps that were handed out already.

        Raises:
            ArgumentError: nothing is left.
        """
        firsts = _firsts(dataset)
        ends = [*list(firsts.values())[1:], len(dataset)]
        positions = sorted(set(indices))
        samples: Samples = {}
        for (source, first), end in zip(firsts.items(), ends, strict=True):
            inside = [at - first for at in positions if first <= at < end]
            if inside:
                samples[source] = _merged((at, at + 1) for at in inside)
            before = [one.samples.get(source, []) for one in self._exclusions]
            left_out = _merged([*samples.get(source, []), *(pair for ranges in before for pair in ranges)])
            if left_out == [(0, end - first)]:
                what = f"all {end - first:,} samples"
                of = f" of source {source!r}" if source else ""
                advice = "give it the weight 0" if source else "leave some in"
                raise ArgumentError(f"samples excludes {what}{of}, so that none can stand in: {advice}")
        if samples:
            self._exclusions.append(_Exclusion(epoch, step, list(ahead), samples))
            self.version += 1

    def steps(self, epoch: int, steps: int | None) -> int | None:
        """How many steps an epoch has that was entered, where it has `steps` if it is read from its start."""
        segments = self._epochs[epoch].segments
        return steps if segments[0].step == 0 and len(segments) == 1 else None

    def skip(self, epoch: int, steps: Iterable[int]) -> None:
        """Leave steps of an epoch out that was entered with `enter`."""
        segments, skipped = self._epochs[epoch]
        last = segments[-1]
        starts = [last.sample + (step - last.step) * last.per_step for step in steps]
        skipped[:] = _merged([*skipped, *((start, start + last.per_step) for start in starts)])
        self.version += 1

    def enter(self, epoch: int, step: int, per_step: int, sample: int | None) -> None:
        """From this step on, an epoch is read with so many samples a step. A repeated call changes nothing.

        Args:
            sample: the first of these, if the sampler knows; else it is computed.
        """
        segments = self._epochs.setdefault(epoch, _Epoch([], [])).segments
        if segments and segments[-1].per_step == per_step:
            return
        if segments:
            last = segments[-1]
            sample = last.sample + (step - last.step) * last.per_step
        if segments and segments[-1].step == step:
            segments.pop()
        first = step * per_step if sample is None else sample
        segments.append(Segment(step, first, per_step))
        self.version += 1

    def leave(self, epoch: int) -> None:
        """An epoch begins: forget the segments of earlier ones to which no rule refers."""
        kept = self._epochs_with_rules()
        self._epochs = {one: found for one, found in self._epochs.items() if one >= epoch or one in kept}

    def _epochs_with_rules(self) -> set[int]:
        skipping = {epoch for epoch, found in self._epochs.items() if found.skipped}
        return skipping | {one.epoch for one in self._exclusions}

    def state(self) -> dict[str, Any]:
        """As JSON."""
        kept = self._epochs_with_rules()
        if not kept:
            return {}
        return {
            "excluded": [
                {
                    "from": [one.epoch, one.step],
                    "ahead": one.ahead,
                    "samples": {source: _as_lists(ranges) for source, ranges in one.samples.items()},
                }
                for one in self._exclusions
            ],
            "epochs": [
                {"epoch": epoch, "segments": _as_lists(found.segments), "skipped": _as_lists(found.skipped)}
                for epoch, found in sorted(self._epochs.items())
                if epoch in kept
            ],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave, in place of these rules; {}: nothing is left out.

        Rules of both were rejected: a state has what its run left out, and resuming it must give that run.

        Raises:
            ArgumentError: it is no such state.
        """
        try:
            exclusions = [
                _Exclusion(
                    int(one["from"][0]), int(one["from"][1]), list(one["ahead"]), _as_samples(one["samples"])
                )
                for one in state.get("excluded", [])
            ]
            epochs = {
                int(one["epoch"]): _Epoch(
                    [Segment(*map(int, numbers)) for numbers in one["segments"]], _as_ranges(one["skipped"])
                )
                for one in state.get("epochs", [])
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"state_dict has a 'left_out' that no loader has made ({error!r}): load it whole, as "
                "state_dict() returned it"
            ) from error
        before = self._excluded()
        self._exclusions, self._epochs = exclusions, epochs
        self.version += 1
        ranges: dict[str, list[Range]] = {}
        for one in exclusions:
            for source, found in one.samples.items():
                ranges.setdefault(source, []).extend(found)
        now = {source: _merged(found) for source, found in ranges.items()}
        lost = [at for source, at in before if not _holds(now.get(source, []), at)]
        if lost:
            warnings.warn(
                f"load_state_dict replaces what is left out: {len(lost):,} excluded samples are not in the "
                "state, and are used again. To go on without them, call exclude() after it",
                stacklevel=3,
            )

    def _excluded(self) -> set[tuple[str, int]]:
        """(source, position) of all samples that are excluded now."""
        return {
            (source, at)
            for one in self._exclusions
            for source, ranges in one.samples.items()
            for start, end in ranges
            for at in range(start, end)
        }


def _firsts(dataset: Any) -> dict[str, int]:
    """Source of a mixture -> its first index; {"": 0} for another dataset.

    A mixture may be resumed with other sources before these, which moves their indices.
    """
    firsts, first = {}, 0
    for name, length in view_of(dataset).lengths(len(dataset)).items():
        firsts[name] = first
        first += length
    return firsts


def _numbers(dataset: Any, indices: list[Any]) -> list[int]:
    """Indices as those of `Rules.excluded`."""
    try:
        numbers = [operator.index(index) for index in indices]
    except TypeError as error:
        raise ArgumentError(
            f"exclude and skip need samples that have an index, a whole number, and the sampler gives "
            f"{next(index for index in indices if not hasattr(index, '__index__'))!r}: leave the samples out "
            "in the sampler"
        ) from error
    view, length = view_of(dataset), len(dataset)
    return [view.position(number, length) for number in numbers]


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order, none of which touch."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _holds(merged: Sequence[Range], at: int) -> bool:
    number = bisect.bisect_right(merged, (at, math.inf)) - 1
    return number >= 0 and at < merged[number][1]


def _covered(ranges: Iterable[Range], first: int, end: int) -> bool:
    return any(start <= first and end <= stop for start, stop in ranges)


def _as_lists(rows: Iterable[Sequence[int]]) -> list[list[int]]:
    return [list(row) for row in rows]


def _as_ranges(rows: Iterable[Sequence[int]]) -> list[Range]:
    return [(int(start), int(end)) for start, end in rows]


def _as_samples(state: Mapping[str, Any]) -> Samples:
    return {source: _as_ranges(rows) for source, rows in state.items()}
