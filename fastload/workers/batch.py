"""One index batch in, one collated batch out: the steps of `BatchMaker.make_batch`, in order.

    announce (earlier) ─▶ new_batch ─▶ fill: payload ─▶ decode ─▶ row ─▶ settle errors ─▶ finish
     ReadAhead            rows in a slot                                ErrorPolicy       Collation
                          SampleReader: sample objects, for other datasets

A dataset needs only what torch requires. One over a store is prefetched and writes its rows straight into the
batch. A subclass with a `__getitem__` of its own is prefetched, and asked for its samples.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from fastload.datasets.sample_fields import ordinary_memory
from fastload.datasets.views import Allocate, CacheFilling, RowErrors, RowRequests
from fastload.datasets.wrappers import fastload_datasets, start_epoch, view_of
from fastload.errors import ArgumentError
from fastload.images.kernel import take_by_libjpeg
from fastload.images.rng import SampleSeeds
from fastload.order.state import DatasetState
from fastload.workers.collate import Collation, tell_mismatch
from fastload.workers.on_error import ErrorPolicy
from fastload.workers.protocol import EpochStart, WorkerSetup
from fastload.workers.reading import ReadAhead, SampleReader
from fastload.workers.sample_threads import SampleThreads
from fastload.workers.sources import (
    BatchCounters,
    BatchSource,
    IterableSource,
    StreamReader,
    TakeNext,
    dataset_state,
)
from fastload.workers.witness import Witnesses


def open_source(setup: WorkerSetup, allocate: Allocate) -> BatchSource:
    """Open the dataset of `setup` in this process; `allocate` gives the memory for batches."""
    if isinstance(setup.dataset, IterableDataset):
        return IterableSource(setup)
    return BatchMaker(setup, allocate)


class BatchMaker(BatchSource):
    """Makes the batches of a map-style dataset.

    Args:
        setup: the arguments of the loader.
        allocate: memory for batches that need no `collate_fn`, such as a slot.

    Attributes:
        counters: those of this process for the dataset.
    """

    def __init__(self, setup: WorkerSetup, allocate: Allocate) -> None:
        rows = view_of(setup.dataset)
        # Streamed ids are not announced, and shard datasets hand out a stream's records to one thread.
        threaded = setup.threads > 0 and rows.streams() is None
        self.counters = BatchCounters(setup.dataset, threaded=threaded)
        self._dataset = setup.dataset
        self._datasets = fastload_datasets(setup.dataset)
        self._rows = rows
        self._allocate = allocate
        self._seeds = SampleSeeds() if setup.seeded else None
        self._epoch = (0, 0)  # seed, epoch
        self._stream: dict[str, Any] | None = None  # the state after the last batch, where streams are read
        self._streamed = False
        self._collation = Collation(setup.collate_fn, auto_collation=setup.auto_collation)
        self._errors = ErrorPolicy(setup.dataset, setup.on_error, self.counters)
        self._ahead = ReadAhead(
            rows if rows.reads_ahead else None, auto_collation=setup.auto_collation, threaded=threaded
        )
        self._witnesses = Witnesses(rows, seeded=setup.seeded, logged=setup.logged)
        # A trainer that makes its own batches runs other code too, which must not see what threads draw.
        shares = setup.num_workers == 0
        self._threads = SampleThreads(setup.threads, self._seeds, shares=shares) if threaded else None
        self._samples = SampleReader(
            setup.dataset,
            rows,
            auto_collation=setup.auto_collation,
            seeds=self._seeds,
            errors=self._errors,
            counters=self.counters,
            threads=self._threads,
        )
        self._streams = StreamReader(
            setup.dataset,
            auto_collation=setup.auto_collation,
            drop_last=setup.drop_last,
            cancel=self.cancel,
        )

    def start_epoch(self, start: EpochStart) -> None:
        self._streams.start_epoch(streamed=start.streamed)
        self._streamed, self._stream = start.streamed, None
        self._epoch = (start.seed, start.epoch)
        self._collation.start_epoch()
        # Without an index of the dataset, on_error="replace" acts as "skip".
        self._errors.start_epoch(*self._epoch, indexed=not start.streamed)
        self._errors.left_out = start.left_out
        self._ahead.start_epoch(streamed=start.streamed)
        if self._seeds is not None:
            self._seeds.start_epoch(*self._epoch)
        start_epoch(self._datasets, start.epoch)

    def leave_out(self, samples: frozenset[int]) -> None:
        self._errors.left_out = samples

    def prefetch(self, index: Any) -> None:
        if isinstance(index, TakeNext):
            return
        self._ahead.announce(index)
        try:
            self._samples.announce(index, self._collation.indices(index))
        except BaseException:
            self.cancel(index)
            raise

    def cancel(self, index: Any) -> None:
        if not isinstance(index, TakeNext):
            self._samples.cancel(index)
            self._ahead.cancel(index)

    def begin_batch(self, index: Any) -> Any | None:
        indices = self._collation.indices(index)
        batch = self._new_batch(len(indices), encoded=False)
        if batch is not None:
            self._rows.begin(batch, list(enumerate(indices)), *self._epoch)
        return batch

    def make_batch(self, index: Any, *, encoded: bool, begun: Any | None = None) -> Any:
        """Make the collated batch of `index`; with `encoded`, its images as `EncodedImages`.

        Args:
            begun: see `BatchSource.make_batch`.

        Raises:
            StreamOver: the stream has no more.
            Exception: any of the dataset or `collate_fn` that `on_error` does not cover. It has a note
                of the sample.
        """
        self.witness = self._stream = None
        if isinstance(index, TakeNext):
            index, self._stream = self._streams.take(index)
        try:
            with self._threads or contextlib.nullcontext():
                return self._make_batch(index, encoded, begun)
        except StopIteration as error:
            self.cancel(index)
            # Left alone it would end the epoch silently: it means the end of an iterator.
            raise RuntimeError(f"dataset or collate_fn raised StopIteration for batch {index!r}") from error
        except BaseException:  # Ctrl-C too: the announced rest of the batch will not be used
            self.cancel(index)
            raise

    def _make_batch(self, index: Any, encoded: bool, begun: Any | None) -> Any:
        indices, used_ahead = self._collation.indices(index), self._ahead.used()
        batch = self._new_batch(len(indices), encoded) if begun is None else begun
        if batch is None:
            samples, settled = self._samples.read(index, indices, *self._epoch)
        else:
            self._samples.cancel(index)
            settled = self._errors.settle(
                indices, partial(self._fill, batch), partial(self._rows.copy_row, batch)
            )
        self.witness = self._witnesses.of(settled, *self._epoch)
        self._ahead.finish(index, len(indices), self._ahead.used() - used_ahead)
        with self.counters.timed("collate"):
            if batch is None:
                made = self._collation(samples, lambda row: self._errors.name(settled[row]))
            else:
                made = self._finish(batch, settled, encoded)
        self.counters.made_batch(len(indices))
        return made

    # --- batches whose rows a dataset writes itself: as pixels, or as encoded images for the device to decode

    def _new_batch(self, n: int, encoded: bool) -> Any | None:
        """Make an empty batch of `n` rows; None where the dataset has to be read sample by sample.

        Raises:
            ArgumentError: images stay encoded, and the transform, which may have changed, needs pixels.
        """
        rows = self._rows
        if encoded:
            images = rows.encoded()
            assert images is not None
            why = images.why_not_encoded()
            if why is not None:
                raise ArgumentError(f"decode= of the loader does not work here: {why}")
            return images.new_encoded_batch(n, self._allocate)
        if not rows.reads_ahead or rows.override is not None:
            return None
        return rows.new_batch(n, self._allocate if self._collation.direct else ordinary_memory)

    def _fill(self, batch: Any, requests: RowRequests) -> RowErrors:
        """Wait for the payloads of these samples, and decode them into their rows."""
        with self._seeds or contextlib.nullcontext():
            return self._rows.fill(batch, requests, *self._epoch)

    def _finish(self, batch: Any, indices: list[Any], encoded: bool) -> Any:
        """Return the filled batch itself, or what a user's `collate_fn` makes of its rows."""
        if not encoded and not self._collation.direct:
            samples = self._samples_of(batch, indices)
            if self._seeds is not None and indices:
                self._seeds.set(indices[-1])
            return self._collation(samples, lambda row: self._errors.name(indices[row]))
        with self._collation.on_host():
            images = self._rows.encoded() if encoded else None
            if images is not None:
                return images.finish_encoded_batch(batch)
            try:
                return self._rows.finish_batch(batch)
            except Exception as error:
                samples = self._samples_of(batch, indices)
                tell_mismatch(error, samples, lambda row: self._errors.name(indices[row]))
                raise

    def _samples_of(self, batch: Any, indices: list[Any]) -> list[Any]:
        return [self._rows.sample(batch, row) for row in range(len(indices))]

    # --- what a process reports, and its end

    def state(self) -> DatasetState | dict[str, Any] | None:
        return self._stream if self._streamed else dataset_state(self._dataset, None)

    def drain(self) -> tuple[dict[str, float], list[tuple[str, str]]]:
        bad, self._errors.bad = self._errors.bad, []
        if images := take_by_libjpeg():
            self.counters.add("decode.by_libjpeg", images)
        return self.counters.drain(), bad

    def flush_cache(self) -> None:
        for dataset in self._datasets:
            if isinstance(dataset, CacheFilling):
                dataset._flush_cache()

    def close_cache(self) -> None:
        self._close_threads()
        for dataset in self._datasets:
            if isinstance(dataset, CacheFilling):
                dataset.close()

    def end_iteration(self) -> None:
        self._close_threads()
        self._streams.close()

    def _close_threads(self) -> None:
        if self._threads is not None:
            self._threads.close()
