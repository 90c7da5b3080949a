"""The caches of a loader that have a `remote`: when they pull and push.

an epoch begins ─▶ pull what is published ─▶ the first one waits, if it is short ─▶ the epoch ends ─▶ push
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from fastload.cache import Cache
from fastload.cache.remote import Remote, remote_of
from fastload.datasets.inner import fastload_datasets
from fastload.distributed import find_launched
from fastload.distributed.partition import node_shares
from fastload.distributed.sampler import DistributedSampler
from fastload.errors import FastloadError
from fastload.loader.digest import find_part
from fastload.metrics.counters import Counters

__all__ = ["RemoteCaches"]


class RemoteCaches:
    """Of one loader. A copy of it, in another process, has its own processes."""

    def __init__(self) -> None:
        self._shares: dict[Remote, bytes | None] = {}  # the cache keys of this node's share
        self._begun = False
        self._pushing: list[Remote] = []  # in this epoch
        self._all: list[Remote] = []

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RemoteCaches.__init__(self)

    def start_epoch(self, loader: Any) -> None:
        """Pull what the caches lack, in the first rank of a node. The first epoch waits a little for it."""
        found = _remotes(loader.dataset)
        self._all = list(found)
        if found and _leads(loader):
            self._pushing = [remote for remote in found if remote.pushes]
            for remote, dataset in found.items():
                if remote not in self._shares:
                    self._shares[remote] = _share(dataset, loader)
                remote.pull(self._shares[remote])
        if not self._begun:
            for remote in self._all:
                remote.wait_for_pull()
        self._begun = True

    def end_epoch(self, counters: Counters) -> None:
        """Push what is new, and count what has been done."""
        for remote in self._pushing:
            remote.push()
        for remote in self._all:
            remote.add_counts(counters)


def _remotes(dataset: Any) -> dict[Remote, Any]:
    """What pulls and pushes for the caches of a dataset -> the first dataset with that directory and URL."""
    found: dict[Remote, Any] = {}
    for one in fastload_datasets(dataset):
        cache = getattr(one, "cache", None)
        remote = remote_of(cache) if isinstance(cache, Cache) else None
        if remote is not None:
            found.setdefault(remote, one)
    return found


def _leads(loader: Any) -> bool:
    """Whether this is the first rank of its node. Where no launcher tells, each rank is."""
    rank, world_size = find_part(loader)
    local = [said.local for said in find_launched(rank, world_size) if said.local is not None]
    return not local or local[0] == 0


def _share(dataset: Any, loader: Any) -> bytes | None:
    """The cache keys of this node's share, one behind the other; None where a node reads all, or has no keys.

    With `partition="node"` a disk may hold no more than a share, and nothing that a cache has makes room.
    """
    sampler = loader.sampler
    place = sampler.place if isinstance(sampler, DistributedSampler) else None
    if place is None or place.nodes == 1 or dataset is not loader.dataset:
        return None
    share = node_shares(len(dataset), place.nodes)[place.node :: place.nodes].tolist()
    try:
        return b"".join(chain.from_iterable(map(dataset.cache_keys, share)))
    except (FastloadError, TypeError, AttributeError):  # no keys, such as of shards without an index
        return None
