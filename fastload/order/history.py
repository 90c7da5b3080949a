"""The orders of all epochs of a run, so that they can be made again: some hundred bytes an epoch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from fastload.errors import ArgumentError
from fastload.order.order import Dealt, EpochOrder
from fastload.order.position import Position
from fastload.order.sampler import DistributedSampler
from fastload.order.samplers import Samplers, SamplerState

_STATES_KEPT = 2  # epochs whose order comes from a generator's or a sampler's state: kilobytes each


class History:
    """The orders of one loader's run, over its resumes. Plain data, as the position is."""

    def __init__(self) -> None:
        self._orders: list[EpochOrder] = []
        self._running: tuple[Position, Samplers] | None = None

    def begin(self, samplers: Samplers, position: Position) -> None:
        """Note that an epoch begins, or goes on after a resume."""
        self._settle()
        known = self._of(position.epoch) if position.batches else []
        self._orders = [one for one in self._orders if one.epoch < position.epoch]
        self._orders += continued(known, position.order, samplers)
        self._running = (position, samplers)

    def find(self, epoch: int) -> list[EpochOrder]:
        """Return the orders of an epoch that has begun; [] where nothing is known."""
        self._settle()
        return self._of(epoch)

    def state(self) -> list[EpochOrder]:
        """Return all orders."""
        self._settle()
        return list(self._orders)

    def load(self, orders: list[EpochOrder]) -> None:
        """Take up the history in a loader's state."""
        self._running = None
        self._orders = copy.deepcopy(orders)

    def coming(self, samplers: Samplers, epoch: int, coming: int, *, persistent: bool) -> EpochOrder:
        """Return the order of an epoch that has not begun, where that is known already.

        Args:
            coming: the loader's number of the next epoch.
            persistent: the workers keep their seed.

        Raises:
            ArgumentError: its order is drawn when it begins.
        """
        if not (samplers.seeded or samplers.known_by_epoch):
            raise ArgumentError(
                f"epoch {epoch} has not begun, and {samplers.names[-1]} draws its order then: give an epoch "
                "that has begun; or give the DataLoader a seed=, or use fastload.DistributedSampler, where "
                "the order of an epoch is known by its number"
            )
        orders = self.state()
        last = orders[-1] if orders else None
        order = EpochOrder(
            epoch,
            0,
            samplers.batch_size,
            samplers.replicas,
            samplers.per_step(),
            SamplerState(self._coming_number(samplers, epoch, coming, last), None, over=False),
            base_seed=last.base_seed if last is not None and persistent else None,
            origin=samplers.origin(epoch) if samplers.seeded else None,
        )
        last_sampler = samplers.last
        if isinstance(last_sampler, DistributedSampler):
            order = replace(order, dealt=Dealt(0, last_sampler.place.nodes, last_sampler.exchange))
        return order

    def _coming_number(
        self, samplers: Samplers, epoch: int, coming: int, last: EpochOrder | None
    ) -> int | None:
        """Return the sampler's number of a coming epoch, if `set_epoch` goes on counting as so far."""
        number = samplers.epoch
        firsts = {one.epoch: one.sampler.epoch for one in reversed(self._orders)}
        counts = [firsts[one] for one in sorted(firsts)[-2:]]
        repeats = len(counts) == 2 and counts[0] == counts[1]  # nobody calls `set_epoch`
        if number is None or last is None:
            return None if number is None else number + (epoch - coming)
        before = last.sampler.epoch
        if before is None or (epoch == coming and number != before):
            return number + (0 if repeats else epoch - coming)
        return before + (0 if repeats else epoch - last.epoch)

    def _of(self, epoch: int) -> list[EpochOrder]:
        return [one for one in self._orders if one.epoch == epoch]

    def _settle(self) -> None:
        """Note what the running epoch's order was made from, once its first index is drawn."""
        if self._running is None:
            return
        (position, samplers), last = self._running, self._orders[-1]
        if last.streamed:
            return
        drawn = position.order
        last = replace(last, origin=drawn.origin, generators=drawn.generators or None)
        self._orders[-1] = replace(last, check=position.drawn if samplers.checked else None)
        kept = sorted({one.epoch for one in self._orders})[-_STATES_KEPT:][0]
        for number, order in enumerate(self._orders):
            if order.epoch == position.epoch and samplers.mixture is not None:
                if _mixture(order) == _mixture(last):
                    later = samplers.mixture.changes_since(order.sampler.state["drawn"])
                    changes = sorted((dict(order.changes) | dict(later)).items())
                    self._orders[number] = replace(order, changes=changes)
            elif order.epoch < kept:
                self._orders[number] = _without_states(order)


def continued(orders: list[EpochOrder], order: EpochOrder, samplers: Samplers) -> list[EpochOrder]:
    """Return the orders of an epoch that these samplers read from `order.step` on."""
    earlier = [replace(one, base_seed=order.base_seed) for one in orders if one.step < order.step]
    if not earlier:
        return [order]
    before = earlier[-1]
    if _mixture(before) != _mixture(order):  # weights that were to be set later may not be set now
        drawn = order.sampler.state["drawn"]
        earlier = [
            replace(one, changes=[change for change in one.changes if change[0] < drawn]) for one in earlier
        ]
        order = replace(order, changes=samplers.mixture.changes_since(drawn) if samplers.mixture else [])
    elif (before.batch_size, before.replicas) == (order.batch_size, order.replicas):
        return earlier
    return [*earlier, order]


def _mixture(order: EpochOrder) -> Any:
    """Return the sources and weights that a mixture was given; None where the order is not of a mixture."""
    state = order.sampler.state
    if not isinstance(state, dict) or not {"sources", "given"} <= state.keys():
        return None
    return list(state["sources"]), state["given"]


def _without_states(order: EpochOrder) -> EpochOrder:
    """Return an order that lies far back without its kilobytes: it is not known any more."""
    drawn = order.generators or (order.origin is not None and order.origin.torch is not None)
    if not drawn and order.sampler.state is None:
        return order
    sampler = replace(order.sampler, state=None)
    return replace(order, sampler=sampler, origin=None, generators=None, changes=[], forgotten=True)
