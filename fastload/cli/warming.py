"""The worker processes of `fastload warm`: each fills the cache with its part of the samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info

import fastload
from fastload.errors import ArgumentError

__all__ = ["Warming", "share_of", "warming_loader"]

OUTCOMES_A_MESSAGE = 16


class Warming(IterableDataset[Any]):
    """A `Warmed` tuple, the outcome, for each of `samples` (int64) of a `fastload.ObjectDataset`."""

    def __init__(self, dataset: Any, samples: npt.NDArray[np.int64]) -> None:
        self.dataset = dataset
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        part = self.samples if worker is None else self.samples[worker.id :: worker.num_workers]
        yield from self.dataset.warm(index.item() for index in part)


def warming_loader(dataset: Any, samples: npt.NDArray[np.int64], num_workers: int) -> Any:
    """A loader over lists of `Warmed` tuples, from `num_workers` processes (0: from this one)."""
    return fastload.DataLoader(
        Warming(dataset, samples),
        OUTCOMES_A_MESSAGE,
        num_workers=num_workers,
        collate_fn=list,
        in_order=False,
    )


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
