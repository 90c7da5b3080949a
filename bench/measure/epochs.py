"""One epoch of a loader in this process, timed; and loaders over a cache that it fills, or finds full.

Contenders take turns, and are compared by the median of the ratios within one turn.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.data import BATCH, WORKERS, WORKPLACE
from bench.peers.peer import Run
from fastload import Cache, DataLoader

Make = Callable[[Cache | None], Any]


def shuffled(dataset: Any, **options: Any) -> Any:
    """A loader as a trainer would make it."""
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, **options)


def epoch(loader: Any) -> Run:
    """Iterate once, start and end of the workers included."""
    images, first = 0, 0.0
    cpu, start = cpu_seconds(), time.perf_counter()
    for batch in loader:
        first = first or time.perf_counter() - start
        images += _samples_of(batch)
    took = time.perf_counter() - start
    return Run(images, took, first, cpu_seconds() - cpu)


def _samples_of(batch: Any) -> int:
    """The number of samples in a batch: a count of them, a dict of fields, or (images, labels)."""
    if isinstance(batch, int):
        return batch
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def count(samples: Sequence[Any]) -> int:
    """A `collate_fn` for bytes: the number of samples that are not empty, and no batch."""
    return sum(len(sample) > 0 for sample in samples)


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def filling_and_cached(make: Make) -> tuple[Callable[[], Run], Callable[[], Run]]:
    """(an epoch that fills a new cache, an epoch from that cache) of the dataset that `make` makes."""
    folders: list[tempfile.TemporaryDirectory[str]] = []

    def fill() -> Run:
        if folders:
            folders.pop().cleanup()
        folders.append(tempfile.TemporaryDirectory(dir=WORKPLACE))
        return cached()

    def cached() -> Run:
        return epoch(shuffled(make(Cache(folders[-1].name, "raw"))))

    return fill, cached


def over_a_full_cache(
    make: Make, folder: Path, images: int, mode: str = "raw", short_side: int = 300, **options: Any
) -> Any:
    """A loader with running workers, over a cache in `folder` that holds all `images`."""
    cache = Cache(folder, mode, short_side=short_side)
    loader = shuffled(make(cache), persistent_workers=True, **options)
    while cache.info()["entries"] < images:  # an epoch may leave gaps: filling never waits for the disk
        epoch(loader)
    cache.close()
    return loader


def median_ratio(rates: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios within one turn."""
    return round(statistics.median(a / b for a, b in zip(rates, others, strict=True)), 3)
