"""Measurements without one of the two sides: a device without an accelerator, and a loader without data.

MLPerf Storage measures a loader in this way: a sleep takes the place of the model (0.224 s for a batch of
400, or 1,785.7 images/s, is its H100), so a machine without an accelerator shows how many it could feed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["SimulatedDevice", "SimulatedStep", "SyntheticLoader"]


class SimulatedDevice:
    """A device that computes `rate` samples a second, one batch after the other.

    As with a real device, the trainer fetches the next batch during the current one. A batch begins at the
    end of the previous one or at its own hand-over, whichever is later, on one absolute clock: a sleep that
    ends late delays nothing, so errors do not add up. The time between two batches is idle time.

    Args:
        rate: samples a second.
        now, sleep: a clock in seconds, and its way to wait.

    Attributes:
        busy, idle: seconds since the first hand-over.
    """

    def __init__(
        self,
        rate: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if rate <= 0:
            raise ValueError(f"a simulated device needs a rate above 0 samples/s, found {rate}")
        self.rate = rate
        self.busy = self.idle = 0.0
        self._now = now
        self._sleep = sleep
        self._free_at: float | None = None

    def run(self, samples: int) -> None:
        """Hand over a batch; returns when the device has begun it, and can take another one."""
        start = self._now()
        if self._free_at is not None:
            self.idle += max(0.0, start - self._free_at)
            start = max(start, self._free_at)
            self._wait_until(self._free_at)
        self.busy += samples / self.rate
        self._free_at = start + samples / self.rate

    def synchronize(self) -> float:
        """Wait until all batches are computed; returns that time, on the device's clock."""
        if self._free_at is None:
            return self._now()
        self._wait_until(self._free_at)
        return self._free_at

    def _wait_until(self, moment: float) -> None:
        while (left := moment - self._now()) > 0:
            self._sleep(left)


class SimulatedStep:
    """A Step that computes nothing: each rank has one simulated device."""

    rate = 0.0  # of learning

    def __init__(self, rate: float) -> None:
        self.device = SimulatedDevice(rate)
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        self.checksum = ""

    def begin(self, number: int, samples: int, factor: float) -> None:
        pass

    def add(self, inputs: Any, targets: Any, share: float, last: bool) -> None:
        self.device.run(len(targets))

    def update(self) -> None:
        pass

    def synchronize(self) -> float:
        return self.device.synchronize()

    def traffic(self) -> dict[str, float]:
        return {}

    def gather_communication(self) -> list[Any]:
        return []

    def load_communication(self, states: list[Any]) -> None:
        pass

    def prepare_norms(self, recent: list[Any]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class SyntheticLoader:
    """--synthetic: the first batch stays on the device and serves as every batch: no loader is faster."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batch: Any = None
        self.sampler = loader.sampler
        self.batch_size = loader.batch_size

    def __iter__(self) -> Iterator[Any]:
        if self._batch is None:
            self._batch = next(iter(self._loader))
        left = len(self.sampler)
        while left > 0:
            yield [part[:left] for part in self._batch]
            left -= self.batch_size

    def stats(self) -> dict[str, Any]:
        return {"verdict": "no loader: one batch stays on the device", "counters": {}}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise SystemExit("--synthetic is only a measurement: give another --out, without a checkpoint")
