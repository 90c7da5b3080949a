"""The samplers of a loader, and the generators they draw from: what an order is made from."""

from __future__ import annotations

import base64
import contextlib
import copy
import operator
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastload.errors import ArgumentError
from fastload.formats.sample import dump
from fastload.metrics.machine import default_device
from fastload.order.budget_sampler import BudgetSampler
from fastload.order.mixture_sampler import MixedAt, mixed_at
from fastload.order.sampler import DistributedSampler, known_length

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the text of an object whose class has none of its own


# Samplers of torch whose order is a function of a length, a seed and a position alone; and those of torch and
# fastload that make it of the epoch's number.
_BY_POSITION = (BatchSampler, RandomSampler, SequentialSampler, torch.utils.data.DistributedSampler)
_BY_EPOCH = (
    *(DistributedSampler.__iter__, torch.utils.data.DistributedSampler.__iter__),
    *(SequentialSampler.__iter__, list.__iter__, tuple.__iter__, range.__iter__),
    *(np.ndarray.__iter__, torch.Tensor.__iter__),
)


def is_stateful(thing: object) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


@dataclass(frozen=True)
class Origin:
    """What torch's samplers draw an order from; both None where the order comes from elsewhere.

    Attributes:
        seed: of the generator that a sampler of torch draws all its indices from. It comes from the loader's
            `seed` and the epoch, as the order of a `DistributedSampler` does, or is the one number that
            torch's RandomSampler draws.
        torch: the state of torch's generator, where another sampler of torch draws from that.
    """

    seed: int | None
    torch: str | None


@dataclass(frozen=True)
class SamplerState:
    """Where a sampler stands.

    Attributes:
        epoch: the number that `set_epoch` gave it, or that it counts.
        state: what its `state_dict` gave, if it has one.
        over: its last batch was drawn, so that it stands before the next epoch.
    """

    epoch: int | None
    state: Any
    over: bool

    @property
    def mixed(self) -> MixedAt | None:
        """What the state says of a mixture; None where it is not a mixture's."""
        return None if self.state is None else mixed_at(self.state)


