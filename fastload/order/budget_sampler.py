"""Batches by a budget of each rank: a `DistributedSampler` whose positions are batches, and not samples.

    batches of the epoch    b0 b1 b2 b3 b4 b5 b6 ...      the same on every rank
    rank r of N             b[r], b[r + N], b[r + 2N], ...

The batches are made from (sizes, seed, epoch), see `fastload.order.budget_batches`. What all ranks have read
is a prefix of them, so another number of ranks goes on after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xxhash

from fastload.checks import whole_number
from fastload.errors import ArgumentError
from fastload.order.budget_batches import (
    Batches,
    Numbers,
    SizeClasses,
    bucket_labels,
    checked_sizes,
    is_real,
    packed_batches,
    padded_batches,
)
from fastload.order.sampler import Dealt, DistributedSampler, known_length

_KEPT = 2  # epochs whose batches stay in memory: the one that runs, and one that was asked for


class BudgetPlan(NamedTuple):
    """The size of an epoch, before anything of it is read.

    Attributes:
        steps: batches of each rank.
        batches: over all ranks, each of them once.
        samples: in these.
        padding: the part of these batches that no sample fills, 0 to 1.
    """

    steps: int
    batches: int
    samples: int
    padding: float


class BudgetSampler(DistributedSampler):
    """Batches of at most `budget` tokens, seconds or pixels, of similar samples: a batch sampler.

    Example::

        import fastload
        from fastload import BudgetSampler, DataLoader

        dataset = fastload.ObjectDataset("s3://bucket/train", decode=len)
        sampler = BudgetSampler(dataset.listing().sizes, budget=1 << 20, num_replicas=8, rank=0, seed=1)
        print(sampler.plan())  # BudgetPlan(steps=..., batches=..., samples=..., padding=...)
        for batch in DataLoader(dataset, batch_sampler=sampler, num_workers=2):
            ...

    A batch counts as it lies in memory once it is padded: its largest size times its number of samples. That
    is at most the budget. With `pack=True` samples are put end to end in place of that, and their sum counts.

    All batches of an epoch are known before it begins, as a function of (seed, epoch, sizes): each sample is
    in one of them. Each rank gets every num_replicas-th batch, so that all have equally many, of nearly equal
    budgets. They are rounded up by batches that come twice, the first ones of the epoch; `drop_last=True`
    rounds down. State, resume with any number of ranks, `samples_at`, `batch_at`, `skip` and `exclude` of the
    loader, and epochs are those of `DistributedSampler`, with batches in place of samples. In the place of an
    excluded sample stands one of the same bucket that is as large, or else the next smaller ones.
    `on_error` of the loader is "raise" or, without `pack`, "repeat".

    The classes of similar sizes are the same in each epoch, and so are the number of batches and, but for
    rounding, the padding. With `pack=True` the number of batches may differ a little from epoch to epoch.

    Args:
        sizes: a number above 0 for each sample of the dataset, at most the budget: a list, an array, a tensor
            or a column of a table. To have at most n samples in a batch, raise smaller sizes to `budget / n`.
        budget: of a batch, in the same unit.
        by: None, or the bucket of each sample, a whole number or text: a batch has samples of one bucket.
        tolerance: from 0 to 1, how much smaller than the largest size of its batch a size may be: 0.1 lets a
            batch have sizes from 90 to 100, 0 equal sizes only, 1 any. A smaller tolerance means less
            padding, and more batches that are not full: each class of sizes has one. No effect on packed
            samples.
        pack: fill each batch up to the budget with whole samples, whose sizes are whole numbers: best fit,
            the largest first, within windows of the shuffled order. See `fastload.PackTokens`.
        together: number of neighbouring batches whose samples have the same bucket and similar sizes. Give
            the number of ranks: no rank then waits for one with longer samples, except in the few steps that
            are made of what is left of the buckets and sizes.
        num_replicas, rank, seed: as for `DistributedSampler`.
        shuffle: draw batches and their samples from a permutation of (seed, epoch); else both are in the
            order of the indices, as far as sizes allow.
        drop_last: leave out batches that are not full, and those beyond a multiple of num_replicas. With
            `pack=True`: only the latter.

    Raises:
        ArgumentError: an argument is invalid, or a size is: the message has its place.
    """

    _compared: ClassVar[tuple[str, ...]] = (
        *DistributedSampler._compared,
        *("sizes", "by", "budget", "tolerance", "pack", "together", "drop_last"),
    )

    def __init__(
        self,
        sizes: Any,
        budget: float,
        by: Any = None,
        *,
        tolerance: float = 0.1,
        pack: bool = False,
        together: int = 1,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.budget = _checked_budget(budget, pack)
        if not is_real(tolerance) or not 0 <= tolerance <= 1:
            raise ArgumentError(f"tolerance must be from 0 to 1, found {tolerance!r}: 0.1 allows 10 % less")
        self.tolerance, self.pack = float(tolerance), bool(pack)
        self.together = whole_number("together", together)
        if pack and together != 1:
            raise ArgumentError("together goes with padded batches, and packed ones are alike: leave it out")
        super().__init__((), num_replicas, rank, shuffle, seed, drop_last)
        del self.num_samples, self.total_size  # of (): see `plan`
        self.sizes = checked_sizes(sizes, self.budget, whole=self.pack)
        self._buckets = bucket_labels(by, len(self.sizes))
        self._digests = [_digest(self.sizes), _digest(self._buckets.astype(np.int64))]
        self._classes = None if pack else SizeClasses(self.sizes, self._buckets, self.budget, tolerance)
        self._made = _Made()

    def _draw(self, epoch: int, start: int) -> Iterator[list[int]]:
        batches, replicas = self._batches(epoch), self.num_replicas
        for row in range(self._share(start)):
            first = start + row * replicas
            self._position = (epoch, first + replicas)
            yield batches.batch((first + self.rank) % len(batches))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.sizes):,} samples, budget={self.budget}, pack={self.pack}, "
            f"num_replicas={self.num_replicas}, rank={self.rank}, shuffle={self.shuffle}, seed={self.seed})"
        )

    def __len__(self) -> int:
        """Return the batches of this rank in the whole epoch that runs or comes next."""
        return self._share(0)

    def plan(self, epoch: int | None = None) -> BudgetPlan:
        """Return what an epoch will have; None: the one that runs or comes next. Nothing is read for it."""
        epoch = self.epoch if epoch is None else whole_number("epoch", epoch, 0)
        batches = self._batches(epoch)
        counts = np.diff(batches.bounds)
        held = self.budget * len(batches)
        if not self.pack and len(batches):
            held = float(np.maximum.reduceat(self.sizes[batches.samples], batches.bounds[:-1]) @ counts)
        filled = float(self.sizes[batches.samples].sum())
        steps = self._steps(len(batches), 0)
        return BudgetPlan(steps, len(batches), len(batches.samples), 1 - filled / held if held else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, the epoch and the batches that all ranks together have consumed in it, and digests
        of the sizes and buckets.
        """
        epoch, consumed = self._position
        return {
            "version": 1,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": len(self.sizes),
            "epoch": epoch,
            "consumed": min(consumed, len(self._batches(epoch))) if consumed else 0,
            "advances": self._advances,
            "sizes": self._digests[0],
            "by": self._digests[1],
            "budget": self.budget,
            "tolerance": self.tolerance,
            "pack": self.pack,
            "together": self.together,
            "drop_last": self.drop_last,
        }

    # --- for a loader

    def _deal(self, state: Mapping[str, Any] | None = None) -> Dealt:
        return Dealt(0 if state is None else state["consumed"], 1, 0.0)

    def _similar(self, index: int) -> Numbers:
        """Return the samples that may stand in the place of one, by ascending size: none is larger."""
        if self._made.by_size is None:
            order = np.lexsort((self.sizes, self._buckets))
            starts = np.searchsorted(self._buckets[order], np.arange(int(self._buckets.max()) + 2))
            self._made.by_size = order, self.sizes[order], starts
        order, sizes, starts = self._made.by_size
        first, stop = starts[self._buckets[index]], starts[self._buckets[index] + 1]
        return order[first : first + np.searchsorted(sizes[first:stop], self.sizes[index], "right")]

    # --- what this is made of

    def _length(self) -> int:
        return len(self._batches(self.epoch))

    def _share(self, start: int) -> int:
        return self._steps(self._length(), start)

    def _steps(self, batches: int, start: int) -> int:
        left = max(0, batches - start)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def _batches(self, epoch: int) -> Batches:
        made = self._made.batches
        if epoch not in made:
            seed = self._seed_of(epoch) if self.shuffle else None
            if self._classes is None:
                batches = packed_batches(self.sizes, self._buckets, int(self.budget), seed)
            else:
                batches = padded_batches(
                    self._classes, seed, drop_last=self.drop_last, together=self.together
                )
            while len(made) >= _KEPT:
                del made[next(iter(made))]
            made[epoch] = batches
        return made[epoch]


