"""What `fastload warm` fills: the dataset and its cache, this node's share, and the workers that read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info

import fastload
from fastload.cli.command_options import CacheMode, check_usable
from fastload.cli.kinds import SHARDS, Kind, find_kind
from fastload.cli.shard_source import open_shards
from fastload.datasets.warm import ToRead
from fastload.distributed import find_rank
from fastload.errors import ArgumentError

OUTCOMES_A_MESSAGE = 16


class Target(NamedTuple):
    """What is warmed, and the cache of it: each node opens its own."""

    url: str
    cache: str
    mode: CacheMode
    size_limit: str | None
    short_side: int
    quality: int
    objects: bool
    fields: str | None
    features: str | None
    storage_options: dict[str, Any]

    def __repr__(self) -> str:
        """Leave out the options, which may be secrets."""
        return f"Target({self.url!r}, cache={self.cache!r})"

    def anywhere(self) -> Target:
        """The same for processes in other directories: without relative paths."""
        from fastload.cache.cache import absolute
        from fastload.store import open_store
        from fastload.store.local import LocalStore

        store = open_store(self.url, **self.storage_options)
        url = store.address if isinstance(store, LocalStore) else self.url
        return self._replace(url=url, cache=absolute(self.cache))

    def open(self, listing_max_age: float | str) -> tuple[Any, Kind]:
        """The dataset over the listed objects, and the kind of the data."""
        kept = fastload.Cache(
            self.cache,
            self.mode.value,
            size_limit=self.size_limit,
            short_side=self.short_side,
            quality=self.quality,
        )
        check_usable(kept)
        kind = Kind.objects if self.objects else find_kind(self.url, self.storage_options)
        arguments: dict[str, Any] = {
            "cache": kept,
            "storage_options": self.storage_options,
            "listing_max_age": listing_max_age,
        }
        as_training: dict[str, Any] = {}
        if self.mode is CacheMode.dct:  # its records are for transforms that decode them
            as_training["transform"] = fastload.CenterCrop(224)
        dataset: Any
        if kind in SHARDS:
            if kind is Kind.tfrecord:
                arguments |= as_training
            dataset = open_shards(kind, self.url, self.fields, self.features, **arguments)
        elif self.fields is not None or self.features is not None:
            raise ArgumentError(f"--fields and --features are for shards, and {self.url!r} holds none")
        else:
            kind = Kind.objects if self.objects else Kind.folder
            if self.objects:
                arguments |= as_training
            dataset = (fastload.ObjectDataset if self.objects else fastload.ImageFolder)(
                self.url, **arguments
            )
        if dataset.cache is None:
            raise ArgumentError(f"{dataset.url!r} cannot be cached: the warning above says why")
        return dataset, kind


class Warming(IterableDataset[Any]):
    """A `Warmed` tuple, the outcome, for each sample of a share of a dataset.

    Args:
        dataset: a `fastload.ObjectDataset`, or one of shards.
        samples: the share (int64).
        by_shard: the share is all samples of these shards.
    """

    def __init__(self, dataset: Any, samples: npt.NDArray[np.int64], *, by_shard: bool = False) -> None:
        self.dataset = dataset
        self.samples = samples
        self.by_shard = by_shard

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        part = self.samples if worker is None else self.samples[worker.id :: worker.num_workers]
        warm = self.dataset.warm_shards if self.by_shard else self.dataset.warm
        yield from warm(index.item() for index in part)


def find_left(warming: Warming) -> ToRead:
    """What the store will be asked for."""
    samples = warming.samples.tolist()
    dataset = warming.dataset
    found: ToRead = (
        dataset.left_to_warm_shards(samples) if warming.by_shard else dataset.left_to_warm(samples)
    )
    dataset.cache.close()  # the workers open it themselves
    return found


def warming_loader(warming: Warming, num_workers: int) -> Any:
    """A loader over lists of `Warmed` tuples, from `num_workers` processes (0: from this one)."""
    return fastload.DataLoader(
        warming,
        OUTCOMES_A_MESSAGE,
        num_workers=num_workers,
        collate_fn=list,
        in_order=False,
    )


def find_share(dataset: Any, shard: tuple[int, int] | None) -> tuple[Warming, tuple[int, int]]:
    """What this node warms, and (shard, shards)."""
    if isinstance(dataset, fastload.ObjectDataset):
        samples, found = share_of(dataset, shard)
        return Warming(dataset, samples), found
    return share_of_shards(dataset, shard)


def share_of_shards(dataset: Any, shard: tuple[int, int] | None) -> tuple[Warming, tuple[int, int]]:
    """What this node warms of a dataset of shards, and (shard, shards).

    All shards are streamed. A share is the one of `share_of`, read by a request a sample, for which the
    shards must be indexed and not be compressed.
    """
    alone = (shard or find_rank())[1] == 1
    if alone:
        return Warming(dataset, np.arange(len(dataset.shards())), by_shard=True), (0, 1)
    try:
        samples, found = share_of(dataset, shard)
    except TypeError:
        raise ArgumentError(
            "a share of shards is a share of their samples, and they are not indexed: run fastload index "
            "first, or give --shard 0/1 to warm all of them"
        ) from None
    if any(dataset.index_of(number).compressed for number in range(len(dataset.shards()))):
        raise ArgumentError(
            "compressed shards are read whole, so a share of them costs as much as all: give --shard 0/1"
        )
    return Warming(dataset, samples), found


def share_of(dataset: Any, shard: tuple[int, int] | None) -> tuple[npt.NDArray[np.int64], tuple[int, int]]:
    """The samples of a shard, and (shard, shards): the share of such a node with `partition="node"`.

    None: this rank's part of its node's share, by the variables of torchrun or SLURM; without them, all
        samples.
    """
    options: dict[str, Any] = {"shuffle": False, "mode": "eval", "partition": "node"}
    if shard is None:
        try:
            sampler = fastload.DistributedSampler(dataset, **options)
        except ArgumentError as error:
            raise ArgumentError(
                f"the launcher's variables give no share of this node; give --shard I/N ({error.message})"
            ) from error
    else:
        sampler = fastload.DistributedSampler(dataset, shard[1], shard[0], num_nodes=shard[1], **options)
    samples = np.fromiter(sampler, np.int64, len(sampler))
    return samples, (sampler.rank, sampler.num_replicas)
