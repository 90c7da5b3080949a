"""What a loader shares with its iterators, its caches that have a `remote`, and the parts of an iterator.

an epoch begins ─▶ pull what is published of this loader's samples ─▶ the epoch ends ─▶ push

Other loaders may fill the same directory, on other nodes too: their records are left to them.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    SubsetRandomSampler,
    default_collate,
)
from torch.utils.data.graph_settings import apply_sharding

from fastload.cache import Cache
from fastload.cache.remote import Remote, remote_of
from fastload.datasets.views import Reach
from fastload.datasets.wrappers import fastload_datasets, view_of
from fastload.distributed import find_launched, find_rank
from fastload.errors import FastloadError
from fastload.gpu.transfer import DevicePrefetcher
from fastload.loader.resume import LoaderPosition
from fastload.metrics.counters import BadSamples, Counters, Meter, stage
from fastload.metrics.torch_private import shard_data_pipe
from fastload.order.exclusions import Exclusions
from fastload.order.permutations import node_shares
from fastload.order.position import History
from fastload.order.sampler import DistributedSampler, indexed_length
from fastload.order.samplers import is_stateful
from fastload.store.budget import RequestBudget, RequestCounts
from fastload.trace.digest import Digest, find_part
from fastload.trace.sample_log import LogWriter
from fastload.workers.autoscale import Autoscaler
from fastload.workers.collate import collates_as_torch
from fastload.workers.memory_limit import MemoryLimit, MemoryUse
from fastload.workers.processes import WorkerProcesses
from fastload.workers.protocol import WorkerSetup
from fastload.workers.workers import Arrival, ThisProcess, Workers, allocator

if TYPE_CHECKING:
    from fastload.gpu.decoding import Decoding
    from fastload.workers.protocol import Fingerprint


class RemoteCaches:
    """The processes that pull and push for one loader. A copy of it, in another process, has its own."""

    def __init__(self) -> None:
        self._pushing: list[Remote] = []  # in this epoch
        self._all: list[Remote] = []

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RemoteCaches.__init__(self)

    def start_epoch(self, loader: Any) -> None:
        """Pull what the caches lack, in the first rank of a node."""
        remotes = _remotes(loader.dataset)
        self._all = list(remotes)
        if remotes and _leads(loader):
            self._pushing = [remote for remote in remotes if remote.pushes]
            for remote, datasets in remotes.items():
                remote.pull(self, partial(_keys, loader, datasets))

    def end_epoch(self, counters: Counters) -> None:
        """Push what is new, and count what has been done."""
        for remote in self._pushing:
            remote.push()
        for remote in self._all:
            remote.add_counts(counters)


def _remotes(dataset: Any) -> dict[Remote, list[Any]]:
    """Return what pulls and pushes for caches of a dataset -> the datasets with that directory and URL."""
    remotes: dict[Remote, list[Any]] = {}
    for leaf in fastload_datasets(dataset):
        cache = getattr(leaf, "cache", None)
        if isinstance(cache, Cache) and cache.remote is not None:
            remotes.setdefault(remote_of(cache), []).append(leaf)
    return remotes


def _leads(loader: Any) -> bool:
    """Return whether this is the first rank of its node. Where no launcher tells, each rank is."""
    rank, world_size = find_part(loader)
    local = [said.local for said in find_launched(rank, world_size) if said.local is not None]
    return not local or local[0] == 0


def _keys(loader: Any, datasets: list[Any]) -> Iterator[bytes]:
    """Yield the cache keys of what a loader may read of some datasets; none of shards not indexed yet."""
    with contextlib.suppress(FastloadError, TypeError, AttributeError, IndexError):
        reached: dict[int, list[Reach]] = {}
        for dataset, indices in view_of(loader.dataset).reached(_dealt(loader)):
            reached.setdefault(id(dataset), []).append(indices)
        for dataset in datasets:
            yield from _keys_of(dataset, reached.get(id(dataset), [None]))


def _keys_of(dataset: Any, parts: list[Reach]) -> Iterator[bytes]:
    """Return the cache keys of some parts of a dataset; None: all of it."""
    chosen = [part for part in parts if part is not None]
    every = len(chosen) < len(parts)
    indices: Iterable[int] = range(indexed_length(dataset)) if every else np.unique(np.concatenate(chosen))
    return chain.from_iterable(dataset._cache_keys(int(index)) for index in indices)


def _dealt(loader: Any) -> Reach:
    """Return the samples that the sampler deals to this node in any epoch; None where all may be.

    With `partition="node"` a disk may hold no more than a share, and nothing that a cache has makes room.
    """
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler
    if type(sampler) is SubsetRandomSampler:
        return np.asarray(sampler.indices, np.int64)
    place = sampler._place if isinstance(sampler, DistributedSampler) else None
    if place is None or place.nodes == 1:
        return None
    share: NDArray[np.int64] = node_shares(indexed_length(loader.dataset), place.nodes)[
        place.node :: place.nodes
    ].numpy()
    return share


@dataclass
class LoaderContext:
    """What outlives each iterator of a loader. It pickles with the loader and holds no reference to it.

    Attributes:
        counters: of all epochs.
        memory: of the worker processes, with `memory_limit=`.
        meter: the epoch that runs, or the last one.
        bad: samples that could not be read or decoded.
        position: how much was delivered.
        history: the orders of past epochs.
        exclusions: samples and steps that are left out.
        digest: of all that was delivered.
        remote_caches: what pulls and pushes for them.
        log: of each sample that was delivered, with `sample_log=`.
        budgets: the requests of each dataset to its stores, and their limits.
        autoscaler: with num_workers="auto".
        decoding: where the device decodes images.
        kind: of workers, in the iteration that began last: "threads" of the kernel in one process,
            "processes", or "" where this process makes the batches.
    """

    counters: Counters = field(default_factory=Counters)
    bad: BadSamples = field(default_factory=BadSamples)
    position: LoaderPosition = field(default_factory=LoaderPosition)
    history: History = field(default_factory=History)
    exclusions: Exclusions = field(default_factory=Exclusions)
    digest: Digest = field(default_factory=Digest)
    autoscaler: Autoscaler | None = None
    decoding: Decoding | None = None
    memory: MemoryUse | None = None
    remote_caches: RemoteCaches = field(default_factory=RemoteCaches)
    log: LogWriter | None = None
    kind: str = ""
    budgets: list[RequestBudget] = field(default_factory=list)
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.meter = Meter(self.counters)

    def start_epoch(self, loader: Any) -> None:
        """Note that an iteration of the loader begins."""
        self.bad.start_epoch()
        self.find_budgets(loader.dataset)
        rank, world_size = find_part(loader)
        self.digest.rank, self.digest.world_size = rank, world_size
        if self.log is not None:
            self.log.begin(rank, world_size, self.digest.steps)

    def delivered(self, epoch: int, step: int, fingerprint: Fingerprint | None) -> None:
        """Note that the batch of a step reached the user; without a fingerprint, its error did."""
        if self.log is not None:
            self.log.add(self.digest.steps, epoch, step, fingerprint)
        self.digest.add(epoch, step, fingerprint)
        self.count_requests()

    def find_budgets(self, dataset: Any) -> None:
        """Collect the budgets of the datasets that `dataset` holds."""
        budgets = [view_of(budget).budget() for budget in fastload_datasets(dataset)]
        self.budgets = list(dict.fromkeys(budget for budget in budgets if budget is not None))

    def count_requests(self) -> None:
        """Put into the counters what all processes asked of the stores."""
        spent = RequestCounts(*map(sum, zip(*(budget.spent() for budget in self.budgets), strict=True)))
        if any(spent):
            self.counters.put("store.gets", spent.gets)
            self.counters.put("store.heads", spent.heads)
            self.counters.put("store.lists", spent.lists)
            self.counters.put("store.egress_bytes", spent.egress)

    def limits(self) -> list[dict[str, int | None]]:
        """Return the limits of each dataset that has some, and what was used of them."""
        limited = [budget for budget in self.budgets if any(budget.limits)]
        return [
            {
                "max_gets": budget.limits.gets,
                "gets": budget.used().gets,
                "max_egress": budget.limits.egress,
                "egress": budget.used().egress,
            }
            for budget in limited
        ]

    def rank(self) -> int:
        """Return this process's number among the ranks of its job."""
        return find_rank()[0]

    def flush_log(self) -> None:
        """Write the sample log up to here."""
        if self.log is not None:
            self.log.flush()

    def batches_ahead(self, given: int) -> int:
        """Return how many batches each worker may make ahead: `given`, or more by num_workers="auto"."""
        return given if self.autoscaler is None else max(given, self.autoscaler.ahead)

    def workers_wanted(self, most: int) -> int:
        """Return how many of `most` workers make batches: all, unless num_workers="auto" has found fewer."""
        return most if self.autoscaler is None else int(self.autoscaler.workers)


