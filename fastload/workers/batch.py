"""One index batch in, one collated batch out: the steps of `BatchMaker.make_batch`, in order.

    announce (earlier) ─▶ new_batch ─▶ fill: payload ─▶ decode ─▶ row ─▶ settle errors ─▶ finish
     ReadAhead            RowBatches: rows in a slot                     ErrorPolicy      Collation
                          SampleReader: sample objects, for other datasets

A dataset needs only what torch requires. A `RowDataset` is prefetched and writes its rows straight into the
batch. A subclass with a `__getitem__` of its own is prefetched, and asked for its samples.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from fastload.datasets.columns import ordinary_memory
from fastload.datasets.protocols import (
    Allocate,
    CacheFilling,
    EncodedRows,
    RowErrors,
    RowRequests,
)
from fastload.datasets.seeds import SampleSeeds
from fastload.datasets.views import View
from fastload.datasets.wrappers import fastload_datasets, inner_datasets, start_epoch, view_of
from fastload.errors import ArgumentError
from fastload.metrics.counters import Counters
from fastload.workers.collate import Collation, tell_mismatch
from fastload.workers.on_error import ErrorPolicy
from fastload.workers.reading import ReadAhead, SampleReader
from fastload.workers.sample_threads import SampleThreads
from fastload.workers.witness import Witness, Witnesses


class BatchCounters(Counters):
    """The counters of a process that makes batches, with those of its dataset and of the inner datasets."""

    def __init__(self, dataset: Any, *, threaded: bool = False) -> None:
        sources = fastload_datasets(dataset)
        # A dataset has the counters of its cache only where it prefetches.
        sources += [getattr(source, "cache", None) for source in sources]
        found = [getattr(source, "counters", None) for source in sources]
        super().__init__(dict.fromkeys(counters for counters in found if isinstance(counters, Counters)))
        self._alone = not threaded and any(one.asks is not None for one in inner_datasets(dataset))

    def made_batch(self, samples: int) -> None:
        """Count a batch of this number of samples."""
        self.add("collate.batches")
        self.add("collate.samples", samples)
        if self._alone:
            self.add("get.alone", samples)


class BatchMaker:
    """Makes the batch of an index batch.

    Args:
        dataset: map-style.
        collate_fn: as torch's.
        auto_collation: False where an "index batch" is one index (`batch_size=None`).
        on_error: "raise", "skip" or "replace", see `ErrorPolicy`.
        seeded: make all randomness of a sample a function of (seed, epoch, index), user transforms included,
            and that of `collate_fn` a function of the batch.
        allocate: memory for batches.
        threads: that make the samples of announced index batches; 0: the thread that makes the batch.
        shares: the thread that makes batches runs other code too, which must not see what threads draw.
        logged: each row of a witness is wanted, not their sums alone.

    Attributes:
        counters: those of this process for `dataset`.
        witness: of the batch that was made last.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[Any], Any],
        auto_collation: bool,
        on_error: str,
        seeded: bool,
        allocate: Allocate,
        threads: int = 0,
        shares: bool = False,
        logged: bool = False,
    ) -> None:
        rows = view_of(dataset)
        seeds = SampleSeeds() if seeded else None
        # Streamed ids are not announced, and shard datasets hand out a stream's records to one thread.
        threaded = threads > 0 and rows.streams() is None
        self.counters = BatchCounters(dataset, threaded=threaded)
        self._collation = Collation(collate_fn, auto_collation=auto_collation)
        self._errors = ErrorPolicy(dataset, on_error, self.counters)
        self._ahead = ReadAhead(
            rows if rows.reads_ahead else None, auto_collation=auto_collation, threaded=threaded
        )
        self._seeds = seeds
        self._epoch = (0, 0)  # seed, epoch
        self._datasets = fastload_datasets(dataset)
        self._rows: RowBatches | None = None
        self._encoded: EncodedRowBatches | None = None
        if rows.reads_ahead and rows.override is None:
            self._rows = RowBatches(rows, self._collation, seeds, allocate, self._errors.name)
        encoded = rows.encoded()
        if encoded is not None:
            self._encoded = EncodedRowBatches(rows, encoded, self._collation, seeds, allocate)
        self._witnesses = Witnesses(rows, seeded=seeded, logged=logged)
        self.witness: Witness | None = None
        self._threads = SampleThreads(threads, seeds, shares=shares) if threaded else None
        self._samples = SampleReader(
            dataset,
            rows,
            auto_collation=auto_collation,
            seeds=seeds,
            errors=self._errors,
            counters=self.counters,
            threads=self._threads,
        )

    @property
    def bad(self) -> list[tuple[str, str]]:
        """(sample, error) of each bad sample since the list was emptied."""
        return self._errors.bad

    @bad.setter
    def bad(self, value: list[tuple[str, str]]) -> None:
        self._errors.bad = value

    def start_epoch(self, seed: int, epoch: int, *, indexed: bool = True) -> None:
        """From now on, samples have the randomness of this epoch.

        Args:
            indexed: samples can be asked for by index; otherwise on_error="replace" acts as "skip".
        """
        self._epoch = (seed, epoch)
        self._collation.start_epoch()
        self._errors.start_epoch(seed, epoch, indexed=indexed)
        self._ahead.start_epoch(streamed=not indexed)
        if self._seeds is not None:
            self._seeds.start_epoch(seed, epoch)
        start_epoch(self._datasets, epoch)

    def leave_out(self, samples: frozenset[int]) -> None:
        """From now on, these samples replace no bad ones."""
        self._errors.left_out = samples

    def prefetch(self, index: Any) -> None:
        """Start reading an index batch that will be asked for after those announced before.

        Raises:
            Exception: any that the dataset raises; then none of the batch is announced.
        """
        self._ahead.announce(index)
        try:
            self._samples.announce(index, self._collation.indices(index))
        except BaseException:
            self.cancel(index)
            raise

    def cancel(self, index: Any) -> None:
        """An announced index batch will not be asked for. One that could not be announced is ignored."""
        self._samples.cancel(index)
        self._ahead.cancel(index)

    def flush_cache(self) -> None:
        """Before the last batch of an epoch is handed over: the next epoch finds this one in the cache."""
        for dataset in self._datasets:
            if isinstance(dataset, CacheFilling):
                dataset.flush_cache()

    def close_cache(self) -> None:
        """At the end of this process: write out the queued records."""
        self.close_threads()
        for dataset in self._datasets:
            if isinstance(dataset, CacheFilling):
                dataset.close_cache()

    def close_threads(self) -> None:
        """End the threads that make samples. No batch is made after that."""
        if self._threads is not None:
            self._threads.close()

    def make_batch(self, index: Any, *, encoded: bool = False) -> Any:
        """The collated batch of `index`; with `encoded`, its images as `EncodedImages`.

        Raises:
            Exception: any of the dataset or `collate_fn` that `on_error` does not cover. It has a note
                of the sample.
        """
        try:
            with self._threads or contextlib.nullcontext():
                return self._make_batch(index, encoded)
        except StopIteration as error:
            self.cancel(index)
            # Left alone it would end the epoch silently: it means the end of an iterator.
            raise RuntimeError(f"dataset or collate_fn raised StopIteration for batch {index!r}") from error
        except BaseException:  # Ctrl-C too: the announced rest of the batch will not be used
            self.cancel(index)
            raise

    def _make_batch(self, index: Any, encoded: bool) -> Any:
        indices, used_ahead = self._collation.indices(index), self._ahead.used()
        self.witness = None
        form = self._encoded if encoded else self._rows
        assert form is not None or not encoded
        batch = None if form is None else form.new_batch(len(indices))
        if form is None or batch is None:
            samples, settled = self._samples.read(index, indices, *self._epoch)
        else:
            self._samples.cancel(index)
            fill = partial(form.fill, batch, seed=self._epoch[0], epoch=self._epoch[1])
            settled = self._errors.settle(indices, fill, partial(form.copy_row, batch))
        self.witness = self._witnesses.of(settled, *self._epoch)
        self._ahead.finish(index, len(indices), self._ahead.used() - used_ahead)
        with self.counters.timed("collate"):
            if form is None or batch is None:
                made = self._collation(samples, lambda row: self._errors.name(settled[row]))
            else:
                made = form.finish(batch, settled)
        self.counters.made_batch(len(indices))
        return made


