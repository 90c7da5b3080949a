"""`num_workers="auto"`: the number of workers, and of batches made ahead, found while the first epoch runs.

    cores of this process / ranks of the node, minus the trainer's own threads   =  the ceiling
    start at half of it ──▶ look at the counters about once a second ──▶ let each make more batches ahead,
                                                                        add workers, park some, or wait

The samples do not depend on it: only the worker that makes a batch changes. Where threads of one process
share the rows of a batch, these are the workers: they are switched on and off, and the process stays.

Where a few samples take far longer than the others, a batch is waited for although workers are free: they
have made all that they may make ahead. Then more batches ahead help, as a slow one begins earlier. That other
ranks' workers make batches of this one was rejected: while a rank waits for a slow batch, its own workers are
free too, and simulated waits were the same.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from fastload.datasets.wrappers import view_of
from fastload.distributed import cores_of_rank, local_ranks
from fastload.metrics.bottleneck import find_bottleneck
from fastload.metrics.counters import Counters
from fastload.metrics.machine import Cores

_log = logging.getLogger("fastload")

_INTERVAL = 1.0  # seconds between looks, at least
_ENOUGH = 0.03  # of its time; a consumer that waits less has enough workers
# Of its time; a consumer that waits more may want batches made further ahead. Less than `_ENOUGH`: the other
# ranks wait with it at each step, and count that as their training's.
_LATE = 0.02
_HELD_BACK = 0.1  # of their time; workers that wait more for the consumer may make more ahead
_MOST_AHEAD = 16  # batches; in one step: many looks would put off that of more workers
_GROWTH = 1.5
_GAIN = 1.05  # minimum speed-up; otherwise the added workers are removed
_SLACK = 0.5  # of their time; workers that wait more for the consumer are parked in part
_ROOM = 1.3  # workers to keep, as a multiple of those needed now
_CORE = 0.5  # idle cores needed to add a worker
_WORKING = ("get", "cache", "decode", "collate")


def ceiling(cores: float | None = None, ranks: int | None = None) -> int:
    """Return the most workers of one rank: its share of the cores, less headroom for the trainer's threads.

    Those are its main thread, autograd's, NCCL's: one core, and one more for every 16. A share of two cores
    or less has no headroom.
    """
    cores = Cores().usable if cores is None else cores
    if ranks is None:  # where SLURM binds each rank to cores of its own, there is nothing to divide
        ranks = 1 if cores <= (cores_of_rank() or 0) else local_ranks()
    share = cores / ranks
    headroom = 1 + share // 16 if share > 2 else 0
    return max(1, math.floor(share - headroom))


def why_fixed(dataset: Any) -> str:
    """Return why the number of workers cannot change while an epoch runs; "" where it can."""
    if isinstance(dataset, IterableDataset):
        return "an iterable dataset is split by worker"
    if view_of(dataset).streams() is not None:
        return "shards are read as one stream per worker"
    if callable(getattr(dataset, "state_dict", None)):
        return "the dataset keeps a state in each worker"
    return ""


class Autoscaler:
    """Chooses the number of workers.

    Where the consumer waits and cores are idle, it adds half as many workers again. If the rate does not
    rise, it removes them and does not try again. Where workers wait for the consumer most of the time, it
    keeps the number that their work needs, and 30 % more. Once that was too few, it parks no more workers.
    Before all this, where the consumer waits although workers are held back, each may make 16 batches ahead.

    Args:
        most: the ceiling.
        ahead: finished batches of each worker that may wait for the consumer, for good; None: 2 at first.
        clock: in seconds.
        cores: that this process may use, see `Cores`.
        busy: core-seconds worked on these cores, see `Cores`.

    Attributes:
        workers: the chosen number.
        ahead: the chosen number of batches. Where they are large, workers make fewer ahead.
        why: one sentence.
    """

    def __init__(
        self,
        most: int,
        ahead: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        cores: float | None = None,
        busy: Callable[[], float] | None = None,
    ) -> None:
        self.most = most
        self.workers = min(most, max(2, most // 2))
        self.ahead = ahead or 2
        self.why = "the first epoch has not shown yet how many are needed"
        self._most_ahead = ahead or _MOST_AHEAD
        self._clock = clock
        node = Cores()
        self._cores = node.usable if cores is None else cores
        self._busy = node.busy_seconds if busy is None else busy
        self._least = 1
        self._parked = False
        self._settled = False
        self._why_no_more = "that is the ceiling"
        self._before: tuple[int, float] | None = None  # the number before workers were added, and its rate
        self._due = 0.0  # handed-over batches at which the next measurement may begin
        self._start: tuple[float, float, Mapping[str, float]] | None = None  # time, busy, counters

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_start": None}

    def start_epoch(self, handed_over: float = 0.0) -> None:
        """Start measuring again: the time before the first batch does not count."""
        self._start, self._due = None, handed_over + 1

    def end_epoch(self) -> None:
        """Keep the number that the first epoch has found."""
        if not self._settled:
            self._settled = True
            _log.info("%s", self.sentence())

    def refused(self, count: int) -> int:
        """Note that only `count` workers could be started. Returns the number that there should be."""
        self._before = None
        self.workers = self._at_most(count, "no more processes can be started")
        return self.workers

    def sentence(self) -> str:
        """Return the choice and its reason."""
        ahead = f", {self.ahead} batches ahead each" if self.ahead != 2 else ""
        return f"num_workers='auto': {self.workers} of at most {self.most} workers{ahead}: {self.why}"

    def look(self, counters: Counters, in_flight: int) -> int:
        """Return the number of workers that there should be.

        Args:
            counters: the loader's, of all epochs.
            in_flight: batches under way. A change has its effect after these.
        """
        if self._settled or counters["wait.batches"] < self._due:
            return self.workers
        now = self._clock()
        if self._start is None:
            self._start = now, self._busy(), counters.as_dict()
            return self.workers
        began, busy, before = self._start
        elapsed = now - began
        if elapsed < _INTERVAL or counters["wait.batches"] - before["wait.batches"] < 2 * self.workers:
            return self.workers
        measured = {name: value - before.get(name, 0) for name, value in counters.as_dict().items()}
        idle_cores = self._cores - (self._busy() - busy) / elapsed
        ahead = self.ahead
        wanted = self._decide(measured, measured["wait.batches"] / elapsed, idle_cores)
        self._start = None
        if wanted != self.workers or ahead != self.ahead:
            _log.debug("num_workers='auto': %d -> %d: %s", self.workers, wanted, self.why)
            self.workers, self._due = wanted, counters["wait.batches"] + in_flight
        return self.workers

    def _decide(self, counters: Mapping[str, float], rate: float, idle_cores: float) -> int:
        waiting = counters.get("wait.seconds", 0.0)
        share = waiting / max(waiting + counters.get("consumer.seconds", 0.0), 1e-9)
        if self._before is not None:
            workers, earlier = self._before
            self._before = None
            if share > _ENOUGH and rate < _GAIN * earlier:
                return self._at_most(
                    workers, f"more workers did not help: the bottleneck is {find_bottleneck(counters)}"
                )
        if share > _LATE and self._held_back(counters) > _HELD_BACK and self.ahead < self._most_ahead:
            self.ahead = self._most_ahead
            return self._say(f"the consumer waited for {share:.1%} of its time, while workers were held back")
        if share <= _ENOUGH:
            self.why = f"the consumer waited for {share:.1%} of its time"
            return self._fewer(counters)
        if self.workers >= self.most:
            return self._say(self._why_no_more)
        if idle_cores < _CORE:
            return self._say("no core is idle")
        self.why = f"the consumer waited for {share:.1%} of its time, and {idle_cores:.1f} cores were idle"
        self._before = self.workers, rate
        if self._parked:
            self._least = self.workers + 1
        return min(self.most, max(self.workers + 1, int(self.workers * _GROWTH)))

    def _at_most(self, workers: int, why: str) -> int:
        self.most, self.why, self._why_no_more = workers, why, why
        return workers

    def _say(self, why: str) -> int:
        self.why = why
        return self.workers

    def _held_back(self, counters: Mapping[str, float]) -> float:
        """Return the part of the workers' time in which their finished batches waited for the consumer."""
        working = sum(counters.get(f"{stage}.seconds", 0.0) for stage in _WORKING)
        waiting = counters.get("slot.seconds", 0.0)
        return waiting / max(working + waiting, 1e-9)

    def _fewer(self, counters: Mapping[str, float]) -> int:
        """Return the number that the work needs, where workers wait for the consumer most of the time."""
        held_back = self._held_back(counters)
        if held_back <= _SLACK:
            return self.workers
        needed = math.ceil(self.workers * (1 - held_back) * _ROOM)
        fewer = min(self.workers, max(self._least, needed))
        self._parked |= fewer < self.workers
        return fewer
