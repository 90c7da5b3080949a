"""What the order of a loader's samples comes from: its samplers, and the generators they draw from."""

from __future__ import annotations

import base64
import contextlib
import copy
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
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
from fastload.metrics.torch_private import default_device
from fastload.order.mixture_sampler import MixtureSampler
from fastload.order.sampler import DistributedSampler, ShardSampler

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the text of an object whose class has none of its own


def is_stateful(thing: object) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


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
        checked: not a function of a length, a seed and a position alone, and not followed: whoever resumes it
            compares what was handed out (see `check_of`).
        seeded: torch's samplers draw it from the loader's `seed`, a new order for each epoch.
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
        known = (BatchSampler, RandomSampler, SequentialSampler, torch.utils.data.DistributedSampler)
        ours = (DistributedSampler, ShardSampler, MixtureSampler)
        self.checked = not self.followed and not all(type(part) in known + ours for part in parts)
        self._seed: int | None = loader.seed
        self.seeded = self._seed is not None and self._drawing_globally() is not None
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

    def origin(self, epoch: int, drawing: torch.Generator = torch.default_generator) -> dict[str, Any]:
        """What the order of an epoch of the loader is made from, if it begins now; asking draws nothing.

        Args:
            drawing: torch's generator, or one that stands where that one will stand.

        Returns:
            "seed": of the generator that a sampler of torch draws all its indices from. It comes from the
            loader's `seed` and the epoch, as the order of a `DistributedSampler` does, or is the one number
            that torch's RandomSampler draws; "torch": the state of torch's generator, where another sampler
            of torch draws from that. Both None: the order comes from elsewhere.
        """
        if self.seeded:
            assert self._seed is not None
            return {"seed": (self._seed + epoch) % (1 << 64), "torch": None}
        return self.drawn_origin(drawing)

    def drawn_origin(self, drawing: torch.Generator = torch.default_generator) -> dict[str, Any]:
        """As `origin`, of what the samplers themselves draw, whatever the loader's `seed` is."""
        sampler = self._drawing_globally()
        seed = state = None
        if isinstance(sampler, RandomSampler):
            seed = draw_seed(drawing.clone_state())
        elif sampler is not None:
            state = read_generator(drawing)
        return {"seed": seed, "torch": state}

    def begin(self, made: Iterator[Any], origin: Mapping[str, Any]) -> Iterator[Any]:
        """The order of an epoch, of which nothing was drawn yet.

        Args:
            made: torch's iterator over the sampler.
            origin: as it was settled for this epoch. Torch's generator may have moved since.
        """
        if origin == self.drawn_origin():
            return made
        if not self.seeded:
            next(made, None)  # so that torch's generator stands where it does without a settled origin
        return iter(self.from_origin(origin))

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


def check_of(index_batches: Iterable[Any], check: int | None = 0) -> int | None:
    """The sum by which an order is compared with the one that was handed out; it goes on from `check`.

    None: an index has neither bytes nor a text that is the same in another process.
    """
    for index in index_batches:
        content = None if check is None else content_of(index)
        check = None if content is None or check is None else zlib.crc32(content, check)
    return check


def content_of(index: Any) -> bytes | None:
    """What tells an index batch, or any list of indices, from others; None where nothing does.

    Whole numbers are compared by value, whether they stand in a list, an array or a tensor.
    """
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers = np.asarray(index)
        if numbers.dtype.kind in "iu":
            return numbers.astype(np.int64).tobytes()
    try:
        return bytes(dump(index))
    except ArgumentError:
        text = repr(index)
    return None if _ADDRESS.search(text) else text.encode()


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
