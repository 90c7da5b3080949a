"""The rules of `left_out` at work: each index batch of an iteration is revised before it is given out.

What was given out and not handed out when rules change is revised once more, see
`LoaderIterator._follow_rules`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from fastload.datasets.substitutes import substitutes
from fastload.datasets.wrappers import view_of
from fastload.errors import ArgumentError
from fastload.loader.left_out import LeftOut, Reading, Revised
from fastload.loader.position import Progress
from fastload.order.order import Order
from fastload.order.sampler import DistributedSampler, indexed_length
from fastload.workers.on_error import REPLACEMENTS

NEEDS_INDEX = (
    "needs samples that have an index, and these shards are read as streams: index them first with "
    "`fastload index URL`, or read them once through a cache"
)


class Revision:
    """What is left out of one iteration. It holds no reference to the iterator, whose schedule holds it.

    Args:
        left_out: of the loader.
        reading: of the epoch.
        step: the next one that is handed out.
        replaces: with `on_error="replace"` a worker chooses samples too.
    """

    def __init__(self, left_out: LeftOut, reading: Reading, step: int, *, replaces: bool) -> None:
        self._left_out = left_out
        self._reading = reading
        self._replaces = replaces
        self._seen, self._rules = left_out.version, left_out.at(reading.epoch, step)

    def __call__(self, step: int, index: Any) -> Revised | None:
        """The index batch as it is to be given out; None: its step is skipped."""
        return self._rules.revise(self._reading, step, index) if self._rules else Revised(index, {})

    @property
    def changed(self) -> bool:
        """Whether the rules have changed since."""
        return self._left_out.version != self._seen

    def newer(self, step: int) -> Revision:
        """By the rules that hold now, from this step on."""
        return Revision(self._left_out, self._reading, step, replaces=self._replaces)

    def take_over(self, newer: Revision) -> None:
        """From now on, the rules are those of `newer`."""
        self._seen, self._rules = newer._seen, newer._rules

    @property
    def excluded(self) -> frozenset[int]:
        """The samples that a worker must not choose in the place of a bad one."""
        return self._rules.excluded(self._reading.dataset) if self._replaces else frozenset()

    def may_choose(self, given: Revised, before: frozenset[int]) -> bool:
        """Whether a worker may have chosen an excluded sample in the place of a bad one of this batch.

        Args:
            before: what was excluded then.
        """
        new, reading = self.excluded - before, self._reading
        indices = given.index if reading.auto_collation else [given.index]
        return bool(new) and any(
            self._number(other) in new
            for index in indices
            for other in itertools.islice(
                substitutes(reading.dataset, reading.seed, reading.epoch, index, before), REPLACEMENTS
            )
        )

    def _number(self, index: int) -> int:
        dataset = self._reading.dataset
        return view_of(dataset).position(index, len(dataset))


def reading_of(
    loader: Any, seed: int, epoch: int, rank: int | None = None, replicas: int | None = None
) -> Reading:
    """How a rank reads an epoch; by default the loader's."""
    order = Order(loader)
    sampler = order.stateful
    if (rank is not None or replicas is not None) and isinstance(sampler, DistributedSampler):
        own = sampler.rank if rank is None else rank
        sampler = sampler.at(0, 0, rank=own, replicas=replicas or sampler.num_replicas)
    samples = None
    if order.mixture is not None:
        samples = loader.dataset.num_samples
    elif isinstance(order.stateful, DistributedSampler):
        samples = indexed_length(order.stateful.dataset)
    return Reading(
        loader.dataset,
        seed,
        epoch,
        loader.batch_sampler is not None,
        getattr(sampler, "column", order.rank if rank is None else rank),
        replicas or order.replicas or 1,
        samples,
    )


def samples_per_step(loader: Any, replicas: int) -> int:
    """Over all ranks. 1 where batches have no fixed size, see `Segment`."""
    size = 1 if loader.batch_sampler is None else Order(loader).batch_size
    return size * replicas if isinstance(size, int) else 1


def enter(loader: Any, left_out: LeftOut, epoch: int, place: Mapping[str, Any]) -> None:
    """Tell the rules how many samples over all ranks a step has from this place of an epoch on."""
    order = Order(loader)
    sampler = place["sampler"] or {}
    known = isinstance(order.stateful, DistributedSampler) and sampler.get("state") and place["batches"]
    left_out.enter(
        epoch,
        place["batches"],
        samples_per_step(loader, order.replicas or 1),
        int(sampler["state"]["consumed"]) if known else None,
    )


def begin(loader: Any, left_out: LeftOut, progress: Progress, seed: int) -> Revision:
    """The rules of an iteration that begins.

    Raises:
        ArgumentError: something is left out, and the samples of this epoch have no index.
    """
    replaces, step = loader.on_error == "replace", progress.batches
    if not progress.unordered:
        left_out.leave(progress.epoch)
        enter(loader, left_out, progress.epoch, progress.place)
        return Revision(left_out, reading_of(loader, seed, progress.epoch), step, replaces=replaces)
    if left_out.at(progress.epoch, step):
        raise ArgumentError(f"samples are excluded or steps are skipped, which {NEEDS_INDEX}")
    return Revision(left_out, Reading(loader.dataset, seed, progress.epoch), step, replaces=False)
