"""The state of a loader in a file: alone, or somewhere in the checkpoint of a training.

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
from pathlib import Path
from typing import Any

import torch

from fastload.errors import ArgumentError, FastloadError

VERSION = 2
# Entries that no other loader's state has.
_ENTRIES = {"version", "begun", "epoch", "batches", "base_seed", "one_seed", "sampler", "samplers", "length"}
# The others of a whole state; "streams" is there where an epoch is read as streams.
_FURTHER = {
    *("dataset", "sampler_length", "num_replicas", "batch_size", "num_workers", "seed", "ahead", "origin"),
    *("check", "next_worker", "generators", "workers", "coming", "samples"),
    *("history", "exclusions", "digest", "made_from"),
}
_CLASS = re.compile(r"GLOBAL (\S+)")
_SHOWN = 8  # places in a message
_DEEPEST = 100  # levels of a checkpoint
_DAMAGED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError),
    *(ValueError,),  # RecursionError is a RuntimeError
)


_OWN_LOADER = "pass --loader FILE.py:FUNCTION, a function that makes the loader"


@contextlib.contextmanager
def reading_state(path: str = "the state", advice: str = _OWN_LOADER) -> Iterator[None]:
    """A block that uses what a state says of fastload's and torch's own parts, whoever has written it.

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


def is_state(value: Any) -> bool:
    """Whether this is what `state_dict()` of a loader returned."""
    return isinstance(value, Mapping) and value.keys() >= _ENTRIES


def check_state(state: Any, name: str) -> Mapping[str, Any]:
    """Return a state that is whole and of this version.

    Args:
        name: the state in the error's words.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(f"{name} must be a dict, found {type(state).__name__}")
    if state.get("version") != VERSION:
        raise ArgumentError(
            f"{name} has version {reprlib.repr(state.get('version'))}, this fastload reads version "
            f"{VERSION}: load what state_dict() of a fastload.DataLoader returned"
        )
    missing = sorted((_ENTRIES | _FURTHER) - state.keys())
    if missing:
        raise ArgumentError(f"{name} lacks {missing}: load it whole, as state_dict() returned it")
    return state


def read_state(path: str | os.PathLike[str], at: str | None = None) -> dict[str, Any]:
    """The state of the loader in a file.

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
    """(place, state) of all loaders in a checkpoint, in its order.

    A place is the keys and positions on the way there, such as "loops.train_loader" or "ranks.0"; "" is the
    checkpoint itself.
    """
    return list(_find(content, (), set()))


def _find(content: Any, way: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """`seen`: the containers so far; a file of torch.save may have one in itself."""
    if is_state(content):
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
    """What a file holds, by its first bytes: JSON, or a file of torch.save.

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
        found = _CLASS.search(str(error))
        if found is not None:
            raise ArgumentError(
                f"{str(path)!r} has an object of {found[1]}, and to read it could run code: save the "
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