class Samplers:
    """The samplers of a loader, and the generators they draw from.

    Args:
        index_sampler: what gives index batches, or single indices.
        batch_size: samples of a batch that is full; None where a sampler of the user's own gives batches
            without saying it, and where single samples are delivered.
        single: single samples are delivered.
        seed, generator: of the loader.

    Attributes:
        names: of the samplers' classes.
        stateful: the sampler with `state_dict` and `load_state_dict`, if there is one.
        tracks_state: after each batch its state is that of the position. torch's BatchSampler takes no more
            from its sampler than it gives out. One of the user's own may, and so may a subclass of fastload's
            samplers whose state is inherited and whose `__iter__` is not. There the state is used as it was
            when the epoch began, and the batches are passed over.
        dealer: `stateful`, if it is fastload's and deals to ranks.
        user_defined: made by code that is neither torch's nor fastload's, and its state is not tracked.
        checked: not a function of a length, a seed and a position alone, and its state is not tracked:
            whoever resumes it compares what was delivered (see `check_of`).
        seeded: torch's samplers draw it from the loader's `seed`, a new order for each epoch.
        drawn: they draw it from torch's generator, or from one that they were given.
        replicas, rank: of the sampler that deals to ranks.
    """

    def __init__(
        self,
        index_sampler: Any,
        batch_size: Any,
        single: bool,
        seed: int | None,
        generator: torch.Generator | None,
    ) -> None:
        self.index_sampler = index_sampler
        self.batch_size, self.single = batch_size, single
        self._seed, self._generator = seed, generator
        inner = getattr(index_sampler, "sampler", None)
        parts = [index_sampler] if inner is None else [index_sampler, inner]
        self.last = parts[-1]
        self.names = [type(part).__qualname__ for part in parts]
        self.stateful = next((part for part in parts if is_stateful(part)), None)
        batches = getattr(type(index_sampler), "__iter__", None) is BatchSampler.__iter__
        followed = self.stateful is index_sampler or batches
        inherited = _only_state_is_inherited(self.stateful)
        self.tracks_state = self.stateful is not None and followed and not inherited
        self.dealer = self.stateful if isinstance(self.stateful, DistributedSampler) else None
        homes = {type(part).__module__ for part in parts}
        self.user_defined = not self.tracks_state and not all(
            home.startswith(("torch.utils.data", "fastload.", "builtins")) for home in homes
        )
        self.checked = not self.tracks_state and not all(type(part) in _BY_POSITION for part in parts)
        self.seeded = seed is not None and self._drawing_globally() is not None
        owns_generator = any(isinstance(getattr(part, "generator", None), torch.Generator) for part in parts)
        self.drawn = owns_generator or (self._drawing_globally() is not None and not self.seeded)
        orders = [getattr(type(part), "__iter__", None) for part in parts]
        # The order is a function of the epoch's number, by code of torch's or fastload's.
        by_epoch = orders[-1] in _BY_EPOCH and orders[:-1] in ([], [BatchSampler.__iter__])
        self.known_by_epoch = by_epoch and getattr(self.last, "_by_epoch", True)
        self._with_epoch: Any = next((part for part in parts if hasattr(part, "set_epoch")), None)
        dealing = next((part for part in parts if hasattr(part, "num_replicas")), None)
        self.replicas = getattr(dealing, "num_replicas", None)
        self.rank = getattr(dealing, "rank", 0)
        self._generators: dict[str, torch.Generator] = {}
        owned = [("loader", generator)]
        owned += [("batch_sampler", getattr(index_sampler, "generator", None))]
        owned += [("sampler", getattr(inner, "generator", None))]
        for name, own in owned:
            if isinstance(own, torch.Generator) and own not in self._generators.values():
                self._generators[name] = own
        # A sampler of the user's own may mean the default device that it draws on.
        self._on_host = all(home.startswith(("torch.utils.data", "fastload")) for home in homes)

    @classmethod
    def of(cls, loader: Any) -> Samplers:
        """Return the samplers of a loader."""
        outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        # With batch_size=None a sampler of batches lets the dataset read each as a whole.
        single = loader.batch_sampler is None and not isinstance(outer, BatchSampler)
        size = None if single else loader.batch_size or getattr(outer, "batch_size", None)
        size = size if type(size) is int and size > 0 else None  # not a list of sizes, or a method
        return cls(outer, size, single, loader.seed, loader.generator)

    def copied(self, dataset: Any, sampler: Any = None) -> Samplers:
        """Return copies that share no state with these; the dataset in them is the same one.

        Args:
            sampler: what stands in the place of the innermost sampler; None: a copy of it.

        Raises:
            ArgumentError: a sampler cannot be copied.
        """
        memo: dict[int, Any] = {id(dataset): dataset}
        for generator in self._generators.values():
            memo[id(generator)] = torch.Generator(generator.device)
        if sampler is not None:
            memo[id(self.last)] = sampler
        try:
            outer = _copied(self.index_sampler, memo)
        except Exception as error:
            raise ArgumentError(
                f"{self.names} cannot be copied, so its order cannot be recreated ({error})"
            ) from error
        own = memo.get(id(self._generator))
        return Samplers(outer, self.batch_size, self.single, self._seed, own)

    # --- epochs and states of samplers

    def start_epoch(self) -> None:
        """Fix the epoch of the samplers that count epochs by themselves."""
        self.rewind()
        if self.dealer is not None:
            self.dealer._start_epoch()

    def delivered(self, sampler: SamplerState) -> None:
        """Note the sampler's state after the prefix of the order that was delivered."""
        if self.tracks_state and self.dealer is not None:
            self.dealer._delivered = sampler.state

    def rewind(self) -> bool:
        """Let what was drawn and not delivered be drawn again, by a sampler that does so."""
        rewound = self.dealer is not None and self.dealer._rewind()
        return self.tracks_state and rewound

    def with_changes(self, sampler: SamplerState) -> SamplerState:
        """Return an earlier state, with what was decided since about the samples after it."""
        if self.dealer is None:
            return sampler
        return replace(sampler, state=self.dealer._with_changes(sampler.state))

    @property
    def epoch(self) -> int | None:
        """Return the number of the epoch; None where the samplers have none, or it is no whole number."""
        epoch: Any = getattr(self._with_epoch, "epoch", None)
        with contextlib.suppress(TypeError):
            return operator.index(epoch)  # numpy's numbers too
        return None

    def length_in(self, epoch: int | None) -> int | None:
        """Return the length of the index sampler, which may depend on the epoch; None where it has none."""
        here, sampler = self.epoch, self._with_epoch
        if epoch is None or here is None or epoch == here or sampler is self.dealer:
            return known_length(self.index_sampler)
        sampler.set_epoch(epoch)
        try:
            return known_length(self.index_sampler)
        finally:
            sampler.set_epoch(here)

    def state(self) -> SamplerState:
        """Return where the sampler stands."""
        state = None if self.stateful is None else self.stateful.state_dict()
        return SamplerState(self.epoch, copy.deepcopy(state), over=False)

    def load(self, saved: SamplerState) -> None:
        """Take up a state."""
        elsewhere = self._with_epoch is not None and not isinstance(self._with_epoch, DistributedSampler)
        if elsewhere and saved.epoch is not None:
            self._with_epoch.set_epoch(saved.epoch)
        if self.stateful is not None:
            self.stateful.load_state_dict(copy.deepcopy(saved.state))

    def per_step(self, replicas: int | None = None) -> int:
        """Return the samples of a step over all ranks, see `Segment`; of a `BudgetSampler` the batches."""
        size = 1 if self.single or isinstance(self.index_sampler, BudgetSampler) else self.batch_size
        return size * (replicas or self.replicas or 1) if isinstance(size, int) else 1

    def keep(self, index: Any) -> Any:
        """Return an index batch that stays as it is.

        torch reads one once and at once. Here it is drawn ahead and read several times, and a sampler may
        fill the same list, array or tensor again, or give an iterator.
        """
        if isinstance(index, list | np.ndarray):
            return copy.copy(index)
        if isinstance(index, torch.Tensor):
            return index.clone()
        return list(index) if isinstance(index, Iterator) and not self.single else index

    def is_cut_off(self, index: Any) -> bool:
        """Return True for a last batch that is not full: its sampler stands before the next epoch."""
        inner = self.stateful is not None and self.stateful is not self.index_sampler
        return self.tracks_state and inner and len(index) < self.index_sampler.batch_size

    # --- random numbers

    def seeding(self) -> AbstractContextManager[Any]:
        """Return what stands around the code of torch that draws the base seed, and calls `iter`."""
        return _on_device_of(self._generator) if self._on_host else nullcontext()

    def drawing(self) -> AbstractContextManager[Any]:
        """Return what stands around the draws of the samplers."""
        inner = getattr(self.index_sampler, "sampler", None)
        return _on_device_of(getattr(inner, "generator", None)) if self._on_host else nullcontext()

    def generators(self) -> dict[str, str]:
        """Return the states of the generators that were given to the loader and its samplers."""
        return {name: read_generator(generator) for name, generator in self._generators.items()}

    def write_generators(self, states: Mapping[str, str]) -> None:
        """Set these generators to their states."""
        for name, generator in self._generators.items():
            if name in states:
                write_generator(generator, states[name])

    def draw_base_seed(self) -> None:
        """Draw what torch's iterator draws as the base seed, where the loader was given a generator."""
        if self._generator is not None:
            draw_seed(self._generator)

    def origin(self, epoch: int, drawing: torch.Generator = torch.default_generator) -> Origin:
        """Return the origin of an epoch of the loader that begins now; asking draws nothing.

        Args:
            drawing: torch's generator, or one that stands where that one will stand.
        """
        if self.seeded:
            assert self._seed is not None
            return Origin((self._seed + epoch) % (1 << 64), None)
        return self._drawn_origin(drawing)

    def _drawn_origin(self, drawing: torch.Generator = torch.default_generator) -> Origin:
        """Return the origin of what the samplers draw themselves, whatever the loader's `seed` is."""
        sampler = self._drawing_globally()
        if isinstance(sampler, RandomSampler):
            return Origin(draw_seed(drawing.clone_state()), None)
        return Origin(None, None if sampler is None else read_generator(drawing))

    def begin(self, made: Iterator[Any], origin: Origin) -> Iterator[Any]:
        """Return the order of an epoch, of which nothing was drawn yet.

        Args:
            made: torch's iterator over the sampler.
            origin: as it was settled for this epoch. Torch's generator may have moved since.
        """
        if origin == self._drawn_origin():
            return made
        if not self.seeded:
            next(made, None)  # so that torch's generator stands where it does without a settled origin
        return iter(self.from_origin(origin))

    def from_origin(self, origin: Origin | None) -> Any:
        """Return the index sampler, so that iterating over it gives the order of that origin."""
        sampler = self._drawing_globally()
        if sampler is None or origin is None:
            return self.index_sampler
        again = copy.copy(sampler)
        again.generator = torch.Generator()
        if origin.seed is not None:
            again.generator.manual_seed(origin.seed)
        elif origin.torch is not None:
            write_generator(again.generator, origin.torch)
        return _copied(self.index_sampler, {id(sampler): again})

    def _drawing_globally(self) -> Any:
        """Return a sampler of torch that draws from torch's own generator with its first index; else None."""
        kinds = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
        sampler = self.index_sampler
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
        return sampler if type(sampler) in kinds and sampler.generator is None else None


