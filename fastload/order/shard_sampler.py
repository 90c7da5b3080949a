"""The samples of each rank in shards: those of a `DistributedSampler`, once the shards are indexed.

    not indexed yet       no length: the loader reads streams, and the epoch orders the shards
    indexed               the order of all samples, dealt to the ranks
    columns, shuffled     an order in blocks, in which each rank has row groups of its own

Between epochs, a state of the first serves the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fastload.errors import ArgumentError
from fastload.order.permutations import block_order, blocks_of
from fastload.order.sampler import DistributedSampler, indexed_length


class ShardSampler(DistributedSampler):
    """This rank's part of a shard dataset: the default sampler of `fastload.DataLoader` for such a dataset.

    Example::

        from fastload import DataLoader, ShardSampler, TarDataset

        dataset = TarDataset("s3://bucket/shards/train-{00000..00003}.tar", decode={"jpg": len})
        sampler = ShardSampler(dataset, shuffle=False, mode="eval")  # each sample exactly once over all ranks
        for batch in DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=4):
            batch["cls"]

    While the shards are not indexed the dataset has no length, and the loader reads it as streams: the epoch
    and `shuffle` then decide the order of the shards, and each rank reads its own. Afterwards this is a
    `DistributedSampler`. Of a dataset with `batches="columns"` whose row groups are read as a whole, it
    shuffles these, and their rows in a window of some of them; each rank reads row groups of its own.

    In an epoch of streams, too, mode "train" gives every rank equally many batches: a rank that has read its
    shards repeats its first samples (those of the next rank, if it has none) until the longest rank ends.
    Mode "eval" repeats nothing. A state from the middle of such an epoch belongs to this rank, and only this
    rank can load it; between epochs any number of ranks may load it.

    Args:
        dataset: one of fastload's shard datasets, or any with a length.
        num_replicas, rank, shuffle, seed, drop_last, mode: as for `DistributedSampler`.

    Raises:
        ArgumentError: as `DistributedSampler`.
    """

    _compared: ClassVar[tuple[str, ...]] = (*DistributedSampler._compared, "window")

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mode: str = "train",
    ) -> None:
        super().__init__((), num_replicas, rank, shuffle, seed, drop_last, mode=mode)
        self.dataset = dataset
        self._dealt = (self._parts(), 0.0)
        del self.num_samples, self.total_size  # of (): see `__getattr__`

    def __len__(self) -> int:
        """Return samples of this rank in a whole epoch; by the dataset's `num_samples=` until it is indexed.

        Raises:
            TypeError: the shards of the dataset are not indexed yet, and it has no such hint.
        """
        return self._share(0)

    def __getattr__(self, name: str) -> int:
        if name == "num_samples":
            return len(self)
        if name == "total_size":
            whole = len(self.dataset)  # type: ignore[arg-type]
            return whole if self.mode == "eval" else len(self) * self.num_replicas
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _check_streamable(self, *, over: bool) -> None:
        """Raise ArgumentError if the loaded position needs an indexed dataset.

        Args:
            over: all batches of the epoch were delivered, so that this stands before the next one already.
        """
        if self._start or over:
            where = "at the end of" if over else f"{self._start} samples into"
            if self._length() is None:
                why = "the shards are not indexed here"
                advice = "use the cache directory of that run, or give the dataset index files"
            else:
                why = "its records are in no cache here, so that the shards are read as streams"
                advice = "use the cache of that run, or fill one by `fastload warm` or `fastload cache pull`"
            raise ArgumentError(
                f"the loaded state is {where} an epoch of an indexed dataset, and {why}: {advice}"
            )

    def state_dict(self) -> dict[str, Any]:
        """As of `DistributedSampler`; with the window, where the samples are shuffled in blocks."""
        blocks = blocks_of(self.dataset)
        return super().state_dict() | ({} if blocks is None else {"window": blocks.window})

    def _parts(self) -> int:
        # Each rank has blocks of its own. Without a shuffle the order is that of all samples.
        shuffled = self.shuffle and blocks_of(self.dataset) is not None
        return self.num_replicas if shuffled else super()._parts()

    def _order(self, epoch: int, nodes: int, exchange: float) -> torch.Tensor | None:
        blocks = blocks_of(self.dataset)
        if blocks is None or not self.shuffle:
            return super()._order(epoch, nodes, exchange)
        return block_order(blocks, nodes, self._seed_of(epoch))

    def _length(self) -> int | None:
        try:
            return indexed_length(self.dataset)
        except TypeError:
            return None

    def _was_not_indexed(self, state_dict: Mapping[str, Any]) -> bool:
        return state_dict["length"] is None or self._length() is None