# --- the parts of an iterator


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
    if memory is not None and setup.memory_limit is not None:
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


# Python's own work on a sample of a first epoch is a fifth to a half of its decoding, and one interpreter
# does that for all threads of a process. With fewer they would wait less for it, and take more memory.
_THREADS_OF_PROCESS = 8


def kernel_threads(loader: Any, context: LoaderContext) -> int:
    """Return how many threads of the kernel make rows, in all worker processes together.

    0: each of `num_workers` processes makes its own batches. So it is where code of the user's runs for a
    sample or a batch, and with shards and tables.
    """
    collates = loader.collate_fn is default_collate and loader._auto_collation and collates_as_torch()
    ours = collates and loader.worker_init_fn is None
    asked_for = loader.processes or loader.threads or context.decoding is not None
    if not ours or asked_for or isinstance(loader.dataset, IterableDataset):
        return 0
    by_kernel = not is_stateful(loader.dataset) and view_of(loader.dataset).made_by_kernel()
    return int(loader.num_workers) if by_kernel else 0


def kernel_processes(threads: int) -> int:
    """Return how many worker processes these threads of the kernel are spread over; 0 without any."""
    return -(-threads // _THREADS_OF_PROCESS)


def _setup(
    loader: Any, context: LoaderContext, base_seed: int, part: tuple[int, int], threads: int
) -> WorkerSetup:
    workers, init, limit = kernel_processes(threads) or loader.num_workers, loader.worker_init_fn, None
    start, resumed = context.position.start, context.position.start.resumed
    if loader.memory_limit is not None:
        limit = MemoryLimit.of(loader.memory_limit, workers, loader.multiprocessing_context)
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
        kernel_threads=-(-threads // max(1, workers)),
        batch_size=loader.batch_size or 1,
        memory_limit=limit,
        positions=start.workers,
        # Persistent workers draw on from epoch to epoch, and this process is the user's.
        other_draws=resumed is not None and (not workers or (resumed.one_seed and resumed.epoch > 0)),
        timeout=loader.timeout,
    )


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
