"""A measurement as commands make it: one epoch of a loader, and progress bars."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fastload.cli.report import MeasuredEpoch
from fastload.metrics.bottleneck import explain_bottleneck
from fastload.metrics.watch import Console

SECONDS_BETWEEN_DRAWS = 0.1


def measure_epoch(
    loader: Any,
    progress: Callable[[int, float], None],
    *,
    image_bytes: float | None = None,
    seconds_at_most: float = float("inf"),
) -> MeasuredEpoch:
    """Iterate over `loader` once and time it, start of the workers included.

    Args:
        loader: of batches of samples; torch's has no counters.
        progress: called after each batch with the images and the seconds so far.
        image_bytes: mean size of an encoded image; None: as the counters say.
        seconds_at_most: stop after the first batch that ends later.
    """
    images, first_batch, elapsed = 0, 0.0, 0.0
    before = _counters(loader)
    start = time.perf_counter()
    for batch in loader:
        elapsed = time.perf_counter() - start
        first_batch = first_batch or elapsed
        images += count_samples(batch)
        progress(images, elapsed)
        if elapsed > seconds_at_most:
            break
    after = _counters(loader).items()
    counters = {name: round(value - before.get(name, 0), 6) for name, value in sorted(after)}
    total_bytes = images * (_image_bytes(counters) if image_bytes is None else image_bytes)
    return MeasuredEpoch(
        images=images,
        bytes=round(total_bytes),
        seconds=round(elapsed, 4),
        first_batch_seconds=round(first_batch, 4),
        images_per_second=round(images / elapsed, 1),
        megabytes_per_second=round(total_bytes / elapsed / 1e6, 2),
        counters=counters or None,
        verdict=explain_bottleneck(counters) if counters else None,
    )


def _counters(loader: Any) -> dict[str, float]:
    return dict(loader.stats()["counters"]) if hasattr(loader, "stats") else {}


def _image_bytes(counters: dict[str, float]) -> float:
    """Return the mean size of the encoded images that were read."""
    images = counters.get("get.samples", 0) + counters.get("cache.hits", 0)
    return (counters.get("get.bytes", 0) + counters.get("cache.bytes", 0)) / max(images, 1)


def count_samples(batch: Any) -> int:
    """Return how many samples a batch has: the length of its first column."""
    while isinstance(batch, dict | tuple | list) and batch:
        inner = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        if isinstance(inner, str | bytes | int | float):  # a column that is a list
            break
        batch = inner
    return len(batch)


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
        """Return a new bar below the others, drawn at once. `text` makes an amount readable."""
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
        """Show `done` images after `seconds` (default: since the bar was made)."""
        seconds = seconds if seconds is not None else time.perf_counter() - self._start
        self.show(done, f"{done / seconds:7,.0f} images/s")

    def show(self, done: int, text: str) -> None:
        """Show `done` images, with `text` behind the bar."""
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
