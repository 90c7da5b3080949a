"""A training without a model: it iterates, saves states, resumes, and notes by itself what it was handed.

Its notes are the museum's own oracle. They are made of the samples themselves, which name their index or key
and one random number each, and of nothing that fastload says about them.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

SAMPLES, BATCH = 24, 4  # 6 steps in an epoch of one rank


class Numbered(Dataset[Any]):
    """Sample i says that it is `first` + i, and which random number it drew."""

    def __init__(self, length: int = SAMPLES, first: int = 0) -> None:
        self.length = length
        self.first = first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.first + index, int(torch.randint(1 << 31, ()))])


class Leg(NamedTuple):
    """One rank's part of a run, from a start or resume to the next stop.

    Attributes:
        number: how often the run was resumed before.
        log: for `sample_log=`.
    """

    number: int
    rank: int
    ranks: int
    log: Path

    @property
    def data(self) -> Path:
        """Where the files of this run are."""
        return self.log.with_name("data")


class Stop(NamedTuple):
    """Where all ranks save their states and end; others resume.

    Attributes:
        epoch, step: the first batch that the next leg is due.
        ranks: of the next leg; None: as before.
    """

    epoch: int
    step: int
    ranks: int | None = None


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        loader: makes the loader of a rank, with `sample_log=leg.log`.
        epochs: how many.
        stops: where it is interrupted.
        ranks: at its start.
        before_epoch: called with the loader and the epoch, where the run begins or resumes it.
        after_step: called with the loader, the epoch and the step.
        setting: what is different around the loader, as a context; it gets the number of the leg.
    """

    loader: Callable[[Leg], Any]
    epochs: int = 2
    stops: tuple[Stop, ...] = ()
    ranks: int = 1
    before_epoch: Callable[[Any, int], None] | None = None
    after_step: Callable[[Any, int, int], None] | None = None
    setting: Callable[[int], Any] | None = None


class Difference(NamedTuple):
    """Where two runs were handed different samples for the first time."""

    epoch: int
    step: int


@dataclass
class Run:
    """What came of a plan.

    Attributes:
        log: the directory of sample logs.
        states: the last state of each rank, as JSON gives it back.
        at_stops: the states at each stop, each with where it was saved.
        left: states that nobody resumed from, because the next leg had another number of ranks.
        seen: (epoch, step) -> rank -> its rows.
    """

    log: Path
    states: list[dict[str, Any]] = field(default_factory=list)
    at_stops: list[tuple[Stop, list[dict[str, Any]]]] = field(default_factory=list)
    left: list[dict[str, Any]] = field(default_factory=list)
    seen: dict[tuple[int, int], dict[int, list[Any]]] = field(default_factory=dict)

    def step(self, epoch: int, step: int) -> Counter[Any]:
        """The rows of a step over all ranks, in no order."""
        return Counter(row for rows in self.seen.get((epoch, step), {}).values() for row in rows)


def first_difference(one: Run, other: Run) -> Difference | None:
    """By what was handed out; the ranks of a step count together."""
    for place in sorted(one.seen.keys() | other.seen.keys()):
        if one.step(*place) != other.step(*place):
            return Difference(*place)
    return None


def train(plan: Plan, folder: Path) -> Run:
    """Run a plan. The ranks of a leg run one after the other: they have only their loaders in common."""
    run = Run(folder / "log")
    ranks = plan.ranks
    ends: list[Stop] = [*plan.stops, Stop(plan.epochs, 0)]
    begin = Stop(0, 0)
    for number, end in enumerate(ends):
        states = []
        for rank in range(ranks):
            leg = Leg(number, rank, ranks, run.log)
            if plan.setting is None:
                states.append(_train_rank(plan, leg, begin, end, run))
            else:
                with plan.setting(number):
                    states.append(_train_rank(plan, leg, begin, end, run))
        run.states = states
        run.at_stops.append((end, states))
        if end.ranks not in (None, ranks):
            run.left += states[1:]
        ranks = end.ranks or ranks
        begin = end
    return run


def _train_rank(plan: Plan, leg: Leg, begin: Stop, end: Stop, run: Run) -> dict[str, Any]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):  # as a script does, on every rank
        seed(leg.rank)
    loader = plan.loader(leg)
    if run.states:
        own = leg.rank if len(run.states) == leg.ranks else 0
        loader.load_state_dict(run.states[own])
    epoch, step = begin.epoch, begin.step
    while epoch < end.epoch or (epoch == end.epoch and step < end.step):
        if plan.before_epoch is not None:
            plan.before_epoch(loader, epoch)
        batches = iter(loader)
        while (epoch, step) != end[:2]:
            batch = next(batches, None)
            if batch is None:
                epoch, step = epoch + 1, 0
                break
            run.seen.setdefault((epoch, step), {}).setdefault(leg.rank, []).extend(_rows(batch))
            if plan.after_step is not None:
                plan.after_step(loader, epoch, step)
            step += 1
    return json.loads(json.dumps(loader.state_dict()))  # type: ignore[no-any-return]


def _rows(batch: Any) -> list[Any]:
    """The samples of a batch, as values that can be compared."""
    if isinstance(batch, torch.Tensor):
        return [row.numpy().tobytes() for row in batch]
    parts = batch.values() if isinstance(batch, dict) else batch
    return list(zip(*map(_rows, parts), strict=True))


def replaced(plan: Plan, **changes: Any) -> Plan:
    """This plan with other fields."""
    return dataclasses.replace(plan, **changes)
