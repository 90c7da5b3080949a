"""Which source gives the next sample of a mixture: exact proportions after every sample, in whole numbers.

    due of a source      weight * samples of the mixture - samples of the source, after each sample
    it may give the next sample    once its due would stay above -1
    it must give it                before its due reaches +1

Of the sources that may, the one whose deadline is first gives the sample. For constant weights this keeps
every due between -1 and +1, for any number of sources: Tijdeman, "The chairman assignment problem" (1980);
in scheduling it is the "proportionate progress" of Baruah et al. (1996). The source with the largest due
was rejected: it is as simple, and has no such bound.

When weights change, dues are kept. So a rare source gets its share even if weights change with every batch.
No rule that does not know the coming weights keeps n dues below +1 then: the best one reaches 1/2 + 1/3 +
... + 1/n. Of several sources that are late, the one with the largest due gives the sample. That keeps all
dues above -1, and below 1 + 1/2 + ... + 1/(n // 2), which is 1 for two and three sources.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from typing import Any

from fastload.errors import ArgumentError

Weights = Mapping[str, Any] | Sequence[Any]
GivenWeights = Weights | Callable[[int], Weights]

PASS_BITS = 40
MOST_SAMPLES = 1 << PASS_BITS  # of all sources

# One sample, in the units of weights and dues. With whole numbers nothing drifts. Weights of up to 9 decimals
# with the sum 1 are exact, and so are proportions whose terms add up to 24 or less. Others are rounded to
# 2e-19: over 10**12 samples that is no sample.
ONE = math.lcm(*range(1, 25)) * 10**9


def in_units(weights: Mapping[str, Fraction]) -> list[int]:
    """Return weights as whole numbers with the sum `ONE`.

    Raises:
        ArgumentError: a weight is too small beside the others.
    """
    whole = sum(weights.values())
    exact = [weight * ONE / whole for weight in weights.values()]
    units = [math.floor(weight) for weight in exact]
    for name, weight, unit in zip(weights, weights.values(), units, strict=True):
        if weight and not unit:
            raise ArgumentError(
                f"the weight of source {name!r} is less than 1e-18 of all weights: give it 0, or more"
            )
    by_rest = sorted(range(len(units)), key=lambda source: units[source] - exact[source])
    for source in by_rest[: ONE - sum(units)]:
        units[source] += 1
    return units


class Mixing:
    """The sources of the samples of a mixture, one after the other.

    A function of (weights, dues): what came before does not matter, so a state needs no more.

    Args:
        weights: of each source, in units, with the sum `ONE`. 0: it gives no samples.
        counts: samples that each source gave.
        dues: what each is owed, in units.

    Attributes:
        counts: as above, now.
        total: samples of the mixture.
    """

    def __init__(
        self, weights: Sequence[int], counts: Sequence[int], dues: Sequence[int], total: int
    ) -> None:
        self.counts = list(counts)
        self.total = total
        self._begin(weights, dues)

    @property
    def weights(self) -> list[int]:
        """Return the weight of each source, in units."""
        return list(self._weights)

    @property
    def dues(self) -> list[int]:
        """Return what each source is owed, in units. Those of all sources add up to 0."""
        return [self._due(source, self.total - self._begun) for source in range(len(self.counts))]

    def set_weights(self, weights: Sequence[int]) -> None:
        """Use these weights from the next sample on."""
        self._begin(weights, self.dues)

    def copy(self) -> Mixing:
        """Return one that goes on from here by itself."""
        return Mixing(self._weights, self.counts, self.dues, self.total)

    def advance(self, samples: int) -> int:
        """Go on by this number of samples, at least one. Returns the source of the last of them."""
        weights, given, counts = self._weights, self._given, self.counts
        waiting, ready, source = self._waiting, self._ready, 0
        first = self.total - self._begun + 1
        self.total += samples
        for step in range(first, first + samples):
            while waiting and waiting[0][0] <= step:
                _, deadline, source = heappop(waiting)
                heappush(ready, (deadline, source))
            deadline, source = heappop(ready)
            if ready and ready[0][0] <= step:  # two that must: the weights have changed
                source = self._most_late((deadline, source), step)
            counts[source] += 1
            given[source] = so_far = given[source] + ONE
            heappush(waiting, (*_window(so_far, weights[source]), source))
        return source

    def _begin(self, weights: Sequence[int], dues: Sequence[int]) -> None:
        """Begin a segment: steps of constant weights, counted from 1."""
        self._begun = self.total
        self._weights = list(weights)
        self._given = [-due for due in _settled(dues, weights)]  # in this segment, less what was due before
        self._ready: list[tuple[int, int]] = []  # (deadline, source) of those that may give the next sample
        self._waiting = [  # (release, deadline, source) of the others
            (*_window(given, weight), source)
            for source, (given, weight) in enumerate(zip(self._given, weights, strict=True))
            if weight
        ]
        heapify(self._waiting)

    def _due(self, source: int, steps: int) -> int:
        return self._weights[source] * steps - self._given[source]

    def _most_late(self, first: tuple[int, int], step: int) -> int:
        """Return the source with the largest due, of `first` and the others whose deadline is past."""
        late = [first, *(waiting for waiting in self._ready if waiting[0] <= step)]
        chosen = max(late, key=lambda waiting: (self._due(waiting[1], step), -waiting[1]))
        if chosen != first:
            self._ready.remove(chosen)
            self._ready.append(first)
            heapify(self._ready)
        return chosen[1]


def _window(given: int, weight: int) -> tuple[int, int]:
    """Return (release, deadline): the steps between which a source gives its next sample.

    From its release on, its due stays above -1 if it does. At its deadline the due reaches +1 if it does not.
    """
    return given // weight + 1, -((-given - ONE) // weight)


def _settled(dues: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Return the dues, where the dues of sources that give no samples are left to the others.

    The largest take them: beside their samples a part of one is least. No due passes -1 or +1 by that. A
    source that is left out for a time is owed nothing when it comes back.
    """
    settled = [due if weight else 0 for due, weight in zip(dues, weights, strict=True)]
    surplus = sum(settled)
    for source in sorted(range(len(weights)), key=lambda index: -weights[index]):
        if weights[source]:
            due = settled[source]
            least, most = min(due, 1 - ONE), max(due, ONE - 1)
            settled[source] = max(least, min(most, due - surplus))
            surplus -= due - settled[source]
    return settled


