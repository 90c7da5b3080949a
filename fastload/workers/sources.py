"""The source of a process's batches: a map-style dataset, by index or as streams; or an iterable dataset.

A user's own dataset may have a state, which is that of the process that reads it: a worker, or the trainer.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, graph_settings

from fastload.datasets.protocols import Allocate, SampleStream
from fastload.datasets.wrappers import view_of
from fastload.images.kernel import take_by_libjpeg
from fastload.metrics.torch_private import IterableFetcher
from fastload.order.samplers import is_stateful
from fastload.workers.batch import BatchCounters, BatchMaker
from fastload.workers.protocol import EpochStart, WorkerSetup
from fastload.workers.witness import Witness


def dataset_state(dataset: Any, fetcher: Any) -> dict[str, Any] | None:
    """The state of a dataset and of the iterator that `fetcher` has over it; None without one."""
    iterator = getattr(fetcher, "dataset_iter", None)
    own = is_stateful(dataset) and iterator is not dataset
    if not own and not is_stateful(iterator):
        return None
    return {
        "dataset": dataset.state_dict() if own else None,
        "iterator": iterator.state_dict() if iterator is not None and is_stateful(iterator) else None,
        "ended": getattr(fetcher, "ended", False),
    }


def load_dataset(dataset: Any, saved: Mapping[str, Any] | None) -> None:
    """First step of resuming: the dataset's own state, before an iterator over it is made."""
    if saved is not None and saved["state"] is not None and saved["state"]["dataset"] is not None:
        dataset.load_state_dict(saved["state"]["dataset"])


def resume_fetcher(fetcher: Any, saved: Mapping[str, Any] | None, batch_size: int) -> None:
    """Second step: move the iterator of torch's fetcher over an iterable dataset to the saved position.

    An iterator without a state is moved by drawing and dropping samples.
    """
    if saved is None:
        return
    state = saved["state"]
    if state is not None and state["iterator"] is not None:
        fetcher.dataset_iter.load_state_dict(state["iterator"])
    if saved["fresh"]:
        if state is not None:
            fetcher.dataset_iter = iter(fetcher.dataset)
        return
    if state is None:
        deque(itertools.islice(fetcher.dataset_iter, saved["batches"] * batch_size), maxlen=0)
    fetcher.ended = saved["ended"] or (state is not None and state["ended"])


class StreamOver(Exception):
    """A stream has no more. Not StopIteration, which a dataset may raise by mistake."""


class TakeNext(NamedTuple):
    """In place of an index batch: the next `n` samples of a stream."""

    stream: int
    n: int
    start: dict[str, Any] | None  # with the first batch of the stream: the state to open it with


class StreamReader:
    """Opens streams on request, and takes sample ids from them.

    Args:
        dataset: any; streams are requested only of a `StreamDataset`.
        auto_collation: False where an "index batch" is one id (`batch_size=None`).
        drop_last: a stream ends before a last batch that is not full.
        cancel: called with ids that were taken and will not be used, as an index batch.
    """

    def __init__(
        self, dataset: Any, *, auto_collation: bool, drop_last: bool, cancel: Callable[[Any], None]
    ) -> None:
        self._dataset = view_of(dataset).streams()
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._cancel = cancel
        self._open: dict[int, SampleStream] = {}

    def start_epoch(self, *, streamed: bool) -> None:
        """Close the streams of the previous epoch."""
        self.close()
        if not streamed and self._dataset is not None:
            self._dataset.must_stream()  # reads the shard indexes that other processes have completed

    def take(self, work: TakeNext) -> tuple[Any, dict[str, Any]]:
        """The index batch of the next samples, and the stream's state after them.

        Raises:
            StreamOver: the stream is over.
            Exception: any that the stream raises; it is over then.
        """
        assert self._dataset is not None
        if work.start is not None:
            if work.stream in self._open:  # Ctrl-C came after `take`, so it is opened once more
                self._open.pop(work.stream).close()
            self._open[work.stream] = self._dataset.open_stream(work.start)
        stream = self._open.pop(work.stream, None)
        if stream is None:
            raise StreamOver
        try:
            ids = stream.take(work.n)
            state = stream.state()
        except BaseException as error:
            stream.close()
            if isinstance(error, StopIteration):
                raise RuntimeError("a stream of the dataset raised StopIteration") from error
            raise
        if not ids or (self._drop_last and len(ids) < work.n):
            if ids:
                self._cancel(ids)
            stream.close()
            raise StreamOver
        self._open[work.stream] = stream
        return (ids if self._auto_collation else ids[0]), state

    def close(self) -> None:
        """Close all open streams."""
        while self._open:
            self._open.popitem()[1].close()


