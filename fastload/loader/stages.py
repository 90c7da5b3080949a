"""The parts of an iterator: workers and their number, device, schedule of an epoch, delivery, rules."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, default_collate
from torch.utils.data.graph_settings import apply_sharding

from fastload.datasets.wrappers import view_of
from fastload.gpu.transfer import DevicePrefetcher
from fastload.loader.context import LoaderContext
from fastload.loader.schedule import (
    IndexSchedule,
    ReorderBuffer,
    Schedule,
    StreamSchedule,
    index_batches_ahead,
)
from fastload.loader.stream_epoch import StreamEpoch
from fastload.metrics.torch_private import shard_data_pipe, stage
from fastload.order.position import Position
from fastload.order.samplers import is_stateful
from fastload.workers.memory_limit import MemoryLimit
from fastload.workers.processes import WorkerProcesses
from fastload.workers.protocol import WorkerSetup
from fastload.workers.workers import Arrival, ThisProcess, Workers, allocator


def new_device(loader: Any, context: LoaderContext) -> DevicePrefetcher | None:
    """Return what takes the batches of one iterator to the device; None where they stay as they are."""
    if loader.device is None and loader.batch_transform is None and context.decoding is None:
        return None
    return DevicePrefetcher(loader.device, loader.batch_transform, context.counters, context.decoding)


def new_workers(
    loader: Any,
    context: LoaderContext,
    device: DevicePrefetcher | None,
    *,
    base_seed: int,
    pinned: bool,
    part: tuple[int, int],
) -> Workers:
    """Return the workers of one iterator, started; or, with `num_workers=0`, this process.

    Args:
        base_seed: of the workers, as torch draws it.
        pinned: whether batches that stay on the CPU come in pinned memory.
        part: (number of ranks, this rank), for data pipes, which torch splits by rank and worker.
    """
    threads = kernel_threads(loader, context)
    setup = _setup(loader, context, base_seed, part, threads)
    counters, bad, memory = context.counters, context.bad, context.memory
    memory.start(setup.memory_limit)
    if loader.num_workers > 0:
        if not loader.prefetch_factor:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        context.kind = "threads" if threads else "processes"
        pin = device.pin if device is not None and device.copies else None
        start = context.workers_wanted(loader.num_workers)
        method = loader.multiprocessing_context
        return WorkerProcesses(setup, method, counters, bad, memory, pin=pin, start=start)
    if loader.timeout != 0:
        raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        apply_sharding(loader.dataset, *part)
    allocate = allocator(pinned=pinned) if device is None else device.allocate
    return ThisProcess(setup, counters, bad, allocate)


def kernel_threads(loader: Any, context: LoaderContext) -> int:
    """Return how many threads of the kernel share the rows of a batch, in one worker process.

    0: each of `num_workers` processes makes its own batches. So it is where code of the user's runs for a
    sample or a batch, and with shards and tables.
    """
    ours = loader.collate_fn is default_collate and loader._auto_collation and loader.worker_init_fn is None
    asked_for = loader.processes or loader.threads or context.decoding is not None
    if not ours or asked_for or isinstance(loader.dataset, IterableDataset):
        return 0
    by_kernel = not is_stateful(loader.dataset) and view_of(loader.dataset).made_by_kernel()
    return int(loader.num_workers) if by_kernel else 0


def _setup(
    loader: Any, context: LoaderContext, base_seed: int, part: tuple[int, int], threads: int
) -> WorkerSetup:
    workers, init = 1 if threads else loader.num_workers, loader.worker_init_fn
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        init = functools.partial(shard_data_pipe, init, *part)
    return WorkerSetup(
        dataset=loader.dataset,
        collate_fn=loader.collate_fn,
        auto_collation=loader._auto_collation,
        drop_last=loader.drop_last,
        worker_init_fn=init,
        num_workers=workers,
        prefetch_factor=loader.prefetch_factor or 2,
        base_seed=base_seed,
        on_error=loader.on_error,
        seeded=loader.seed is not None,
        logged=loader.sample_log is not None,
        threads=loader.threads,
        kernel_threads=threads,
        batch_size=loader.batch_size or 1,
        memory_limit=MemoryLimit.of(loader.memory_limit, workers, loader.multiprocessing_context),
        positions=context.position.start.workers,
    )


def new_schedule(
    loader: Any, context: LoaderContext, position: Position, indices: Iterator[Any], workers: Workers
) -> Schedule:
    """Return the schedule of one epoch.

    Args:
        position: of that epoch.
        indices: of its batches, from the sampler.
        workers: that make them.
    """
    inline = not loader.num_workers
    if isinstance(position.streams, StreamEpoch):  # each reads ahead by itself, so no more is announced
        return StreamSchedule(position.streams, ahead=1 if inline else loader.prefetch_factor)
    ahead = 1 if inline else context.batches_ahead(loader.prefetch_factor)
    if view_of(loader.dataset).reads_ahead:
        ahead = inline + index_batches_ahead(loader, 2 if inline else ahead, threads=workers.kernel_threads)
    elif loader.threads:
        ahead = inline + index_batches_ahead(loader, ahead, samples=2 * loader.threads)
    # Of workers that were wanted at the end of an epoch, some may not have been started.
    taking_part = min(context.workers_wanted(loader.num_workers), len(workers.processes))
    return IndexSchedule(
        indices,
        workers=max(1, taking_part),
        first=position.next_worker,
        ahead=ahead,
        in_order=loader.in_order,
    )


class Scaling:
    """Has as many workers make batches as num_workers="auto" wants; without it, all of them."""

    def __init__(self, context: LoaderContext, workers: Workers) -> None:
        self._context = context
        self._workers = workers

    def adjust(self, schedule: Schedule, in_flight: int) -> bool:
        """Start or park workers. Returns whether more work may be given out than before.

        A worker that is parked finishes its work, and waits.
        """
        autoscaler, threads = self._context.autoscaler, self._workers.kernel_threads
        # Where there is no more work, more threads still help with what was given out.
        if autoscaler is None or not isinstance(schedule, IndexSchedule) or not (threads or schedule.turn):
            return False
        wanted = autoscaler.look(self._context.counters, in_flight)
        missing: list[int] = []
        if threads:
            self._workers.scale(wanted, autoscaler.ahead)
        else:
            schedule.park(wanted)
            missing = schedule.missing(wanted)
            self._workers.scale(max(missing, default=-1) + 1, autoscaler.ahead)
        schedule.turn.extend(missing)
        self._context.meter.workers = wanted
        before, schedule.ahead = schedule.ahead, max(schedule.ahead, autoscaler.ahead)
        return bool(missing) or schedule.ahead > before


class Delivery:
    """Hands batches to the consumer: from the device, where they are copied ahead; pinned; or as they are.

    Args:
        device: None: batches stay in host memory.
        pin: pins a batch; None: they are not pinned here.
    """

    def __init__(
        self,
        device: DevicePrefetcher | None,
        context: LoaderContext,
        workers: Workers,
        pin: Callable[[Any], Any] | None,
    ) -> None:
        self._device = device
        self._context = context
        self._workers = workers
        self._pin = pin

    @property
    def ahead(self) -> int:
        """Return how many batches are copied ahead."""
        copies = self._device is not None and self._workers.concurrent
        return self._device.ahead if copies and self._device is not None else 0

    def start(self, arrival: Arrival) -> None:
        """Start a batch on its way to the device, before it is asked for."""
        if self._device is not None and arrival.load is not None:
            self._device.start(arrival.seq, arrival.load)

    def load(self, arrival: Arrival) -> Any:
        """Return the batch as the user gets it. Raises what the device or the pinning raised."""
        assert arrival.load is not None
        start = time.perf_counter()
        with stage("unpack"):
            batch = arrival.load() if self._device is None else self._device.get(arrival.seq, arrival.load)
        if self._pin is not None:
            batch = self._pin(batch)
        if not self._workers.concurrent:  # nothing of it was done ahead
            self._context.meter.waited(time.perf_counter() - start)
        return batch

    def discard(self, arrival: Arrival) -> None:
        """Release the memory of a batch that nobody waits for any more."""
        if self._device is None or not self._device.drop(arrival.seq):
            self._workers.discard(arrival)


def follow_exclusions(
    position: Position, reorder: ReorderBuffer, workers: Workers, first: int, outdated: set[int]
) -> None:
    """Edit once more what was given out and was not handed out, where more or less is left out now.

    Args:
        first: sequence number of the first work of this epoch.
        outdated: gets the work that may be made as it was before.
    """
    older = position.filter
    if older is None or not older.changed:
        return
    before, newer = older.withheld, older.newer(position.batches)
    if newer.withheld != before:
        workers.exclude(newer.withheld)
    for seq in reorder.expected():
        given = position.given_out(seq - first)
        if given is None:
            continue
        edited = newer(given.step, given.index)
        same = edited is not None and edited.replaced == given.edited.replaced
        if same and not newer.may_choose(given.edited, before):
            continue
        index = None if edited is None else edited.index
        if reorder.has(seq) or not workers.revise(seq, index):
            outdated.add(seq)
        elif edited is None:
            reorder.forget(seq)
        position.edit(seq - first, edited)
    position.filter = newer  # last: after Ctrl-C all of this is done again
