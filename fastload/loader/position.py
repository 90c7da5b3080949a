"""What the order of an epoch is made from, and how much of it was handed out.

The order itself is never kept: to resume is to make it again, and to pass over what was handed out.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastload.distributed.mixture_sampler import MixtureSampler
from fastload.distributed.sampler import DistributedSampler
from fastload.errors import ArgumentError
from fastload.loader.left_out import Revised
from fastload.loader.stream_epoch import StreamEpoch
from fastload.metrics.torch_private import default_device
from fastload.workers.dataset_state import is_stateful

__all__ = [
    "GivenOut",
    "Order",
    "Progress",
    "Revise",
    "check_of",
    "draw_seed",
    "read_generator",
    "write_generator",
]

Revise = Callable[
    [int, Any], Revised | None
]  # (step, index batch) -> what is given to a worker; None: skipped

_END = object()


class GivenOut(NamedTuple):
    """An index batch that was given out: its step, as the sampler gave it, and as a worker got it."""

    step: int
    index: Any
    revised: Revised


class Order:
    """What the order of a loader's samples comes from: its samplers, and the generators they draw from.

    Attributes:
        kind: the names of the samplers' classes.
        batch_size: samples of a batch that is full; None where a sampler of the user's own gives batches
            without saying it, and where single samples are handed out.
        stateful: the sampler with `state_dict` and `load_state_dict`, if there is one.
        followed: after each batch its state is that of the position. torch's BatchSampler takes no more from
            its sampler than it gives out. One of the user's own may, so there the state is used as it was
            when the epoch began, and the batches are passed over.
        mixture: `stateful`, if it is the sampler of a mixture.
        foreign: made by code that is neither torch's nor fastload's, and not followed.
    """

    def __init__(self, loader: Any) -> None:
        self.index_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        inner = getattr(self.index_sampler, "sampler", None)
        self._parts = parts = [part for part in (self.index_sampler, inner) if part is not None]
        self.kind = [type(part).__qualname__ for part in parts]
        self.batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        self.stateful = next((part for part in parts if is_stateful(part)), None)
        self.followed = self.stateful is not None and (
            self.stateful is self.index_sampler
            or getattr(type(self.index_sampler), "__iter__", None) is BatchSampler.__iter__
        )
        self.mixture = self.stateful if isinstance(self.stateful, MixtureSampler) else None
        homes = {type(part).__module__ for part in parts}
        self.foreign = not self.followed and not all(
            home.startswith(("torch.utils.data", "fastload.", "builtins")) for home in homes
        )
        self._with_epoch: Any = next((part for part in parts if hasattr(part, "set_epoch")), None)
        dealing = next((part for part in parts if hasattr(part, "num_replicas")), None)
        self.replicas = getattr(dealing, "num_replicas", None)
        self.rank = getattr(dealing, "rank", 0)
        self._generators: dict[str, torch.Generator] = {}
        for name, owner in [("loader", loader), ("batch_sampler", self.index_sampler), ("sampler", inner)]:
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and generator not in self._generators.values():
                self._generators[name] = generator
        # A sampler of the user's own may mean the default device that it draws on.
        self._on_host = all(home.startswith(("torch.utils.data", "fastload")) for home in homes)
        self._loaders_generator = loader.generator

    # --- epochs and states of samplers

    def start_epoch(self) -> None:
        self.give_back()
        if isinstance(self.stateful, DistributedSampler):
            self.stateful.start_epoch()

    def handed_out(self, sampler: Mapping[str, Any]) -> None:
        """This is the sampler's state after the prefix of the order that was handed out."""
        if self.followed and self.mixture is not None:
            self.mixture.handed_out(sampler["state"])

    def give_back(self) -> bool:
        """What was drawn and not handed out is drawn again, by the one sampler that does so."""
        if self.mixture is not None:
            self.mixture.give_back()
        return self.followed and self.mixture is not None

    def with_changes(self, sampler: Mapping[str, Any]) -> dict[str, Any]:
        """An earlier state of the sampler, with what was decided since about the samples after it."""
        if self.mixture is None:
            return dict(sampler)
        return dict(sampler) | {"state": self.mixture.with_changes(sampler["state"])}

    @property
    def epoch(self) -> int | None:
        epoch = getattr(self._with_epoch, "epoch", None)
        return epoch if isinstance(epoch, int) else None

    def sampler_state(self) -> dict[str, Any]:
        state = copy.deepcopy(self.stateful.state_dict()) if self.stateful is not None else None
        return {"epoch": self.epoch, "state": state, "over": False}

    def load_sampler_state(self, saved: Mapping[str, Any]) -> None:
        elsewhere = self._with_epoch is not None and not isinstance(self._with_epoch, DistributedSampler)
        if elsewhere and saved["epoch"] is not None:
            self._with_epoch.set_epoch(saved["epoch"])
        if self.stateful is not None:
            self.stateful.load_state_dict(copy.deepcopy(saved["state"]))

    def is_cut_off(self, index: Any) -> bool:
        """True for a last batch that is not full: its sampler has ended, and stands before the next epoch."""
        inner = self.stateful is not None and self.stateful is not self.index_sampler
        return self.followed and inner and len(index) < self.index_sampler.batch_size

    # --- random numbers

    def seeding(self) -> AbstractContextManager[Any]:
        """Around the code of torch that draws the base seed, and calls `iter` of the sampler."""
        return _on_device_of(self._loaders_generator) if self._on_host else nullcontext()

    def drawing(self) -> AbstractContextManager[Any]:
        """Around what the samplers draw."""
        inner = getattr(self.index_sampler, "sampler", None)
        return _on_device_of(getattr(inner, "generator", None)) if self._on_host else nullcontext()

    def generators(self) -> dict[str, str]:
        """The states of the generators that were given to the loader and its samplers."""
        return {name: read_generator(generator) for name, generator in self._generators.items()}

    def write_generators(self, states: Mapping[str, Any]) -> None:
        for name, generator in self._generators.items():
            write_generator(generator, states[name])

    def generators_again(self, states: Mapping[str, str]) -> list[torch.Generator | None]:
        """Of each sampler, the outer one first: a generator of its own that stands at its state, if any."""
        again = {name: torch.Generator() for name in states}
        for name, state in states.items():
            write_generator(again[name], state)
        names = {id(generator): name for name, generator in self._generators.items()}
        return [again.get(names.get(id(getattr(part, "generator", None)), "")) for part in self._parts]

    def draw_base_seed(self) -> None:
        """Draw what torch's iterator draws as the base seed, where the loader was given a generator."""
        if self._loaders_generator is not None:
            draw_seed(self._loaders_generator)

    def origin(self, drawing: torch.Generator = torch.default_generator) -> dict[str, Any]:
        """What an order that is about to be drawn will be made from; nothing is drawn by asking.

        Args:
            drawing: torch's generator, or one that stands where that one stood.

        Returns:
            "seed": the one number that torch's RandomSampler draws from it; "torch": its state, where a
            sampler of torch draws all its indices from it. Both None: the order comes from elsewhere.
        """
        sampler = self._drawing_globally()
        seed = state = None
        if isinstance(sampler, RandomSampler):
            seed = draw_seed(drawing.clone_state())
        elif sampler is not None:
            state = read_generator(drawing)
        return {"seed": seed, "torch": state}

    def from_origin(self, origin: Mapping[str, Any]) -> Any:
        """The index sampler, such that iterating over it gives the order of that epoch once more."""
        sampler = self._drawing_globally()
        if sampler is None:
            return self.index_sampler
        again = copy.copy(sampler)
        again.generator = torch.Generator()
        if origin["seed"] is not None:
            again.generator.manual_seed(origin["seed"])
        else:
            write_generator(again.generator, origin["torch"])
        if sampler is self.index_sampler:
            return again
        batches = copy.copy(self.index_sampler)
        batches.sampler = again
        return batches

    def _drawing_globally(self) -> Any:
        """A sampler of torch that draws from torch's own generator with its first index; else None."""
        kinds = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
        sampler = self.index_sampler
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
        return sampler if type(sampler) in kinds and sampler.generator is None else None