def _only_state_is_inherited(sampler: Any) -> bool:
    """Return whether this is a user's subclass with an order of its own, and with fastload's state."""
    if not isinstance(sampler, DistributedSampler):
        return False
    own_order = type(sampler).__iter__ is not DistributedSampler.__iter__
    return own_order and type(sampler).state_dict.__module__.startswith("fastload.")


def _copied(sampler: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a sampler, and of the one in it. `memo`: as for `copy.deepcopy`."""
    if id(sampler) in memo:
        return memo[id(sampler)]
    if type(sampler) in (list, tuple):
        return sampler
    if not type(sampler).__module__.startswith("torch.utils.data"):
        return copy.deepcopy(sampler, memo)
    again = copy.copy(sampler)  # its indices and weights do not change
    if getattr(sampler, "generator", None) is not None:
        again.generator = memo.get(id(sampler.generator), sampler.generator)
    if hasattr(sampler, "sampler"):
        again.sampler = _copied(sampler.sampler, memo)
    return again


def check_of(index_batches: Iterable[Any], check: int | None = 0) -> int | None:
    """Return the sum by which an order is compared with the one that was delivered; it goes on from `check`.

    None: an index has neither bytes nor a text that is the same in another process.
    """
    for index in index_batches:
        content = None if check is None else content_of(index)
        check = None if content is None or check is None else zlib.crc32(content, check)
    return check


def content_of(index: Any) -> bytes | None:
    """Return what tells an index batch, or any list of indices, from others; None where nothing does.

    Whole numbers are compared by value, whether they stand in a list, an array or a tensor.
    """
    with contextlib.suppress(Exception):
        numbers = np.asarray(index)
        if numbers.dtype.kind in "iu":
            return numbers.astype(np.int64).tobytes()
    try:
        return bytes(dump(index))
    except ArgumentError:
        text = repr(index)
    return None if _ADDRESS.search(text) else text.encode()


def read_generator(generator: torch.Generator) -> str:
    """Return the state of a torch generator, 3.4 KB (its 5 KB are half zeros)."""
    return base64.b64encode(zlib.compress(generator.get_state().numpy().tobytes())).decode()


def write_generator(generator: torch.Generator, state: str) -> None:
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(state)), np.uint8)
    generator.set_state(torch.from_numpy(numbers.copy()))


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed as torch draws those of its samplers and workers."""
    drawn = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
    return int(drawn.item())


def _on_device_of(generator: torch.Generator | None) -> AbstractContextManager[Any]:
    """Let torch's code draw from `generator` (None: the CPU's), whatever the default device is.

    That code leaves the device to the default, even where the generator is of another one.
    """
    device = torch.device("cpu") if generator is None else generator.device
    return nullcontext() if default_device() == device else device
