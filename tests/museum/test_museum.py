"""The museum: `fastload.prove` finds thirty real bugs of other loaders at the first wrong step.

Where that step is, each exhibit says from its fault, and what the trainer was handed confirms it.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from tests.museum import samples
from tests.museum.exhibits import EXHIBITS, Exhibit
from tests.museum.loaders import make_loader
from tests.museum.orders import Epochs
from tests.museum.training import Numbered, Plan, Run, first_difference, train

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module")
def rooms() -> dict[Plan, Run]:
    """Plan -> its run. Many exhibits have a healthy run in common."""
    return {}


def run_of(plan: Plan, rooms: dict[Plan, Run], tmp_path: Path) -> Run:
    if plan not in rooms:
        rooms[plan] = train(plan, tmp_path / str(len(rooms)))
    return rooms[plan]


@pytest.fixture(params=EXHIBITS, ids=lambda exhibit: exhibit.name.replace(" ", "_"))
def exhibit(request: pytest.FixtureRequest) -> Exhibit:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def healthy(exhibit: Exhibit, rooms: dict[Plan, Run], tmp_path: Path) -> Run:
    return run_of(exhibit.healthy, rooms, tmp_path)


@pytest.fixture
def faulty(exhibit: Exhibit, rooms: dict[Plan, Run], tmp_path: Path) -> Run:
    return run_of(exhibit.faulty, rooms, tmp_path)


def test_museum_has_thirty_exhibits() -> None:
    assert len(EXHIBITS) == len({one.name for one in EXHIBITS}) == 30


def test_fault_shows_in_what_was_handed_out(exhibit: Exhibit, healthy: Run, faulty: Run) -> None:
    assert first_difference(healthy, faulty) == exhibit.first


def test_logs_name_the_first_wrong_step(exhibit: Exhibit, healthy: Run, faulty: Run) -> None:
    proof = fastload.prove(healthy.log, faulty.log)

    assert not proof
    assert (proof.epoch, proof.step) == exhibit.first
    if exhibit.rank is not None and proof.rank is not None:
        assert proof.rank == exhibit.rank


def test_states_show_where_it_differs(exhibit: Exhibit, healthy: Run, faulty: Run) -> None:
    proof = fastload.prove(healthy.states, faulty.states)

    assert not proof
    first, last = range_of(proof)
    assert first <= exhibit.first <= last


# --- what it cannot see, as docs/how-to/prove.md says


class AnotherSample(Numbered):
    """Gives other samples than it is asked for."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(self.length - 1 - index)


class OwnGenerator(Numbered):
    """Draws from a generator that nobody seeds."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.SystemRandom().randrange(1 << 31)])


def collate_backwards(samples: list[Any]) -> Any:
    return torch.stack(samples[::-1])


def of(dataset: Any, **options: Any) -> Plan:
    return Plan(lambda leg: make_loader(leg, dataset(leg), sampler=Epochs(), **options), epochs=1)


PLAIN = of(lambda leg: Numbered())
UNSEEN = {
    "another sample": (PLAIN, of(lambda leg: AnotherSample())),
    "own generator": (PLAIN, of(lambda leg: OwnGenerator())),
    "collate_fn": (PLAIN, of(lambda leg: Numbered(), collate_fn=collate_backwards)),
    "batch_transform": (PLAIN, of(lambda leg: Numbered(), batch_transform=torch.zeros_like)),
    "same size and time": (
        of(lambda leg: samples.as_listed(samples.write_objects(leg.data))),
        of(lambda leg: samples.as_listed(samples.write_other_objects(leg.data))),
    ),
}


@pytest.mark.parametrize("plans", UNSEEN.values(), ids=UNSEEN)
def test_what_the_page_says_is_not_seen_is_not_seen(plans: tuple[Plan, Plan], tmp_path: Path) -> None:
    one, other = (train(plan, tmp_path / str(number)) for number, plan in enumerate(plans))

    assert one.seen != other.seen
    assert fastload.prove(one.log, other.log)


def range_of(proof: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first and the last (epoch, step) that a proof from states allows for the first difference."""
    if proof.step is not None:
        return (proof.epoch, proof.step), (proof.epoch, proof.step)
    steps = re.search(r"one of the steps (\d+) to (\d+) of epoch (\d+)", proof.why)
    if steps is not None:
        first, last, epoch = map(int, steps.groups())
        return (epoch, first), (epoch, last)
    epochs = re.search(r"one of the epochs (\d+) to (\d+)", proof.why)
    found = (proof.epoch, proof.epoch) if epochs is None else tuple(map(int, epochs.groups()))
    return (found[0], 0), (found[1], 1 << 32)
