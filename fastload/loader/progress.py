"""How much of an iteration was handed out, and how its order and its dataset are brought back there."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import BatchSampler

from fastload.distributed.sampler import DistributedSampler
from fastload.loader.generators import (
    on_device_of,
    read_generator,
    read_globals,
    write_generator,
    write_globals,
)
from fastload.loader.stream_epoch import StreamEpoch
from fastload.workers.dataset_state import is_stateful

__all__ = ["Order", "Progress"]

_END = object()


class Order:
    """What the order of a loader's samples comes from: its samplers, and the generators they draw from."""

    def __init__(self, loader: Any) -> None:
        self.index_sampler = loader._index_sampler
        inner = getattr(self.index_sampler, "sampler", None)
        parts = [part for part in (self.index_sampler, inner) if part is not None]
        self.kind = [type(part).__qualname__ for part in parts]
        self.stateful = next((part for part in parts if is_stateful(part)), None)
        # torch's BatchSampler takes no more from its sampler than it gives out. One of the user's own may, so
        # there the sampler's state is used as it was when the epoch began, and the batches are passed over.
        self.followed = self.stateful is not None and (
            self.stateful is self.index_sampler
            or getattr(type(self.index_sampler), "__iter__", None) is BatchSampler.__iter__
        )
        self._with_epoch: Any = next((part for part in parts if hasattr(part, "set_epoch")), None)
        self.replicas = next((part.num_replicas for part in parts if hasattr(part, "num_replicas")), None)
        self._generators: dict[str, torch.Generator] = {}
        for name, owner in [("loader", loader), ("batch_sampler", self.index_sampler), ("sampler", inner)]:
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and generator not in self._generators.values():
                self._generators[name] = generator
        known = all(type(part).__module__.startswith("torch.utils.data") for part in parts)
        self.globals = ("torch",) if known or self.followed else ("torch", "python", "numpy")
        # torch's samplers draw from the process-wide generators with their first index only.
        self.drawn_at_once = known
        # One of the user's own may mean the default device that it draws on.
        self._pinned = all(
            type(part).__module__.startswith(("torch.utils.data", "fastload")) for part in parts
        )
        self._samplers_generator = getattr(inner, "generator", None)
        self._loaders_generator = loader.generator

    def start_epoch(self) -> None:
        if isinstance(self.stateful, DistributedSampler):
            self.stateful.start_epoch()

    @property
    def epoch(self) -> int | None:
        epoch = getattr(self._with_epoch, "epoch", None)
        return epoch if isinstance(epoch, int) else None

    def seeding(self) -> AbstractContextManager[Any]:
        """Around the code of torch that draws the base seed, and calls `iter` of the sampler."""
        return on_device_of(self._loaders_generator) if self._pinned else nullcontext()

    def drawing(self) -> AbstractContextManager[Any]:
        """Around what the samplers draw."""
        return on_device_of(self._samplers_generator) if self._pinned else nullcontext()

    def drawn(self, index_batches: Iterator[Any]) -> Iterator[Any]:
        """The same, drawn in `drawing`."""
        if isinstance(self.drawing(), nullcontext):
            yield from index_batches
            return
        while True:
            with self.drawing():
                index = next(index_batches, _END)
            if index is _END:
                return
            yield index

    def sampler_state(self) -> dict[str, Any]:
        state = copy.deepcopy(self.stateful.state_dict()) if self.stateful is not None else None
        return {"epoch": self.epoch, "state": state, "over": False}

    def is_cut_off(self, index: Any) -> bool:
        """True for a last batch that is not full: its sampler has ended, and stands before the next epoch."""
        inner = self.stateful is not None and self.stateful is not self.index_sampler
        return self.followed and inner and len(index) < self.index_sampler.batch_size

    def load_sampler_state(self, saved: Mapping[str, Any]) -> None:
        elsewhere = self._with_epoch is not None and not isinstance(self._with_epoch, DistributedSampler)
        if elsewhere and saved["epoch"] is not None:
            self._with_epoch.set_epoch(saved["epoch"])
        if self.stateful is not None:
            self.stateful.load_state_dict(copy.deepcopy(saved["state"]))

    def read_generators(self) -> dict[str, Any]:
        own = {name: read_generator(generator) for name, generator in self._generators.items()}
        return read_globals(self.globals) | own

    def write_generators(self, states: Mapping[str, Any], *, own_only: bool = False) -> None:
        """The samplers' and the loader's; and the process-wide ones, which is for inside a `Lender`."""
        if not own_only:
            write_globals(states)
        for name, generator in self._generators.items():
            write_generator(generator, states[name])


