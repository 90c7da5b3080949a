"""The state of a loader, in memory and in a file: alone, or somewhere in a checkpoint.

    torch.save(loader.state_dict(), path)     json.dump(loader.state_dict(), file)
    torch.save({"model": ..., "loops": {"train_loader": loader.state_dict()}}, path)

Nothing in the file is run: it is JSON, or what torch.load reads with weights_only=True.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from fastload.errors import ArgumentError, FastloadError
from fastload.order.exclusions import ExclusionsState
from fastload.order.order import EpochOrder
from fastload.order.samplers import Origin, SamplerState
from fastload.order.schema import plain, read

VERSION = 2
_CLASS = re.compile(r"GLOBAL (\S+)")
_SHOWN = 8  # places in a message
_DEEPEST = 100  # levels of a checkpoint
_DAMAGED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError),
    *(ValueError,),  # RecursionError is a RuntimeError
)


@dataclass
class DatasetState:
    """What the `state_dict` of a dataset and of an iterator over it gave; `ended`: the iterator is."""

    dataset: Any
    iterator: Any
    ended: bool


@dataclass
class WorkerState:
    """What a worker, or this process, has read in an epoch.

    Attributes:
        batches: delivered.
        ended: its part of an iterable dataset is over.
        fresh: nothing was drawn from the dataset's iterator.
        state: of the dataset, if it has one.
        failed: of an iterable dataset without a state, the batches in whose place an error was delivered.
    """

    batches: int
    ended: bool
    fresh: bool
    state: DatasetState | None
    failed: list[int] = field(default_factory=list)


@dataclass
class StreamState:
    """The position of a rank in an epoch that is read as streams: see `fastload.loader.stream_epoch`."""

    rank: int
    ranks: int
    count: int
    batches: int
    lap: int
    source: int
    in_lap: int
    empty: int
    first: list[Any]
    streams: list[tuple[int, Any]]


@dataclass
class Coming:
    """What the coming iteration draws from torch's generator. `base_seed`: None where it draws none."""

    base_seed: int | None
    origin: Origin


@dataclass
class DatasetIdentity:
    """What tells a dataset from others of the same length: see `fastload.trace.identity`."""

    type: str
    indices: list[str | None]
    keys: str | None
    listing: tuple[str, str] | None


@dataclass
class Identity:
    """What the samplers hold, and the dataset or each source of a mixture."""

    sampler: list[str | None] = field(default_factory=list)
    datasets: dict[str, DatasetIdentity] = field(default_factory=dict)


@dataclass
class DigestPart:
    """The digest of a rank's part of a run: see `fastload.trace.digest`.

    Attributes:
        sums: its lanes, as hexadecimal text.
        epochs: (epoch, steps, samples, ordered sum, unordered sum) of each.
        trail: partial sums, as base64 of 32-bit numbers.
    """

    rank: int
    world_size: int
    steps: int
    samples: int
    every: int
    next_step: int
    batch: int
    sums: list[str]
    epochs: list[tuple[int, int, int, str, str]]
    trail: str


@dataclass
class DigestState(DigestPart):
    """The digest of a rank's run, with the parts that had other ranks before."""

    earlier: list[DigestPart]


@dataclass
class Unknown:
    """Why a state does not say how something was made."""

    why: str


@dataclass
class DatasetRecipe:
    """How a dataset was made.

    Attributes:
        class_: its name.
        url: where it is, or a list.
        options, withheld: of its store, without secrets; the names of those that are withheld.
        arguments: of the class, as JSON.
        keys, versions: digests of what it lists; None: it lists nothing.
    """

    class_: str
    url: Any
    options: dict[str, Any]
    withheld: list[str]
    arguments: dict[str, Any]
    keys: str | None
    versions: str | None


@dataclass
class SamplerRecipe:
    """How a sampler was made. `kind`: its class; the others are its arguments, where it has them."""

    kind: str
    replacement: Any = None
    num_samples: Any = None
    generator: str | None = None
    shuffle: Any = None
    seed: Any = None
    drop_last: Any = None
    mode: Any = None
    nodes: int | None = None
    exchange: Any = None


