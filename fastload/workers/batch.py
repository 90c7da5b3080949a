"""One index batch in, one collated batch out: the steps of `BatchMaker.make_batch`, in order.

    announce (earlier) ─▶ new_batch ─▶ fill: payload ─▶ decode ─▶ row ─▶ resolve errors ─▶ finish
     ReadAhead            rows in a slot                                ErrorPolicy       Collation
                          SampleReader: sample objects, for other datasets

A dataset needs only what torch requires. One over a store is prefetched and writes its rows straight into the
batch. A subclass with a `__getitem__` of its own is prefetched, and asked for its samples.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate, default_convert, get_worker_info

from fastload.datasets.sample_fields import ordinary_memory
from fastload.datasets.views import (
    FLUSH_SECONDS,
    Allocate,
    CacheFilling,
    RowErrors,
    RowRequests,
    View,
    numbers_of,
    stopping,
)
from fastload.datasets.wrappers import by_epoch, fastload_datasets, inner_datasets, start_epoch, view_of
from fastload.errors import ArgumentError
from fastload.images.kernel import take_by_libjpeg
from fastload.images.rng import SampleSeeds
from fastload.metrics.counters import Counters
from fastload.metrics.machine import default_device
from fastload.metrics.torch_private import IterableFetcher
from fastload.order.samplers import is_stateful
from fastload.order.state import DatasetState, WorkerState
from fastload.workers.collate import collates_as_torch, collating, tell_mismatch
from fastload.workers.protocol import EpochStart, Fingerprint, WorkerSetup
from fastload.workers.reading import ErrorPolicy, ReadAhead, SampleReader
from fastload.workers.sample_threads import GeneratorStates, SampleThreads
from fastload.workers.streams import (
    StreamOver,
    StreamReader,
    TakeNext,
    dataset_state,
    resume_fetcher,
    share_seed,
)

_FILLERS = 2  # threads: one for the batch that is due, and one for the next


def open_source(setup: WorkerSetup, allocate: Allocate) -> BatchSource:
    """Open the dataset of `setup` in this process; `allocate` gives the memory for batches."""
    if isinstance(setup.dataset, IterableDataset):
        return IterableSource(setup)
    return BatchMaker(setup, allocate)


class BegunBatch(NamedTuple):
    """A batch whose rows another thread fills.

    Attributes:
        batch: as of `View.new_batch`.
        errors: of its rows, once all are filled.
        stop: set where nobody wants it any more.
    """

    batch: Any
    errors: Future[RowErrors]
    stop: threading.Event


class BatchSource:
    """Makes the batches of one process. The methods that need not be written do nothing.

    Attributes:
        fingerprint: of the batch that was made last; None where the samples have no index.
        remembers: a batch depends on those made before it: by the generators of this process, or an iterator.
    """

    fingerprint: Fingerprint | None = None
    remembers = True

    def start_epoch(self, start: EpochStart) -> None:
        """Begin an epoch. No work of the one before is left."""
        raise NotImplementedError

    def begin_batch(self, index: Any) -> BegunBatch | None:
        """Let another thread fill the rows of a batch, which `make_batch` gets; None where it cannot."""
        return None

    def end_batch(self, begun: BegunBatch) -> None:
        """Fill no more rows of a batch: nobody writes into its memory when this returns."""

    def make_batch(self, index: Any, *, encoded: bool, begun: BegunBatch | None = None) -> Any:
        """Make the collated batch.

        Args:
            begun: what `begin_batch` returned for this index, in this epoch.

        Raises:
            StreamOver: an iterable dataset or the stream has no more.
        """
        raise NotImplementedError

    def state(self) -> DatasetState | dict[str, Any] | None:
        """Return the state of a stateful dataset, or of the stream after its last batch; None without one."""
        raise NotImplementedError

    def drain(self) -> tuple[dict[str, float], list[tuple[str, str]]]:
        """Return (counters, bad samples) since the last call."""
        raise NotImplementedError

    def prefetch(self, index: Any) -> None:
        """Start reading an index batch that will be asked for after those announced before.

        Raises:
            Exception: any that the dataset raises; then none of the batch is announced.
        """

    def cancel(self, index: Any) -> None:
        """Forget an announced index batch. One that could not be announced is ignored."""

    def exclude(self, samples: frozenset[int]) -> None:
        """Let these samples replace no bad ones from now on."""

    def resume(self, position: WorkerState | None) -> None:
        """Move an iterable dataset to a saved position, see `dataset_state`; None: to its beginning."""

    def flush_cache(self) -> None:
        """Wait until the cache has this epoch's records: the next epoch finds them there."""

    def close_cache(self) -> None:
        """Write out the queued records, at the end of this process."""

    def end_iteration(self) -> None:
        """Stop reading ahead for streams, and end the threads that make samples, in the trainer's process."""


