"""An accelerator that is not there: it takes as long as one would, and keeps its own clock.

MLPerf Storage measures a loader in this way: the model is replaced by a sleep (0.224 s for a batch of 400, or
1,785.7 images/s, is its H100), so that a machine without an accelerator tells how many it could feed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["SimulatedDevice"]


class SimulatedDevice:
    """A device that computes `rate` samples a second, one batch after the other.

    As with a real one, the trainer fetches the next batch while this one is computed. A batch begins when the
    one before has ended or when it is handed over, whichever is later, on one absolute clock: a sleep that
    ends late delays nothing, so no error adds up. What is between two batches is the device's idle time.

    Args:
        rate: samples a second.
        now, sleep: the clock, in seconds, and how to wait on it.

    Attributes:
        busy, idle: seconds since the first batch was handed over.
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
        """Hand over a batch; returns when the device has begun with it, and may be handed one more."""
        start = self._now()
        if self._free_at is not None:
            self.idle += max(0.0, start - self._free_at)
            start = max(start, self._free_at)
            self._wait_until(self._free_at)
        self.busy += samples / self.rate
        self._free_at = start + samples / self.rate

    def synchronize(self) -> float:
        """Wait until all is computed; returns when that was, on the device's clock."""
        if self._free_at is None:
            return self._now()
        self._wait_until(self._free_at)
        return self._free_at

    def _wait_until(self, moment: float) -> None:
        while (left := moment - self._now()) > 0:
            self._sleep(left)
