"""What a loader shares with its iterators, and its caches that have a `remote`.

an epoch begins ─▶ pull what is published of this loader's samples ─▶ the epoch ends ─▶ push

Other loaders may fill the same directory, on other nodes too: their records are left to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, SubsetRandomSampler

from fastload.cache import Cache
from fastload.cache.remote import Remote, remote_of
from fastload.datasets.views import Reach
from fastload.datasets.wrappers import fastload_datasets, view_of
from fastload.distributed import find_launched, find_rank
from fastload.errors import FastloadError
from fastload.loader.resume import LoaderPosition
from fastload.metrics.counters import BadSamples, Counters, Meter
from fastload.order.exclusions import Exclusions
from fastload.order.position import History
from fastload.order.sampler import DistributedSampler, indexed_length, node_shares
from fastload.store.budget import RequestBudget, RequestCounts
from fastload.trace.digest import Digest, find_part
from fastload.trace.sample_log import LogWriter
from fastload.workers.autoscale import Autoscaler
from fastload.workers.memory_limit import MemoryUse

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
        found = _remotes(loader.dataset)
        self._all = list(found)
        if found and _leads(loader):
            self._pushing = [remote for remote in found if remote.pushes]
            for remote, datasets in found.items():
                remote.pull(self, partial(_keys, loader, datasets))

    def end_epoch(self, counters: Counters) -> None:
        """Push what is new, and count what has been done."""
        for remote in self._pushing:
            remote.push()
        for remote in self._all:
            remote.add_counts(counters)


def _remotes(dataset: Any) -> dict[Remote, list[Any]]:
    """Return what pulls and pushes for caches of a dataset -> the datasets with that directory and URL."""
    found: dict[Remote, list[Any]] = {}
    for one in fastload_datasets(dataset):
        cache = getattr(one, "cache", None)
        remote = remote_of(cache) if isinstance(cache, Cache) else None
        if remote is not None:
            found.setdefault(remote, []).append(one)
    return found


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
    return chain.from_iterable(dataset.cache_keys(int(index)) for index in indices)


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
        memory: of the worker processes, under `memory_limit`.
        meter: the epoch that runs, or the last one.
        bad: samples that could not be read or decoded.
        position: how much was handed out.
        history: the orders of past epochs.
        exclusions: samples and steps that are left out.
        digest: of all that was handed out.
        remote_caches: what pulls and pushes for them.
        log: of each sample that was handed out, with `sample_log=`.
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
    memory: MemoryUse = field(default_factory=MemoryUse)
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
        found = [view_of(one).budget() for one in fastload_datasets(dataset)]
        self.budgets = list(dict.fromkeys(one for one in found if one is not None))

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
        limited = [one for one in self.budgets if any(one.limits)]
        return [
            {
                "max_gets": one.limits.gets,
                "gets": one.used().gets,
                "max_egress": one.limits.egress,
                "egress": one.used().egress,
            }
            for one in limited
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