class Proportions:
    """The sources of a mixture and their weights, which a `Mixture` shares with the sampler that reads it.

    Args:
        lengths: name of each source -> its samples.
        given: the weights, or a function from the epoch to them.
        num_samples: samples of an epoch, over all ranks.

    Attributes:
        reader: the sampler that read last, in the trainer's process; None before that.
        were_set: the weights that were set since it began; None where none were.
    """

    def __init__(self, lengths: Mapping[str, int], given: GivenWeights, num_samples: int) -> None:
        self.lengths = dict(lengths)
        self._starts = [0, *itertools.accumulate(lengths.values())]
        self.num_samples = num_samples
        self.reader: Any = None
        self.were_set: dict[str, Fraction] | None = None
        self._given: Callable[[int], Weights] | dict[str, Fraction]
        self._give(given)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"reader": None}

    def weights(self) -> dict[str, float]:
        """Return the weights of the next samples, with the sum 1."""
        weights = self.were_set or self.weights_in(0 if self.reader is None else self.reader.epoch)
        whole = sum(weights.values())
        return {name: float(weight / whole) for name, weight in weights.items()}

    def set_weights(self, weights: GivenWeights) -> None:
        """Set the weights of the samples that no rank has drawn yet: see `Mixture.weights`."""
        if self.reader is None:
            self._give(weights)
            self.were_set = None
            return
        if callable(weights):
            raise ArgumentError(
                "weights cannot be set to a function of the epoch while the mixture is read: set the weights "
                "of each epoch when it begins, or give the function to the constructor"
            )
        parsed = parse_weights(weights, list(self.lengths))
        self.reader._set_weights(parsed)
        self.were_set = parsed

    def weights_in(self, epoch: int) -> dict[str, Fraction]:
        """Return the weights in an epoch, as they were given."""
        if not callable(self._given):
            return self._given
        return parse_weights(self._given(epoch), list(self.lengths), f"weights({epoch})")

    def given(self) -> dict[str, str] | None:
        """Return the weights that were given, as text; None for a function."""
        if callable(self._given):
            return None
        return {name: str(weight) for name, weight in self._given.items()}

    def read(self) -> tuple[dict[str, int], dict[str, float]]:
        """Return (samples, weight) of each source, at what was delivered."""
        if self.reader is None:
            return dict.fromkeys(self.lengths, 0), self.weights()
        samples, weights = self.reader._samples_of_sources()
        return samples, weights

    def index(self, source: int, position: int, lap: int) -> int:
        """Return the index of the sample at a position of a source, in pass `lap` over it."""
        return lap << PASS_BITS | self._starts[source] + position

    def _give(self, weights: GivenWeights) -> None:
        before = vars(self).get("_given")
        self._given = weights if callable(weights) else parse_weights(weights, list(self.lengths))
        try:
            self.weights_in(0)
        except BaseException:
            self._given = before  # type: ignore[assignment]
            raise


def parse_weights(weights: Any, names: Sequence[str], what: str = "weights") -> dict[str, Fraction]:
    """Return name -> weight, as it is written.

    Raises:
        ArgumentError: they are not one finite number >= 0 for each name, or all are 0.
    """
    if isinstance(weights, Mapping):
        missing, unknown = set(names) - weights.keys(), weights.keys() - set(names)
        if missing or unknown:
            raise ArgumentError(
                f"{what} must have one weight for each source: missing {sorted(missing)}, and no source has "
                f"the names {sorted(map(str, unknown))}; the sources are {list(names)}"
            )
        given = [weights[name] for name in names]
    elif isinstance(weights, Iterable) and not isinstance(weights, str):
        given = list(weights)
        if len(given) != len(names):
            raise ArgumentError(
                f"{what} has {len(given)} weights for {len(names)} sources: give one for each"
            )
    else:
        raise ArgumentError(
            f"{what} must be a list or dict of numbers, or a function of the epoch that returns one, found "
            f"{weights!r}"
        )
    parsed = {name: _fraction(name, weight, what) for name, weight in zip(names, given, strict=True)}
    if not any(parsed.values()):
        raise ArgumentError(f"{what} are all 0, so no source gives samples: make one of them positive")
    return parsed


def _fraction(name: str, weight: Any, what: str) -> Fraction:
    if isinstance(weight, numbers.Rational) and weight is not True and weight is not False:
        exact = Fraction(int(weight.numerator), int(weight.denominator))  # numpy's integers overflow
    else:
        try:
            number = math.nan if isinstance(weight, bool | str) else float(weight)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ArgumentError(
                f"{what}: the weight of source {name!r} must be a finite number >= 0, found {weight!r}"
            )
        exact = Fraction(repr(number))
    if exact < 0:
        raise ArgumentError(
            f"{what}: the weight of source {name!r} must be >= 0, found {weight!r}; 0 leaves it out"
        )
    return exact