class BatchCounters(Counters):
    """The counters of a process that makes batches, with those of its dataset and of the inner datasets."""

    def __init__(self, dataset: Any, *, threaded: bool = False) -> None:
        sources = fastload_datasets(dataset)
        # A dataset has the counters of its cache only where it prefetches.
        sources += [getattr(source, "cache", None) for source in sources]
        held = [getattr(source, "counters", None) for source in sources]
        super().__init__(dict.fromkeys(counters for counters in held if isinstance(counters, Counters)))
        self._alone = not threaded and any(inner.asks is not None for inner in inner_datasets(dataset))

    def made_batch(self, samples: int) -> None:
        """Count a batch of this number of samples."""
        self.add("collate.batches")
        self.add("collate.samples", samples)
        if self._alone:
            self.add("get.alone", samples)


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
        streams = rows.streams()
        # Streamed ids are not announced, and shard datasets give a stream's records to one thread.
        threaded = setup.threads > 0 and streams is None
        self.counters = BatchCounters(setup.dataset, threaded=threaded)
        self._dataset = setup.dataset
        self._datasets = fastload_datasets(setup.dataset)
        self._by_epoch: list[Any] = []  # of these, with a transform that depends on the epoch
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
        self._fingerprint_of = partial(fingerprint_of, rows, seeded=setup.seeded, logged=setup.logged)
        self._stateful = is_stateful(setup.dataset)
        by_kernel = rows.made_by_kernel() and self._collation.direct
        self.remembers = self._stateful or not (setup.seeded or by_kernel)
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
        self._streams = None
        if streams is not None:
            self._streams = StreamReader(
                streams,
                auto_collation=setup.auto_collation,
                drop_last=setup.drop_last,
                cancel=self.cancel,
            )
        self._fillers = ThreadPoolExecutor(_FILLERS, "fastload-fill")  # starts none before it is used
        # The last batch waits for this, and its consumer must not time out.
        self._flush_seconds = min(FLUSH_SECONDS, setup.timeout / 2 or math.inf)

    def start_epoch(self, start: EpochStart) -> None:
        if self._streams is not None:
            self._streams.start_epoch(streamed=start.streamed)
        self._streamed, self._stream = start.streamed, None
        self._epoch = (start.seed, start.epoch)
        self._collation.start_epoch()
        # Without an index of the dataset, on_error="replace" acts as "repeat".
        self._errors.start_epoch(*self._epoch, indexed=not start.streamed)
        self._errors.excluded = start.excluded
        self._ahead.start_epoch(streamed=start.streamed)
        if self._seeds is not None:
            self._seeds.start_epoch(*self._epoch)
        self._by_epoch = by_epoch(self._datasets)
        start_epoch(self._by_epoch, start.epoch)

    def exclude(self, samples: frozenset[int]) -> None:
        self._errors.excluded = samples

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

    def begin_batch(self, index: Any) -> BegunBatch | None:
        indices = self._collation.indices(index)
        batch, stop = self._new_batch(len(indices), encoded=False), threading.Event()
        if batch is None:
            return None
        requests = list(enumerate(indices))
        return BegunBatch(batch, self._fillers.submit(self._fill_until, stop, batch, requests), stop)

    def end_batch(self, begun: BegunBatch) -> None:
        begun.stop.set()
        if not begun.errors.cancel():
            wait([begun.errors])

    def _fill_until(self, stop: threading.Event, batch: Any, requests: RowRequests) -> RowErrors:
        """Fill rows in a thread of its own, until `stop` is set."""
        stopping.set(stop)
        return self._fill(batch, requests)

    def make_batch(self, index: Any, *, encoded: bool, begun: BegunBatch | None = None) -> Any:
        """Make the collated batch of `index`; with `encoded`, its images as `EncodedImages`.

        Args:
            begun: see `BatchSource.make_batch`.

        Raises:
            StreamOver: the stream has no more.
            Exception: any of the dataset or `collate_fn` that `on_error` does not cover. It has a note
                of the sample.
        """
        # Another iterator of this process may have put the datasets into its own epoch.
        start_epoch(self._by_epoch, self._epoch[1])
        self.fingerprint = self._stream = None
        if isinstance(index, TakeNext):
            assert self._streams is not None
            index, self._stream = self._streams.take(index)
        try:
            with self._threads or contextlib.nullcontext():
                return self._make_batch(index, encoded, begun)
        except StopIteration as error:
            self.cancel(index)
            # Left alone it would end the epoch silently: it means the end of an iterator.
            raise RuntimeError(f"dataset or collate_fn raised StopIteration for batch {index!r}") from error
        except BaseException:  # Ctrl-C too: the announced rest of the batch will not be used
            if begun is not None:
                self.end_batch(begun)
            self.cancel(index)
            raise

    def _make_batch(self, index: Any, encoded: bool, begun: BegunBatch | None) -> Any:
        indices, used_ahead = self._collation.indices(index), self._ahead.used()
        batch = self._new_batch(len(indices), encoded) if begun is None else begun.batch
        if batch is None:
            samples, resolved = self._samples.read(index, indices, *self._epoch)
        else:
            self._samples.cancel(index)
            fill, copy = partial(self._fill, batch), partial(self._rows.copy_row, batch)
            errors = fill(list(enumerate(indices))) if begun is None else begun.errors.result()
            resolved = self._errors.resolve(indices, errors, fill, copy)
        self.fingerprint = self._fingerprint_of(resolved, *self._epoch)
        self._ahead.finish(index, len(indices), self._ahead.used() - used_ahead)
        with self.counters.timed("collate"):
            if batch is None:
                made = self._collation(samples, lambda row: self._errors.name(resolved[row]))
            else:
                made = self._finish(batch, resolved, encoded)
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
                raise ArgumentError(f"decoder= of the loader does not work here: {why}")
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
        with self._collation.on_host(), collating:
            images = self._rows.encoded() if encoded else None
            if images is not None:
                return images.finish_batch(batch)
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
        if self._streamed:
            return self._stream
        return dataset_state(self._dataset, None) if self._stateful else None

    def drain(self) -> tuple[dict[str, float], list[tuple[str, str]]]:
        bad, self._errors.bad = self._errors.bad, []
        if images := take_by_libjpeg():
            self.counters.add("decode.by_libjpeg", images)
        return self.counters.drain(), bad

    def flush_cache(self) -> None:
        for dataset in self._datasets:
            if isinstance(dataset, CacheFilling):
                dataset._flush_cache(self._flush_seconds)

    def close_cache(self) -> None:
        self._close_threads()
        for dataset in self._datasets:
            if isinstance(dataset, CacheFilling):
                dataset.close()

    def end_iteration(self) -> None:
        self._close_threads()
        if self._streams is not None:
            self._streams.close()

    def _close_threads(self) -> None:
        if self._threads is not None:
            self._threads.close()


