"""Per-stage counters, mergeable over processes; and the rates of an epoch.

A counter set is a flat dict of floats, `"stage.counter" -> value`, so that merging is addition, sending is
cheap, and TensorBoard or Prometheus can take it as it is. The stages and their counters:

    sampler  seconds (the trainer's process drew index batches)
    get      samples, bytes, seconds (this thread waited for the store), requests, retries, hedged, refreshed,
             ahead (samples asked for that had been announced before)
             alone (samples that a dataset asked for which wraps one of fastload's: not read ahead)
    cache    hits, misses, bytes, seconds, writes, write_bytes, dropped, corrupt, failures
    decode   samples, seconds (decode and transform, without the get and cache seconds spent inside)
    collate  samples (as many as were asked for), batches, seconds (the batch's copy into its slot too)
    idle     seconds (a worker had no batch to make, though the epoch had more), of which:
    slot     seconds (its finished batches waited for the consumer)
    wait     batches, seconds (the consumer waited for a batch), first_seconds (for the first of an epoch)
    consumer seconds (from one batch to the call for the next)
    decoder  batches, samples (that came encoded), seconds (the trainer's process fed the decoder and waited
             for it), fallbacks (batches that it gave up, and the kernel decoded), rebuilt
    copy     batches, bytes, seconds (on the copy stream, by its events), wait_seconds (the trainer's process
             waited for copies to end)
    device   seconds (of the device's own clock that were watched, by events), idle.seconds (of these, it had
             no batch to work on): "device.seconds" and "device.idle.seconds"
    bad      samples (skipped or replaced under `on_error`), bytes (of shards, that could not be read)
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from fastload.metrics.cores import Cores

__all__ = ["Counters", "Meter", "rates"]

# Replaced by `fastload.metrics.tracing`, where torch is loaded: this module does without.
profiler_range: Callable[[str], AbstractContextManager[object]] = nullcontext


class Counters:
    """Named sums. One instance belongs to one process; `drain` hands its content to another.

    Pickles as an empty set. Threads may share it.

    Args:
        parts: others of this process whose content `drain` takes too, and whose reading `timed` leaves out.
    """

    _all: ClassVar[weakref.WeakSet[Counters]] = weakref.WeakSet()

    def __init__(self, parts: Iterable[Counters] = ()) -> None:
        self._values: dict[str, float] = {}
        self._parts = tuple(parts)
        # Reentrant: garbage is collected at any moment, also within `add`, and an iterator counts as it ends.
        self._lock = threading.RLock()
        self._all.add(self)

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()

    def add(self, name: str, value: float = 1) -> None:
        """Add `value` to counter `name` ("stage.counter")."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + value

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """Add the seconds that the block takes to `<stage>.seconds`, but for those it spends in reading.

        A dataset may read in its `__getitem__`: the time is then the store's or the disk's, not decoding's.
        """
        return _Timed(self, stage)

    def reading_seconds(self) -> float:
        """Seconds spent in waiting for the store and in reading the cache, those of the parts too."""
        own = self._values.get("get.seconds", 0) + self._values.get("cache.seconds", 0)
        return own + sum(part.reading_seconds() for part in self._parts)

    def merge(self, other: Mapping[str, float]) -> None:
        """Add every counter of `other`."""
        for name, value in other.items():
            self.add(name, value)

    def drain(self) -> dict[str, float]:
        """Return the values, those of the parts added, and start again from nothing."""
        with self._lock:
            values, self._values = self._values, {}
        for part in self._parts:
            for name, value in part.drain().items():
                values[name] = values.get(name, 0) + value
        return values

    def __getitem__(self, name: str) -> float:
        return self._values.get(name, 0)

    def as_dict(self) -> dict[str, float]:
        """A copy of the values."""
        return dict(self._values)


def _forked() -> None:
    # A thread of the parent may have held a lock at the moment of the fork, and does not exist here. What was
    # counted is the parent's: each of its workers would report it once more.
    for counters in list(Counters._all):
        counters._lock = threading.RLock()
        counters._values = {}


