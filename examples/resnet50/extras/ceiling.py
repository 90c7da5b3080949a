"""Utilisation of the devices: the rate of a run against that of the same step without a loader."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from extras.simulate import SimulatedStep
from step import Meter, Step

__all__ = ["Ceiling", "Ceilings", "limit", "measure", "utilisation"]

ENOUGH = 0.99  # utilisation from which on the device is the limit


def utilisation(samples: float, rate: float, seconds: float) -> float:
    """MLPerf Storage's accelerator utilisation, 0 to 1: total compute time / total running time.

    Args:
        samples: of one accelerator, without its first step.
        rate: its samples/s on data that is already on the device.
        seconds: from the end of the first step to the end of the last one.
    """
    return min(1.0, samples / rate / seconds) if seconds > 0 else 0.0


def limit(used: float, waited: float, stats: dict[str, Any]) -> str:
    """The limit of the run.

    Args:
        used: utilisation.
        waited: the share of time that the rank with the longest wait was without a batch; it stalls all.
        stats: of that rank's loader, with its own limit.
    """
    if used >= ENOUGH:
        return "the device"
    # The loader's own limit is the consumer where only the first batch of an epoch was late.
    if waited >= (1 - used) / 2 and stats.get("limit") != "consumer":
        return f"the loader: {stats['verdict']}"
    return f"this process and its cores: it waited for data {waited:.1%} of the time"


@dataclass(frozen=True)
class Ceiling:
    """The rates of this rank without a loader, on one batch that stays on the device.

    Attributes:
        rate: samples/s of one rank, with all ranks in step.
        exposed: seconds per update that the exchange of gradients adds.
        bare: seconds of the same exchange alone, in one message.
    """

    rate: float
    exposed: float = 0.0
    bare: float = 0.0

    @property
    def overlap(self) -> float | None:
        """The share of the exchange that overlaps with the backward pass."""
        return max(0.0, 1 - self.exposed / self.bare) if self.bare else None


class Ceilings:
    """Adds the utilisation to the line of an epoch.

    The ceiling is measured at the end of the first epoch with a new shape of a batch or a new sparsity of the
    gradients, with its last full batch. It takes time, which counts in the "time to target".

    Args:
        passes: forward and backward passes in a measurement, but at least one update.
    """

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self._known: dict[Any, Ceiling] = {}

    def __call__(self, run: Any, meter: Meter) -> dict[str, Any]:
        """The columns for the report of a Run of train.py; all ranks call it."""
        ceiling = self._ceiling(run)
        samples, seconds = meter.after_first
        [used] = run.ranks.sums(utilisation(samples, ceiling.rate, seconds) / run.ranks.size)
        stats = {name: run.loader.stats().get(name) for name in ("verdict", "limit")}
        waits = run.ranks.gather((meter.waited / max(seconds, 1e-9), stats))
        columns = {
            "ceiling per GPU": round(ceiling.rate, 1),
            "utilisation": round(used, 4),
            "limit": limit(used, *max(waits, key=lambda wait: wait[0])),
        }
        if run.ranks.size > 1:
            columns["communication"] = {
                "exposed ms": round(ceiling.exposed * 1000, 3),
                "alone ms": round(ceiling.bare * 1000, 3),
                "overlap": None if ceiling.overlap is None else round(ceiling.overlap, 3),
            }
        return columns

    def _ceiling(self, run: Any) -> Ceiling:
        if isinstance(run.step, SimulatedStep):
            return Ceiling(run.step.device.rate)
        inputs, targets = run.full
        key = run.batch, tuple(targets.shape), getattr(inputs, "shape", None), sparsity(run.step)
        if key not in self._known:
            passes = run.batch.passes
            updates = max(1, self._passes // passes)
            self._known[key] = measure(run.step, inputs, targets, passes, updates)
        return self._known[key]


def sparsity(step: Step) -> float:
    """The share of the gradients that the last update did not send."""
    return getattr(step.communication, "sparsity", 0.0)


def measure(step: Step, inputs: Any, targets: Any, passes: int, updates: int) -> Ceiling:
    """The ceiling of this rank with this batch, at the position of the last update; the state stays."""
    talk, ranks = step.communication, step.ranks
    kept = copy.deepcopy((step.state_dict(), talk.state_dict() if talk is not None else None))
    loss_sum, (number, samples) = step.loss_sum.clone(), step.begun

    def seconds(talking: bool) -> float:
        for update in range(-2 if passes == 1 else -1, updates):  # the first ones are not measured
            if update == 0:
                start = step.synchronize()
            step.begin(number, samples, 0.0)
            for index in range(passes):
                step.add(inputs, targets, 1 / passes, last=talking and index == passes - 1)
            step.update()
        return ranks.maxima((step.synchronize() - start) / updates)[0]

    together = seconds(True)
    alone = seconds(False) if ranks.size > 1 else together
    bare = _bare_exchange(step, updates) if talk is not None else 0.0
    step.load_state_dict(kept[0])
    if talk is not None:
        talk.load_state_dict(kept[1])
    step.loss_sum.copy_(loss_sum)
    return Ceiling(len(targets) * passes / together, max(0.0, together - alone), bare)


def _bare_exchange(step: Step, updates: int) -> float:
    """Seconds of the exchange of all gradients of an update, in its own form, without a backward pass."""
    bucket = _AllGradients(step)
    for update in range(-1, updates):
        if update == 0:
            start = step.synchronize()
        step.communication.begin(step.begun[1])
        bucket.fill()
        step.communication.average(bucket).wait()
    return step.ranks.maxima((step.synchronize() - start) / updates)[0]


class _AllGradients:
    """One bucket with random gradients of all weights, for a communication hook."""

    def __init__(self, step: Step) -> None:
        self._weights = [weight for weight in step.module.parameters() if weight.requires_grad]
        sizes = [weight.numel() for weight in self._weights]
        self._random = torch.randn(sum(sizes), device=step.ranks.device)
        self._buffer = torch.empty_like(self._random)
        self._gradients = list(self._buffer.split(sizes))

    def fill(self) -> None:
        self._buffer.copy_(self._random)

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def parameters(self) -> list[Any]:
        return self._weights

    def is_last(self) -> bool:
        return True
