"""The caches of a loader that have a `remote`: when they pull and push.

an epoch begins ─▶ pull what is published of this loader's samples ─▶ the epoch ends ─▶ push

Other loaders may fill the same directory, on other nodes too: their records are left to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, SubsetRandomSampler

from fastload.cache import Cache
from fastload.cache.remote import Remote, remote_of
from fastload.datasets.views import Reach
from fastload.datasets.wrappers import fastload_datasets, view_of
from fastload.distributed import find_launched
from fastload.errors import FastloadError
from fastload.metrics.counters import Counters
from fastload.order.partition import node_shares
from fastload.order.sampler import DistributedSampler, indexed_length
from fastload.trace.digest import find_part


class RemoteCaches:
    """Of one loader. A copy of it, in another process, has its own processes."""

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
    """What pulls and pushes for the caches of a dataset -> the datasets with that directory and URL."""
    found: dict[Remote, list[Any]] = {}
    for one in fastload_datasets(dataset):
        cache = getattr(one, "cache", None)
        remote = remote_of(cache) if isinstance(cache, Cache) else None
        if remote is not None:
            found.setdefault(remote, []).append(one)
    return found


def _leads(loader: Any) -> bool:
    """Whether this is the first rank of its node. Where no launcher tells, each rank is."""
    rank, world_size = find_part(loader)
    local = [said.local for said in find_launched(rank, world_size) if said.local is not None]
    return not local or local[0] == 0


def _keys(loader: Any, datasets: list[Any]) -> Iterator[bytes]:
    """The cache keys of what a loader may read of some of its datasets; none of shards not indexed yet."""
    with contextlib.suppress(FastloadError, TypeError, AttributeError, IndexError):
        reached: dict[int, list[Reach]] = {}
        for dataset, indices in view_of(loader.dataset).reached(_dealt(loader)):
            reached.setdefault(id(dataset), []).append(indices)
        for dataset in datasets:
            yield from _keys_of(dataset, reached.get(id(dataset), [None]))


def _keys_of(dataset: Any, parts: list[Reach]) -> Iterator[bytes]:
    """The cache keys of some parts of a dataset; None: all of it."""
    chosen = [part for part in parts if part is not None]
    every = len(chosen) < len(parts)
    indices: Iterable[int] = range(indexed_length(dataset)) if every else np.unique(np.concatenate(chosen))
    return chain.from_iterable(dataset._cache_keys(int(index)) for index in indices)


def _dealt(loader: Any) -> Reach:
    """The samples that the sampler deals to this node, in any epoch; None where that may be all of them.

    With `partition="node"` a disk may hold no more than a share, and nothing that a cache has makes room.
    """
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler
    if type(sampler) is SubsetRandomSampler:
        return np.asarray(sampler.indices, np.int64)
    place = sampler.place if isinstance(sampler, DistributedSampler) else None
    if place is None or place.nodes == 1:
        return None
    share: NDArray[np.int64] = node_shares(indexed_length(loader.dataset), place.nodes)[
        place.node :: place.nodes
    ].numpy()
    return share