class IterableSource(BatchSource):
    """An iterable dataset, by torch's own fetcher."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._counters = BatchCounters(setup.dataset)
        self._collation = Collation(setup.collate_fn, auto_collation=setup.auto_collation)
        self._generators = GeneratorStates() if setup.other_draws else None
        self._fetcher = self._new_fetcher()

    def resume(self, position: WorkerState | None) -> None:
        resume_fetcher(self._fetcher, position, self._setup.batch_size)
        generators, self._generators = self._generators, None
        passed_over = position is not None and position.state is None and position.batches
        if generators is not None and passed_over and generators.changed():
            self._warn_of_draws()

    def _warn_of_draws(self) -> None:
        info = get_worker_info()
        if info is None or info.id == 0:  # one worker says it for all
            warnings.warn(
                f"{type(self._setup.dataset).__name__} draws from the process-wide generators, which may "
                "have stood elsewhere when the saved run began this epoch: if they decide the order, samples "
                "are lost and others repeated. Let it draw from a generator of its own, seeded for each "
                "epoch, or give it state_dict() and load_state_dict()",
                stacklevel=3,
            )

    def _new_fetcher(self) -> Any:
        setup = self._setup
        # Without `self`: a cycle would live on.
        collate = partial(_collate_counted, self._collation, self._counters)
        return IterableFetcher(setup.dataset, setup.auto_collation, collate, setup.drop_last)

    def start_epoch(self, start: EpochStart) -> None:
        """Iterate again. The first epoch has its iterator already, which may have been resumed."""
        self._collation.start_epoch()
        if start.first == 0:
            return
        if start.shared_seed is not None:
            share_seed(self._setup.dataset, start.shared_seed)
        self._fetcher = self._new_fetcher()

    def make_batch(self, index: Any, *, encoded: bool, begun: BegunBatch | None = None) -> Any:
        try:
            with self._counters.timed("decode"):
                return self._fetcher.fetch(index)
        except StopIteration:
            self._fetcher.ended = True  # an iterator that is asked again may begin anew, or wait
            raise StreamOver from None

    def state(self) -> DatasetState | None:
        return dataset_state(self._setup.dataset, self._fetcher)

    def drain(self) -> tuple[dict[str, float], list[tuple[str, str]]]:
        return self._counters.drain(), []


def _collate_counted(collation: Collation, counters: BatchCounters, samples: Any) -> Any:
    """Return the batch of these samples, and count it: the last one of an epoch may have fewer."""
    with collation.on_host(), collating:
        batch = collation.function(samples)
    counters.made_batch(len(samples) if collation.auto_collation else 1)
    return batch


# --- collation


class Collation:
    """The `collate_fn` of a loader.

    Args:
        collate_fn: as torch's.
        auto_collation: False where an "index batch" is one index, and a batch one sample (`batch_size=None`).

    Attributes:
        function, auto_collation: see above; `function` is the `collate_fn`.
        direct: torch's own `default_collate` makes the batches, so a dataset may write their rows instead.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], *, auto_collation: bool) -> None:
        self.function = collate_fn
        self.auto_collation = auto_collation
        self.direct = auto_collation and collate_fn is default_collate and collates_as_torch()
        self.on_host: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def start_epoch(self) -> None:
        """Look up torch's default device, which may have changed.

        torch's own functions make tensors of numbers on that device: on CUDA, even in a forked worker.
        """
        moved = default_device().type != "cpu"
        moved = moved and self.function in (default_collate, default_convert)
        self.on_host = partial(torch.device, "cpu") if moved else contextlib.nullcontext

    def indices(self, index: Any) -> list[Any]:
        """Return the sample indices of an index batch."""
        return list(index) if self.auto_collation else [index]

    def __call__(self, samples: Any, name: Callable[[int], str]) -> Any:
        """Return the batch of these samples. `name`: row of the batch -> the sample's name, for errors.

        Raises:
            Exception: any that `collate_fn` raises. One of `default_collate` has a note on the samples that
                do not fit together.
        """
        with self.on_host(), collating:
            try:
                return self.function(samples if self.auto_collation else samples[0])
            except Exception as error:
                if self.function is default_collate:
                    tell_mismatch(error, samples, name)
                raise


