"""Samples of any map-style dataset: as its rows, one by one, by its `__getitems__`, or in threads."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from fastload.datasets.protocols import RowErrors, RowRequests
from fastload.datasets.seeds import SampleSeeds
from fastload.datasets.seen_rows import Rows
from fastload.metrics.counters import Counters
from fastload.workers.on_error import ErrorPolicy
from fastload.workers.sample_threads import SampleThreads, Task

__all__ = ["SampleReader"]

_Fill = Callable[[list[Any], RowRequests], RowErrors]


class SampleReader:
    """Reads the samples of an index batch as torch does.

    Args:
        dataset: map-style.
        rows: what is seen of it.
        auto_collation: False where an "index batch" is one index.
        seeds: of the loader's `seed`, or None.
        errors: what happens to bad samples.
        counters: counts decode.samples and decode.seconds.
        threads: make the samples of announced index batches; None: this thread makes them.
    """

    def __init__(
        self,
        dataset: Any,
        rows: Rows,
        *,
        auto_collation: bool,
        seeds: SampleSeeds | None,
        errors: ErrorPolicy,
        counters: Counters,
        threads: SampleThreads | None,
    ) -> None:
        self._dataset = dataset
        self._rows = rows
        self._bulk = auto_collation and rows.bulk
        self._seeds = seeds
        self._errors = errors
        self._counters = counters
        self._threads = threads
        self._announced: deque[tuple[Any, list[Task]]] = deque()  # index batches, and their tasks

    def announce(self, index: Any, indices: list[Any]) -> None:
        """An index batch will be read after those announced before: the threads begin with it."""
        if self._threads is None or self._by_rows():
            return
        if self._bulk and self._seeds is None:
            tasks = [self._threads.submit(index, partial(self._dataset.__getitems__, index))]
        else:
            last = len(indices) - 1
            tasks = [self._submit(one, last=row == last) for row, one in enumerate(indices)]
        self._announced.append((index, tasks))

    def cancel(self, index: Any) -> None:
        """An index batch will not be read, or was read."""
        tasks = self._take(index)
        if self._threads is not None:
            self._threads.cancel(tasks)

    def read(self, index: Any, indices: list[Any], seed: int, epoch: int) -> tuple[Any, list[Any]]:
        """(samples of an index batch, index of each), where substitutes stand for bad ones.

        Args:
            index: the index batch itself, which a `__getitems__` receives.
            indices: its sample indices.
            seed, epoch: of the randomness of rows.
        """
        tasks, before = self._take(index), self._counted()
        if self._bulk and self._seeds is None:
            try:
                with self._counters.timed("decode"):
                    samples = self._many(index, tasks)
                self._counters.add("decode.samples", len(indices))
                return samples, indices
            except Exception as error:
                self._errors.raise_uncovered(error)  # else one by one, to find the bad ones
                tasks = []
        parts: list[Any] = [None] * len(indices)
        if self._by_rows():
            if self._threads is not None:
                self._threads.cancel(tasks)  # the transform was set after they were announced
            fill: _Fill = partial(self._fill_from_rows, seed=seed, epoch=epoch)
        elif self._threads is not None:
            fill = partial(self._fill_from_threads, tasks=tasks)
        else:
            fill = self._fill

        def copy(target: int, source: int) -> None:
            parts[target] = parts[source]

        settled = self._errors.settle(indices, partial(fill, parts), copy)
        self._counters.add("decode.samples", max(0, len(parts) - (self._counted() - before)))
        return [sample for part in parts for sample in part] if self._bulk else parts, settled

    def _by_rows(self) -> bool:
        """Whether fastload fills rows, from which the samples are made. `__getitems__` gets its own call."""
        return not self._rows.bulk and self._rows.writes()

    def _counted(self) -> float:
        """Samples that the datasets count themselves."""
        return sum(leaf.counters["decode.samples"] for leaf in self._rows.leaves())

    def _many(self, index: Any, tasks: list[Task]) -> Any:
        if tasks and self._threads is not None:
            return self._threads.result(tasks[0])
        return self._dataset.__getitems__(index)

    # --- each fills some rows

    def _fill(self, parts: list[Any], requests: RowRequests) -> RowErrors:
        errors: RowErrors = []
        seeds = self._seeds
        if seeds is not None and requests:
            seeds.begin_batch(requests[0][1])
        with self._counters.timed("decode"):
            for row, index in requests:
                try:
                    if seeds is None:
                        parts[row] = self._sample(index)
                    elif row != requests[-1][0]:
                        parts[row] = seeds.call(index, self._sample, index)
                    else:  # `collate_fn` draws from the state after the last sample
                        seeds.set(index)
                        parts[row] = self._sample(index)
                except Exception as error:
                    errors.append((row, error))
                    if self._errors.on_error == "raise":
                        break
        return errors

    def _fill_from_rows(self, parts: list[Any], requests: RowRequests, seed: int, epoch: int) -> RowErrors:
        errors: RowErrors = []
        with self._seeds or contextlib.nullcontext():
            made = self._rows.prepare([index for _, index in requests], seed, epoch)
        with self._counters.timed("decode"):
            for (row, index), make in zip(requests, made, strict=True):
                try:
                    if self._seeds is not None:
                        # Not `call`, which may make a sample twice: functions may change the row in place.
                        self._seeds.set(index)
                    parts[row] = _checked(make, index)
                except Exception as error:
                    errors.append((row, error))
                    if self._errors.on_error == "raise":
                        break
        return errors

    def _fill_from_threads(self, parts: list[Any], requests: RowRequests, tasks: list[Task]) -> RowErrors:
        errors: RowErrors = []
        assert self._threads is not None
        if tasks:
            mine, tasks[:] = tasks[:], []  # substitutes of bad samples are new
        else:
            mine = [self._submit(index, last=row == requests[-1][0]) for row, index in requests]
        try:
            with self._counters.timed("decode"):
                for (row, _), task in zip(requests, mine, strict=True):
                    try:
                        parts[row] = self._threads.result(task)
                    except Exception as error:
                        errors.append((row, error))
                        if self._errors.on_error == "raise":
                            break
        finally:
            self._threads.cancel(mine)
        return errors

    # --- one sample

    def _submit(self, index: Any, *, last: bool) -> Task:
        assert self._threads is not None
        return self._threads.submit(index, partial(self._sample, index), last=last)

    def _sample(self, index: Any) -> Any:
        """One sample; a list with it where a `__getitems__` makes the samples."""
        if self._bulk:
            return _checked(partial(self._dataset.__getitems__, [index]), index)
        return _checked(partial(operator.getitem, self._dataset, index), index)

    def _take(self, index: Any) -> list[Task]:
        for at, (one, tasks) in enumerate(list(self._announced)):
            if one is index:
                del self._announced[at]
                return tasks
        return []


def _checked(make: Callable[[], Any], index: Any) -> Any:
    try:
        return make()
    except StopIteration as error:
        raise RuntimeError(f"the dataset raised StopIteration for sample {index!r}") from error
