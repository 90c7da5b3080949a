"""What a loader counts: the sums of each stage, the rates of its epoch, and its bad samples.

A counter set is a flat dict of floats, `"stage.counter" -> value`: merging is addition, sending is cheap, and
TensorBoard can take it unchanged. `fastload/metrics/exporters.py` lists the counters of all stages.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from fastload.errors import address, warn
from fastload.metrics.machine import Cores, call_in_forks

_NOTHING = nullcontext()
# Whether a profiler runs in this thread. `torch_private` puts torch's own in its place, once torch is loaded.
profiler_enabled: Callable[[], bool] = lambda: False  # noqa: E731


def stage(name: str) -> AbstractContextManager[object]:
    """Return a range for the block, named "fastload.<name>", where a profiler of torch runs in this thread.

    In the trainer's process the stages are wait, unpack, sampler and batch_transform; in a worker with a
    profiler of its own (started from `worker_init_fn`, say) those that its counters time, such as decode,
    cache and collate. The profiler is asked first: `record_function` calls the dispatcher even without one.
    """
    if not profiler_enabled():
        return _NOTHING
    import torch  # loaded already: this module works without it

    return torch.profiler.record_function(f"fastload.{name}")


class Counters:
    """Named sums of one process; `drain` empties them, to be sent to another process.

    Pickles as an empty set. Threads may share it.

    Args:
        parts: other counters of this process. `drain` empties them too, and `timed` subtracts their reading.
    """

    _all: ClassVar[weakref.WeakSet[Counters]] = weakref.WeakSet()

    def __init__(self, parts: Iterable[Counters] = ()) -> None:
        self._values: dict[str, float] = {}
        self._parts = tuple(parts)
        # Reentrant: garbage collection may run inside `add`, and an iterator that it ends counts something.
        self._lock = threading.RLock()
        self._all.add(self)

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()

    def add(self, name: str, value: float = 1) -> None:
        """Add `value` to counter `name` ("stage.counter")."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + value

    def put(self, name: str, value: float) -> None:
        """Set counter `name`, whose sum is kept elsewhere."""
        with self._lock:
            self._values[name] = value

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """Add the seconds of the block to `<stage>.seconds`, without those spent in reading.

        A dataset may read in its `__getitem__`: that time belongs to the store or the disk, not to decoding.
        """
        return _Timed(self, stage)

    def reading_seconds(self) -> float:
        """Return seconds spent waiting for the store and reading the cache, including those of the parts."""
        seconds = self._values.get("get.seconds", 0) + self._values.get("cache.seconds", 0)
        for part in self._parts:  # not `sum`, whose generator doubles the time of a call
            seconds += part.reading_seconds()
        return seconds

    def merge(self, other: Mapping[str, float]) -> None:
        """Add every counter of `other`."""
        with self._lock:
            for name, value in other.items():
                self._values[name] = self._values.get(name, 0) + value

    def drain(self) -> dict[str, float]:
        """Return the values, including those of the parts, and start again from zero."""
        with self._lock:
            values, self._values = self._values, {}
        for part in self._parts:
            for name, value in part.drain().items():
                values[name] = values.get(name, 0) + value
        return values

    def __getitem__(self, name: str) -> float:
        return self._values.get(name, 0)

    def as_dict(self) -> dict[str, float]:
        """Return a copy of the values."""
        return dict(self._values)


def _forked() -> None:
    # A thread of the parent may have held a lock at the moment of the fork, and does not exist here. The sums
    # stay with the parent: otherwise each worker would report them again.
    for counters in list(Counters._all):
        counters._lock = threading.RLock()
        counters._values = {}


call_in_forks(_forked)


class _Timed:
    """See `Counters.timed`. A class, because a generator takes three times as long."""

    __slots__ = ("_counters", "_range", "_reading", "_stage", "_start")

    def __init__(self, counters: Counters, stage: str) -> None:
        self._counters = counters
        self._stage = stage

    def __enter__(self) -> None:
        self._range = stage(self._stage)
        self._range.__enter__()
        # Looking costs as much as all else here, and nothing else is read within a read of the cache.
        self._reading = 0.0 if self._stage == "cache" else self._counters.reading_seconds()
        self._start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        elapsed = time.perf_counter() - self._start
        reading = 0.0 if self._stage == "cache" else self._counters.reading_seconds() - self._reading
        # The dataset's own threads may have waited at the same time, together for longer than the block took.
        self._counters.add(f"{self._stage}.seconds", max(0.0, elapsed - reading))
        self._range.__exit__(*error)