# --- what a batch was really made of
#
# The process that makes a batch says so, once `on_error` has resolved its errors. Every other account of a
# run, such as the order that the trainer planned, would repeat the plan's mistakes.
#
#     identity      key and version of the object; shard, its version and the record's number; else the index
#     fingerprint   identity mixed with the random number of the sample: one 64-bit number for each row
#     sums          over the rows of the batch, in four functions of the fingerprint: the same in any order

LANES = 4
_FACTORS = np.array(
    [[0x9E3779B97F4A7C15], [0xC2B2AE3D27D4EB4F], [0xD6E8FEB86659FD93], [0xA0761D6478BD642F]], np.uint64
)
_HALF = np.uint64(32)


def sums_of(fingerprints: NDArray[np.uint64]) -> tuple[int, ...]:
    """Return four sums modulo 2**64, each over another function of the fingerprints: 256 bits together."""
    lanes = fingerprints * _FACTORS
    lanes ^= lanes >> _HALF
    return tuple(lanes.sum(axis=1, dtype=np.uint64).tolist())


def fingerprint_of(
    view: View, indices: list[Any], seed: int, epoch: int, *, seeded: bool, logged: bool
) -> Fingerprint:
    """Return the fingerprint of a batch.

    Args:
        view: of the loader's dataset.
        indices: of the samples in its rows, substitutes of bad ones included.
        seeded: the loader has a seed, so that all that draws gets random numbers of (seed, epoch, index).
        logged: there is a sample log, which needs each row.
    """
    of_rows = view.fingerprints(indices, seed, epoch, seeded=seeded)
    return Fingerprint(len(indices), sums_of(of_rows), (numbers_of(indices), of_rows) if logged else None)
