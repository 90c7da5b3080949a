"""The schedules of a run: learning rate and resolution; and the division of a global batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["DECAYS", "Batches", "LearningRate", "resolutions"]

# Each maps the finished share of the run after the warm-up (0 to 1) to a factor of the peak.
DECAYS = {
    "polynomial": lambda t, power: (1 - t) ** power,
    "cosine": lambda t, power: 0.5 * (1 + math.cos(math.pi * t)),
    # A cosine times a falling line: it spends longer at small rates than the cosine (Bello et al. 2017).
    "linear-cosine": lambda t, power: (1 - t) * 0.5 * (1 + math.cos(math.pi * t)) + 0.001,
    "constant": lambda t, power: 1.0,
}


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then a decay to the end of the run.

    Attributes:
        peak: after the warm-up.
        warmup: steps; the first has peak / warmup, the last of them peak.
        total: steps of the whole run.
        decay: a name in DECAYS.
        power: of "polynomial".
    """

    peak: float
    warmup: int
    total: int
    decay: str = "cosine"
    power: float = 2.0

    def at(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        over = (step - self.warmup) / max(1, self.total - self.warmup)
        return self.peak * DECAYS[self.decay](min(1.0, over), self.power)


@dataclass(frozen=True)
class Batches:
    """The division of a global batch among ranks and backward passes.

    Attributes:
        of_all: samples of one update of the weights, all ranks together.
        ranks: the number of ranks.
        micro: samples of one forward and backward pass of a rank.
    """

    of_all: int
    ranks: int
    micro: int

    @property
    def per_rank(self) -> int:
        """Samples of one update, of each rank."""
        return self.of_all // self.ranks

    @property
    def passes(self) -> int:
        """Forward and backward passes of one update, the gradients summed up between them."""
        return self.per_rank // self.micro

    @classmethod
    def split(cls, of_all: int, ranks: int, limit: int) -> Batches:
        """The fewest passes of equal size, and of at most `limit` samples.

        A global batch has the same samples on any number of ranks that divides it, so a resumed run sees no
        difference.

        Raises:
            SystemExit: the number of ranks does not divide the batch, or passes would be less than half full.
        """
        if of_all % ranks:
            raise SystemExit(
                f"{ranks} ranks cannot share a global batch of {of_all} evenly: "
                f"use a number of ranks that divides it or, for a new run, "
                f"--global-batch {of_all - of_all % ranks or ranks}"
            )
        share = of_all // ranks
        passes = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= limit)
        if 2 * (share // passes) < min(limit, share):
            fitting = [size * ranks for size in (share - share % limit, share - share % limit + limit)]
            raise SystemExit(
                f"the {share:,} samples of a rank divide only into passes of {share // passes:,}, where "
                f"--batch-size allows {limit:,}: give a --global-batch of {fitting[0]:,} or {fitting[1]:,}, "
                "or another --batch-size"
            )
        return cls(of_all, ranks, share // passes)


def resolutions(text: str) -> dict[int, int]:
    """ "0:128,18:224,30:288" -> {0: 128, 18: 224, 30: 288}, first epoch -> pixels; "224" -> {0: 224}.

    Raises:
        ValueError: the text has neither form.
    """
    if ":" not in text:
        return {0: int(text)}
    pairs = [part.split(":") for part in text.split(",")]
    sizes = {int(epoch): int(size) for epoch, size in pairs}
    if 0 not in sizes or min(sizes) < 0:
        raise ValueError(f"resolutions must begin with epoch 0, found {text!r}")
    return sizes
