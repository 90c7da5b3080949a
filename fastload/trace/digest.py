"""A number over all that a loader has delivered, and how it came about: enough to compare two runs.

    sum of a step     the sums of its rows' fingerprints, as the process that made the batch gave them
    digest            over all steps: sum of the step * a number of (epoch, step), in each of four lanes

All is modulo 2**64. Adding has no order, so the rows of a step may be dealt to any number of ranks and
workers, and the digests of all ranks add up to that of one. The product says in which step a row stood.
"""

from __future__ import annotations

import base64
import bisect
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fastload.distributed import find_rank
from fastload.images.rng import sample_seed
from fastload.order.samplers import Samplers
from fastload.order.state import DigestPart, DigestState
from fastload.workers.batch import LANES
from fastload.workers.protocol import Fingerprint

_MASK = (1 << 64) - 1
_SALT = 0x5A17  # so that the numbers of steps are not those of samples
_TRAIL = 512  # partial sums kept of the epoch that runs
_EPOCHS = 64  # sums kept of past epochs
_TRAIL_MASK = (1 << 32) - 1
_COUNTS = 1 << 62
_EARLIER = 10_000  # parts: kilobytes each
_SUM = re.compile(r"[0-9a-f]{16}")
_COUNTED = ("rank", "world_size", "steps", "samples", "every", "next_step", "batch")


