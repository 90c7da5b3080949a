"""A measurement as commands make it: one epoch of a loader, and progress bars."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fastload.metrics.console import Console

SECONDS_BETWEEN_DRAWS = 0.1


class Epoch(NamedTuple):
    """The timing of one epoch, from the call of iter() to the last batch."""

    images: int
    seconds: float
    first_batch_seconds: float

    def rates(self, total_bytes: float) -> dict[str, Any]:
        """Return the arguments of a `MeasuredEpoch`; `total_bytes` is the size of all its encoded images."""
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
        loader: of batches of samples.
        progress: called after each batch with the images and the seconds so far.
        seconds_at_most: stop after the first batch that ends later.
    """
    images = 0
    first_batch = elapsed = 0.0
    start = time.perf_counter()
    for batch in loader:
        elapsed = time.perf_counter() - start
        first_batch = first_batch or elapsed
        images += count_samples(batch)
        progress(images, elapsed)
        if elapsed > seconds_at_most:
            break
    return Epoch(images, elapsed, first_batch)


def count_samples(batch: Any) -> int:
    """Return how many samples a batch has: the length of its first column."""
    while isinstance(batch, dict | tuple | list) and batch:
        inner = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        if isinstance(inner, str | bytes | int | float):  # a column that is a list
            break
        batch = inner
    return len(batch)


def stage_counters(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The difference of a loader's counters (`stats()["counters"]`) before and after one epoch."""
    return {name: round(value - before.get(name, 0), 6) for name, value in sorted(after.items())}


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
            TimeRemainingColumn(compact=True),
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


class Rate:
    """The rates of a loop since it began, in words.

    Args:
        name: what is counted.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Return the time since the beginning."""
        return max(time.perf_counter() - self._start, 1e-9)

    def words(self, count: int, size: int) -> str:
        """Return the rates of so many things and bytes."""
        seconds = self.seconds()
        return f"{count / seconds:7,.0f} {self._name}/s {size / seconds / 1e6:6,.1f} MB/s"
