"""The reading of index batches: announced to a dataset that can prefetch, and read as torch does.

`ReadAhead` announces index batches, and cancels those that are not used. `SampleReader` makes the samples of
any map-style dataset: as its rows, one by one, by its `__getitems__`, or in threads. `ErrorPolicy` is what
`on_error` does with samples that cannot be read or decoded.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from fastload.datasets.views import (
    MadeSample,
    Prefetches,
    RowErrors,
    RowRequests,
    View,
    current_reader,
    noted_prefetches,
)
from fastload.datasets.wrappers import substitutes, view_of
from fastload.errors import (
    FastloadError,
    NotFoundError,
    ObjectChangedError,
    ShortReadError,
    StoreError,
    WorkerError,
)
from fastload.images.rng import SampleSeeds
from fastload.metrics.counters import Counters
from fastload.workers.collate import tell_more, tell_sample
from fastload.workers.sample_threads import SampleThreads, Task

_log = logging.getLogger("fastload")

_UNUSED = 256  # samples prefetched in vain, after which prefetching stops

_Fill = Callable[[list[Any], RowRequests], RowErrors]
_T = TypeVar("_T")


class _Announced(Generic[_T]):
    """Index batches that were announced and not made yet, each with what is on its way for it."""

    def __init__(self) -> None:
        self._batches: deque[tuple[Any, list[_T]]] = deque()

    def add(self, index: Any, coming: list[_T]) -> None:
        self._batches.append((index, coming))

    def find(self, index: Any) -> list[_T] | None:
        """Return what is on its way for an index batch; None where it was not announced."""
        return next((coming for known, coming in list(self._batches) if known is index), None)

    def take(self, index: Any) -> list[_T]:
        """Return what is on its way for an index batch, and forget it."""
        for number, (known, coming) in enumerate(list(self._batches)):
            if known is index:
                del self._batches[number]
                return coming
        return []


class ReadAhead:
    """Announces index batches, and cancels those that are not used.

    Args:
        rows: of the dataset, or None where it cannot prefetch.
        auto_collation: False where an "index batch" is one index.
        threaded: samples are made before their batch is, so what one batch uses cannot be counted.
    """

    def __init__(self, rows: View | None, *, auto_collation: bool, threaded: bool) -> None:
        self._rows = rows
        self._auto_collation = auto_collation
        self._threaded = threaded
        self._reader = object()  # not `self`, which the dataset would keep
        self._streamed = False
        self._announced = _Announced[tuple[Any, list[Any]]]()
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
        self._announced.add(index, notes)
        before = current_reader.set(self._reader)
        try:
            with noted_prefetches(notes):
                self._rows.prefetch(self._indices(index))
        except BaseException as error:
            self.cancel(index)
            if self._rows.override is None or not isinstance(error, Exception):
                raise
            # The user's `__getitem__` may accept an index that the dataset below has no sample for.
            self._unused = _UNUSED
        finally:
            current_reader.reset(before)
        for dataset, _ in notes:
            self._counters.setdefault(id(dataset), dataset.counters)

    def cancel(self, index: Any) -> None:
        """Cancel an index batch that nobody will ask for. One that is not announced, or made, is ignored."""
        notes = self._announced.take(index)
        if self._rows is not None and self._streamed:
            with contextlib.suppress(Exception):
                self._rows.cancel(self._indices(index))
        for dataset, indices in notes:
            with contextlib.suppress(Exception):
                dataset._cancel(indices)

    def used(self) -> float:
        """Return prefetched samples used so far, as counted by the datasets."""
        return sum(counters["get.ahead"] for counters in self._counters.values())

    def finish(self, index: Any, samples: int, used: float) -> None:
        """Release the prefetched samples that a batch did not use, which was made and used this many.

        A `__getitem__` that never asks for its own sample (it returns the key alone, or another sample) makes
        prefetching useless: it stops after a while.
        """
        if self._rows is None:
            return
        if self._rows.uses_all:
            self._announced.take(index)
            return
        notes = self._announced.find(index)
        announced = samples if notes is None else sum(len(indices) for _, indices in notes)
        if self._threaded or used < announced:
            self.cancel(index)
        else:
            self._announced.take(index)
        if self._threaded or used or not announced:
            self._unused = 0
            return
        self._unused += samples
        if self._unused >= _UNUSED and self._rows.override is None and not self._warned:
            self._warned = True
            _log.warning(
                "the last %d samples that prefetch() of the dataset announced were not read by its "
                "__getitem__: nothing more is read ahead in this epoch",
                self._unused,
            )

    def _indices(self, index: Any) -> Any:
        return index if self._auto_collation else [index]


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
        rows: View,
        *,
        auto_collation: bool,
        seeds: SampleSeeds | None,
        errors: ErrorPolicy,
        counters: Counters,
        threads: SampleThreads | None,
    ) -> None:
        self._dataset = dataset
        self._rows = rows
        if not auto_collation:
            rows.ask_alone()
        self._seeds = seeds
        self._errors = errors
        self._counters = counters
        self._threads = threads
        self._announced = _Announced[Task]()

    def announce(self, index: Any, indices: list[Any]) -> None:
        """Let the threads begin with an index batch that will be read after those announced before."""
        if self._threads is None or self._by_rows():
            return
        if self._rows.bulk and self._seeds is None:
            tasks = [self._threads.submit(index, partial(self._dataset.__getitems__, index))]
        else:
            last = len(indices) - 1
            tasks = [self._submit(one, last=row == last) for row, one in enumerate(indices)]
        self._announced.add(index, tasks)

    def cancel(self, index: Any) -> None:
        """Forget an index batch that will not be read, or was read."""
        tasks = self._announced.take(index)
        if self._threads is not None:
            self._threads.cancel(tasks)

    def read(self, index: Any, indices: list[Any], seed: int, epoch: int) -> tuple[Any, list[Any]]:
        """Return (samples of an index batch, index of each), where substitutes stand for bad ones.

        Args:
            index: the index batch itself, which a `__getitems__` receives.
            indices: its sample indices.
            seed, epoch: of the randomness of rows.
        """
        tasks, before = self._announced.take(index), self._counted()
        by_rows = self._by_rows()
        bulk = self._rows.bulk and not by_rows
        if bulk and self._seeds is None:
            try:
                with self._counters.timed("decode"):
                    many = partial(self._dataset.__getitems__, index)
                    samples = many() if self._threads is None or not tasks else self._threads.result(tasks[0])
                self._counters.add("decode.samples", len(indices))
                return samples, indices
            except Exception as error:
                self._errors.raise_uncovered(error)  # else one by one, to find the bad ones
                tasks = []
        parts: list[Any] = [None] * len(indices)
        if by_rows:
            if self._threads is not None:
                self._threads.cancel(tasks)  # the transform was set after they were announced
            fill: _Fill = partial(self._fill_from_rows, seed=seed, epoch=epoch)
        elif self._threads is not None:
            fill = partial(self._fill_from_threads, tasks=tasks)
        else:
            fill = self._fill

        def copy(target: int, source: int) -> None:
            parts[target] = parts[source]

        errors = fill(parts, list(enumerate(indices)))
        resolved = self._errors.resolve(indices, errors, partial(fill, parts), copy)
        self._counters.add("decode.samples", max(0, len(parts) - (self._counted() - before)))
        return [sample for part in parts for sample in part] if bulk else parts, resolved

    def _by_rows(self) -> bool:
        """Return whether samples are made from rows that fastload fills."""
        return self._rows.writes()

    def _counted(self) -> float:
        """Return samples that the datasets count themselves."""
        return float(sum(leaf.counters["decode.samples"] for leaf in self._rows.leaves()))

    # --- each fills some rows

    def _fill(self, parts: list[Any], requests: RowRequests) -> RowErrors:
        seeds, makes = self._seeds, [partial(self._sample, index) for _, index in requests]
        if seeds is not None and requests:
            seeds.begin_batch(requests[0][1])
            makes = [partial(seeds.call, index, self._sample, index) for _, index in requests[:-1]]
            last = requests[-1][1]  # `collate_fn` draws from the state after it
            makes.append(partial(self._make_seeded, partial(self._sample, last), last))
        return self._fill_each(parts, requests, makes)

    def _fill_from_rows(self, parts: list[Any], requests: RowRequests, seed: int, epoch: int) -> RowErrors:
        indices = [index for _, index in requests]
        try:
            made = self._prepare(indices, seed, epoch)
        except Exception as error:
            if not self._rows.bulk:
                raise
            self._errors.raise_uncovered(error)  # else one by one, to find the bad ones
            made = [partial(self._make_alone, index, seed, epoch) for index in indices]
        # Not `seeds.call`, which may make a sample twice: functions may change the row in place.
        makes = [
            partial(self._make_seeded, partial(_checked, make, index), index)
            for (_, index), make in zip(requests, made, strict=True)
        ]
        return self._fill_each(parts, requests, makes)

    def _prepare(self, indices: list[Any], seed: int, epoch: int) -> list[MadeSample]:
        with self._seeds or contextlib.nullcontext():
            return self._rows.prepare(indices, seed, epoch)

    def _make_alone(self, index: Any, seed: int, epoch: int) -> Any:
        return self._prepare([index], seed, epoch)[0]()

    def _make_seeded(self, make: Callable[[], Any], index: Any) -> Any:
        if self._seeds is not None:
            self._seeds.set(index)
        return make()

    def _fill_from_threads(self, parts: list[Any], requests: RowRequests, tasks: list[Task]) -> RowErrors:
        assert self._threads is not None
        if tasks:
            mine, tasks[:] = tasks[:], []  # substitutes of bad samples are new
        else:
            mine = [self._submit(index, last=row == requests[-1][0]) for row, index in requests]
        try:
            return self._fill_each(parts, requests, [partial(self._threads.result, task) for task in mine])
        finally:
            self._threads.cancel(mine)

    def _fill_each(
        self, parts: list[Any], requests: RowRequests, makes: Sequence[Callable[[], Any]]
    ) -> RowErrors:
        errors: RowErrors = []
        with self._counters.timed("decode"):
            for (row, _), make in zip(requests, makes, strict=True):
                try:
                    parts[row] = make()
                except Exception as error:
                    errors.append((row, error))
                    if self._errors.on_error == "raise":
                        break
        return errors

    # --- one sample

    def _submit(self, index: Any, *, last: bool) -> Task:
        assert self._threads is not None
        return self._threads.submit(index, partial(self._sample, index), last=last)

    def _sample(self, index: Any) -> Any:
        """Return one sample; a list with it where a `__getitems__` makes the samples."""
        if self._rows.bulk:
            return _checked(partial(self._dataset.__getitems__, [index]), index)
        return _checked(partial(operator.getitem, self._dataset, index), index)


def _checked(make: Callable[[], Any], index: Any) -> Any:
    try:
        return make()
    except StopIteration as error:
        raise RuntimeError(f"the dataset raised StopIteration for sample {index!r}") from error


# --- bad samples

REPLACEMENTS = 16  # how many other samples `on_error="replace"` tries before it gives up


class ErrorPolicy:
    """Keeps batches full where samples are bad.

    Args:
        dataset: the loader's.
        on_error: "raise"; "repeat" (the row repeats another one of its batch); "replace" (the row gets
            another sample: the same one in every run with this seed, as long as the same samples are bad).
        counters: counts bad.samples.

    Attributes:
        bad: (sample, error) of each bad sample that was replaced.
        excluded: indices of samples that replace no other one.
    """

    def __init__(self, dataset: Any, on_error: str, counters: Counters) -> None:
        self._dataset = dataset
        self.on_error = on_error
        self._counters = counters
        self._epoch = (0, 0)
        self._indexed = True
        self.bad: list[tuple[str, str]] = []
        self.excluded: frozenset[int] = frozenset()

    def start_epoch(self, seed: int, epoch: int, *, indexed: bool) -> None:
        """Note what replacements depend on. Without an index of the dataset, "replace" acts as "repeat"."""
        self._epoch, self._indexed = (seed, epoch), indexed

    def resolve(
        self,
        indices: list[Any],
        errors: RowErrors,
        fill: Callable[[RowRequests], RowErrors],
        copy: Callable[[int, int], None],
    ) -> list[Any]:
        """Put substitutes into the rows of bad samples.

        Returns:
            the sample that stands in each row.

        Args:
            indices: the sample of each row.
            errors: of filling them.
            fill: fills some rows and returns the errors of those that failed.
            copy: (target, source) makes one row equal to another.

        Raises:
            Exception: that of a bad sample that `on_error` does not cover, with a note of the sample.
        """
        requests, used = list(enumerate(indices)), indices
        others: dict[int, Iterator[int]] = {}  # row -> its substitutes
        attempt = 0
        while errors:
            asked = dict(requests)
            for row, error in errors:
                self._note(asked[row], error)
            failed = {row for row, _ in errors}
            good = [row for row in range(len(indices)) if row not in failed]
            # A list names a batch that the dataset makes: no other sample can stand for it.
            batches = any(isinstance(asked[row], list) for row in failed)
            repeats = self.on_error == "repeat" or not self._indexed or batches
            if attempt == REPLACEMENTS or (repeats and not good):
                error = errors[0][1]
                which = "all of its batch" if repeats else f"the {attempt} that it was to replace"
                end = f". on_error={self.on_error!r} ends here: {which} are bad too"
                if isinstance(error, FastloadError):
                    error.message += end
                else:
                    tell_more(error, end)
                raise error
            for _, error in errors:
                _drop_traceback(error)
            used = list(used)
            if repeats:
                for row in failed:
                    copy(row, good[row % len(good)])
                    used[row] = used[good[row % len(good)]]
                return used
            for row in failed - others.keys():
                others[row] = substitutes(self._dataset, *self._epoch, indices[row], self.excluded)
            requests = [(row, next(others[row])) for row in sorted(failed)]
            for row, index in requests:
                used[row] = index
            attempt += 1
            errors = fill(requests)
        return used

    def _note(self, index: Any, error: Exception) -> None:
        """Count a bad sample, or raise its error."""
        if not isinstance(error, FastloadError):
            tell_sample(error, self.name(index))
        self.raise_uncovered(error)
        key = getattr(error, "key", None) or _key_of(self._dataset, index)
        self.bad.append((str(index if key is None else key), f"{type(error).__name__}: {error}"))
        self._counters.add("bad.samples")

    def raise_uncovered(self, error: Exception) -> None:
        """Raise `error` unless `on_error` covers it: a bad sample, no deadlock, and no store that is down."""
        outage = isinstance(error, StoreError) and not isinstance(
            error, NotFoundError | ObjectChangedError | ShortReadError
        )
        if self.on_error == "raise" or outage or isinstance(error, WorkerError):
            raise error

    def name(self, index: Any) -> str:
        return name_sample(self._dataset, index)


def name_sample(dataset: Any, index: Any) -> str:
    """Return "sample 3 'cat/3.jpg'": with its key, where the dataset knows it."""
    name = f"sample {index!r}"
    with contextlib.suppress(Exception):  # of the user's classes
        name = view_of(dataset).sample_name(index)
    key = _key_of(dataset, index)
    return name if key is None else f"{name} {key!r}"


def _key_of(dataset: Any, index: Any) -> str | None:
    with contextlib.suppress(Exception):  # not indexed, or out of range: that may be the very error
        return view_of(dataset).key(index)
    return None


def _drop_traceback(error: BaseException | None) -> None:
    """Drop the frames, which would keep the errors, the batch and the iterator until the next collection."""
    while error is not None and error.__traceback__ is not None:
        error.with_traceback(None)
        error = error.__cause__ or error.__context__
