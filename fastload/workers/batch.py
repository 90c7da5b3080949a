"""One index batch in, one collated batch out: the steps of `BatchMaker.make_batch`, in order.

    announce (earlier) ─▶ new_batch ─▶ fill: payload ─▶ decode ─▶ row ─▶ settle errors ─▶ finish
     ReadAhead            RowBatches: rows in a slot                     ErrorPolicy      Collation
                          SampleReader: sample objects, for other datasets

A dataset needs only what torch requires. A `RowDataset` is prefetched and writes its rows straight into the
batch. A subclass with a `__getitem__` of its own is prefetched, and asked for its samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastload.datasets.protocols import (
    Allocate,
    CacheFilling,
    as_encoded_rows,
    as_filling,
    as_rows,
    inner_datasets,
    own_samples,
    start_epoch,
)
from fastload.datasets.seeds import SampleSeeds
from fastload.metrics.counters import Counters
from fastload.workers.collate import Collation
from fastload.workers.on_error import ErrorPolicy
from fastload.workers.readahead import ReadAhead
from fastload.workers.rows import EncodedRowBatches, RowBatches
from fastload.workers.sample_reader import SampleReader

__all__ = ["BatchCounters", "BatchMaker"]


class BatchCounters(Counters):
    """The counters of a process that makes batches, with those of its dataset and of the inner datasets."""

    def __init__(self, dataset: Any) -> None:
        inner = inner_datasets(dataset)
        sources = [as_rows(dataset), as_filling(dataset), *(one.dataset for one in inner)]
        # A dataset has the counters of its cache only where it prefetches.
        sources += [getattr(source, "cache", None) for source in sources]
        found = [getattr(source, "counters", None) for source in sources]
        super().__init__(dict.fromkeys(counters for counters in found if isinstance(counters, Counters)))
        self._alone = any(one.alone for one in inner)

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

    Attributes:
        counters: those of this process for `dataset`.
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
    ) -> None:
        rows, encoded = as_rows(dataset), as_encoded_rows(dataset)
        seeds = SampleSeeds() if seeded else None
        by_rows = rows is not None and own_samples(dataset) is None
        self.counters = BatchCounters(dataset)
        self._dataset = dataset
        self._collation = Collation(collate_fn, auto_collation=auto_collation)
        self._errors = ErrorPolicy(dataset, on_error, self.counters)
        self._ahead = ReadAhead(rows, auto_collation=auto_collation, optional=not by_rows)
        self._seeds = seeds
        self._epoch = (0, 0)  # seed, epoch
        fastloads = [as_filling(dataset), *(inner.dataset for inner in inner_datasets(dataset))]
        self._filling = [one for one in fastloads if isinstance(one, CacheFilling)]
        self._rows: RowBatches | None = None
        self._encoded: EncodedRowBatches | None = None
        if rows is not None and by_rows:
            name = self._errors.name_row
            self._rows = RowBatches(dataset, rows, self._collation, seeds, allocate, name)
        if rows is not None and encoded is not None:
            self._encoded = EncodedRowBatches(rows, encoded, self._collation, seeds, allocate)
        self._samples = SampleReader(
            dataset, auto_collation=auto_collation, seeds=seeds, errors=self._errors, counters=self.counters
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
        self._ahead.start_epoch()
        if self._seeds is not None:
            self._seeds.start_epoch(seed, epoch)
        start_epoch(self._dataset, epoch)

    def prefetch(self, index: Any) -> None:
        """Start reading an index batch that will be asked for after those announced before.

        Raises:
            Exception: any that the dataset raises; then none of the batch is announced.
        """
        self._ahead.announce(index)

    def cancel(self, index: Any) -> None:
        """An announced index batch will not be asked for. One that could not be announced is ignored."""
        self._ahead.cancel(index)

    def flush_cache(self) -> None:
        """Before the last batch of an epoch is handed over: the next epoch finds this one in the cache."""
        for filling in self._filling:
            filling.flush_cache()

    def close_cache(self) -> None:
        """At the end of this process: write out the queued records."""
        for filling in self._filling:
            filling.close_cache()

    def make_batch(self, index: Any, *, encoded: bool = False) -> Any:
        """The collated batch of `index`; with `encoded`, its images as `EncodedImages`.

        Raises:
            Exception: any of the dataset or `collate_fn` that `on_error` does not cover. It has a note
                of the sample.
        """
        try:
            indices = self._collation.indices(index)
            form = self._encoded if encoded else self._rows
            assert form is not None or not encoded
            batch = None if form is None else form.new_batch(len(indices))
            if form is None or batch is None:
                made = self._of_samples(index, indices)
            else:
                fill = partial(form.fill, batch, seed=self._epoch[0], epoch=self._epoch[1])
                self._errors.settle(indices, fill, partial(form.copy_row, batch))
                with self.counters.timed("collate"):
                    made = form.finish(batch, indices)
        except StopIteration as error:
            self.cancel(index)
            # Left alone it would end the epoch silently: it means the end of an iterator.
            raise RuntimeError(f"dataset or collate_fn raised StopIteration for batch {index!r}") from error
        except BaseException:  # Ctrl-C too: the announced rest of the batch will not be used
            self.cancel(index)
            raise
        self.counters.made_batch(len(indices))
        return made

    def _of_samples(self, index: Any, indices: list[Any]) -> Any:
        """The batch of a dataset that does not write rows."""
        before = self._ahead.used()
        samples = self._samples.read(index, indices)
        if self._rows is None:
            mine = indices if self._collation.auto_collation else indices[0]
            self._ahead.drop_unused(mine, len(indices), self._ahead.used() - before)
        with self.counters.timed("collate"):
            return self._collation(samples, partial(self._errors.name_row, indices))