_IDLE_INTERVAL = 1.0  # seconds


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
        self._until = 0.0  # the last moment that is counted
        self._first = True

    def start(self, workers: int) -> None:
        """Note that an epoch begins, with this number of workers."""
        self._cores = self._cores or Cores()
        self.workers = workers
        now = self._until = time.perf_counter()
        # In one step: another thread sees the old epoch or the new one, and no part of each.
        self._epoch = _Epoch(self._counters.as_dict(), now, self._cores.busy_seconds())
        self._first = True

    def asked(self) -> None:
        """Note that the consumer asks for a batch, after a step with the last one, or with its error."""
        if not self._first:
            now = time.perf_counter()
            self._counters.add("consumer.seconds", now - self._until)
            self._until = now

    def waited(self, seconds: float) -> None:
        """Note that the consumer has waited. The workers' counters have grown, so the rates are up to now."""
        self._counters.add("wait.seconds", seconds)
        self._until = time.perf_counter()

    def delivered(self) -> None:
        """Note that the consumer gets a batch."""
        self._until = time.perf_counter()
        self._counters.add("wait.batches")
        if self._first:
            self._first = False
            waited = self._counters["wait.seconds"] - self._epoch.before.get("wait.seconds", 0)
            self._counters.add("wait.first_seconds", waited)
        self._look_at_cores(self._epoch)  # now: after an epoch that is left early other work may follow
        if self.tick is not None:
            self.tick()

    def stop(self) -> None:
        """Note that the epoch is over."""
        self._epoch.idle_at_end = self._measure_idle_cores(self._epoch)

    def counters(self) -> dict[str, float]:
        """Return this epoch's part of the loader's counters."""
        return self._since(self._epoch)

    def gauges(self) -> dict[str, float]:
        """Return the rates of this epoch up to its latest batch, wait or request (see `rates`), and:

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
        """Return the mean over the epoch, up to about its latest batch."""
        if epoch.idle_at_end is not None:
            return epoch.idle_at_end
        if self._first:
            self._look_at_cores(epoch)
        return epoch.idle[1]

    def _look_at_cores(self, epoch: _Epoch) -> None:
        """Measure the idle cores at most once a second: it takes milliseconds."""
        now = time.perf_counter()
        if now - epoch.idle[0] >= _IDLE_INTERVAL:
            epoch.idle = now, self._measure_idle_cores(epoch)

    def _measure_idle_cores(self, epoch: _Epoch) -> float:
        if self._cores is None:
            return 0.0
        elapsed = time.perf_counter() - epoch.began
        busy = (self._cores.busy_seconds() - epoch.busy) / max(elapsed, 1e-3)
        return max(0.0, self._cores.usable - busy)


_WORKER_STAGES = ("get", "cache", "decode", "collate")


def samples_per_batch(counters: Mapping[str, float]) -> float:
    """Return the mean over the batches that were made."""
    return counters.get("collate.samples", 0.0) / max(counters.get("collate.batches", 0.0), 1.0)


def rates(counters: Mapping[str, float], seconds: float, batch_size: float | None = None) -> dict[str, float]:
    """Return the rates of some counters over `seconds`, as flat numbers for TensorBoard or Prometheus.

    `batch_size`: samples of a batch, where `seconds` are too few for as many to be made as are handed over.

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

    gauges = {
        f"{name}_per_second": value / seconds
        for name, value in counters.items()
        if name.endswith((".samples", ".bytes"))
    }

    def get(name: str) -> float:
        return counters.get(name, 0.0)

    batches = get("wait.batches")
    gauges["loader.batches_per_second"] = batches / seconds
    batch_size = samples_per_batch(counters) if batch_size is None else batch_size
    gauges["loader.samples_per_second"] = batches * batch_size / seconds
    stages = (*_WORKER_STAGES, "idle")
    busy = sum(get(f"{stage}.seconds") for stage in stages)
    gauges |= {f"{stage}.share": share(get(f"{stage}.seconds"), busy) for stage in stages}
    gauges |= {f"{stage}.share": get(f"{stage}.seconds") / seconds for stage in ("wait", "consumer")}
    gauges["cache.hit_share"] = share(get("cache.hits"), get("cache.hits") + get("cache.misses"))
    if get("device.seconds"):
        gauges["device.idle_share"] = share(get("device.idle.seconds"), get("device.seconds"))
    return gauges


FEW_BAD = 5  # of an epoch; more of them are seldom damage
_KEPT = 1000


class BadSamples:
    """The last samples of a loader that could not be read or decoded, and that `on_error` covered.

    The first epoch that has more than a few of them is warned of: a transform or `decode` that fails for a
    part of the data would else train on the rest without a word.

    Attributes:
        last: (key, error) of the last ones.
    """

    def __init__(self) -> None:
        self.last: deque[tuple[str, str]] = deque(maxlen=_KEPT)
        self._of_epoch = 0
        self._warned = False

    def start_epoch(self) -> None:
        self._of_epoch = 0

    def extend(self, samples: Iterable[tuple[str, str]]) -> None:
        """Keep (key, error) of more of them."""
        for sample in samples:
            self.last.append(sample)
            self._of_epoch += 1
        if self._of_epoch > FEW_BAD and not self._warned:
            self._warned = True
            key, error = self.last[-1]
            first_line = error.partition("\n")[0]
            warn(
                f"fastload replaced {self._of_epoch:,} bad samples of this epoch so far, and goes on. "
                f"The last one is {key}: {first_line}. See {address('bad-samples')}"
            )
