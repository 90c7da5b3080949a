"""How much of an epoch was handed out, and what its order is made from (see `fastload.order.order`).

The order itself is never kept: to resume is to make it again, and to pass over what was handed out.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fastload.errors import ArgumentError
from fastload.loader.stream_epoch import StreamEpoch
from fastload.order.exclusions import Edited, Filter
from fastload.order.order import Order, check_of
from fastload.order.sampler import DistributedSampler

_END = object()


def compare(order: Order, check: int | None, saved: int | None) -> None:
    """Raise ArgumentError unless an order that was made again has begun as in the run that was saved."""
    if saved is None or check is None:
        raise ArgumentError(
            f"{order.kind} gives indices that cannot be compared with those of the run that was saved: give "
            "their class a __repr__ that says what they are, or resume from a state that was saved between "
            "two epochs"
        )
    if check != saved:
        raise ArgumentError(
            f"{order.kind} gives another order than in the run that was saved: give the sampler a "
            "seed of its own, or state_dict() and load_state_dict(), or resume from a state that was "
            "saved between two epochs"
        )


class GivenOut(NamedTuple):
    """An index batch that was given out: its step, as the sampler gave it, and as a worker got it."""

    step: int
    index: Any
    edited: Edited


class Progress:
    """What one iteration has handed out. Plain data: it outlives its iterator, and pickles with its loader.

    Args:
        order: of the loader.
        epoch: the loader's count of iterations, this one excluded.
        iterable: the dataset is.
        workers: one entry per worker, or one for this process: batches handed out in this epoch; "ended";
            "fresh": nothing was drawn from the dataset's iterator; the dataset's "state".
        streams: of an epoch that is read as streams, else None.
        origin: what the order is made from, where a state has settled that before the epoch began.
    """

    def __init__(
        self,
        order: Order,
        epoch: int,
        iterable: bool,
        workers: list[dict[str, Any]],
        streams: StreamEpoch | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self._order = order
        self.unordered = iterable or streams is not None  # no sampler says what is read
        self.streams = streams
        self.epoch = epoch
        self.base_seed = 0
        self.next_worker = 0
        self.finished = False
        self.drawn: tuple[int, int | None] = (0, 0)  # of a checked order: batches, and the sum over them
        self.steps_left_out = 0  # of those that were skipped, in the prefix
        self.workers = workers
        self.filter: Filter | None = None  # what is left out
        # Plain data, as it stands in a state. "batches": in the prefix of the order that was handed out;
        # "ahead": batches handed out beyond it, which in_order=False allows; "sampler": its state after the
        # prefix; "origin" and "generators": what the order is made from, None until its first index is drawn;
        # "check": a sum over the indices of the prefix, of a checked order.
        self.place: dict[str, Any] = {
            "batches": 0,
            "ahead": [],
            "sampler": order.sampler_state(),
            "origin": None,
            # A foreign sampler may draw in iter(), which comes next.
            "generators": order.generators() if order.foreign else None,
            "check": 0,
        }
        order.handed_out(self.place["sampler"])
        self._settled = origin  # before the first index was drawn
        self._seeded_late = False  # the run that was saved drew its base seed after iter(sampler)
        self._due: dict[int, GivenOut] = {}  # by ticket
        self._skipped: set[int] = (
            set()
        )  # batches that were drawn, are not handed out, and wait for the prefix
        self._after: dict[int, dict[str, Any]] = {}  # batch -> what `place` says once it is in the prefix

    @property
    def batches(self) -> int:
        """Handed out, without a gap."""
        return int(self.place["batches"])

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Take up a position that was saved in the middle of this epoch."""
        self.place = {name: saved[name] for name in self.place} | {"ahead": list(saved["ahead"])}
        self.drawn = (self.batches, self.place["check"])
        self._settled = (saved["coming"] or {}).get("origin")
        self.base_seed = saved["base_seed"]
        self._seeded_late = saved["num_workers"] == 0
        self.next_worker = saved["next_worker"] if saved["num_workers"] == len(self.workers) else 0

    def order_again(self, made: Iterator[Any]) -> Iterator[Any]:
        """The order of the epoch that is resumed, after what was handed out of it.

        Args:
            made: torch's iterator over the sampler.

        Raises:
            ArgumentError: a sampler without a state gives another order than in the run that was saved.
        """
        order, place = self._order, self.place
        if place["generators"] is not None:
            order.write_generators(place["generators"])
        if not isinstance(order.stateful, DistributedSampler):
            order.load_sampler_state(place["sampler"])  # once more: torch has called iter(sampler) since
        sampler = order.index_sampler if place["origin"] is None else order.from_origin(place["origin"])
        if order.foreign and order.stateful is None and not place["generators"]:
            index_batches = made  # it may draw in iter(): not once more than in the run that was saved
        else:
            index_batches = iter(() if place["sampler"]["over"] else sampler)
            if order.foreign and self._seeded_late:
                order.draw_base_seed()
        if self.unordered or order.followed:
            return index_batches
        with order.drawing():
            passed = itertools.islice(index_batches, self.batches)
            if order.checked:
                compare(order, check_of(passed), place["check"])
            else:
                deque(passed, maxlen=0)
        return index_batches

    def watch(self, index_batches: Iterator[Any]) -> Iterator[Any]:
        """What of it is to be handed out, with note of it. The n-th of these has ticket n, from 0."""
        order, passed, check, ticket = self._order, frozenset(self.place["ahead"]), self.place["check"], 0
        drawing = order.drawing()  # once: to ask for torch's default device takes microseconds
        for number in itertools.count(self.batches):
            with drawing:
                if self.place["origin"] is None:
                    origin = order.origin(self.epoch) if self._settled is None else self._settled
                    index_batches = order.begin(index_batches, origin)
                    self.place["origin"] = origin
                    if not order.foreign:
                        self.place["generators"] = order.generators()
                index = next(index_batches, _END)
            if index is _END:
                break
            if order.followed:
                self._after[number] = {"sampler": order.sampler_state() | {"over": order.is_cut_off(index)}}
            elif order.checked:
                check = check_of([index], check)
                self._after[number] = {"check": check}
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
        self._after[-1] = {"sampler": order.sampler_state()}

    def given_out(self, ticket: int) -> GivenOut | None:
        """What was given out with this ticket; None where it was handed out, or is skipped now."""
        return self._due.get(ticket)

    def edit(self, ticket: int, edited: Edited | None) -> None:
        """Note that what was given out is edited before it is handed out; None: its step is skipped now."""
        if edited is None:
            self._skipped.add(self._due.pop(ticket).step)
        else:
            self._due[ticket] = self._due[ticket]._replace(edited=edited)

    def began(self, worker_id: int = 0, state: Any = None) -> None:
        """The state of the dataset before anything was read from it in this epoch."""
        if self.workers[worker_id]["fresh"] and state is not None:
            self.workers[worker_id].update(fresh=False, state=state)

    def handed_out(self, ticket: int, worker_id: int, state: Any) -> tuple[int, int]:
        """A batch reached the user, or the exception that it raised did.

        Returns:
            (its step of the epoch, how many substitutes for excluded samples it has).

        Where the epoch is read as streams, `worker_id` is the stream's, and `state` too.
        """
        if self.streams is not None:
            self.streams.handed_out(worker_id, state)
            self.place["batches"] += 1
            return self.batches - 1, 0
        worker = self.workers[worker_id]
        worker.update(batches=worker["batches"] + 1, fresh=False, state=state)
        if self.unordered:
            self.place["batches"] += 1
            return self.batches - 1, 0
        given = self._due.pop(ticket)
        self.place["ahead"].append(given.step)
        self._advance()
        return given.step, len(given.edited.replaced)

    def _advance(self, *, ended: bool = False) -> None:
        """The prefix goes on over what was handed out, and over skipped batches before that.

        Not over those after it, until the epoch has `ended`: they may be drawn or not, and states must not
        depend on how far ahead this loader draws.
        """
        place, first = self.place, self.batches
        ahead: list[int] = place["ahead"]
        noted = self._order.followed or self._order.checked
        while first in ahead or (first in self._skipped and (ahead or ended)):
            if noted and first not in self._after:
                break
            if first in self._skipped:
                self._skipped.remove(first)
                self.steps_left_out += 1
            else:
                ahead.remove(first)
            place |= self._after.pop(first, {})
            first = place["batches"] = first + 1
        self._order.handed_out(place["sampler"])

    def ended(self, worker_id: int, state: Any) -> None:
        """An iterable dataset, or a worker's part of it, or the stream `worker_id`, is at its end."""
        if self.streams is not None:
            self.streams.ended(worker_id)
        else:
            self.workers[worker_id].update(ended=True, fresh=False, state=state)

    def finish(self) -> None:
        """The user was told that the iteration is over."""
        if self.streams is not None and not self.finished:
            self._order.start_epoch()
        if not self.unordered and not self.finished:
            self._advance(ended=True)
        self.finished = True
        if self._order.give_back():  # the last batch, where drop_last is set
            self._after.clear()
        self.place |= self._after.get(-1) or {"sampler": self._order.sampler_state()}

    @property
    def ran_on(self) -> bool:
        """Workers may have read on from datasets with a state after the user had left."""
        return not self.finished and any(worker["state"] is not None for worker in self.workers)

    def position(self) -> dict[str, Any]:
        """The part of a state that is about an iteration which goes on."""
        coming = None
        if self.place["origin"] is None and not self.unordered:
            self._settled = self._settled or self._order.origin(self.epoch)
            coming = {"base_seed": None, "origin": self._settled}
        place = self.place | {"ahead": sorted(self.place["ahead"])}
        if place["generators"] is None:  # nothing was drawn from them yet
            place["generators"] = self._order.generators()
        return (
            place
            | {
                "begun": True,
                "coming": coming,
                "epoch": self.epoch,
                "next_worker": self.next_worker,
                "base_seed": self.base_seed,
                "workers": self.workers,
            }
            | ({} if self.streams is None else {"streams": self.streams.state()})
        )