os.register_at_fork(after_in_child=_forked)


class _Timed:
    """See `Counters.timed`. A class, as a generator would take three times as long."""

    __slots__ = ("_counters", "_range", "_reading", "_stage", "_start")

    def __init__(self, counters: Counters, stage: str) -> None:
        self._counters = counters
        self._stage = stage

    def __enter__(self) -> None:
        self._range = profiler_range(self._stage)
        self._range.__enter__()
        self._reading = self._counters.reading_seconds()
        self._start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        elapsed = time.perf_counter() - self._start
        reading = self._counters.reading_seconds() - self._reading
        # Threads of the dataset's own may have waited at the same time: in all for longer than it took.
        self._counters.add(f"{self._stage}.seconds", max(0.0, elapsed - reading))
        self._range.__exit__(*error)


class Meter:
    """The epoch that runs, or the last one: what it added to a loader's counters, and in what time.

    The iterator tells it when the epoch begins and ends, and when a batch is asked for and handed over.
    What happened between `stop` and the next `start` (a validation, a checkpoint) belongs to no epoch.

    Attributes:
        tick: called with every batch, and now and then while one is waited for.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._cores: Cores | None = None
        self.tick: Callable[[], None] | None = None
        self.workers = 0
        self._before: dict[str, float] = {}
        self._began = self._handed = self._busy = self._idle_cores = 0.0
        self._first = True

    def start(self, workers: int) -> None:
        """An epoch begins, with so many workers."""
        self._cores = self._cores or Cores()
        self.workers = workers
        self._before = self._counters.as_dict()
        self._began = self._handed = time.perf_counter()
        self._busy, self._idle_cores = self._cores.busy_seconds(), -1.0
        self._first = True

    def asked(self) -> None:
        """The consumer asks for a batch."""
        if not self._first:
            self._counters.add("consumer.seconds", time.perf_counter() - self._handed)

    def handed_over(self) -> None:
        """The consumer gets a batch."""
        self._handed = time.perf_counter()
        self._counters.add("wait.batches")
        if self._first:
            self._first = False
            waited = self._counters["wait.seconds"] - self._before.get("wait.seconds", 0)
            self._counters.add("wait.first_seconds", waited)
        if self.tick is not None:
            self.tick()

    def stop(self) -> None:
        """The epoch is over."""
        self._idle_cores = self._measure_idle_cores()

    def counters(self) -> dict[str, float]:
        """What this epoch added to the loader's counters."""
        return {name: value - self._before.get(name, 0) for name, value in self._counters.as_dict().items()}

    def gauges(self) -> dict[str, float]:
        """The rates of this epoch, from its beginning to its latest batch; see `rates`. And:

        workers          that make batches (0: the trainer's process does)
        node.cores       that this process may use, by its affinity and control group
        node.idle_cores  of these, as a mean over the epoch
        """
        idle = self._idle_cores if self._idle_cores >= 0 else self._measure_idle_cores()
        cores = self._cores.usable if self._cores is not None else 0.0
        node = {"workers": self.workers, "node.cores": cores, "node.idle_cores": idle}
        return rates(self.counters(), self._handed - self._began) | node

    def _measure_idle_cores(self) -> float:
        if self._cores is None:
            return 0.0
        elapsed = time.perf_counter() - self._began
        busy = (self._cores.busy_seconds() - self._busy) / max(elapsed, 1e-3)
        return max(0.0, self._cores.usable - busy)


_WORKER_STAGES = ("get", "cache", "decode", "collate")


def rates(counters: Mapping[str, float], seconds: float) -> dict[str, float]:
    """What `counters` are per second, as flat numbers for TensorBoard or Prometheus.

    <stage>.samples_per_second, <stage>.bytes_per_second   for every stage that counts them
    loader.samples_per_second, loader.batches_per_second   handed to the consumer
    get.share, cache.share, decode.share, collate.share, idle.share     of the workers' time
    wait.share, consumer.share                             of `seconds`, in the trainer
    cache.hit_share                                        of the cache's lookups
    device.idle_share                                      of the device's time that was watched
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