# --- batches whose rows a dataset writes itself: as pixels, or as encoded images for the device to decode


class _Batches(ABC):
    """Batches that `rows` fills."""

    def __init__(
        self, rows: View, collation: Collation, seeds: SampleSeeds | None, allocate: Allocate
    ) -> None:
        self._rows = rows
        self._collation = collation
        self._seeds = seeds
        self._allocate = allocate

    @abstractmethod
    def new_batch(self, n: int) -> Any | None:
        """An empty batch of `n` rows; None where the dataset has to be read sample by sample."""

    def fill(self, batch: Any, requests: RowRequests, seed: int, epoch: int) -> RowErrors:
        """Wait for the payloads of these samples, and decode them into their rows."""
        with self._seeds or contextlib.nullcontext():
            return self._rows.fill(batch, requests, seed, epoch)

    def copy_row(self, batch: Any, target: int, source: int) -> None:
        """Make row `target` equal to row `source`."""
        self._rows.copy_row(batch, target, source)

    @abstractmethod
    def finish(self, batch: Any, indices: list[Any]) -> Any:
        """The filled batch in the form that the loader hands over. `indices`: the sample in each row."""


class RowBatches(_Batches):
    """Batches of pixels and columns: no sample objects, no stacking.

    Args:
        rows: of the loader's dataset.
        collation: the loader's.
        seeds: of the loader's `seed`, or None.
        allocate: memory for batches that need no `collate_fn`, such as a slot.
        name: index of a sample -> its name, for errors.
    """

    def __init__(
        self,
        rows: View,
        collation: Collation,
        seeds: SampleSeeds | None,
        allocate: Allocate,
        name: Callable[[Any], str],
    ) -> None:
        super().__init__(rows, collation, seeds, allocate)
        self._name = name

    def new_batch(self, n: int) -> Any | None:
        return self._rows.new_batch(n, self._allocate if self._collation.direct else ordinary_memory)

    def finish(self, batch: Any, indices: list[Any]) -> Any:
        """The batch itself, or that which a user's `collate_fn` makes of its rows."""
        if not self._collation.direct:
            samples = self._samples(batch, indices)
            if self._seeds is not None and indices:
                self._seeds.set(indices[-1])
            return self._collation(samples, lambda row: self._name(indices[row]))
        with self._collation.on_host():
            try:
                return self._rows.finish_batch(batch)
            except Exception as error:
                tell_mismatch(error, self._samples(batch, indices), lambda row: self._name(indices[row]))
                raise

    def _samples(self, batch: Any, indices: list[Any]) -> list[Any]:
        return [self._rows.sample(batch, row) for row in range(len(indices))]


class EncodedRowBatches(_Batches):
    """Batches with `EncodedImages` in place of pixels.

    Args:
        rows, encoded: the same dataset, in both of its roles.
        collation, seeds, allocate: as for `RowBatches`.
    """

    def __init__(
        self,
        rows: View,
        encoded: EncodedRows,
        collation: Collation,
        seeds: SampleSeeds | None,
        allocate: Allocate,
    ) -> None:
        super().__init__(rows, collation, seeds, allocate)
        self._encoded = encoded

    def new_batch(self, n: int) -> Any:
        """An empty batch of `n` rows.

        Raises:
            ArgumentError: the dataset's transform, which may have changed, needs pixels.
        """
        why = self._encoded.why_not_encoded()
        if why is not None:
            raise ArgumentError(f"decode= of the loader does not work here: {why}")
        return self._encoded.new_encoded_batch(n, self._allocate)

    def finish(self, batch: Any, indices: list[Any]) -> Any:
        with self._collation.on_host():
            return self._encoded.finish_encoded_batch(batch)
