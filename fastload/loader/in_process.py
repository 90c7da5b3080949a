"""`num_workers=0`: the path from sampler to batch without a worker process."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections import deque
from typing import Any

import torch
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils import pin_memory as torch_pin_memory

from fastload.datasets.protocols import Allocate, as_rows
from fastload.loader.generators import kept_globals
from fastload.loader.stream_epoch import StreamEpoch
from fastload.workers.batch import BatchCounters, BatchMaker
from fastload.workers.collate import note_sample
from fastload.workers.dataset_state import dataset_state, resume_fetcher
from fastload.workers.stream_reader import StreamOver, StreamReader

__all__ = ["InProcessIterator"]

_END = object()


class InProcessIterator(torch_dataloader._SingleProcessDataLoaderIter):
    """The same path as with workers, in the trainer's process and with the same fetch window."""

    def __init__(self, loader: Any) -> None:
        self._coming: deque[Any] = deque()
        self._maker: BatchMaker | None = None
        self._reader: StreamReader | None = None
        self._stream: int | None = None  # the one that the last batch is from
        self._after: Any = None  # its state then
        self._ahead = 0
        self._feed: Any = None
        self._owner = os.getpid()
        self._progress = loader._state.begin(loader, late_seed=True)
        with loader._state.seeding(loader):
            super().__init__(loader)
        loader._state.started(loader, self, self._progress)
        self._loader = loader
        self._feed = loader._new_feed()
        if self._feed is not None and self._feed.copies:
            self._pin_memory = False
        self._counters, self._bad = loader._counters, loader._bad
        self._meter = loader._meter
        self._meter.start(0)
        self._decoding = loader._decoding
        self._streams = self._progress.streams
        if self._dataset_kind == torch_dataloader._DatasetKind.Iterable:
            self._iterable_counters = BatchCounters(self._dataset)
        if self._dataset_kind == torch_dataloader._DatasetKind.Map:
            self._dataset_fetcher = self._maker = BatchMaker(
                self._dataset,
                collate_fn=self._collate_fn,
                auto_collation=self._auto_collation,
                on_error=loader.on_error,
                seeded=loader.seed is not None,
                allocate=_allocator(self._pin_memory) if self._feed is None else self._feed.allocate,
            )
            self._maker.start_epoch(
                loader._samples_seed(self._base_seed), self._progress.epoch, numbered=self._streams is None
            )
            if self._streams is not None:
                self._reader = StreamReader(
                    self._dataset,
                    auto_collation=self._auto_collation,
                    drop_last=loader.drop_last,
                    cancel=self._maker.cancel,
                )
            elif as_rows(self._dataset) is not None:
                self._ahead = loader._batches_ahead(2)

    def take_up(self, positions: list[dict[str, Any]] | None) -> None:
        """Go to the place in an iterable dataset that was loaded, and note where that is."""
        if self._maker is None and positions is not None:
            resume_fetcher(self._dataset_fetcher, positions[0], self._loader._samples_per_batch())
        self._progress.began(state=self._state_after())

    def _state_after(self) -> Any:
        """Of the stream or the dataset, with what was read last."""
        if self._streams is not None:
            return self._after
        return copy.deepcopy(dataset_state(self._dataset, self._dataset_fetcher))

    def _next_ids(self, streams: StreamEpoch, reader: StreamReader, maker: BatchMaker) -> Any:
        """The next batch of the stream whose turn it is."""
        while True:
            self._stream = None
            ask = streams.lap > 0 or not streams.live
            if ask and not streams.goes_on(ready=len(streams.live)):
                reader.close()
                raise StopIteration
            self._stream, self._after = streams.live[0], None
            try:
                ids, self._after = reader.take(streams.work(self._stream))
            except StreamOver:
                self._progress.ended(self._stream)
                maker.flush_cache()
                continue
            except KeyboardInterrupt:
                streams.lost(self._stream)
                raise
            if streams.lap == 0:
                streams.goes_on(ready=1)  # so that the other ranks know
            return ids

    def _next_index(self) -> Any:
        """The next index batch, those after it announced to the dataset."""
        while len(self._coming) <= self._ahead:
            with self._counters.timed("sampler"):
                index = next(self._sampler_iter, _END)
            if index is _END:
                break
            self._coming.append(index)  # before it is announced: Ctrl-C takes it from nobody
            if self._maker is not None and self._ahead:
                try:
                    self._maker.prefetch(index)
                except Exception:  # an index that there is not: this batch is the error that is raised now
                    self._coming.pop()
                    raise
        if not self._coming:
            if self._maker is not None:
                self._maker.flush_cache()  # a dataset that is not read ahead shows its last batch only now
            raise StopIteration
        return self._coming.popleft()

    def _next_data(self) -> Any:
        self._meter.asked()
        try:
            data = self._read_next()
        except StopIteration:
            self._meter.stop()
            if self._streams is None:
                self._progress.ended(state=self._state_after())
            self._progress.finish()
            raise
        except Exception:
            if self._streams is None or self._stream is not None:  # else it is the error of no batch
                self._progress.handed_out(worker_id=self._stream or 0, state=self._state_after())
            raise
        self._progress.handed_out(worker_id=self._stream or 0, state=self._state_after())
        self._meter.handed_over()
        return data

    def _read_next(self) -> Any:
        if self._feed is not None:
            self._feed.mark_wait()
        start, drawn = time.perf_counter(), self._counters["sampler.seconds"]
        data = self._fetch() if self._maker is None else self._make(self._maker)
        data = self._finished(data)
        drawn = self._counters["sampler.seconds"] - drawn
        self._counters.add("wait.seconds", time.perf_counter() - start - drawn)
        return data

    def _fetch(self) -> Any:
        """The next batch of an iterable dataset."""
        index = self._next_index()
        try:
            with self._iterable_counters.timed("decode"):
                data = self._dataset_fetcher.fetch(index)
            self._iterable_counters.made_batch(len(index) if self._auto_collation else 1)
        finally:
            self._counters.merge(self._iterable_counters.drain())
        return data

    def _make(self, maker: BatchMaker) -> Any:
        """The next batch of a map-style dataset."""
        if self._streams is not None and self._reader is not None:
            index = self._next_ids(self._streams, self._reader, maker)
        else:
            index = self._next_index()
        # A seed sets the generators for each sample, and here they are the trainer's.
        with contextlib.nullcontext() if self._loader.seed is None else kept_globals():
            encoded = self._decoding is not None and self._decoding.next_encoded()
            try:
                data = maker(index, encoded=encoded)
            except Exception as error:
                note_sample(error)
                raise
        if self._ahead and not self._coming:
            maker.flush_cache()
        self._counters.merge(maker.counters.drain())
        self._bad.extend(maker.bad)
        maker.bad.clear()
        return data

    def _finished(self, data: Any) -> Any:
        """Taken to the device and transformed, or pinned, as asked for."""
        if self._feed is not None:
            data = self._feed.get(0, lambda: data)
        if self._pin_memory:
            data = torch_pin_memory.pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return data

    def __del__(self) -> None:
        if self._owner != os.getpid():  # a fork has the locks, but not the threads that may hold them
            return
        if self._feed is not None:
            self._feed.close()
        if self._reader is not None:
            self._reader.close()
        if self._maker is not None:
            for index in self._coming:
                self._maker.cancel(index)


def _allocator(pinned: bool) -> Allocate:
    return lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)
