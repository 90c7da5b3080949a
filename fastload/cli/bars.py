"""Progress bars of a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

__all__ = ["Bar", "Bars"]

SECONDS_BETWEEN_DRAWS = 0.1


class Bars:
    """Bars that are drawn only when they are updated.

    rich's own refresh thread would do it by itself, but workers are forked while it runs, and a lock that
    it holds at that moment is locked for ever in the worker.
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
        """`done` images, and `text` behind the bar."""
        now = time.perf_counter()
        amount = f"{self._text(done)}/{self._text(self._total)}"
        self._progress.update(self._task, completed=done, rate=text, amount=amount)
        if done >= self._total or now - self._drawn > SECONDS_BETWEEN_DRAWS:
            self._drawn = now
            self._progress.refresh()
