"""The questions that a loader answers about its samples, and what can be left out of them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from fastload.errors import ArgumentError
from fastload.loader.context import LoaderContext
from fastload.loader.samples_at import SampleAt, batch_at, find_step, samples_at

__all__ = ["BlackBox"]


class BlackBox:
    """The part of `fastload.DataLoader` that is asked about its samples.

    The order of an epoch and the randomness of a sample are functions of (seed, epoch, index), so that past
    and coming batches can be named and made again.
    """

    loader_context: LoaderContext
    dataset: Any

    def samples_at(
        self, step: int, epoch: int | None = None, *, rank: int | None = None, world_size: int | None = None
    ) -> list[SampleAt]:
        """The rows of a step, past or to come: index, key, label, crop and flip of each.

        Example::

            for sample in loader.samples_at(1240):
                print(sample.row, sample.key, sample.label, sample.crop, sample.flip)

        The samples are read and made in this process, one after the other; the iteration does not move. A
        sample that cannot be made has its error in `error`.

        Known are the epochs that this run has begun, over all resumes, and the coming epochs of
        `fastload.DistributedSampler`, torch's DistributedSampler and of orders without shuffling. Of epochs
        that torch's generator or a sampler's own state has ordered, the last two are known. The crop and flip
        of an epoch to come are None unless the loader has a `seed`; so are those of samples that draw from
        the process-wide generators.

        Args:
            step: a batch of the epoch, from 0.
            epoch: an iteration of the loader, from 0. None: the one that runs, or the next one.
            rank, world_size: those of another rank. With world_size, the epoch as that many ranks would read
                it from its beginning. Default: this rank.

        Raises:
            ArgumentError: there is no such step or rank; or what was asked for cannot be known, as of an
                iterable dataset, or of shards that were read as streams.
        """
        return samples_at(self, find_step(self, step, epoch, rank, world_size))

    def batch_at(
        self, step: int, epoch: int | None = None, *, rank: int | None = None, world_size: int | None = None
    ) -> Any:
        """The batch of a step, past or to come, bit for bit as it is handed out. The iteration does not move.

        Example::

            images, labels = loader.batch_at(1240)

        It is made in this process, with the loader's `collate_fn`, `batch_transform` and device. The
        arguments are those of `samples_at`.

        Raises:
            ArgumentError: as `samples_at`; or the samples draw random numbers, and the loader has no `seed`.
        """
        return batch_at(self, find_step(self, step, epoch, rank, world_size))

    def digest(self) -> bytes:
        """32 bytes over all samples that this rank was handed out since its run began, over resumes.

        Example::

            print(loader.digest().hex())

        Each sample counts with its identity (key and version of its object; the shard, its version and the
        record's number; or else its index), its random numbers, its epoch and its step. The order within a
        step does not count. So the digest does not depend on workers, caches and processes, and as four
        64-bit numbers, little-endian, the digests of all ranks add up (modulo 2**64) to that of one rank
        with the same global batch. `fastload.prove` compares states and logs, and finds the difference.

        A run that goes on with other ranks: what the state of a rank counts is counted by the rank of the
        same number. With fewer ranks, the parts of those that are gone are missing from the sum.

        Raises:
            ArgumentError: the dataset is iterable, so that its samples have no index.
        """
        if isinstance(self.dataset, IterableDataset):
            raise ArgumentError(
                f"digest() needs samples that have an index, and {type(self.dataset).__name__} is iterable"
            )
        return self.loader_context.digest.value()