class Progress:
    """What one iteration has handed out. Plain data: it outlives its iterator, and pickles with its loader.

    Args:
        order: of the loader.
        epoch: the loader's count of iterations, this one excluded.
        iterable: the dataset is.
        workers: one entry per worker, or one for this process: batches handed out in this epoch; "ended";
            "fresh": nothing was drawn from the dataset's iterator; the dataset's "state".
        streams: of an epoch that is read as streams, else None.
    """

    def __init__(
        self,
        order: Order,
        epoch: int,
        iterable: bool,
        workers: list[dict[str, Any]],
        streams: StreamEpoch | None = None,
    ) -> None:
        self._order = order
        self.unordered = iterable or streams is not None  # no sampler says what is read
        self.streams = streams
        self.epoch = epoch
        self.base_seed = 0
        self.next_worker = 0
        self.finished = False
        self.drawn = (0, 0)  # of a foreign sampler: batches, and the sum over their indices
        self.steps_left_out = 0  # of those that were skipped, in the prefix
        self.workers = workers
        # Plain data, as it stands in a state. "batches": in the prefix of the order that was handed out;
        # "ahead": batches handed out beyond it, which in_order=False allows; "sampler": its state after the
        # prefix; "origin" and "generators": what the order is made from, None until its first index is drawn;
        # "check": a sum over the indices of the prefix, of a foreign sampler.
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
        self.base_seed = saved["base_seed"]
        self._seeded_late = saved.get("num_workers") == 0
        self.next_worker = saved["next_worker"] if saved.get("num_workers") == len(self.workers) else 0

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
            passed = list(itertools.islice(index_batches, self.batches)) if order.foreign else []
            deque(itertools.islice(index_batches, self.batches - len(passed)), maxlen=0)
        if check_of(passed) != place["check"]:
            raise ArgumentError(
                f"{order.kind} gives another order than in the run that was saved: give the sampler a "
                "seed of its own, or state_dict() and load_state_dict(), or resume from a state that was "
                "saved between two epochs"
            )
        return index_batches

    def watch(self, index_batches: Iterator[Any], revise: Revise) -> Iterator[Any]:
        """What of it is to be handed out, with note of it. The n-th of these has ticket n, from 0."""
        order, passed, check, ticket = self._order, frozenset(self.place["ahead"]), self.place["check"], 0
        drawing = order.drawing()  # once: to ask for torch's default device takes microseconds
        for number in itertools.count(self.batches):
            with drawing:
                if self.place["origin"] is None:
                    self.place["origin"] = order.origin()
                    if not order.foreign:
                        self.place["generators"] = order.generators()
                index = next(index_batches, _END)
            if index is _END:
                break
            if order.followed:
                self._after[number] = {"sampler": order.sampler_state() | {"over": order.is_cut_off(index)}}
            elif order.foreign:
                check = _added(check, index)
                self._after[number] = {"check": check}
                self.drawn = (number + 1, check)
            if number in passed:
                continue
            revised = revise(number, index)
            if revised is None:
                self._skipped.add(number)
            else:
                self._due[ticket] = GivenOut(number, index, revised)
                ticket += 1
                yield revised.index
        self._after[-1] = {"sampler": order.sampler_state()}

    def given_out(self, ticket: int) -> GivenOut | None:
        """What was given out with this ticket; None where it was handed out, or is skipped now."""
        return self._due.get(ticket)

    def revise(self, ticket: int, revised: Revised | None) -> None:
        """What was given out is revised once more before it is handed out; None: its step is skipped now."""
        if revised is None:
            self._skipped.add(self._due.pop(ticket).step)
        else:
            self._due[ticket] = self._due[ticket]._replace(revised=revised)

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
        return given.step, len(given.revised.replaced)

    def _advance(self, *, ended: bool = False) -> None:
        """The prefix goes on over what was handed out, and over skipped batches before that.

        Not over those after it, until the epoch has `ended`: they may be drawn or not, and states must not
        depend on how far ahead this loader draws.
        """
        place, first = self.place, self.batches
        ahead: list[int] = place["ahead"]
        noted = self._order.followed or self._order.foreign
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
        place = self.place | {"ahead": sorted(self.place["ahead"])}
        if place["generators"] is None:  # nothing was drawn from them yet
            place["generators"] = self._order.generators()
        return (
            place
            | {
                "begun": True,
                "epoch": self.epoch,
                "next_worker": self.next_worker,
                "base_seed": self.base_seed,
                "workers": self.workers,
            }
            | ({} if self.streams is None else {"streams": self.streams.state()})
        )