@dataclass
class Recipe:
    """How a loader was made: see `fastload.trace.recipe`.

    Attributes:
        generator: it was given one.
        batch_transform: as JSON. None: there is none. {}: a function of the user's.
        no_images: why its batches cannot be made again; or None.
        notes: what may be unlike them, in sentences.
    """

    dataset: DatasetRecipe | Unknown
    sampler: SamplerRecipe | Unknown
    drop_last: Any
    on_error: str
    generator: bool
    batch_transform: dict[str, Any] | None
    no_images: str | None
    notes: list[str]


@dataclass
class State:
    """The state of a loader: what it was, the position, and what leads to the same batches.

    Attributes:
        dataset, length, samplers, sampler_length, num_replicas, batch_size, num_workers, seed: what the
            loader was. What would change the order is compared with the loader that takes up the state.
        begun: it is of the middle of an epoch.
        epoch: iterations before this one.
        batches, ahead, sampler, check, origin, generators: as in `Position` and `EpochOrder`.
        coming: before the first index is drawn, what will be.
        base_seed: of the workers. `one_seed`: the run has drawn one for all its epochs.
        shared_seed: of torch's data pipes; None where there are none, or the epoch has not begun.
        next_worker, workers, streams: who reads what. `workers` is None where datasets keep no state.
        samples: which samples these are.
        history: the orders of the epochs so far.
        exclusions, digest: see `Exclusions` and `Digest`.
        recipe: how the loader was made.
    """

    version: int
    dataset: str
    length: int | None
    samplers: list[str]
    sampler_length: int | None
    num_replicas: Any
    batch_size: Any
    num_workers: int
    seed: int | None
    sampler: SamplerState
    generators: dict[str, str]
    digest: DigestState
    samples: Identity = field(default_factory=Identity)
    recipe: Recipe | Unknown = field(default_factory=lambda: Unknown("it was not looked at"))
    history: list[EpochOrder] = field(default_factory=list)
    exclusions: ExclusionsState = field(default_factory=ExclusionsState)
    begun: bool = False
    epoch: int = 0
    batches: int = 0
    ahead: list[int] = field(default_factory=list)
    origin: Origin | None = None
    check: int | None = 0
    coming: Coming | None = None
    base_seed: int | None = None
    one_seed: bool = False
    shared_seed: int | None = None
    next_worker: int = 0
    workers: list[WorkerState] | None = None
    streams: StreamState | None = None

    def replicas_at(self, epoch: int, step: int) -> int | None:
        """Return how many ranks read a step; None where the order is not dealt to ranks."""
        orders = [order for order in self.history if order.epoch == epoch and order.step <= step]
        known = [self.num_replicas, *(order.replicas for order in orders[-1:])]
        return next((int(replicas) for replicas in reversed(known) if replicas is not None), None)


_RARE = ("streams", "shared_seed")  # entries of an epoch that is read as streams, and of a data pipe's
_NAMES = {one.name for one in fields(State)} - set(_RARE)
# Entries that no other loader's state has.
_ENTRIES = {"version", "begun", "epoch", "batches", "base_seed", "one_seed", "sampler", "samplers", "length"}


OWN_LOADER = "pass --loader FILE.py:FUNCTION, a function that makes the loader"
_AS_SAVED = "load it as state_dict() returned it"


@contextlib.contextmanager
def reading_state(path: str = "the state", advice: str = OWN_LOADER) -> Iterator[None]:
    """Stand around code that uses what a state says of fastload's and torch's parts, whoever wrote it.

    Args:
        path: the part of the state, in words.
        advice: what to do where it is damaged, in words.

    Raises:
        ArgumentError: it says what no loader has saved. No other error leaves the block.
    """
    try:
        yield
    except FastloadError:
        raise
    except _DAMAGED as error:
        said = reprlib.repr(error)
        raise ArgumentError(f"{path} is damaged, or a newer fastload wrote it ({said}): {advice}") from error


def plain_state(state: State) -> dict[str, Any]:
    """Return a state as `parse_state` reads it."""
    entries: dict[str, Any] = plain(state, whole=True)
    for name in _RARE:
        if entries[name] is None:
            del entries[name]
    return entries


