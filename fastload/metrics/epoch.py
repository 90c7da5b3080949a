"""The epoch of a loader: its counters, its rates and its idle cores."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastload.metrics.cores import Cores
from fastload.metrics.counters import Counters

__all__ = ["Meter", "rates"]

_IDLE_INTERVAL = 0.5  # seconds


@dataclass
class _Epoch:
    """The beginning of an epoch, and the idle cores since then.

    Attributes:
        before: the counters then.
        began: the time.
        busy: what the cores had worked.
        idle: when the idle cores were measured last, and their number.
        idle_at_end: their number when the epoch was over.
    """

    before: dict[str, float]
    began: float
    busy: float
    idle: tuple[float, float] = (-math.inf, 0.0)
    idle_at_end: float | None = None


class Meter:
    """Measures the current epoch, or the last one: its time, and its part of a loader's counters.

    The iterator reports when the epoch begins and ends, and when a batch is asked for and handed over. The
    time between `stop` and the next `start` (a validation, a checkpoint) belongs to no epoch. Any thread may
    ask for the counters and rates meanwhile.

    Attributes:
        tick: called with every batch, and about twice a second while the consumer waits for one.
        workers: processes that make batches; 0: the trainer's process does.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._cores: Cores | None = None
        self.tick: Callable[[], None] | None = None
        self.workers = 0
        self._epoch = _Epoch({}, 0.0, 0.0)
        self._handed = self._until = 0.0
        self._first = True

    def start(self, workers: int) -> None:
        """An epoch begins, with this number of workers."""
        self._cores = self._cores or Cores()
        self.workers = workers
        now = self._handed = self._until = time.perf_counter()
        # In one step: another thread sees the old epoch or the new one, and no part of each.
        self._epoch = _Epoch(self._counters.as_dict(), now, self._cores.busy_seconds())
        self._first = True

    def asked(self) -> None:
        """The consumer asks for a batch."""
        if not self._first:
            self._counters.add("consumer.seconds", time.perf_counter() - self._handed)

    def waited(self, seconds: float) -> None:
        """The consumer has waited. The workers' counters have grown meanwhile, so the rates are up to now."""
        self._counters.add("wait.seconds", seconds)
        self._until = time.perf_counter()

    def handed_over(self) -> None:
        """The consumer gets a batch."""
        self._handed = self._until = time.perf_counter()
        self._counters.add("wait.batches")
        if self._first:
            self._first = False
            waited = self._counters["wait.seconds"] - self._epoch.before.get("wait.seconds", 0)
            self._counters.add("wait.first_seconds", waited)
        if self.tick is not None:
            self.tick()

    def stop(self) -> None:
        """The epoch is over."""
        self._epoch.idle_at_end = self._measure_idle_cores(self._epoch)

    def counters(self) -> dict[str, float]:
        """This epoch's part of the loader's counters."""
        return self._since(self._epoch)

    def gauges(self) -> dict[str, float]:
        """The rates of this epoch, from its beginning to its latest batch or wait (see `rates`), and:

        workers          processes that make batches (0: the trainer's process does)
        node.cores       cores that this process may use, by its affinity and control group
        node.idle_cores  the idle ones of these, as a mean over the epoch
        """
        epoch = self._epoch
        cores = self._cores.usable if self._cores is not None else 0.0
        node = {"workers": self.workers, "node.cores": cores, "node.idle_cores": self._idle(epoch)}
        # Before the first wait has ended, workers may have counted already.
        until = self._until if self._until > epoch.began else time.perf_counter()
        return rates(self._since(epoch), until - epoch.began) | node

    def _since(self, epoch: _Epoch) -> dict[str, float]:
        return {name: value - epoch.before.get(name, 0) for name, value in self._counters.as_dict().items()}

    def _idle(self, epoch: _Epoch) -> float:
        """The mean over the epoch, measured at most twice a second: with many cores it takes milliseconds."""
        if epoch.idle_at_end is not None:
            return epoch.idle_at_end
        now, (measured, idle) = time.perf_counter(), epoch.idle
        if now - measured >= _IDLE_INTERVAL:
            idle = self._measure_idle_cores(epoch)
            epoch.idle = now, idle
        return idle

    def _measure_idle_cores(self, epoch: _Epoch) -> float:
        if self._cores is None:
            return 0.0
        elapsed = time.perf_counter() - epoch.began
        busy = (self._cores.busy_seconds() - epoch.busy) / max(elapsed, 1e-3)
        return max(0.0, self._cores.usable - busy)


_WORKER_STAGES = ("get", "cache", "decode", "collate")


def rates(counters: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The rates of some counters over `seconds`, as flat numbers for TensorBoard or Prometheus.

    <stage>.samples_per_second, <stage>.bytes_per_second   for every stage that counts them
    loader.samples_per_second, loader.batches_per_second   handed to the consumer
    get.share, cache.share, decode.share, collate.share, idle.share     of the workers' time
    wait.share, consumer.share                             of `seconds`, in the trainer's process
    cache.hit_share                                        of the cache's lookups
    device.idle_share                                      of the device's measured time
    """
    seconds = max(seconds, 1e-9)

    def share(part: float, whole: float) -> float:
        return part / whole if whole > 0 else 0.0

    found = {
        f"{name}_per_second": value / seconds
        for name, value in counters.items()
        if name.endswith((".samples", ".bytes"))
    }

    def get(name: str) -> float:
        return counters.get(name, 0.0)

    batches = get("wait.batches")
    found["loader.batches_per_second"] = batches / seconds
    per_batch = share(get("collate.samples"), get("collate.batches"))
    found["loader.samples_per_second"] = batches * per_batch / seconds
    stages = (*_WORKER_STAGES, "idle")
    busy = sum(get(f"{stage}.seconds") for stage in stages)
    found |= {f"{stage}.share": share(get(f"{stage}.seconds"), busy) for stage in stages}
    found |= {f"{stage}.share": get(f"{stage}.seconds") / seconds for stage in ("wait", "consumer")}
    found["cache.hit_share"] = share(get("cache.hits"), get("cache.hits") + get("cache.misses"))
    if get("device.seconds"):
        found["device.idle_share"] = share(get("device.idle.seconds"), get("device.seconds"))
    return found