class BatchSource:
    """Makes the batches of one process. What a kind of dataset does not need, it leaves out."""

    def start_epoch(self, start: EpochStart) -> None:
        """An epoch begins. Work of the one before was cancelled."""

    def prefetch(self, index: Any) -> None:
        """Start reading an index batch that will be asked for after those announced before."""

    def cancel(self, index: Any) -> None:
        """An announced index batch will not be asked for."""

    def leave_out(self, samples: frozenset[int]) -> None:
        """From now on, these samples replace no bad ones."""

    def resume(self, position: dict[str, Any] | None) -> None:
        """Move an iterable dataset to a saved position, see `dataset_state`; None: to its beginning."""

    def take(self, index: Any) -> tuple[Any, Any]:
        """(index batch, state of its stream); the latter is None for an index that is not of a stream.

        Raises:
            StreamOver: the stream has no more.
        """
        return index, None

    def make_batch(self, index: Any, *, encoded: bool) -> Any:
        """The collated batch.

        Raises:
            StreamOver: an iterable dataset has no more.
        """
        raise NotImplementedError

    @property
    def witness(self) -> Witness | None:
        """Of the batch that was made last; None where the samples have no index."""
        return None

    def state(self) -> dict[str, Any] | None:
        """The state of a stateful dataset; None for others."""
        raise NotImplementedError

    def drain(self) -> tuple[dict[str, float], list[tuple[str, str]]]:
        """(counters, bad samples) since the last call."""
        raise NotImplementedError

    def flush_cache(self) -> None:
        """Wait until the cache has this epoch's records."""

    def close_cache(self) -> None:
        """At the end of this process: write out the queued records."""

    def end_iteration(self) -> None:
        """In the trainer's process: stop reading ahead for streams, and end the threads that make samples."""


class IndexedSource(BatchSource):
    """A map-style dataset."""

    def __init__(self, setup: WorkerSetup, allocate: Allocate) -> None:
        self._dataset = setup.dataset
        self._maker = BatchMaker(
            setup.dataset,
            collate_fn=setup.collate_fn,
            auto_collation=setup.auto_collation,
            on_error=setup.on_error,
            seeded=setup.seeded,
            allocate=allocate,
            threads=setup.threads,
            shares=setup.num_workers == 0,
            logged=setup.logged,
        )
        self._streams = StreamReader(
            setup.dataset,
            auto_collation=setup.auto_collation,
            drop_last=setup.drop_last,
            cancel=self._maker.cancel,
        )

    def start_epoch(self, start: EpochStart) -> None:
        self._streams.start_epoch(streamed=start.streamed)
        self._maker.start_epoch(start.seed, start.epoch, indexed=not start.streamed)
        self._maker.leave_out(start.left_out)

    def leave_out(self, samples: frozenset[int]) -> None:
        self._maker.leave_out(samples)

    def prefetch(self, index: Any) -> None:
        if not isinstance(index, TakeNext):
            self._maker.prefetch(index)

    def cancel(self, index: Any) -> None:
        if not isinstance(index, TakeNext):
            self._maker.cancel(index)

    def take(self, index: Any) -> tuple[Any, Any]:
        return self._streams.take(index) if isinstance(index, TakeNext) else (index, None)

    def make_batch(self, index: Any, *, encoded: bool) -> Any:
        return self._maker.make_batch(index, encoded=encoded)

    @property
    def witness(self) -> Witness | None:
        return self._maker.witness

    def state(self) -> dict[str, Any] | None:
        return dataset_state(self._dataset, self._maker)

    def drain(self) -> tuple[dict[str, float], list[tuple[str, str]]]:
        bad, self._maker.bad = self._maker.bad, []
        if images := take_by_libjpeg():
            self._maker.counters.add("decode.by_libjpeg", images)
        return self._maker.counters.drain(), bad

    def flush_cache(self) -> None:
        self._maker.flush_cache()

    def close_cache(self) -> None:
        self._maker.close_cache()

    def end_iteration(self) -> None:
        self._maker.close_threads()
        self._streams.close()


class IterableSource(BatchSource):
    """An iterable dataset, by torch's own fetcher."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._counters = BatchCounters(setup.dataset)
        self._fetcher = self._new_fetcher()

    def resume(self, position: dict[str, Any] | None) -> None:
        resume_fetcher(self._fetcher, position, self._setup.batch_size)

    def _new_fetcher(self) -> Any:
        setup = self._setup
        return IterableFetcher(setup.dataset, setup.auto_collation, setup.collate_fn, setup.drop_last)

    def start_epoch(self, start: EpochStart) -> None:
        """Iterate again. The first epoch has its iterator already, which may have been resumed."""
        if start.first == 0:
            return
        if start.shared_seed is not None:
            rng = torch.Generator().manual_seed(start.shared_seed)
            graph_settings.apply_random_seed(self._setup.dataset, rng)
        self._fetcher = self._new_fetcher()

    def make_batch(self, index: Any, *, encoded: bool) -> Any:
        try:
            with self._counters.timed("decode"):
                batch = self._fetcher.fetch(index)
        except StopIteration:
            raise StreamOver from None
        self._counters.made_batch(len(index) if self._setup.auto_collation else 1)
        return batch

    def state(self) -> dict[str, Any] | None:
        return dataset_state(self._setup.dataset, self._fetcher)

    def drain(self) -> tuple[dict[str, float], list[tuple[str, str]]]:
        return self._counters.drain(), []


def open_source(setup: WorkerSetup, allocate: Allocate) -> BatchSource:
    """The source for the dataset of `setup`; `allocate` gives the memory for batches."""
    if isinstance(setup.dataset, IterableDataset):
        return IterableSource(setup)
    return IndexedSource(setup, allocate)
