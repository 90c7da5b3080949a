"""Per-stage counters, mergeable over processes, and the verdict that names the slowest stage.

A counter set is a flat dict of floats, `"stage.counter" -> value`, so that merging is addition, sending is
cheap, and TensorBoard or Prometheus can take it as it is. The stages and their counters:

    sampler  seconds (the trainer's process drew index batches)
    get      samples, bytes, seconds (this thread waited for the store), requests, retries, hedged, refreshed
    cache    hits, misses, bytes, seconds, writes, write_bytes, dropped, corrupt, failures
    decode   samples, seconds (decode and transform, without the get and cache seconds spent inside)
    collate  samples, batches, bytes, seconds (samples: as many as were asked for)
    idle     seconds (a worker had no batch to make), of which:
    slot     seconds (its finished batches waited for the consumer)
    wait     batches, seconds (the consumer waited for a batch), first_seconds (for the first of an epoch)
    consumer seconds (from one batch to the call for the next)
    copy     batches, bytes, seconds (on the copy stream, by its events), wait_seconds (the trainer's process
             waited for copies to end)
    device   seconds (of the device's own clock that were watched, by events), idle.seconds (of these, it had
             no batch to work on): "device.seconds" and "device.idle.seconds"
    bad      samples (skipped or replaced under `on_error`)
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

__all__ = ["Counters", "verdict"]


class Counters:
    """Named sums. One instance belongs to one process; `drain` hands its content to another.

    Pickles as an empty set. Threads may share it.
    """

    _all: ClassVar[weakref.WeakSet[Counters]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()
        self._all.add(self)

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()

    def add(self, name: str, value: float = 1) -> None:
        """Add `value` to counter `name` ("stage.counter")."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + value

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds that the block takes to `<stage>.seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(f"{stage}.seconds", time.perf_counter() - start)

    def merge(self, other: Mapping[str, float]) -> None:
        """Add every counter of `other`."""
        for name, value in other.items():
            self.add(name, value)

    def drain(self) -> dict[str, float]:
        """Return the values and start again from nothing."""
        with self._lock:
            values, self._values = self._values, {}
        return values

    def __getitem__(self, name: str) -> float:
        return self._values.get(name, 0)

    def as_dict(self) -> dict[str, float]:
        """A copy of the values."""
        return dict(self._values)


def _forked() -> None:
    # A thread of the parent may have held a lock at the moment of the fork, and does not exist here.
    for counters in list(Counters._all):
        counters._lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)

_ADVICE = {
    "get": "the store: reading objects. A cache, more connections or a closer bucket would help",
    "cache": "the cache: reading records from disk. A faster SSD or mode 'shrunk' would help",
    "decode": "decoding and transforming samples. More workers, or a cache in mode 'shrunk' or 'decoded', "
    "would help",
    "collate": "collating batches. More workers would help",
}


def verdict(counters: Mapping[str, float]) -> str:
    """One sentence: who is the limit, and what would help.

    The consumer is, where the workers waited for it longer than it waited for them; otherwise the stage in
    which the workers spent most of their time.
    """
    if not counters.get("wait.batches"):
        return "nothing was loaded yet"
    seconds = {stage: counters.get(f"{stage}.seconds", 0.0) for stage in _ADVICE}
    wait, idle = counters.get("wait.seconds", 0.0), counters.get("idle.seconds", 0.0)
    busy = sum(seconds.values())
    if busy == 0 or (idle > busy and wait < idle):
        return "the consumer is the limit: the loader waited for it, and a faster loader would change nothing"
    stage = max(seconds, key=lambda name: seconds[name])
    return (
        f"the slowest stage is {stage} ({seconds[stage] / busy:.0%} of the workers' time): {_ADVICE[stage]}"
    )
