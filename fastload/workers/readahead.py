"""Index batches announced to a dataset that can prefetch their samples."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from typing import Any

from fastload.datasets.protocols import Prefetches, current_reader, noted_prefetches
from fastload.datasets.seen_rows import Rows
from fastload.metrics.counters import Counters

__all__ = ["ReadAhead"]

_log = logging.getLogger("fastload")

_UNUSED = 256  # samples prefetched in vain, after which prefetching stops


class ReadAhead:
    """Announces index batches, and cancels those that are not used.

    Args:
        rows: of the dataset, or None where it cannot prefetch.
        auto_collation: False where an "index batch" is one index.
        threaded: samples are made before their batch is, so what one batch uses cannot be counted.
    """

    def __init__(self, rows: Rows | None, *, auto_collation: bool, threaded: bool) -> None:
        self._rows = rows
        self._auto_collation = auto_collation
        self._threaded = threaded
        self._reader = object()  # not `self`, which the dataset would keep
        self._streamed = False
        self._announced: deque[tuple[Any, Prefetches]] = deque()  # index batches that were not made yet
        self._counters: dict[int, Counters] = {}  # of the datasets that were told to prefetch
        self._unused = 0
        self._warned = False
        for leaf in () if rows is None else rows.leaves():
            self._counters[id(leaf)] = leaf.counters

    def start_epoch(self, *, streamed: bool) -> None:
        """Prefetch again, also where the last epoch did not use it. Ids of streams are not announced."""
        self._unused = 0
        self._streamed = streamed

    def announce(self, index: Any) -> None:
        """Start reading an index batch that will be asked for after those announced before.

        Raises:
            Exception: any that the dataset raises; then none of the batch is announced.
        """
        if self._rows is None or self._unused >= _UNUSED:
            return
        notes: Prefetches = []
        self._announced.append((index, notes))
        before = current_reader.set(self._reader)
        try:
            with noted_prefetches(notes):
                self._rows.prefetch(self._indices(index))
        except Exception:
            self.cancel(index)
            if self._rows.own is None:
                raise
            # The user's `__getitem__` may accept an index that the dataset below has no sample for.
            self._unused = _UNUSED
        except BaseException:
            self.cancel(index)
            raise
        finally:
            current_reader.reset(before)
        for dataset, _ in notes:
            self._counters.setdefault(id(dataset), dataset.counters)

    def cancel(self, index: Any) -> None:
        """An index batch will not be asked for. One that was not announced, or was made, is ignored."""
        notes = self._take(index)
        if self._rows is not None and self._streamed:
            with contextlib.suppress(Exception):
                self._rows.cancel(self._indices(index))
        for dataset, indices in notes:
            with contextlib.suppress(Exception):
                dataset.cancel(indices)

    def used(self) -> float:
        """Prefetched samples used so far, as counted by the datasets."""
        return sum(counters["get.ahead"] for counters in self._counters.values())

    def finish(self, index: Any, samples: int, used: float) -> None:
        """After a batch was made that used this many prefetched samples: release those that it did not use.

        A `__getitem__` that never asks for its own sample (it returns the key alone, or another sample) makes
        prefetching useless: it stops after a while.
        """
        if self._rows is None:
            return
        if self._rows.certain:
            self._take(index)
            return
        found = self._find(index)
        announced = (
            samples if found is None else sum(len(indices) for _, indices in self._announced[found][1])
        )
        if self._threaded or used < announced:
            self.cancel(index)
        else:
            self._take(index)
        if self._threaded or used or not announced:
            self._unused = 0
            return
        self._unused += samples
        if self._unused >= _UNUSED and self._rows.own is None and not self._warned:
            self._warned = True
            _log.warning(
                "the last %d samples that prefetch() of the dataset announced were not read by its "
                "__getitem__: nothing more is read ahead in this epoch",
                self._unused,
            )

    def _indices(self, index: Any) -> Any:
        return index if self._auto_collation else [index]

    def _find(self, index: Any) -> int | None:
        return next((at for at, (one, _) in enumerate(list(self._announced)) if one is index), None)

    def _take(self, index: Any) -> Prefetches:
        """What was announced for an index batch, which is forgotten."""
        at = self._find(index)
        if at is None:
            return []
        notes = self._announced[at][1]
        del self._announced[at]
        return notes
