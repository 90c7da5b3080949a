"""Per-stage counters, mergeable over processes.

A counter set is a flat dict of floats, `"stage.counter" -> value`: merging is addition, sending is cheap, and
TensorBoard or Prometheus can take it unchanged. The stages and their counters:

    sampler  seconds (the trainer's process drew index batches)
    get      samples, bytes, seconds (this thread waited for the store), requests, retries, hedged, refreshed,
             ahead (samples used that had been prefetched), alone (samples not prefetched, because a dataset
             of the user wraps one of fastload's)
    cache    hits, misses, bytes, seconds, writes, write_bytes, dropped, corrupt, failures, chose_raw,
             chose_dct (processes in which mode "auto" chose that one)
    decode   samples, seconds (decode and transform, without the get and cache seconds spent inside)
    collate  samples, batches, seconds (with the batch's copy into its slot)
    idle     seconds (a worker had no batch to make, although the epoch had more)
    slot     seconds (the part of idle.seconds in which its finished batches waited for the consumer)
    wait     batches, seconds (the consumer waited for a batch), first_seconds (for the first of an epoch)
    consumer seconds (from one batch to the call for the next)
    decoder  batches, samples (that the workers left encoded), seconds (of the trainer's process with the
             decoder), fallbacks (batches that the kernel decoded after the decoder failed), rebuilt (decoder
             pipelines replaced after a failure)
    copy     batches, bytes, seconds (on the copy stream, by its events), wait_seconds (the trainer's process
             waited for copies to end), unregistered (slots whose memory CUDA refused to register)
    device   seconds (measured on the device, by events), idle.seconds (the part without a batch to work on):
             "device.seconds" and "device.idle.seconds"
    bad      samples (skipped or replaced under `on_error`), bytes (of shards that could not be read)
    left_out samples (excluded, in batches that were handed out with substitutes), steps (skipped)
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