def check_of(index_batches: Iterable[Any]) -> int:
    """The sum by which an order is compared with the one that was handed out."""
    check = 0
    for index in index_batches:
        check = _added(check, index)
    return check


def _added(check: int, index: Any) -> int:
    """A sum that goes on over the numbers of an index batch; what are no numbers is left out."""
    with contextlib.suppress(Exception):
        numbers = np.asarray(index)
        if numbers.dtype.kind in "iu":
            return zlib.crc32(numbers.astype(np.int64).tobytes(), check)
    return check


def read_generator(generator: torch.Generator) -> str:
    """The state of a torch generator, 3.4 KB (its 5 KB are half zeros)."""
    return base64.b64encode(zlib.compress(generator.get_state().numpy().tobytes())).decode()


def write_generator(generator: torch.Generator, state: str) -> None:
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(state)), np.uint8)
    generator.set_state(torch.from_numpy(numbers.copy()))


def draw_seed(generator: torch.Generator) -> int:
    """A seed, drawn as torch draws those of its samplers and workers."""
    drawn = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
    return int(drawn.item())


def _on_device_of(generator: torch.Generator | None) -> AbstractContextManager[Any]:
    """Where torch's code draws from `generator` (None: the CPU's), whatever the default device is.

    That code leaves the device to the default, even where the generator is of another one.
    """
    device = torch.device("cpu") if generator is None else generator.device
    return nullcontext() if default_device() == device else device