@dataclass
class EpochSums:
    """The sums of an epoch; where a run has many, of several that follow each other.

    Attributes:
        epoch: the first one.
        steps, samples: delivered.
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
        steps, samples: delivered since the run began.
        sums: of all of them.
        epochs: the last of these runs, or is over.
        every, trail: of the last epoch, the lower half of `ordered` over its first `every` steps, over twice
            as many, and so on.
        next_step: of the last epoch.
        batch: the most samples that a step had.
        earlier: where the run had other ranks before: the parts that this rank was resumed from.
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
    earlier: list[DigestPart] = field(default_factory=list)

    def value(self) -> bytes:
        """Return the digest, 32 bytes."""
        mine = [Digest.of_part(part) for part in self.earlier if part.rank == self.rank]
        lanes = zip(self.sums, *[part.sums for part in mine], strict=True)
        return struct.pack(f"<{LANES}Q", *[sum(lane) & _MASK for lane in lanes])

    def add(self, epoch: int, step: int, fingerprint: Fingerprint | None) -> None:
        """Note that a step was delivered; without a fingerprint where its error was raised."""
        current = self._sums_of(epoch)
        if current is self.epochs[-1]:
            while (len(self.trail) + 1) * self.every <= step:
                self._mark(current.ordered)
            self.next_step = max(self.next_step, step + 1)
        self.steps += 1
        current.steps += 1
        if fingerprint is None:
            return
        factor = sample_seed(_SALT, epoch, step) | 1
        placed = [factor * lane & _MASK for lane in fingerprint.sums]
        self.sums = tuple([(a + b) & _MASK for a, b in zip(self.sums, placed, strict=True)])
        self.samples += fingerprint.samples
        self.batch = max(self.batch, fingerprint.samples)
        current.samples += fingerprint.samples
        current.ordered = (current.ordered + placed[0]) & _MASK
        current.unordered = (current.unordered + fingerprint.sums[0]) & _MASK

    def _sums_of(self, epoch: int) -> EpochSums:
        """Return the sums of an epoch, which begins where it has none. Iterations may take turns."""
        known = next((sums for sums in reversed(self.epochs) if sums.epoch == epoch), None)
        return self._begin(epoch) if known is None else known

    def _begin(self, epoch: int) -> EpochSums:
        if len(self.epochs) >= _EPOCHS:
            for sums, later in zip(self.epochs[::2], self.epochs[1::2], strict=False):
                sums.add(later)
            self.epochs = self.epochs[::2]
        begun = EpochSums(epoch)
        bisect.insort(self.epochs, begun, key=lambda sums: sums.epoch)
        if begun is self.epochs[-1]:
            self.every, self.trail, self.next_step = 1, [], 0
        return begun

    def _mark(self, partial: int) -> None:
        self.trail.append(partial & _TRAIL_MASK)
        if len(self.trail) == _TRAIL:
            self.trail, self.every = self.trail[1::2], self.every * 2

    # --- as a part of the loader's state

    def state(self) -> DigestState:
        """Return all of it: as JSON at most 7 kilobytes."""
        return DigestState(**vars(self._part()), earlier=self.earlier)

    def _part(self) -> DigestPart:
        """Return all of it but the earlier parts."""
        return DigestPart(
            **{name: getattr(self, name) for name in _COUNTED},
            sums=[f"{lane:016x}" for lane in self.sums],
            epochs=[
                (sums.epoch, sums.steps, sums.samples, f"{sums.ordered:016x}", f"{sums.unordered:016x}")
                for sums in self.epochs
            ],
            trail=base64.b64encode(np.array(self.trail, "<u4").tobytes()).decode(),
        )

    def load(self, loaded: Digest, rank: int, world_size: int) -> None:
        """Go on from another digest.

        The part of another rank, or of another number of ranks, is kept as it is, and this rank's begins.
        """
        if (loaded.rank, loaded.world_size) != (rank, world_size):
            loaded = loaded._handed_to(rank, world_size)
        vars(self).update(vars(loaded))

    def _handed_to(self, rank: int, world_size: int) -> Digest:
        if not self.steps:
            return replace(self, rank=rank, world_size=world_size)
        return Digest(
            rank=rank,
            world_size=world_size,
            steps=self.steps,
            epochs=[EpochSums(sums.epoch, sums.steps) for sums in self.epochs],
            every=self.every,
            trail=[0] * len(self.trail),
            next_step=self.next_step,
            earlier=[*self.earlier, self._part()],
        )

    @classmethod
    def of(cls, state: DigestState) -> Digest:
        """Return the digest that gave this state.

        Raises:
            ValueError: none did.
        """
        if len(state.earlier) > _EARLIER:
            raise ValueError(f"{len(state.earlier)} earlier parts of a digest")
        for part in state.earlier:
            cls.of_part(part)
        return replace(cls.of_part(state), earlier=list(state.earlier))

    @classmethod
    def of_part(cls, part: DigestPart) -> Digest:
        """Return the digest of one part, without earlier ones.

        Raises:
            ValueError: its numbers are such as no run leads to.
        """
        digest = cls(
            **{name: getattr(part, name) for name in _COUNTED},
            sums=tuple(map(_sum, part.sums)),
            epochs=[
                EpochSums(epoch, steps, samples, _sum(ordered), _sum(unordered))
                for epoch, steps, samples, ordered, unordered in part.epochs
            ],
            trail=np.frombuffer(base64.b64decode(part.trail), "<u4").tolist(),
        )
        digest._check()
        return digest

    def _check(self) -> None:
        """Raise ValueError for numbers that `add` never leads to, and `merged` relies on."""
        epochs = [sums.epoch for sums in self.epochs]
        counts = [getattr(self, name) for name in _COUNTED]
        counts += [number for sums in self.epochs for number in (sums.epoch, sums.steps, sums.samples)]
        if any(not 0 <= count < _COUNTS for count in counts):
            raise ValueError(f"counts {counts[:8]}")
        power = self.every > 0 and not self.every & (self.every - 1)
        if len(self.sums) != LANES or len(self.trail) >= _TRAIL or not power:
            raise ValueError(f"{len(self.sums)} sums, {len(self.trail)} partial ones of {self.every} steps")
        if bool(epochs) != bool(self.steps) or len(epochs) > _EPOCHS or sorted({*epochs}) != epochs:
            raise ValueError(f"{self.steps} steps in the epochs {epochs[:8]}")

    def partial_sums(self) -> dict[int, int]:
        """Return steps of the last epoch -> the lower half of `ordered` over all before that one."""
        marks = {(number + 1) * self.every: mark for number, mark in enumerate(self.trail)}
        return marks | {self.next_step: self.epochs[-1].ordered & _TRAIL_MASK}


def _sum(text: str) -> int:
    if not _SUM.fullmatch(text):
        raise ValueError(f"the sum {text!r} in a digest")
    return int(text, 16)


def find_part(loader: Any) -> tuple[int, int]:
    """Return (rank, number of ranks) whose samples the loader gives: of its sampler, else of this process."""
    samplers = Samplers.of(loader)
    rank, replicas = samplers.rank, samplers.replicas
    return (rank, replicas) if isinstance(rank, int) and isinstance(replicas, int) else find_rank()


def merged(groups: Iterable[Sequence[Digest]]) -> Digest:
    """Return the digest of all ranks together.

    Args:
        groups: the parts of the ranks that ran together, at one step; one group more for each other number of
            ranks that the run had before.
    """
    groups = [list(group) for group in groups]
    parts = [digest for group in groups for digest in group]
    epochs: dict[int, EpochSums] = {}
    for digest in parts:
        for sums in digest.epochs:
            known = epochs.setdefault(sums.epoch, EpochSums(sums.epoch))
            steps = max(sums.steps, known.steps)
            known.add(sums)
            known.steps = steps
    every = max(digest.every for digest in parts)
    return Digest(
        steps=max(digest.steps for digest in parts),
        samples=sum(digest.samples for digest in parts),
        sums=tuple([sum(lane) & _MASK for lane in zip(*[digest.sums for digest in parts], strict=True)]),
        epochs=[epochs[epoch] for epoch in sorted(epochs)],
        every=every,
        trail=_added_trails(parts, max(epochs), every),
        next_step=max(digest.next_step for digest in parts if digest.epochs[-1].epoch == max(epochs)),
        batch=max(sum(digest.batch for digest in group) for group in groups),
    )


def _added_trails(parts: list[Digest], epoch: int, every: int) -> list[int]:
    """Return the partial sums of an epoch. A part that ended within it has its whole sum from there on."""
    trails = []
    for digest in parts:
        marks = digest.trail[every // digest.every - 1 :: every // digest.every]
        trails.append((marks, digest.epochs[-1].ordered if digest.epochs[-1].epoch == epoch else 0))
    length = max(len(marks) for marks, _ in trails)
    return [
        sum(marks[number] if number < len(marks) else end for marks, end in trails) & _TRAIL_MASK
        for number in range(length)
    ]
