"""The order of an epoch: what it is made from, as a few numbers, and how it is recreated from them.

An order is never kept. To resume is to recreate it from where it stood, `samples_at` makes it with copies
of the samplers, the history of a run is a list of orders, and a replay makes one from a state.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.utils.data
from torch.utils.data import BatchSampler

from fastload.errors import ArgumentError
from fastload.order.exclusions import Segment
from fastload.order.sampler import Dealt, DistributedSampler
from fastload.order.samplers import Origin, Samplers, SamplerState, check_of

_END = object()


@dataclass(frozen=True)
class EpochOrder:
    """The order of an epoch from one of its steps on, on all ranks.

    Attributes:
        epoch: the loader's count.
        step: the first step. An epoch that goes on with other ranks, another batch size or other sources of a
            mixture has one more order from there on.
        batch_size, replicas: of these steps.
        per_step: samples of a step over all ranks. 1 where batches have no fixed size.
        sampler: where it stood at `step`, if its state is tracked; else when the epoch began. The state of a
            mixture has the weights that were set after `step`.
        dealt: the same for a `DistributedSampler`.
        base_seed: of the samples' randomness, where the loader has no seed of its own; None: not known.
        origin, generators: what it is drawn from; None until its first index is drawn.
        seeded_late: `generators` were noted before the base seed was drawn, which came after `iter(sampler)`.
        check: of an order that has to be compared: how many batches were drawn, and the sum over them.
        streamed: no sampler says what is read.
        forgotten: the states that it is made from were kilobytes, and were dropped.
    """

    epoch: int
    step: int
    batch_size: Any
    replicas: Any
    per_step: int
    sampler: SamplerState
    dealt: Dealt | None = None
    base_seed: int | None = None
    origin: Origin | None = None
    generators: dict[str, str] | None = None
    seeded_late: bool = False
    check: tuple[int, int | None] | None = None
    streamed: bool = False
    forgotten: bool = False

    @classmethod
    def begun(
        cls, samplers: Samplers, epoch: int, step: int, sampler: SamplerState, **others: Any
    ) -> EpochOrder:
        """Return the order of an epoch that these samplers read from a step on.

        Args:
            sampler: where it stands. Without a state, a sampler that deals begins the epoch.
        """
        dealer = samplers.dealer
        dealt = None if dealer is None else dealer._deal(sampler.state)
        if dealer is not None and dealt is not None and sampler.state is not None:
            sampler = replace(sampler, epoch=dealer._epoch_in(sampler.state), state=None)
        size, replicas = samplers.batch_size, samplers.replicas
        return cls(epoch, step, size, replicas, samplers.per_step(), sampler, dealt, **others)

    def batches(
        self,
        samplers: Samplers,
        step: int,
        *,
        made: Iterator[Any] | None = None,
    ) -> Iterator[Any]:
        """Return the index batches from a step on: the samplers draw their order once more.

        Args:
            samplers: of the loader, or copies.
            made: torch's iterator over the samplers of the loader. One of the user's own may draw in `iter`,
                and does so not once more than in the run that was saved. One that counts epochs does so
                there, and is asked again for the epoch of this order.

        Raises:
            ArgumentError: a sampler gives another order than before.
        """
        if self.generators is not None:
            samplers.write_generators(self.generators)
        if samplers.dealer is None:
            samplers.load(self.sampler)
        index_sampler = samplers.from_origin(self.origin)
        if type(index_sampler) is BatchSampler and index_sampler.batch_size != self.batch_size:
            index_sampler = BatchSampler(index_sampler.sampler, self.batch_size, index_sampler.drop_last)
        users = samplers.user_defined and samplers.stateful is None
        if made is None or not users or self.generators or self.sampler.epoch is not None:
            made = iter(() if self.sampler.over else index_sampler)
            if samplers.user_defined and self.seeded_late:
                samplers.draw_base_seed()
        with samplers.drawing():
            self._pass_over(samplers, made, step)
        return made

    def _pass_over(self, samplers: Samplers, made: Iterator[Any], step: int) -> None:
        count = 0 if self.streamed else step - self.step if samplers.tracks_state else step
        passed = itertools.islice(made, count)
        if samplers.checked and self.check is not None and self.check[0] == count:
            _compare(samplers, check_of(map(samplers.keep, passed)), self.check[1])
        else:
            deque(passed, maxlen=0)

    def batch_at(
        self, samplers: Samplers, dataset: Any, step: int, rank: int | None, replicas: int | None
    ) -> Any:
        """Return the index batch of a step, drawn by copies of the samplers.

        Args:
            samplers, dataset: of the loader.
            rank, replicas: None: those of the run. With them, the whole epoch is dealt to that many ranks.

        Raises:
            ArgumentError: the epoch has no such step, or its order cannot be recreated.
        """
        if self.forgotten:
            raise ArgumentError(
                f"the order of epoch {self.epoch} was drawn from a generator or sampler whose state is kept "
                "for the last two epochs only: use fastload.DistributedSampler, whose orders are known by "
                "the number of the epoch"
            )
        if self.origin is None and not (samplers.tracks_state or samplers.known_by_epoch):
            raise ArgumentError(
                f"epoch {self.epoch} has begun, and {samplers.names} draws its order with the first batch: "
                "ask after that"
            )
        if samplers.checked and self.check is not None:
            copies, order = self._copies(samplers, dataset, self.check[0], None, None)
            order.batches(copies, self.check[0])
        copies, order = self._copies(samplers, dataset, step, rank, replicas)
        with copies.drawing():
            index = next(order.batches(copies, step), _END)
        if index is _END:
            copies, order = self._copies(samplers, dataset, self.step, rank, replicas)
            with copies.drawing():
                count = self.step + sum(1 for _ in order.batches(copies, self.step))
            raise ArgumentError(
                f"epoch {self.epoch} has no step {step} on this rank: it has {count:,} steps, from 0 on"
            )
        return samplers.keep(index)

    def _copies(
        self, samplers: Samplers, dataset: Any, step: int, rank: int | None, replicas: int | None
    ) -> tuple[Samplers, EpochOrder]:
        """Return copies of the samplers for a rank, and the order from where they stand, up to `step`."""
        last, order = samplers.last, self
        if not isinstance(last, torch.utils.data.DistributedSampler):
            return samplers.copied(dataset), self
        ranks = replicas or self.replicas
        own = last.rank if rank is None else rank
        if own >= ranks:
            raise ArgumentError(f"epoch {self.epoch} was read by {ranks} ranks, found rank {own}")
        moved: torch.utils.data.DistributedSampler[Any]
        if not isinstance(last, DistributedSampler):
            moved = samplers.copied(dataset).last
            arguments = (last.shuffle, last.seed, last.drop_last)
            torch.utils.data.DistributedSampler.__init__(moved, last.dataset, ranks, own, *arguments)
        elif samplers.dealer is not last:  # its batch sampler has the state
            return samplers.copied(dataset), self
        elif self.dealt is None:
            moved = last._at_state(self.sampler.state, rank=own, replicas=ranks)
        else:
            dealt, consumed = self.dealt, self.dealt.consumed
            if samplers.known_by_epoch:  # each step takes a batch of samples in turn
                consumed += (step - self.step) * (self.batch_size or 1) * ranks
                order = replace(self, step=step)
            # Another number of ranks may be on other nodes.
            nodes = None if replicas is not None and dealt.nodes != 1 else (dealt.nodes, dealt.exchange)
            epoch = self.sampler.epoch or 0
            moved = last._at(epoch, consumed, rank=own, replicas=ranks, dealt=nodes)
        return samplers.copied(dataset, moved), order


def order_at(
    orders: Iterable[EpochOrder], samplers: Samplers, step: int, rank: int | None, replicas: int | None
) -> EpochOrder:
    """Return the order of an epoch that a step belongs to.

    Args:
        orders: of the epoch, the first one first.
        rank, replicas: as for `EpochOrder.batch_at`.

    Raises:
        ArgumentError: there is none, or it is of one rank.
    """
    orders = list(orders)
    if not isinstance(samplers.last, torch.utils.data.DistributedSampler):
        if replicas is not None and replicas != 1:
            raise ArgumentError(
                f"world_size={replicas}: the order comes from {samplers.names}, which deals to one rank; use "
                "fastload.DistributedSampler"
            )
        if rank and replicas is None:
            raise ArgumentError(
                f"rank={rank}: the order comes from {samplers.names}, which deals to one rank"
            )
    known = orders[:1] if replicas is not None else orders
    order = next((earlier for earlier in reversed(known) if earlier.step <= step), None)
    if order is None or (replicas is not None and order.step):
        raise ArgumentError(
            f"epoch {orders[0].epoch} is known from step {orders[0].step} on, where this run took it up"
        )
    return order


def segments_of(orders: Iterable[EpochOrder]) -> list[Segment]:
    """Return the segments of an epoch that is read in these orders."""
    segments: list[Segment] = []
    for order in orders:
        if segments and segments[-1].per_step == order.per_step:
            continue
        sample = order.step * order.per_step
        if segments:
            sample = segments[-1].start(order.step)
        elif order.step and order.dealt is not None:
            sample = order.dealt.consumed
        elif order.step and (mixed := order.sampler.mixed) is not None:
            sample = mixed.consumed
        segments.append(Segment(order.step, sample, order.per_step))
    return segments


def _compare(samplers: Samplers, check: int | None, saved: int | None) -> None:
    """Raise ArgumentError unless a recreated order has begun as before."""
    if saved is None or check is None:
        raise ArgumentError(
            f"{samplers.names} gives indices that cannot be compared with those of the run that was saved: "
            "give their class a __repr__ that says what they are, or resume from a state that was saved "
            "between two epochs"
        )
    if check != saved:
        raise ArgumentError(
            f"{samplers.names} gives another order than in the run that was saved: give the sampler a "
            "seed of its own for each epoch, or state_dict() and load_state_dict(), or resume from a state "
            "that was saved between two epochs; where its order is each rank's own, load the state that this "
            "rank has saved"
        )
