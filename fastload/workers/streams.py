"""Data that is read in its own order: streams of shards, iterable datasets, and the states of datasets.

A stream gives sample ids, which make batches as indices do. An iterable dataset gives samples, to torch's own
fetcher. A dataset or its iterator may keep a state, in each process that reads it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch.utils.data import graph_settings

from fastload.datasets.views import SampleStream, StreamDataset
from fastload.order.samplers import is_stateful
from fastload.order.state import DatasetState, WorkerState


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
        dataset: whose streams are read.
        auto_collation: False where an "index batch" is one id (`batch_size=None`).
        drop_last: a stream ends before a last batch that is not full.
        cancel: called with ids that were taken and will not be used, as an index batch.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        *,
        auto_collation: bool,
        drop_last: bool,
        cancel: Callable[[Any], None],
    ) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._cancel = cancel
        self._open: dict[int, SampleStream] = {}

    def start_epoch(self, *, streamed: bool) -> None:
        """Close the streams of the previous epoch."""
        self.close()
        if not streamed:
            self._dataset.must_stream()  # reads the shard indexes that other processes have completed

    def take(self, work: TakeNext) -> tuple[Any, dict[str, Any]]:
        """Return the index batch of the next samples, and the stream's state after them.

        Raises:
            StreamOver: the stream is over.
            Exception: any that the stream raises; it is over then.
        """
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


# --- iterable datasets, and states of datasets: that of the process that reads one


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


def share_seed(pipe: Any, seed: int) -> None:
    """Let torch's data pipe draw from a seed that all workers and ranks share, from its next pass on."""
    graph_settings.apply_random_seed(pipe, torch.Generator().manual_seed(seed))


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
        _pass_over(fetcher.dataset_iter, saved, batch_size)
    fetcher.ended = saved.ended or (state is not None and state.ended)


def _pass_over(samples: Iterator[Any], saved: WorkerState, batch_size: int) -> None:
    """Draw and drop the batches that were delivered. The error of one that failed then is behind us."""
    for batch in range(saved.batches):
        with suppress(Exception) if batch in saved.failed else nullcontext():
            deque(itertools.islice(samples, batch_size), maxlen=0)
