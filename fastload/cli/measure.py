"""One epoch of a loader, timed as a trainer sees it: from the call of iter() to the last batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["Epoch", "measure_epoch", "stage_counters"]


class Epoch(NamedTuple):
    """What one epoch took."""

    images: int
    seconds: float
    first_batch_seconds: float

    def as_dict(self, total_bytes: float) -> dict[str, Any]:
        """For JSON, with the rates; `total_bytes`: of the encoded images."""
        return {
            "images": self.images,
            "bytes": round(total_bytes),
            "seconds": round(self.seconds, 4),
            "first_batch_seconds": round(self.first_batch_seconds, 4),
            "images_per_second": round(self.images / self.seconds, 1),
            "megabytes_per_second": round(total_bytes / self.seconds / 1e6, 2),
        }


def measure_epoch(
    loader: Iterable[Any], progress: Callable[[int, float], None], seconds_at_most: float = float("inf")
) -> Epoch:
    """Iterate over `loader` once and time it, start of the workers included.

    Args:
        loader: gives (images, labels) batches.
        progress: called after each batch with the images and the seconds so far.
        seconds_at_most: stop after the first batch beyond.
    """
    images = 0
    first_batch = elapsed = 0.0
    start = time.perf_counter()
    for batch in loader:
        elapsed = time.perf_counter() - start
        first_batch = first_batch or elapsed
        images += len(batch[0])
        progress(images, elapsed)
        if elapsed > seconds_at_most:
            break
    return Epoch(images, elapsed, first_batch)


def stage_counters(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What one epoch added to a loader's counters (`stats()["counters"]` before it and after it)."""
    return {name: round(value - before.get(name, 0), 6) for name, value in sorted(after.items())}