class Progress:
    """What one iteration has handed out. Plain data: it outlives its iterator, and pickles with its loader.

    Args:
        order: of the loader.
        epoch: the loader's count of iterations, this one excluded.
        iterable: the dataset is.
        streams: of an epoch that is read as streams, else None.
        late_seed: the base seed is drawn after `iter(sampler)`, as torch does without workers.
        workers: one entry per worker, or one for this process: batches handed out in this epoch; "ended";
            "fresh": nothing was drawn from the dataset's iterator; the dataset's "state".
    """

    def __init__(
        self,
        order: Order,
        epoch: int,
        iterable: bool,
        late_seed: bool,
        workers: list[dict[str, Any]],
        streams: StreamEpoch | None = None,
    ) -> None:
        self._order = order
        self.unordered = iterable or streams is not None  # no sampler says what is read
        self.streams = streams
        self.epoch = epoch
        self.late_seed = late_seed
        self.workers = workers
        self.base_seed: int | None = None  # not drawn yet
        self.generators = order.read_generators()
        self.sampler = order.sampler_state()  # after the last batch of the prefix that was handed out
        self.batches = 0  # in that prefix
        self.ahead: set[int] = set()  # batches handed out beyond it, which in_order=False allows
        self.next_worker = 0
        self.finished = False
        self.drawn = 0  # batches, from the start of the epoch on, also in the run that is resumed
        self._due: dict[int, int] = {}  # ticket -> batch
        self._passed: frozenset[int] = frozenset()  # batches that were handed out before this was resumed
        self._states: dict[int, dict[str, Any]] = {}  # batch -> sampler's state after it was drawn

    def resume(self, saved: Mapping[str, Any]) -> None:
        self.late_seed = saved["late_seed"]
        self.base_seed = saved["base_seed"]
        self.generators = saved["generators"]
        self.sampler = saved["sampler"]
        self.batches = saved["batches"]
        self.drawn = int(saved["drawn"])
        self.ahead = set(saved["ahead"])
        self._passed = frozenset(self.ahead)
        self.next_worker = saved["next_worker"] if saved.get("num_workers") == len(self.workers) else 0

    def watch(self, index_batches: Iterator[Any]) -> Iterator[Any]:
        """What of it was not handed out yet, with note of it. The n-th of these has ticket n, from 0."""
        ticket = 0
        for number, index in enumerate(index_batches, self.batches):
            self.drawn = max(self.drawn, number + 1)
            self._note_sampler(number, over=self._order.is_cut_off(index))
            if number not in self._passed:
                self._due[ticket] = number
                ticket += 1
                yield index
        self._note_sampler(-1)

    def _note_sampler(self, batch: int, *, over: bool = False) -> None:
        if self._order.followed:
            self._states[batch] = self._order.sampler_state() | {"over": over}

    def began(self, worker_id: int = 0, state: Any = None) -> None:
        """The state of the dataset before anything was read from it in this epoch."""
        if self.workers[worker_id]["fresh"] and state is not None:
            self.workers[worker_id].update(fresh=False, state=state)

    def handed_out(self, ticket: int | None = None, worker_id: int = 0, state: Any = None) -> None:
        """A batch (None: the one drawn first) reached the user, or the exception that it raised did.

        Where the epoch is read as streams, `worker_id` is the stream's, and `state` too.
        """
        if self.streams is not None:
            self.streams.handed_out(worker_id, state)
            self.batches += 1
            return
        worker = self.workers[worker_id]
        worker.update(batches=worker["batches"] + 1, fresh=False, state=state)
        if self.unordered:
            self.batches += 1
            return
        ticket = next(iter(self._due), None) if ticket is None else ticket
        if ticket is None:
            return  # it was the sampler that raised, and no batch was drawn
        self.ahead.add(self._due.pop(ticket))
        while self.batches in self.ahead and (not self._order.followed or self.batches in self._states):
            self.ahead.remove(self.batches)
            self.sampler = self._states.pop(self.batches, self.sampler)
            self.batches += 1

    def ended(self, worker_id: int = 0, state: Any = None) -> None:
        """An iterable dataset, or a worker's part of it, or the stream `worker_id`, is at its end."""
        if self.streams is not None:
            self.streams.ended(worker_id)
            return
        self.workers[worker_id].update(ended=True, fresh=False, state=state)

    def finish(self) -> None:
        """The user was told that the iteration is over."""
        if self.streams is not None and not self.finished:
            self._order.start_epoch()
        self.finished = True
        self.sampler = self._states.get(-1) or self._order.sampler_state()

    @property
    def ran_on(self) -> bool:
        """Workers may have read on from datasets with a state after the user had left."""
        return not self.finished and any(worker["state"] is not None for worker in self.workers)

    @property
    def sampler_followed(self) -> bool:
        return self._order.followed

    @property
    def drawn_at_once(self) -> bool:
        return self._order.drawn_at_once

    def order_again(self, generator: torch.Generator | None) -> Iterator[Any]:
        """What is left of the order, made from the generators and the sampler as they were."""
        order = self._order
        order.write_generators(self.generators)
        if not isinstance(order.stateful, DistributedSampler):
            order.load_sampler_state(self.sampler)  # once more: torch has called iter(sampler) since
        index_batches = iter(() if self.sampler["over"] else order.index_sampler)
        if self.late_seed:
            with order.seeding():
                torch.empty((), dtype=torch.int64).random_(generator=generator)
        if not self.unordered and not order.followed:
            with order.drawing():
                deque(itertools.islice(index_batches, self.batches), maxlen=0)
        return index_batches

    def position(self) -> dict[str, Any]:
        """The part of a state that is about an iteration which goes on."""
        return {
            "begun": True,
            "epoch": self.epoch,
            "batches": self.batches,
            "ahead": sorted(self.ahead),
            "drawn": self.drawn,
            "next_worker": self.next_worker,
            "late_seed": self.late_seed,
            "base_seed": self.base_seed,
            "generators": self.generators,
            "sampler": self.sampler,
            "workers": self.workers,
        } | ({} if self.streams is None else {"streams": self.streams.state()})
