"""What an iterator works with: its executor, its device, and the schedule of each epoch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.graph_settings import apply_sharding

from fastload.datasets.wrappers import view_of
from fastload.gpu.transfer import DevicePrefetcher
from fastload.loader.context import LoaderContext
from fastload.loader.schedule import IndexSchedule, Schedule, StreamSchedule, index_batches_ahead
from fastload.loader.stream_epoch import StreamEpoch
from fastload.metrics.torch_private import shard_data_pipe
from fastload.order.position import Position
from fastload.workers.executor import Executor, ProcessExecutor
from fastload.workers.inline import InlineExecutor, allocator
from fastload.workers.memory_limit import MemoryLimit
from fastload.workers.protocol import WorkerSetup


def new_device(loader: Any, context: LoaderContext) -> DevicePrefetcher | None:
    """What takes the batches of one iterator to the device; None where they stay as they are."""
    if loader.device is None and loader.batch_transform is None and context.decoding is None:
        return None
    return DevicePrefetcher(loader.device, loader.batch_transform, context.counters, context.decoding)


def new_executor(
    loader: Any,
    context: LoaderContext,
    device: DevicePrefetcher | None,
    *,
    base_seed: int,
    pinned: bool,
    part: tuple[int, int],
) -> Executor:
    """The workers of one iterator, started; or, with `num_workers=0`, this process.

    Args:
        base_seed: of the workers, as torch draws it.
        pinned: whether batches that stay on the CPU come in pinned memory.
        part: (number of ranks, this rank), for data pipes, which torch splits by rank and worker.
    """
    setup = _setup(loader, context, base_seed, part)
    counters, bad, memory = context.counters, context.bad, context.memory
    memory.start(setup.memory_limit)
    if loader.num_workers > 0:
        if not loader.prefetch_factor:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        pin = device.pin if device is not None and device.copies else None
        start = context.workers_wanted(loader.num_workers)
        method = loader.multiprocessing_context
        return ProcessExecutor(setup, method, counters, bad, memory, pin=pin, start=start)
    if loader.timeout != 0:
        raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        apply_sharding(loader.dataset, *part)
    allocate = allocator(pinned=pinned) if device is None else device.allocate
    return InlineExecutor(setup, counters, bad, allocate)


def _setup(loader: Any, context: LoaderContext, base_seed: int, part: tuple[int, int]) -> WorkerSetup:
    workers, init = loader.num_workers, loader.worker_init_fn
    positions = context.position.start.workers
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
        batch_size=loader.batch_size or 1,
        memory_limit=MemoryLimit.of(loader.memory_limit, workers, loader.multiprocessing_context),
        positions=None if positions is None else [vars(worker) for worker in positions],
    )


def new_schedule(
    loader: Any, context: LoaderContext, position: Position, indices: Iterator[Any], workers: int
) -> Schedule:
    """The schedule of one epoch.

    Args:
        position: of that epoch.
        indices: of its batches, from the sampler.
        workers: the number that it begins with; 0: this process alone.
    """
    inline = not loader.num_workers
    if isinstance(
        position.streams, StreamEpoch
    ):  # each reads ahead by itself, so what is announced need not be more
        return StreamSchedule(position.streams, ahead=1 if inline else loader.prefetch_factor)
    ahead = 1 if inline else context.batches_ahead(loader.prefetch_factor)
    if view_of(loader.dataset).reads_ahead:
        ahead = 1 + index_batches_ahead(loader, 2) if inline else index_batches_ahead(loader, ahead)
    elif loader.threads:
        ahead = inline + index_batches_ahead(loader, ahead, 2 * loader.threads)
    return IndexSchedule(
        indices,
        workers=1 if inline else workers,
        first=position.next_worker,
        ahead=ahead,
        in_order=loader.in_order,
    )