class _Made:
    """Results that can be made again from the sizes. Copies of a sampler share them; no pickle has them."""

    def __init__(self) -> None:
        self.batches: dict[int, Batches] = {}
        # The samples by bucket, and by ascending size in each; their sizes; where each bucket begins.
        self.by_size: tuple[Numbers, Numbers, Numbers] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _Made.__init__(self)


def check_sampler(dataset: Any, sampler: Any, batch_sampler: Any, on_error: str) -> None:
    """Raise `ArgumentError` where a `BudgetSampler` has sizes of another dataset, or is no batch sampler, or
    where its batches would not keep to the budget."""
    if isinstance(sampler, BudgetSampler):
        raise ArgumentError("a BudgetSampler gives batches: pass it as batch_sampler=, without batch_size")
    if not isinstance(batch_sampler, BudgetSampler):
        return
    length, sizes = known_length(dataset), len(batch_sampler.sizes)
    if length is None:
        raise ArgumentError(
            f"a BudgetSampler needs samples that have an index, and {type(dataset).__name__} has none yet: "
            "index shards first with `fastload index URL`, or read them once through a cache"
        )
    if length != sizes:
        raise ArgumentError(
            f"the BudgetSampler has {sizes:,} sizes, and the dataset has {length:,} samples: give it one "
            "size for each sample, of a Subset those of its indices"
        )
    kept = ("raise",) if batch_sampler.pack else ("raise", "repeat")
    if on_error not in kept:
        raise ArgumentError(
            f"on_error={on_error!r} may put a larger sample into a batch of the BudgetSampler, which is then "
            f"above the budget: use {' or '.join(map(repr, kept))}, and leave bad samples out by exclude()"
        )


def _checked_budget(budget: Any, pack: bool) -> float:
    if not is_real(budget) or not 0 < budget < float("inf"):
        raise ArgumentError(f"budget must be a number above 0, found {budget!r}: the most of a batch")
    if pack and budget != int(budget):
        raise ArgumentError(f"budget must be a whole number with pack=True, found {budget!r}")
    return int(budget) if budget == int(budget) else float(budget)


def _digest(numbers: Numbers) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(numbers).data)[:16]
