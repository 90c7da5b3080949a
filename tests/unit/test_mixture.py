"""Mixture and its sampler against a slow, obvious simulation: proportions, passes, ranks, resumed runs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fastload import Mixture, MixtureSampler
from fastload.order.mixing import ONE, Mixing, in_units
from tests.loaderdata import Numbers, through_json

Weights = dict[str, Fraction]
_LAP = 1 << 40


def mixing(weights: list[Any]) -> Mixing:
    count = len(weights)
    units = in_units({str(at): Fraction(repr(weight)) for at, weight in enumerate(weights)})
    return Mixing(units, [0] * count, [0] * count, 0)


def sources(**lengths: int) -> dict[str, Numbers]:
    return {name: Numbers(length, lambda index, name=name: (name, index)) for name, length in lengths.items()}


# --- the proportions alone


def random_weights(rng: random.Random, count: int) -> list[Any]:
    return rng.choice(
        [
            [rng.randint(1, 9) for _ in range(count)],
            [rng.random() for _ in range(count)],
            [2.0**-at for at in range(count)],
            [10 ** rng.uniform(-6, 0) for _ in range(count)],
            [rng.choice([1.0, 1.0, 0.5, 1e-3]) for _ in range(count)],
        ]
    )


@pytest.mark.parametrize("seed", range(15))
def test_constant_weights_keep_each_count_within_one_sample(seed: int) -> None:
    rng = random.Random(seed)
    weights = random_weights(rng, rng.choice([1, 2, 3, 4, 5, 8, 13, 40]))
    exact = [Fraction(repr(weight)) for weight in weights]
    parts = [weight / sum(exact) for weight in exact]
    mixed = mixing(weights)
    for total in range(1, 300):
        mixed.advance(1)
        assert sum(mixed.counts) == total
        for part, count in zip(parts, mixed.counts, strict=True):
            assert abs(part * total - count) < 1 + Fraction(total, 10**17)


@pytest.mark.parametrize("count", [2, 3, 4, 6, 15])
def test_weights_that_change_at_every_step_never_put_a_source_a_sample_ahead(count: int) -> None:
    """Each step gives all weight to the sources that are due most, which is the worst for any rule."""
    rng = random.Random(count)
    bound = sum(Fraction(1, at) for at in range(1, count // 2 + 1))
    for _ in range(30):
        mixed = mixing([rng.randint(1, 9) for _ in range(count)])
        worst = rng.random()
        targets = [Fraction(0)] * count
        for _ in range(60):
            dues = mixed.dues
            weights = [1.0 if due > 0 or rng.random() > worst else 1e-6 for due in dues]
            mixed.set_weights(
                in_units({str(at): Fraction(repr(weight)) for at, weight in enumerate(weights)})
            )
            targets = [
                target + Fraction(unit, ONE) for target, unit in zip(targets, mixed.weights, strict=True)
            ]
            mixed.advance(1)
            for target, taken in zip(targets, mixed.counts, strict=True):
                assert -1 < target - taken < bound


def test_rare_source_gets_its_part_though_weights_change_with_every_batch() -> None:
    mixed = mixing([0.999, 0.0, 0.001])
    for batch in range(100):
        weights = {"a": Fraction(batch % 2), "b": Fraction(1 - batch % 2), "c": Fraction(1, 999)}
        mixed.set_weights(in_units(weights))
        mixed.advance(256)
    assert abs(mixed.counts[2] - 25.6) < 1.5


def test_of_sources_that_are_late_the_one_with_the_largest_due_comes_first() -> None:
    weights = in_units({name: Fraction(1 + 96 * (name == "e")) for name in "abcdefg"})
    dues = [ONE // 1000 * part for part in (999, 999, 999, 999, 500, -2248, -2248)]
    mixed = Mixing(weights, [0] * 7, dues, 0)
    assert mixed.advance(1) == 4


def test_many_samples_at_once_are_those_of_single_steps() -> None:
    one, many = mixing([5, 3, 1]), mixing([5, 3, 1])
    last = [one.advance(1) for _ in range(1000)]
    assert [many.advance(samples) for samples in (1, 9, 490, 500)] == [last[at] for at in (0, 9, 499, 999)]
    assert many.counts == one.counts and many.dues == one.dues


# --- random histories against the simulation


@dataclass(frozen=True)
class Place:
    """Where a simulated run is. Dues are in samples."""

    epoch: int
    consumed: int
    total: int
    weights: Weights
    counts: dict[str, int]
    dues: Weights
    were_set: bool


@dataclass
class Simulation:
    """The same promises, one sample at a time, with fractions and without any index."""

    names: list[str]
    given: Weights | Callable[[int], Weights]
    place: Place
    changes: dict[int, Weights] = field(default_factory=dict)
    seen: dict[int, Place] = field(default_factory=dict)
    target: Weights = field(default_factory=dict)  # of each source since the dues were last settled

    def set_weights(self, weights: Weights) -> None:
        whole = sum(weights.values())
        weights = {name: weights[name] / whole for name in self.names}
        dues = {
            name: self.place.dues.get(name, Fraction(0)) if weights[name] else Fraction(0) for name in weights
        }
        most = 1 - Fraction(1, ONE)
        rest = sum(dues.values())
        for name in sorted(self.names, key=lambda name: -weights[name]):
            if weights[name]:
                due = dues[name]
                dues[name] = max(min(due, -most), min(max(due, most), due - rest))
                rest -= due - dues[name]
        assert rest == 0 == sum(dues.values())
        counts = {name: self.place.counts.get(name, 0) for name in self.names}
        self.place = replace(self.place, weights=weights, dues=dues, counts=counts)

    def begin_epoch(self) -> None:
        if not self.place.were_set:
            self.set_weights(self.given(self.place.epoch) if callable(self.given) else self.given)

    def next(self) -> tuple[str, int]:
        """(source, its how manieth sample) of the next sample of all ranks."""
        if self.place.total in self.changes:
            self.set_weights(self.changes[self.place.total])
            self.place = replace(self.place, were_set=True)
        at = self.place
        dues = {name: at.dues[name] + at.weights[name] for name in self.names}
        may = [name for name in self.names if at.weights[name] and dues[name] > 0]
        must = [name for name in may if dues[name] >= 1]
        steps = {name: math.ceil((1 - at.dues[name]) / at.weights[name]) for name in may}
        first = max(must, key=dues.__getitem__) if must else min(may, key=steps.__getitem__)
        dues[first] -= 1
        number, counts = at.counts[first], at.counts | {first: at.counts[first] + 1}
        self.place = replace(at, total=at.total + 1, dues=dues, counts=counts)
        assert all(due > -1 for due in dues.values())
        assert len(self.names) > 3 or all(due < 1 for due in dues.values())
        return first, number


def order_of_pass(length: int, seed: int, name: str, lap: int) -> list[int]:
    """From a sampler of this source alone, whose epochs are its passes."""
    alone = MixtureSampler(Mixture(sources(**{name: length}), [1]), 1, 0, seed=seed)
    for _ in range(lap):
        list(alone)
    order = [index - lap * _LAP for index in alone]
    assert sorted(order) == list(range(length))
    return order


def test_each_pass_has_an_order_of_its_own_whatever_the_other_sources() -> None:
    orders = [order_of_pass(50, seed, name, lap) for seed in (0, 1) for name in "ab" for lap in (0, 1)]
    assert len({tuple(order) for order in orders}) == 8
    sampler = MixtureSampler(Mixture(sources(c=9, a=50), [1, 1], num_samples=200), 1, 0)
    mixed = [index % _LAP - 9 for index in sampler if index % _LAP >= 9]
    assert mixed == order_of_pass(50, 0, "a", 0) + order_of_pass(50, 0, "a", 1)


def test_pass_is_by_index_without_shuffle() -> None:
    sampler = MixtureSampler(Mixture(sources(a=3, b=2), [0.5, 0.5], num_samples=10), 1, 0, shuffle=False)
    assert [index % _LAP for index in sampler] == [0, 3, 1, 4, 2, 3, 0, 4, 1, 3]


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64])
def test_weights_that_are_integers_of_numpy_are_numbers_and_do_not_overflow(kind: Any) -> None:
    mixture = Mixture(sources(a=90, b=200), np.array([90, 200], kind), num_samples=29)
    assert mixture.weights == {"a": 9 / 29, "b": 20 / 29}
    read = [mixture[index][0] for index in MixtureSampler(mixture)]
    assert (read.count("a"), read.count("b")) == (9, 20)


def test_weights_that_are_set_after_a_resume_or_a_break_take_the_place_of_those_that_were_to_come() -> None:
    def ahead(state: dict[str, Any] | None) -> tuple[Mixture, MixtureSampler, dict[str, Any]]:
        """A run that has drawn 6 samples more than it has delivered, from a state on."""
        mixture = Mixture(sources(a=9, b=9), [1, 1], num_samples=40)
        sampler = MixtureSampler(mixture)
        if state is not None:
            sampler.load_state_dict(state)
        delivered = sampler._delivered = sampler.state_dict()
        list(itertools.islice(sampler, 6))
        return mixture, sampler, delivered

    def places(sampler: MixtureSampler, state: dict[str, Any]) -> list[int]:
        return [at for at, _ in sampler._with_changes(state)["changes"]]

    mixture, sampler, delivered = ahead(None)
    mixture.weights = [1, 3]
    assert places(sampler, delivered) == [6]
    saved = sampler._with_changes(delivered)

    resumed = MixtureSampler(Mixture(sources(a=9, b=9), [1, 1], num_samples=40))
    resumed.load_state_dict(saved)
    resumed._mixture.set_weights([1, 2])
    assert places(resumed, saved) == [0]

    sampler._rewind()
    assert places(sampler, sampler.state_dict()) == []
    assert mixture.weights == {"a": 0.25, "b": 0.75}


class History:
    """A run of some ranks that is killed, resumed, left and changed at random, beside the simulation."""

    def __init__(self, seed: int, orders: dict[Any, list[int]]) -> None:
        self.rng = rng = random.Random(seed)
        self.orders = orders
        self.seed, self.shuffle = rng.randrange(3), rng.random() < 0.8
        self.known = {name: rng.randint(1, 9) for name in "abcdefghij"}
        self.lengths = {name: self.known[name] for name in "abcdef"[: rng.choice([1, 2, 2, 3, 3, 4, 6])]}
        self.epoch_samples = rng.randint(5, 50)
        self.given: Any = self.random_given()
        nothing = dict.fromkeys(self.lengths, Fraction(0))
        place = Place(0, 0, 0, nothing, dict.fromkeys(self.lengths, 0), nothing, False)
        self.simulation = Simulation(list(self.lengths), self.given, place)
        self.states: list[dict[str, Any]] = []  # after each row of this epoch, of this start
        self.start(rng.choice([1, 1, 2, 3, 5]), None)

    def random_weights(self) -> Weights:
        exact = [Fraction(self.rng.randint(0, 4)) for _ in self.lengths]
        if not any(exact) or self.rng.random() < 0.3:
            exact = [Fraction(self.rng.randint(1, 100), 100) for _ in self.lengths]
        whole = sum(exact)
        rounded = [Fraction(round(part / whole * 1000), 1000) for part in exact]
        rounded[-1] += 1 - sum(rounded)
        return dict(zip(self.lengths, rounded, strict=True)) if min(rounded) >= 0 else self.random_weights()

    def random_given(self) -> Any:
        if self.rng.random() < 0.7:
            return self.random_weights()
        each = [self.random_weights() for _ in range(3)]
        return lambda epoch: each[epoch % 3]

    def start(self, world: int, state: dict[str, Any] | None) -> None:
        """Start the job with this number of ranks."""
        self.mixtures = [
            Mixture(sources(**self.lengths), self.given, num_samples=self.epoch_samples) for _ in range(world)
        ]
        self.samplers = [
            MixtureSampler(mixture, world, rank, self.shuffle, self.seed)
            for rank, mixture in enumerate(self.mixtures)
        ]
        if state is not None:
            for sampler in self.samplers:
                sampler.load_state_dict(state)
        self.begin_iteration()

    def begin_iteration(self) -> None:
        """As a loader does: it says what it has handed out from the beginning on."""
        for sampler in self.samplers:
            sampler._start_epoch()
            sampler._delivered = sampler.state_dict()
        self.iterators = [iter(sampler) for sampler in self.samplers]
        self.states = [self.samplers[0].state_dict()]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.rng.choice([self.draw, self.draw, self.set_weights, self.kill, self.leave])()

    def draw(self) -> None:
        for _ in range(self.rng.randint(1, 12)):
            simulation = self.simulation
            if simulation.place.consumed == 0:
                simulation.begin_epoch()
            row = [next(iterator, None) for iterator in self.iterators]
            if simulation.place.consumed >= self.epoch_samples:
                assert row == [None] * len(row)
                simulation.place = replace(simulation.place, epoch=simulation.place.epoch + 1, consumed=0)
                self.begin_iteration()
                simulation.seen[simulation.place.total] = simulation.place
                continue
            simulation.seen.setdefault(simulation.place.total, simulation.place)
            expected = [self.index(*simulation.next()) for _ in row]
            assert row == expected
            place = simulation.place
            simulation.place = replace(place, consumed=place.consumed + len(row))
            simulation.seen[simulation.place.total] = simulation.place
            self.states.append(self.samplers[0].state_dict())
            assert all(sampler.state_dict() == self.states[-1] for sampler in self.samplers[1:])

    def index(self, name: str, number: int) -> int:
        lap, position = divmod(number, self.lengths[name])
        if self.shuffle:
            key = (self.lengths[name], self.seed, name, lap)
            if key not in self.orders:
                self.orders[key] = order_of_pass(*key)
            position = self.orders[key][position]
        before = [self.lengths[other] for other in list(self.lengths)[: list(self.lengths).index(name)]]
        return lap * _LAP + sum(before) + position

    def set_weights(self) -> None:
        if not all(mixture._proportions.reader for mixture in self.mixtures):
            return  # before anything is read they are as given to the constructor
        weights = self.random_weights()
        for mixture in self.mixtures:
            mixture.weights = weights
        total, changes = self.simulation.place.total, self.simulation.changes
        self.simulation.changes = {when: old for when, old in changes.items() if when < total} | {
            total: weights
        }

    def handed_out(self) -> dict[str, Any]:
        """A state some rows ago, as the loader draws ahead."""
        return self.states[max(0, len(self.states) - self.rng.choice([1, 1, 2, 5, 9]))]

    def kill(self) -> None:
        state = self.samplers[0]._with_changes(self.handed_out())
        simulation, at = self.simulation, state["drawn"]
        if at in simulation.seen:
            simulation.place = replace(simulation.seen[at], epoch=state["epoch"], consumed=state["consumed"])
        simulation.changes = {when: weights for when, weights in simulation.changes.items() if when >= at}
        if self.rng.random() < 0.3:
            self.change_sources()
        self.start(self.rng.choice([1, 2, 3, 4]), through_json(state))

    def change_sources(self) -> None:
        kept = self.rng.sample(list(self.lengths), self.rng.randint(1, len(self.lengths)))
        new = [name for name in self.rng.sample("abcdefghij", 2) if name not in self.lengths]
        self.lengths = {name: self.known[name] for name in [*new, *kept]}
        before, self.given = self.given, self.random_weights()
        simulation = self.simulation
        simulation.names, simulation.given = list(self.lengths), self.given
        if before == self.given:
            return
        simulation.changes = {}
        simulation.place = replace(simulation.place, were_set=False)
        simulation.set_weights(self.given)
        simulation.seen.clear()

    def leave(self) -> None:
        """The training loop is left; the samples that were drawn ahead were not handed out."""
        if len(self.states) < 2:
            return
        state, simulation = self.handed_out(), self.simulation
        for sampler in self.samplers:
            sampler._delivered = state
            sampler._rewind()
            sampler._start_epoch()
        later = [when for when in simulation.changes if when >= state["drawn"]]
        place = simulation.seen[state["drawn"]]
        simulation.place = replace(place, epoch=self.samplers[0].epoch, consumed=0)
        weights = simulation.changes[max(later)] if later else place.weights
        simulation.set_weights(weights)
        simulation.place = replace(simulation.place, were_set=place.were_set or bool(later))
        simulation.changes, simulation.seen = {}, {place.total: simulation.place}
        self.begin_iteration()


def check_histories(seeds: range) -> None:
    orders: dict[Any, list[int]] = {}
    for seed in seeds:
        try:
            History(seed, orders).run(12)
        except Exception as error:
            error.add_note(f"history {seed}")
            raise


def test_random_histories_give_the_samples_of_the_simulation() -> None:
    check_histories(range(100))


@pytest.mark.stress
def test_ten_thousand_random_histories_give_the_samples_of_the_simulation() -> None:
    check_histories(range(10_000))
