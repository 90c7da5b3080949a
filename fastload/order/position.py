"""How much of an epoch was delivered, the order that it is delivered in, and the orders of past epochs.

The orders of the last 10,000 epochs are kept, some hundred bytes each, so that they can be recreated.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from fastload.errors import ArgumentError
from fastload.metrics.counters import Counters
from fastload.order.exclusions import Edited, Filter
from fastload.order.order import EpochOrder
from fastload.order.samplers import Origin, Samplers, SamplerState, check_of
from fastload.order.state import Coming, DatasetState, State, StreamState, WorkerState

_END = object()
ORDERS_KEPT = 10_000  # of the last epochs: a kilobyte of memory each, and some hundred bytes of a state
_epoch_of = attrgetter("epoch")


class Streams(Protocol):
    """An epoch that is read as streams."""

    def delivered(self, stream: int, state: dict[str, Any] | None) -> None: ...

    def ended(self, stream: int) -> None: ...

    def state(self) -> StreamState: ...


class GivenOut(NamedTuple):
    """An index batch that was given out: its step, as the sampler gave it, and as a worker got it."""

    step: int
    index: Any
    edited: Edited


class _After(NamedTuple):
    """What the position says once a batch is in the prefix; None: what it said before."""

    sampler: SamplerState | None
    check: int | None


class Position:
    """What one iteration has delivered. Plain data: it outlives its iterator, and pickles with its loader.

    Args:
        samplers: of the loader.
        epoch: the loader's count of iterations, this one excluded.
        iterable: the dataset is.
        workers: one entry per worker, or one for this process.
        counters: count what is left out of the prefix.
        streams: of an epoch that is read as streams, else None.
        origin: what the order is made from, where a state has settled that before its first index is drawn.
        resumed: the state of the middle of this epoch, where that goes on.
        seeded_late: torch draws the base seed of this iteration after `iter(sampler)`.

    Attributes:
        samplers: see above.
        order: of the epoch, from the step on where this iteration began.
        batches: in the prefix of the order that was delivered.
        ahead: batches delivered beyond it, which in_order=False allows.
        sampler: its state after the prefix.
        check: a sum over the indices of the prefix, of a checked order.
        drawn: of a checked order: batches, and the sum over them.
        filter: what is left out; None where samples have no index.
        shared_seed: of torch's data pipes; None where there are none.
    """

    def __init__(
        self,
        samplers: Samplers,
        epoch: int,
        iterable: bool,
        workers: list[WorkerState],
        counters: Counters,
        streams: Streams | None = None,
        origin: Origin | None = None,
        resumed: State | None = None,
        *,
        seeded_late: bool = False,
    ) -> None:
        self.samplers = samplers
        self.unordered = iterable or streams is not None  # no sampler says what is read
        self.streams = streams
        self.workers = workers
        self._counters = counters
        self.next_worker = 0
        self.finished = False
        self.batches = 0
        self.ahead: list[int] = []
        self.sampler = samplers.state()
        self.check: int | None = 0
        self.filter: Filter | None = None
        self.shared_seed: int | None = None
        # A sampler of the user's own may draw in iter(), which comes next.
        drawing = samplers.generators() if samplers.user_defined else None
        made_from: dict[str, Any] = {"generators": drawing, "seeded_late": bool(drawing) and seeded_late}
        if resumed is not None:
            self.batches, self.ahead = resumed.batches, list(resumed.ahead)
            self.sampler, self.check = resumed.sampler, resumed.check
            made_from = {name: getattr(resumed, name) for name in ("base_seed", "origin", "generators")}
            made_from["check"] = (self.batches, self.check)
            of_epoch = [order for order in resumed.history if order.epoch == epoch]
            made_from["seeded_late"] = any(order.seeded_late for order in of_epoch)
            if resumed.num_workers == len(workers):
                self.next_worker = resumed.next_worker
        self.drawn = (self.batches, self.check)
        self.order = EpochOrder.begun(
            samplers, epoch, self.batches, self.sampler, streamed=self.unordered, **made_from
        )
        samplers.delivered(self.sampler)
        self._settled = origin
        self._resumed = resumed is not None
        self._due: dict[int, GivenOut] = {}  # by ticket
        self._skipped: set[int] = set()  # batches that were drawn, are left out, and wait for the prefix
        self._after: dict[int, _After] = {}  # by batch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"filter": None}

    @property
    def epoch(self) -> int:
        """Return the loader's count."""
        return self.order.epoch

    @property
    def base_seed(self) -> int:
        """Return the seed of the workers, as torch drew it."""
        return self.order.base_seed or 0

    def begin(self, base_seed: int, made: Iterator[Any]) -> Iterator[Any]:
        """Return the index batches that are to be given out, from torch's iterator over the sampler.

        Raises:
            ArgumentError: a sampler without a state gives another order than in the run that was saved.
        """
        self.order = replace(self.order, base_seed=base_seed)
        if self._resumed:
            made = self.order.batches(self.samplers, self.batches, made=made)
        return made if self.unordered else self._watched(made)

    def _watched(self, index_batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the index batches, with note of each. The n-th of them has ticket n, from 0."""
        samplers, passed, check, ticket = self.samplers, frozenset(self.ahead), self.check, 0
        drawing = samplers.drawing()  # once: to ask for torch's default device takes microseconds
        for number in itertools.count(self.batches):
            with drawing:
                if self.order.origin is None:
                    index_batches = self._settle(index_batches)
                index = next(index_batches, _END)
            if index is _END:
                break
            index = samplers.keep(index)
            if samplers.tracks_state:
                state = replace(samplers.state(), over=samplers.is_cut_off(index))
                self._after[number] = _After(state, None)
            elif samplers.checked:
                check = check_of([index], check)
                self._after[number] = _After(None, check)
                self.drawn = (number + 1, check)
            if number in passed:
                continue
            edited = Edited(index, {}) if self.filter is None else self.filter(number, index)
            if edited is None:
                self._skipped.add(number)
            else:
                self._due[ticket] = GivenOut(number, index, edited)
                ticket += 1
                yield edited.index
        self._after[-1] = _After(samplers.state(), None)

    def _settle(self, index_batches: Iterator[Any]) -> Iterator[Any]:
        """Settle what the order is made from, before its first index is drawn."""
        samplers = self.samplers
        origin = samplers.origin(self.epoch) if self._settled is None else self._settled
        index_batches = samplers.begin(index_batches, origin)
        generators = self.order.generators if samplers.user_defined else samplers.generators()
        self.order = replace(self.order, origin=origin, generators=generators)
        return index_batches

    def given_out(self, ticket: int) -> GivenOut | None:
        """Return what was given out with this ticket; None where it was delivered, or is skipped now."""
        return self._due.get(ticket)

    def edit(self, ticket: int, edited: Edited | None) -> None:
        """Note that what was given out is edited before it is delivered; None: its step is skipped now."""
        if edited is None:
            self._skipped.add(self._due.pop(ticket).step)
        else:
            self._due[ticket] = self._due[ticket]._replace(edited=edited)

    def began(self, worker_id: int = 0, state: DatasetState | None = None) -> None:
        """Note the state of the dataset before anything was read from it in this epoch."""
        worker = self.workers[worker_id]
        if worker.fresh and state is not None:
            worker.fresh, worker.state = False, state

    def delivered(self, ticket: int, worker_id: int, state: Any, *, failed: bool = False) -> int:
        """Note that a batch reached the user, or the exception that it raised did. Return its step.

        Where the epoch is read as streams, `worker_id` is the stream's, and `state` too.

        Args:
            failed: it was an exception.
        """
        if self.streams is not None:
            self.streams.delivered(worker_id, state)
        else:
            worker = self.workers[worker_id]
            if failed and self.unordered and state is None:
                worker.failed.append(worker.batches)
            worker.batches, worker.fresh = worker.batches + 1, False
            worker.state = worker.state if state is None else state  # None of a batch that was not begun
        if self.unordered:
            self.batches += 1
            return self.batches - 1
        given = self._due.pop(ticket)
        self.ahead.append(given.step)
        if given.edited.replaced:
            self._counters.add("left_out.samples", len(given.edited.replaced))
        self._advance()
        return given.step

    def _advance(self, *, ended: bool = False) -> None:
        """Move the prefix on over what was delivered, and over skipped batches before that.

        Not over those after it, until the epoch has `ended`: they may be drawn or not, and states must not
        depend on how far ahead this loader draws.
        """
        ahead, noted = self.ahead, self.samplers.tracks_state or self.samplers.checked
        while self.batches in ahead or (self.batches in self._skipped and (ahead or ended)):
            first = self.batches
            if noted and first not in self._after:
                break
            if first in self._skipped:
                self._skipped.remove(first)
                self._counters.add("left_out.steps")
            else:
                ahead.remove(first)
            if noted:
                after = self._after.pop(first)
                self.sampler = after.sampler or self.sampler
                self.check = after.check if self.samplers.checked else self.check
            self.batches = first + 1
        self.samplers.delivered(self.sampler)

    def ended(self, worker_id: int, state: Any) -> None:
        """Note that an iterable dataset, a worker's part of it, or the stream `worker_id` is at its end."""
        if self.streams is not None:
            self.streams.ended(worker_id)
        else:
            worker = self.workers[worker_id]
            worker.ended, worker.fresh, worker.state = True, False, state

    def finish(self) -> None:
        """Note that the user was told that the iteration is over."""
        if self.streams is not None and not self.finished:
            self.samplers.start_epoch()
        if not self.unordered and not self.finished:
            self._advance(ended=True)
        self.finished = True
        if self.samplers.rewind():  # the last batch, where drop_last is set
            self._after.clear()
        end = self._after.get(-1)
        self.sampler = self.samplers.state() if end is None or end.sampler is None else end.sampler

    @property
    def ran_on(self) -> bool:
        """Return whether workers may have read on from stateful datasets after the user had left."""
        return not self.finished and any(worker.state is not None for worker in self.workers)

    def write(self, state: State) -> None:
        """Write into a state what is about an iteration which goes on."""
        order = self.order
        if order.origin is None and not self.unordered:
            self._settled = self._settled or self.samplers.origin(self.epoch)
            state.coming = Coming(None, self._settled)
        state.begun, state.epoch = True, self.epoch
        state.batches, state.ahead = self.batches, sorted(self.ahead)
        state.sampler, state.check, state.origin = self.sampler, self.check, order.origin
        # None: nothing was drawn from them yet.
        state.generators = self.samplers.generators() if order.generators is None else order.generators
        state.next_worker, state.base_seed, state.workers = self.next_worker, self.base_seed, self.workers
        state.shared_seed = self.shared_seed
        state.streams = None if self.streams is None else self.streams.state()


class History:
    """The orders of one loader's run, over its resumes. Plain data, as the position is."""

    def __init__(self) -> None:
        self._orders: list[EpochOrder] = []
        self._running: Position | None = None

    def begin(self, position: Position) -> None:
        """Note that an epoch begins, or goes on after a resume."""
        known = self.find(position.epoch)
        del self._orders[self._start(position.epoch) :]
        self._orders += continued(known if position.batches else [], position.order)
        del self._orders[:-ORDERS_KEPT]
        self._running = position

    def find(self, epoch: int | None = None) -> list[EpochOrder]:
        """Return the orders of an epoch that has begun, [] where nothing is known; None: all orders."""
        self._settle()
        if epoch is None:
            return list(self._orders)
        return self._orders[self._start(epoch) : self._start(epoch + 1)]

    def _start(self, epoch: int) -> int:
        """Return the position of the first order that is of this epoch or a later one."""
        return bisect.bisect_left(self._orders, epoch, key=_epoch_of)

    def load(self, orders: list[EpochOrder]) -> None:
        """Take up the history in a loader's state."""
        self._running = None
        self._orders = sorted(copy.deepcopy(orders), key=_epoch_of)

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
        last = next(reversed(self.find()), None)
        return EpochOrder.begun(
            samplers,
            epoch,
            0,
            SamplerState(self._coming_number(samplers, epoch, coming, last), None, over=False),
            base_seed=last.base_seed if last is not None and persistent else None,
            origin=samplers.origin(epoch) if samplers.seeded else None,
        )

    def _coming_number(
        self, samplers: Samplers, epoch: int, coming: int, last: EpochOrder | None
    ) -> int | None:
        """Return the sampler's number of a coming epoch, if `set_epoch` goes on counting as so far."""
        number = samplers.epoch
        firsts = {begun.epoch: begun.sampler.epoch for begun in reversed(self._orders)}
        counts = [firsts[begun] for begun in sorted(firsts)[-2:]]
        repeats = len(counts) == 2 and counts[0] == counts[1]  # nobody calls `set_epoch`
        if number is None or last is None:
            return None if number is None else number + (epoch - coming)
        before = last.sampler.epoch
        if before is None or (epoch == coming and number != before):
            return number + (0 if repeats else epoch - coming)
        return before + (0 if repeats else epoch - last.epoch)

    def _settle(self) -> None:
        """Note what the running epoch's order was made from, once its first index is drawn."""
        if self._running is None:
            return
        position, last = self._running, self._orders[-1]
        if last.streamed:
            return
        samplers, drawn = position.samplers, position.order
        last = replace(last, origin=drawn.origin, generators=drawn.generators or None)
        self._orders[-1] = replace(last, check=position.drawn if samplers.checked else None)
        running = self._start(position.epoch)
        for number in range(running, len(self._orders)):
            order = self._orders[number]
            if _proportions(order) is not None and _proportions(order) == _proportions(last):
                self._orders[number] = replace(order, sampler=samplers.with_changes(order.sampler))
        if running:
            self._forget_before(self._orders[running - 1].epoch)

    def _forget_before(self, epoch: int) -> None:
        """Drop the states of earlier epochs, from the last one back to those of which they were dropped."""
        for number in reversed(range(self._start(epoch))):
            order = _without_states(self._orders[number])
            if order is self._orders[number]:
                break
            self._orders[number] = order


def continued(orders: list[EpochOrder], order: EpochOrder) -> list[EpochOrder]:
    """Return the orders of an epoch that is read in this order from `order.step` on."""
    earlier = [replace(known, base_seed=order.base_seed) for known in orders if known.step < order.step]
    if not earlier:
        return [order]
    before = earlier[-1]
    alike = _proportions(before) == _proportions(order)
    if alike and (before.batch_size, before.replicas) == (order.batch_size, order.replicas):
        return earlier
    return [*earlier, order]


def _proportions(order: EpochOrder) -> Any:
    """Return the sources and weights that a mixture was given; None where the order is not of a mixture."""
    mixed = order.sampler.mixed
    return None if mixed is None else mixed.proportions


def _without_states(order: EpochOrder) -> EpochOrder:
    """Return an order that lies far back without its kilobytes: it is not known any more."""
    drawn = order.generators or (order.origin is not None and order.origin.torch is not None)
    if not drawn and order.sampler.state is None:
        return order
    sampler = replace(order.sampler, state=None)
    return replace(order, sampler=sampler, origin=None, generators=None, forgotten=True)
