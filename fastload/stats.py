"""Per-stage counters, mergeable over processes, and the verdict that names the slowest stage.

A counter set is a flat dict of floats, `"stage.counter" -> value`, so that merging is addition, sending is
cheap, and TensorBoard or Prometheus can take it as it is. The stages and their counters:

    get      samples, bytes, seconds (this thread waited for the store), requests, retries, errors
    cache    hits, misses, bytes, seconds, writes, write_bytes, dropped, corrupt, failures
    decode   samples, seconds (decode and transform)
    collate  batches, bytes, seconds
    idle     seconds (a worker waited for index batches: the consumer is the slower one)
    wait     batches, seconds (the consumer waited for a batch)
    bad      samples (skipped or replaced under `on_error`)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["Counters"]


class Counters:
    """Named sums. One instance belongs to one process; `drain` hands its content to another."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        """Add `value` to counter `name` ("stage.counter")."""
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
        values, self._values = self._values, {}
        return values

    def __getitem__(self, name: str) -> float:
        return self._values.get(name, 0)

    def as_dict(self) -> dict[str, float]:
        """A copy of the values."""
        return dict(self._values)
