"""`num_workers > 0`: the path from sampler to batch, seen from the trainer's process."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import time
import weakref
from collections import deque
from collections.abc import Iterable
from multiprocessing import forkserver
from typing import Any, NoReturn

import torch.utils.data
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data import _utils as torch_utils
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils import pin_memory as torch_pin_memory

from fastload.datasets.protocols import as_rows
from fastload.gpu.transfer import DevicePrefetcher
from fastload.loader.progress import Progress
from fastload.metrics.tracing import stage
from fastload.workers.pool import WorkerPool
from fastload.workers.protocol import Result, WorkerSetup

__all__ = ["WorkerIterator"]

# By the fork server; obstore starts its threads with its first request, not on import.
_PRELOADED = ["torch", "fastload.workers.worker", "fastload.datasets.image_folder", "obstore.store"]


class WorkerIterator(torch_dataloader._BaseDataLoaderIter):
    """Sequence numbers name index batches; batch i goes to worker i mod W.

    An epoch that is read as streams has a lane for each: its batches are handed out in turn, and lane i is
    served by worker i mod W. Otherwise a worker is a lane.
    """

    _progress: Progress

    def __init__(self, loader: Any) -> None:
        self._pool: WorkerPool | None = None
        self._feed: DevicePrefetcher | None = None
        with loader._state.seeding(loader):
            super().__init__(loader)
        self._base_seed = loader._state.base_seed(int(self._base_seed))
        # Persistent workers end with their loader, so there must be no cycle: no reference back to it.
        self._forget = weakref.WeakMethod(loader._forget)
        self._counters, self._bad, self._meter = loader._counters, loader._bad, loader._meter
        self._in_order = loader.in_order
        self._decoding = loader._decoding
        self._autoscaler = loader._autoscaler
        if not loader.prefetch_factor:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        self._least_ahead = self._ahead = loader.prefetch_factor
        if as_rows(self._dataset) is not None:
            self._ahead = loader._batches_ahead(self._least_ahead)
        self._broken = False
        self._sent = 0  # sequence number of the next index batch
        self._arrived: dict[int, tuple[int, Result]] = {}
        self._owner: dict[int, int] = {}  # batches that are due: sequence number -> lane
        self._feed = loader._new_feed()
        pin = None
        if self._feed is not None and self._feed.copies:
            self._pin_memory = False
            pin = self._feed.pin
        self._pool = WorkerPool(_setup(self, loader), _context(loader), pin, start=self._wanted())
        self._pin_memory_thread = None
        self._reset(loader, first_iter=True)

    @property
    def _workers(self) -> list[Any]:
        return self._pool.processes if self._pool is not None else []

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        previous = None if first_iter else self._progress
        self._progress = loader._state.begin(loader, late_seed=False, previous=previous)
        self._meter.start(self._wanted())
        if self._autoscaler is not None:
            self._autoscaler.start_epoch(self._counters["wait.batches"])
        super()._reset(loader, first_iter)
        loader._state.started(loader, self, self._progress)
        assert self._pool is not None
        for seq in list(self._arrived):
            self._discard(*self._arrived.pop(seq))
        if self._feed is not None:
            self._feed.end_epoch()
        self._owner.clear()
        self._first = self._sent
        self._streams = self._progress.streams
        self._pool.start_epoch(
            self._sent,
            loader._samples_seed(self._base_seed),
            self._progress.epoch,
            streamed=self._streams is not None,
            shared_seed=self._shared_seed,
        )
        self._begin()
        if previous is not None and previous.ran_on:
            # These workers' datasets went on after the break: only they know where this epoch begins.
            while set(self._owner.values()) - {worker_id for worker_id, _ in self._arrived.values()}:
                self._receive()

    def _begin(self) -> None:
        """Give every lane its first work."""
        if self._streams is not None:  # each reads ahead by itself, so what is announced need not be more
            self._turn, ahead = deque(self._streams.live), self._least_ahead
        else:
            # Of workers that were wanted at the end of an epoch, some may not have been started.
            self._turn, ahead = deque(range(min(self._wanted(), len(self._workers)))), self._ahead
            self._turn.rotate(-self._progress.next_worker)
        for _ in range(ahead * len(self._turn)):
            self._submit()

    def _next_data(self) -> Any:
        if self._broken and self._pool is not None:
            self._pool.check_open()
        self._meter.asked()
        if self._feed is not None:
            self._feed.mark_wait()
        while True:
            seq = self._due()
            if seq is None:
                if self._turn and self._submit():  # what was asked for was lost in errors and interrupts
                    continue
                if self._streams is not None and self._streams.goes_on(ready=0):
                    self._begin()
                    continue
                self._finish()
            while seq not in self._arrived:
                self._receive()
                if not self._in_order:
                    seq = self._due()
                    assert seq is not None
            self._stage_ahead()
            worker_id, result = self._arrived[seq]
            if (
                self._streams is not None
                and not result.exhausted
                and not self._streams.goes_on(self._ready())
            ):
                self._finish()
            del self._arrived[seq]
            lane = self._owner.pop(seq)
            if result.exhausted:
                self._progress.ended(lane, result.after)
                self._retire(lane)
                continue
            return self._deliver(worker_id, lane, result)

    def _due(self) -> int | None:
        """The sequence number to hand over next, or None at the end of the epoch."""
        due: dict[int, Any] = self._arrived if self._arrived and not self._in_order else self._owner
        return next(iter(due), None)

    def _stage_ahead(self) -> None:
        """Start what is here and due next on its way to the device, before it is asked for."""
        if self._feed is None or not self._feed.ahead:
            return
        assert self._pool is not None
        self._receive(wait=False)
        due: Iterable[int] = self._owner if self._in_order else self._arrived
        here = itertools.takewhile(self._arrived.__contains__, due)
        for seq in itertools.islice(here, 1 + self._feed.ahead):
            worker_id, result = self._arrived[seq]
            if result.packed is not None:
                self._feed.start(seq, functools.partial(self._pool.unpack, worker_id, result.packed))

    def _ready(self) -> int:
        """How many batches are here that will be handed out."""
        return sum(not result.exhausted for _, result in self._arrived.values())

    def _finish(self) -> NoReturn:
        self._owner.clear()
        self._progress.finish()
        self._meter.stop()
        if self._autoscaler is not None:
            self._autoscaler.end_epoch()
        if not self._persistent_workers:
            self._shutdown_workers()
        raise StopIteration

    def _deliver(self, worker_id: int, lane: int, result: Result) -> Any:
        assert self._pool is not None
        self._pool.consume(worker_id)
        try:
            data = self._unpack(worker_id, result)
        except BaseException as error:
            self._replace(worker_id, lane)
            if isinstance(error, Exception):  # after Ctrl-C, whoever resumes gets this batch once more
                self._count(lane, result)
            raise
        self._replace(worker_id, lane)
        self._meter.handed_over()
        if self._autoscaler is not None and self._turn:
            self._adjust(self._autoscaler.look(self._counters, len(self._owner)))
        self._count(lane, result)  # last, for the same reason
        return data

    def _unpack(self, worker_id: int, result: Result) -> Any:
        """The batch as the user gets it. Raises what its worker, the feed or the pinning raised."""
        assert self._pool is not None
        if result.failure is not None:
            result.failure.reraise(f"in DataLoader worker process {worker_id}")
        data = None
        if result.packed is not None:
            unpack = functools.partial(self._pool.unpack, worker_id, result.packed)
            with stage("unpack"):
                data = unpack() if self._feed is None else self._feed.get(result.seq, unpack)
        if self._pin_memory:
            data = torch_pin_memory.pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return data

    def _replace(self, worker_id: int, lane: int) -> None:
        """Give out new work in the place of a batch that leaves the loader, and say that it does."""
        assert self._pool is not None
        parked = self._autoscaler is not None and bool(self._turn) and lane not in self._turn
        if parked or not self._submit(lane):
            self._pool.finish(worker_id)

    def _count(self, lane: int, result: Result) -> None:
        self._progress.handed_out(result.seq - self._first, lane, result.after)
        self._progress.next_worker = next(iter(self._owner.values()), 0)

    def _wanted(self) -> int:
        """How many workers make batches: all, unless `num_workers="auto"` has found that fewer do."""
        return self._num_workers if self._autoscaler is None else int(self._autoscaler.workers)

    def _adjust(self, wanted: int) -> None:
        """Have so many workers make batches. One that is parked finishes what it has, and waits."""
        assert self._pool is not None and self._autoscaler is not None
        while len(self._turn) > wanted:
            self._turn.remove(max(self._turn))
        while self._turn and len(self._turn) < wanted:
            worker_id = min(set(range(wanted)) - set(self._turn))
            if worker_id == len(self._workers):
                self._pool.grow()
            self._turn.append(worker_id)
            for _ in range(self._ahead):
                self._submit()
        self._meter.workers = wanted

    def _submit(self, lane: int | None = None) -> bool:
        """Give the next index batch to the worker whose turn it is; out of order, to the one that is free.

        A stream of which a batch was handed out (`lane`) is given its next work: so they stay in turn.
        """
        assert self._pool is not None
        if not self._turn:
            return False
        if lane is None or lane not in self._turn or (self._in_order and self._streams is None):
            lane = self._turn[0]
            self._turn.rotate(-1)
        try:
            with self._counters.timed("sampler"):
                index = self._next_index() if self._streams is None else self._streams.work(lane)  # type: ignore[no-untyped-call]
        except StopIteration:
            self._turn.clear()
        if not self._turn:
            for every in range(len(self._workers)):
                self._pool.finish(every)
            return False
        seq, self._sent = self._sent, self._sent + 1
        self._owner[seq] = lane
        try:
            encoded = self._decoding is not None and self._decoding.next_encoded()
            self._pool.submit(lane % self._num_workers, seq, index, encoded=encoded)
        except BaseException:  # an index that cannot be pickled, Ctrl-C: nobody may wait for this batch
            del self._owner[seq]
            raise
        return True

    def _receive(self, *, wait: bool = True) -> None:
        """Take in what the workers have sent; with `wait`, at least one result."""
        assert self._pool is not None
        start = time.perf_counter()
        try:
            with stage("wait"):
                received = (
                    self._pool.receive(self._timeout, self._meter.tick) if wait else self._pool.arrived()
                )
            if wait:
                self._counters.add("wait.seconds", time.perf_counter() - start)
            for worker_id, result in received:
                self._take_in(worker_id, result)
        except BaseException:  # Ctrl-C too: what had come in by then may be lost, and would be waited for
            self._break()
            raise

    def _take_in(self, worker_id: int, result: Result) -> None:
        self._counters.merge(result.counters)
        self._bad.extend(result.bad)
        if result.seq in self._owner:
            self._progress.began(worker_id, result.before)
            self._arrived[result.seq] = (worker_id, result)
        else:
            self._discard(worker_id, result)

    def _discard(self, worker_id: int, result: Result) -> None:
        """A batch that nobody waits for any more; its slots go back."""
        assert self._pool is not None
        if result.seq >= self._first and not result.exhausted:
            self._pool.consume(worker_id)
        staged = self._feed is not None and self._feed.drop(result.seq)
        if result.packed is not None and not staged:
            self._pool.unpack(worker_id, result.packed)

    def _retire(self, lane: int) -> None:
        """This stream, or this worker's part of an iterable dataset, is at its end."""
        if lane in self._turn:
            self._turn.remove(lane)
        for seq in [seq for seq, owner in self._owner.items() if owner == lane]:
            del self._owner[seq]
            if seq in self._arrived:
                self._discard(*self._arrived.pop(seq))
        if self._streams is None:
            self._submit()

    def _break(self) -> None:
        """End the workers, and this iterator with them."""
        self._broken = True
        self._shutdown_workers()
        if (forget := self._forget()) is not None:
            forget(self)

    def _shutdown_workers(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def __del__(self) -> None:
        if torch_utils is not None and not torch_utils.python_exit_status:
            if self._feed is not None:
                self._feed.close()
            self._shutdown_workers()


def _setup(iterator: WorkerIterator, loader: Any) -> WorkerSetup:
    init = loader.worker_init_fn
    if isinstance(iterator._dataset, IterDataPipe | MapDataPipe):
        init = functools.partial(
            torch_dataloader._sharding_worker_init_fn, init, iterator._world_size, iterator._rank
        )
    return WorkerSetup(
        dataset=iterator._dataset,
        collate_fn=iterator._collate_fn,
        auto_collation=iterator._auto_collation,
        drop_last=iterator._drop_last,
        worker_init_fn=init,
        num_workers=iterator._num_workers,
        prefetch_factor=loader.prefetch_factor or 2,
        base_seed=int(iterator._base_seed),
        on_error=loader.on_error,
        seeded=loader.seed is not None,
        batch_size=loader._samples_per_batch(),
        positions=loader._state.worker_positions(),
    )


def _context(loader: Any) -> Any:
    """The user's start method, or torch's default."""
    context = loader.multiprocessing_context or multiprocessing.get_context()
    if loader.multiprocessing_context is None and context.get_start_method() == "fork":
        return torch.multiprocessing
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(_preloaded())
    return context


def _preloaded() -> list[str]:
    """What the fork server imports once for all workers: the modules that the user has set, and ours."""
    chosen: list[str] = list(forkserver._forkserver._preload_modules)  # type: ignore[attr-defined]
    if chosen == ["__main__"]:  # Python's default; the main script may have no `__main__` guard
        chosen = []
    return chosen + [module for module in _PRELOADED if module not in chosen]
