"""A number over all that a loader has handed out, and how it came about: enough to compare two runs.

    sum of a step     the sums of its rows' witnesses, as the process that made the batch gave them
    digest            over all steps: sum of the step * a number of (epoch, step), in each of four lanes

All is modulo 2**64. Adding has no order, so the rows of a step may be dealt to any number of ranks and
workers, and the digests of all ranks add up to that of one. The product says in which step a row stood.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastload.distributed import find_rank
from fastload.images.rng import sample_seed
from fastload.workers.witness import LANES, Witness

__all__ = ["Digest", "EpochSums", "find_part"]

_MASK = (1 << 64) - 1
_SALT = 0x5A17  # so that the numbers of steps are not those of samples
_TRAIL = 512  # partial sums kept of the epoch that runs
_EPOCHS = 64  # sums kept of past epochs
_TRAIL_MASK = (1 << 32) - 1
_PLAIN = ("rank", "world_size", "steps", "samples", "every", "next_step", "batch", "whole")  # in a state


@dataclass
class EpochSums:
    """The sums of an epoch; where a run has many, of several that follow each other.

    Attributes:
        epoch: the first one.
        steps, samples: handed out.
        ordered: with the step in which each sample stood.
        unordered: without it, for runs whose steps have other numbers of samples.
    """

    epoch: int
    steps: int = 0
    samples: int = 0
    ordered: int = 0
    unordered: int = 0

    def add(self, other: EpochSums) -> None:
        """Take in the sums of later epochs, or of another rank."""
        self.steps += other.steps
        self.samples += other.samples
        self.ordered = (self.ordered + other.ordered) & _MASK
        self.unordered = (self.unordered + other.unordered) & _MASK


@dataclass
class Digest:
    """The digest of one loader's run, over its epochs and resumes.

    Attributes:
        rank, world_size: whose part of the samples this is.
        steps, samples: handed out since the run began.
        sums: of all of them.
        epochs: the last of these runs, or is over.
        every, trail: of the last epoch, the lower half of `ordered` over its first `every` steps, over twice
            as many, and so on.
        next_step: of the last epoch.
        batch: the most samples that a step had.
        whole: False after a resume from a state that had no digest.
    """

    rank: int = 0
    world_size: int = 1
    steps: int = 0
    samples: int = 0
    sums: tuple[int, ...] = (0,) * LANES
    epochs: list[EpochSums] = field(default_factory=list)
    every: int = 1
    trail: list[int] = field(default_factory=list)
    next_step: int = 0
    batch: int = 0
    whole: bool = True

    def value(self) -> bytes:
        """The digest, 32 bytes."""
        return struct.pack(f"<{LANES}Q", *self.sums)

    def add(self, epoch: int, step: int, witness: Witness | None) -> None:
        """A step was handed out; without a witness where its error was raised."""
        if not self.epochs or self.epochs[-1].epoch != epoch:
            self._begin(epoch)
        current = self.epochs[-1]
        while (len(self.trail) + 1) * self.every <= step:
            self._mark(current.ordered)
        self.steps += 1
        current.steps += 1
        self.next_step = max(self.next_step, step + 1)
        if witness is None:
            return
        factor = sample_seed(_SALT, epoch, step) | 1
        placed = [factor * one & _MASK for one in witness.sums]
        self.sums = tuple([(a + b) & _MASK for a, b in zip(self.sums, placed, strict=True)])
        self.samples += witness.samples
        self.batch = max(self.batch, witness.samples)
        current.samples += witness.samples
        current.ordered = (current.ordered + placed[0]) & _MASK
        current.unordered = (current.unordered + witness.sums[0]) & _MASK

    def _begin(self, epoch: int) -> None:
        if len(self.epochs) >= _EPOCHS:
            for one, other in zip(self.epochs[::2], self.epochs[1::2], strict=False):
                one.add(other)
            self.epochs = self.epochs[::2]
        self.epochs.append(EpochSums(epoch))
        self.every, self.trail, self.next_step = 1, [], 0

    def _mark(self, partial: int) -> None:
        self.trail.append(partial & _TRAIL_MASK)
        if len(self.trail) == _TRAIL:
            self.trail, self.every = self.trail[1::2], self.every * 2

    # --- as a part of the loader's state

    def state(self) -> dict[str, Any]:
        """As JSON of at most 7 kilobytes."""
        packed = np.array(self.trail, "<u4").tobytes()
        return {name: getattr(self, name) for name in _PLAIN} | {
            "sums": [f"{one:016x}" for one in self.sums],
            "epochs": [
                [one.epoch, one.steps, one.samples, f"{one.ordered:016x}", f"{one.unordered:016x}"]
                for one in self.epochs
            ],
            "trail": base64.b64encode(packed).decode(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; {}: the state is of a version without it."""
        vars(self).update(vars(Digest.of(state) if state else Digest(whole=False)))

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Digest:
        """The digest that gave this state."""
        return cls(
            **{name: state[name] for name in _PLAIN},
            sums=tuple(int(one, 16) for one in state["sums"]),
            epochs=[
                EpochSums(epoch, steps, samples, int(ordered, 16), int(unordered, 16))
                for epoch, steps, samples, ordered, unordered in state["epochs"]
            ],
            trail=np.frombuffer(base64.b64decode(state["trail"]), "<u4").tolist(),
        )

    def partial_sums(self) -> dict[int, int]:
        """Steps of the last epoch -> the lower half of `ordered` over all before that one."""
        marks = {(number + 1) * self.every: mark for number, mark in enumerate(self.trail)}
        return marks | {self.next_step: self.epochs[-1].ordered & _TRAIL_MASK}


def find_part(loader: Any) -> tuple[int, int]:
    """(rank, number of ranks) whose samples the loader gives: of its sampler, else of this process."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers: Sequence[Any] = (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    for sampler in samplers:
        rank, replicas = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
        if isinstance(rank, int) and isinstance(replicas, int):
            return rank, replicas
    return find_rank()


def merged(digests: Sequence[Digest]) -> Digest:
    """The digest of all ranks together, from those of some ranks at the same step."""
    whole = Digest(steps=max(one.steps for one in digests))
    epochs: dict[int, EpochSums] = {}
    for one in digests:
        whole.samples += one.samples
        whole.batch += one.batch
        whole.sums = tuple((a + b) & _MASK for a, b in zip(whole.sums, one.sums, strict=True))
        for sums in one.epochs:
            steps = max(sums.steps, epochs.setdefault(sums.epoch, EpochSums(sums.epoch)).steps)
            epochs[sums.epoch].add(sums)
            epochs[sums.epoch].steps = steps
    whole.epochs = [epochs[epoch] for epoch in sorted(epochs)]
    whole.every = max(one.every for one in digests)
    whole.next_step = max(one.next_step for one in digests)
    whole.trail = _added_trails(digests, whole.every)
    return whole


def _added_trails(digests: Sequence[Digest], every: int) -> list[int]:
    trails = [one.trail[every // one.every - 1 :: every // one.every] for one in digests]
    return [sum(marks) & _TRAIL_MASK for marks in zip(*trails, strict=False)]