def parse_state(state: Any, name: str, advice: str = _AS_SAVED) -> State:
    """Return a state that is whole, of this version, and whose entries have the right types.

    Args:
        name: the state in the error's words.
        advice: what to do where it is damaged.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(state, Mapping):
        found, advice = type(state).__name__, "load what state_dict() of a fastload.DataLoader returned"
        if isinstance(state, str | os.PathLike):
            found, advice = repr(state), "read it by torch.load first"
        raise ArgumentError(f"{name} must be a dict, found {found}: {advice}")
    if state.get("version") != VERSION:
        raise ArgumentError(
            f"{name} has version {reprlib.repr(state.get('version'))}, this fastload reads version "
            f"{VERSION}: load what state_dict() of a fastload.DataLoader returned"
        )
    missing = sorted(_NAMES - state.keys())
    if missing:
        raise ArgumentError(f"{name} lacks {missing}: load it whole, as state_dict() returned it")
    with reading_state(name, advice):
        parsed = read(State, state)
        _check_seeds(parsed)
    return parsed


def _check_seeds(state: State) -> None:
    """Raise ValueError unless the seeds are such as torch draws: the next iteration hands them to it."""
    if state.begun and state.base_seed is None:
        raise ValueError("no seed of an epoch that has begun")
    coming = None if state.coming is None else state.coming.base_seed
    for seed in (state.base_seed, state.shared_seed, coming):
        if seed is not None and not 0 <= seed < 1 << 63:
            raise ValueError(f"the seed {seed!r}")


def read_state(path: str | os.PathLike[str], at: str | None = None) -> dict[str, Any]:
    """Return the state of the loader in a file.

    Args:
        at: which one, if the file has several: its place as `find_states` writes it.

    Raises:
        ArgumentError: the file cannot be read, or would run code; it has no state of a loader, or none at
            that place, or several and `at` is None. The message lists the places.
    """
    shown = repr(os.fspath(path))
    states = find_states(content_of(Path(path)))
    if not states:
        raise ArgumentError(
            f"{shown} has no state of a fastload.DataLoader: save what loader.state_dict() returns, alone or "
            "in a checkpoint"
        )
    places = ", ".join(repr(place) for place, _ in states[:_SHOWN])
    places += ", ..." if len(states) > _SHOWN else ""
    chosen = states if at is None else [(place, state) for place, state in states if place == at]
    if not chosen:
        raise ArgumentError(f"{shown} has no state of a loader at {at!r}, but at {places}")
    if len(chosen) > 1:
        raise ArgumentError(
            f"{shown} has the states of {len(states)} loaders, at {places}: choose one, as in --at "
            f"{chosen[0][0]}; in Python pass the state itself"
        )
    return dict(chosen[0][1])


def find_states(content: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (place, state) of all loaders in a checkpoint, in its order.

    A place is the keys and positions on the way there, such as "loops.train_loader" or "ranks.0"; "" is the
    checkpoint itself.
    """
    return list(_find(content, (), set()))


def _find(content: Any, way: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """`seen`: the containers so far; a file of torch.save may have one in itself."""
    if isinstance(content, Mapping) and content.keys() >= _ENTRIES:
        yield ".".join(way), content
        return
    if not isinstance(content, Mapping | list | tuple) or id(content) in seen:
        return
    if len(way) > _DEEPEST:
        raise ArgumentError(f"the checkpoint has more than {_DEEPEST} levels: save the loader's state alone")
    seen.add(id(content))
    parts = content.items() if isinstance(content, Mapping) else enumerate(content)
    for key, value in parts:
        yield from _find(value, (*way, str(key)), seen)


def content_of(path: Path) -> Any:
    """Read a file, by its first bytes: JSON, or a file of torch.save.

    Raises:
        ArgumentError: it cannot be read, is of another kind, or would run code.
    """
    try:
        with path.open("rb") as file:
            head = file.read(64)
        if head.lstrip()[:1] in (b"{", b"["):
            return json.loads(path.read_bytes())
        # Of a large checkpoint, only the pages of what is looked at are read. Old files cannot be mapped.
        mapped = head.startswith(b"PK")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise ArgumentError(f"the state {str(path)!r} cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        refused = _CLASS.search(str(error))
        if refused is not None:
            raise ArgumentError(
                f"{str(path)!r} has an object of {refused[1]}, and to read it could run code: save the "
                "loader's state in a file of its own, by torch.save(loader.state_dict(), ...) or as JSON"
            ) from None
        raise _unreadable(path) from None
    except (*_DAMAGED, EOFError):
        raise _unreadable(path) from None


def _unreadable(path: Path) -> ArgumentError:
    return ArgumentError(
        f"{str(path)!r} is neither JSON nor a whole file of torch.save: give the file in which "
        "loader.state_dict() was saved"
    )
