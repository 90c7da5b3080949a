"""The process's random generators as text, and a way to draw from them as if they stood elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = [
    "Lender",
    "digest",
    "on_device_of",
    "read_generator",
    "read_globals",
    "write_generator",
    "write_globals",
]


def read_generator(generator: torch.Generator) -> str:
    """The state of a torch generator, 3.4 KB (its 5 KB are half zeros)."""
    return _pack(generator.get_state().numpy())


def write_generator(generator: torch.Generator, state: str) -> None:
    generator.set_state(torch.from_numpy(_unpack(state, np.uint8)))


def read_globals(names: Iterable[str]) -> dict[str, Any]:
    """The states of these of the process-wide generators "torch", "python" and "numpy", ready for JSON."""
    return {name: _GLOBALS[name].pack(_GLOBALS[name].get()) for name in names}


def write_globals(states: Mapping[str, Any]) -> None:
    """Put the process-wide generators where `read_globals` found them; other entries are left alone."""
    for name, kind in _GLOBALS.items():
        if name in states:
            kind.set(kind.unpack(states[name]))


def digest(states: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(states, sort_keys=True).encode(), digest_size=8).hexdigest()


class Lender:
    """While entered, the process-wide generators continue from `states`; after it, from where they were.

    What is drawn inside moves `states` on, so that the next entry continues where this one ended. An entry
    inside another one changes nothing.

    Args:
        states: see `read_globals`.
        stays: leave the process-wide generators where they are at the end.
    """

    def __init__(self, states: Mapping[str, Any], *, stays: bool = False) -> None:
        self._states = {name: _GLOBALS[name].unpack(state) for name, state in states.items()}
        self._stays = stays
        self._kept: dict[str, Any] = {}
        self._depth = 0

    @property
    def states(self) -> dict[str, Any]:
        return {name: _GLOBALS[name].pack(state) for name, state in self._states.items()}

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._kept = self._swap(self._states)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._states = self._swap({} if self._stays else self._kept)

    def _swap(self, states: Mapping[str, Any]) -> dict[str, Any]:
        before = {name: _GLOBALS[name].get() for name in self._states}
        for name, state in states.items():
            _GLOBALS[name].set(state)
        return before


def on_device_of(generator: torch.Generator | None) -> AbstractContextManager[Any]:
    """Where torch's code draws from `generator` (None: the CPU's), whatever the default device is.

    That code leaves the device to the default, even where the generator is of another one.
    """
    device = torch.device("cpu") if generator is None else generator.device
    return nullcontext() if torch.get_default_device() == device else device


def _pack(numbers: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(numbers.tobytes())).decode()


def _unpack(text: str, dtype: Any) -> np.ndarray[Any, Any]:
    return np.array(np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype))


class _Global(NamedTuple):
    """A process-wide generator: its state as it has it, and that state ready for JSON."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def _pack_python(state: Any) -> list[Any]:
    version, numbers, gauss = state
    return [version, _pack(np.array(numbers, np.uint32)), gauss]


def _unpack_python(packed: list[Any]) -> Any:
    version, numbers, gauss = packed
    return version, tuple(_unpack(numbers, np.uint32).tolist()), gauss


def _pack_numpy(state: Any) -> list[Any]:
    name, numbers, *rest = state
    return [name, _pack(np.asarray(numbers)), *rest]


def _unpack_numpy(packed: list[Any]) -> Any:
    name, numbers, *rest = packed
    return name, _unpack(numbers, np.uint32), *rest


_GLOBALS = {
    "torch": _Global(
        torch.get_rng_state,
        torch.set_rng_state,
        lambda state: _pack(state.numpy()),
        lambda packed: torch.from_numpy(_unpack(packed, np.uint8)),
    ),
    "python": _Global(random.getstate, random.setstate, _pack_python, _unpack_python),
    "numpy": _Global(np.random.get_state, np.random.set_state, _pack_numpy, _unpack_numpy),
}
