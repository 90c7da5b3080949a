"""The questions that a loader answers about its samples, and what can be left out of them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from fastload.errors import ArgumentError
from fastload.loader.context import LoaderContext

__all__ = ["BlackBox"]


class BlackBox:
    """The part of `fastload.DataLoader` that is asked about its samples.

    The order of an epoch and the randomness of a sample are functions of (seed, epoch, index), so that past
    and coming batches can be named and made again.
    """

    loader_context: LoaderContext
    dataset: Any

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
