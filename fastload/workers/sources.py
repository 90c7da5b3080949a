"""What batches are made of beside a map-style dataset: streams of shards, and iterable datasets.

`batch.BatchMaker` makes the batches of map-style datasets. A dataset of the user's may have a state, which is
that of the process that reads it: a worker, or the trainer.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import graph_settings

from fastload.datasets.views import SampleStream
from fastload.datasets.wrappers import fastload_datasets, inner_datasets, view_of
from fastload.metrics.counters import Counters
from fastload.metrics.torch_private import IterableFetcher
from fastload.order.samplers import is_stateful
from fastload.order.state import DatasetState, WorkerState
from fastload.workers.protocol import EpochStart, WorkerSetup
from fastload.workers.witness import Witness


def dataset_state(dataset: Any, fetcher: Any) -> DatasetState | None:
    """Return the state of a dataset and of the iterator that `fetcher` has over it; None without one."""
    iterator = getattr(fetcher, "dataset_iter", None)
    own = is_stateful(dataset) and iterator is not dataset
    if not own and not is_stateful(iterator):
        return None
    return DatasetState(
        dataset=dataset.state_dict() if own else None,
        iterator=iterator.state_dict() if iterator is not None and is_stateful(iterator) else None,
        ended=getattr(fetcher, "ended", False),
    )


def load_dataset(dataset: Any, saved: WorkerState | None) -> None:
    """Load the dataset's own state, before an iterator over it is made: the first step of resuming."""
    if saved is not None and saved.state is not None and saved.state.dataset is not None:
        dataset.load_state_dict(saved.state.dataset)


def resume_fetcher(fetcher: Any, saved: WorkerState | None, batch_size: int) -> None:
    """Move the iterator of torch's fetcher over an iterable dataset to the saved position: the second step.

    An iterator without a state is moved by drawing and dropping samples.
    """
    if saved is None:
        return
    state = saved.state
    if state is not None and state.iterator is not None:
        fetcher.dataset_iter.load_state_dict(state.iterator)
    if saved.fresh:
        if state is not None:
            fetcher.dataset_iter = iter(fetcher.dataset)
        return
    if state is None:
        deque(itertools.islice(fetcher.dataset_iter, saved.batches * batch_size), maxlen=0)
    fetcher.ended = saved.ended or (state is not None and state.ended)


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
    """Makes the batches of one process. The methods that need not be written do nothing.

    Attributes:
        witness: of the batch that was made last; None where the samples have no index.
    """

    witness: Witness | None = None

    def start_epoch(self, start: EpochStart) -> None:
        """Begin an epoch. Work of the one before was cancelled."""
        raise NotImplementedError

    def begin_batch(self, index: Any) -> Any | None:
        """Let threads of the kernel begin a batch, which `make_batch` gets; None where they cannot."""
        return None

    def make_batch(self, index: Any, *, encoded: bool, begun: Any | None = None) -> Any:
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

    def leave_out(self, samples: frozenset[int]) -> None:
        """Let these samples replace no bad ones from now on."""

    def resume(self, position: WorkerState | None) -> None:
        """Move an iterable dataset to a saved position, see `dataset_state`; None: to its beginning."""

    def flush_cache(self) -> None:
        """Wait until the cache has this epoch's records: the next epoch finds them there."""

    def close_cache(self) -> None:
        """At the end of this process: write out the queued records."""

    def end_iteration(self) -> None:
        """In the trainer's process: stop reading ahead for streams, and end the threads that make samples."""


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


class IterableSource(BatchSource):
    """An iterable dataset, by torch's own fetcher."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._counters = BatchCounters(setup.dataset)
        self._fetcher = self._new_fetcher()

    def resume(self, position: WorkerState | None) -> None:
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

    def make_batch(self, index: Any, *, encoded: bool, begun: Any | None = None) -> Any:
        try:
            with self._counters.timed("decode"):
                batch = self._fetcher.fetch(index)
        except StopIteration:
            raise StreamOver from None
        self._counters.made_batch(len(index) if self._setup.auto_collation else 1)
        return batch

    def state(self) -> DatasetState | None:
        return dataset_state(self._setup.dataset, self._fetcher)

    def drain(self) -> tuple[dict[str, float], list[tuple[str, str]]]:
        return self._counters.drain(), []
