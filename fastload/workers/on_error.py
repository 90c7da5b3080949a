"""`on_error`: what happens to samples that cannot be read or decoded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fastload.datasets.views import RowErrors, RowRequests
from fastload.datasets.wrappers import substitutes, view_of
from fastload.errors import (
    FastloadError,
    NotFoundError,
    ObjectChangedError,
    ShortReadError,
    StoreError,
    WorkerError,
)
from fastload.metrics.counters import Counters
from fastload.workers.collate import tell_sample

REPLACEMENTS = 16  # how many other samples `on_error="replace"` tries before it gives up


class ErrorPolicy:
    """Keeps batches full where samples are bad.

    Args:
        dataset: the loader's.
        on_error: "raise"; "skip" (the row repeats another row of its batch); "replace" (the row gets another
            sample: the same one in every run with this seed, as long as the same samples are bad).
        counters: counts bad.samples.

    Attributes:
        bad: (sample, error) of each bad sample that was skipped or replaced.
        left_out: indices of samples that replace no other one.
    """

    def __init__(self, dataset: Any, on_error: str, counters: Counters) -> None:
        self._dataset = dataset
        self.on_error = on_error
        self._counters = counters
        self._epoch = (0, 0)
        self._indexed = True
        self.bad: list[tuple[str, str]] = []
        self.left_out: frozenset[int] = frozenset()

    def start_epoch(self, seed: int, epoch: int, *, indexed: bool) -> None:
        """Replacements depend on (seed, epoch). Without an index of the dataset, "replace" acts as "skip"."""
        self._epoch, self._indexed = (seed, epoch), indexed

    def settle(
        self, indices: list[Any], fill: Callable[[RowRequests], RowErrors], copy: Callable[[int, int], None]
    ) -> list[Any]:
        """Fill every row of a batch, with a substitute where its sample is bad.

        Returns:
            the sample that stands in each row.

        Args:
            indices: the sample of each row.
            fill: fills some rows and returns the errors of those that failed.
            copy: (target, source) makes one row equal to another.

        Raises:
            Exception: that of a bad sample that `on_error` does not cover, with a note of the sample.
        """
        requests, used = list(enumerate(indices)), indices
        others: dict[int, Iterator[int]] = {}  # row -> its substitutes
        attempt = 0
        while True:
            errors = fill(requests)
            if not errors:
                return used
            asked = dict(requests)
            for row, error in errors:
                self._note(asked[row], error)
            failed = {row for row, _ in errors}
            good = [row for row in range(len(indices)) if row not in failed]
            skips = self.on_error == "skip" or not self._indexed
            if attempt == REPLACEMENTS or (skips and not good):
                raise errors[0][1]
            for _, error in errors:
                _drop_traceback(error)
            used = list(used)
            if skips:
                for row in failed:
                    copy(row, good[row % len(good)])
                    used[row] = used[good[row % len(good)]]
                return used
            for row in failed - others.keys():
                others[row] = substitutes(self._dataset, *self._epoch, indices[row], self.left_out)
            requests = [(row, next(others[row])) for row in sorted(failed)]
            for row, index in requests:
                used[row] = index
            attempt += 1

    def _note(self, index: Any, error: Exception) -> None:
        """Count a bad sample, or raise its error."""
        if not isinstance(error, FastloadError):
            tell_sample(error, self.name(index))
        self.raise_uncovered(error)
        key = getattr(error, "key", None) or index
        self.bad.append((str(key), f"{type(error).__name__}: {error}"))
        self._counters.add("bad.samples")

    def raise_uncovered(self, error: Exception) -> None:
        """Raise `error` unless `on_error` covers it: a bad sample, no deadlock, and no store that is down."""
        outage = isinstance(error, StoreError) and not isinstance(
            error, NotFoundError | ObjectChangedError | ShortReadError
        )
        if self.on_error == "raise" or outage or isinstance(error, WorkerError):
            raise error

    def name(self, index: Any) -> str:
        """ "sample 3 'cat/3.jpg'": with its key, where the dataset knows it."""
        name = f"sample {index!r}"
        with contextlib.suppress(Exception):  # not indexed, or out of range: that may be the very error
            view = view_of(self._dataset)
            name = view.sample_name(index)
            key = view.key(index)
            if key is not None:
                return f"{name} {key!r}"
        return name


def _drop_traceback(error: BaseException | None) -> None:
    """Its frames hold the errors, the batch and the iterator, which would live until the next collection."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
