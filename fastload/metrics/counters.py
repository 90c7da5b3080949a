"""Per-stage counters, mergeable over processes.

A counter set is a flat dict of floats, `"stage.counter" -> value`: merging is addition, sending is cheap, and
TensorBoard can take it unchanged. `fastload/metrics/metric_names.py` lists the counters of all stages.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

__all__ = ["Counters"]

# `fastload.metrics.tracing` replaces it, once torch is loaded: this module works without torch.
profiler_range: Callable[[str], AbstractContextManager[object]] = nullcontext


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
        """Seconds spent waiting for the store and reading the cache, including those of the parts."""
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
        """A copy of the values."""
        return dict(self._values)


def _forked() -> None:
    # A thread of the parent may have held a lock at the moment of the fork, and does not exist here. The sums
    # stay with the parent: otherwise each worker would report them again.
    for counters in list(Counters._all):
        counters._lock = threading.RLock()
        counters._values = {}


os.register_at_fork(after_in_child=_forked)


class _Timed:
    """See `Counters.timed`. A class, because a generator takes three times as long."""

    __slots__ = ("_counters", "_range", "_reading", "_stage", "_start")

    def __init__(self, counters: Counters, stage: str) -> None:
        self._counters = counters
        self._stage = stage

    def __enter__(self) -> None:
        self._range = profiler_range(self._stage)
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
