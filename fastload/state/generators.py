"""The process's random generators as text, and a way to draw from them as if they stood elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = [
    "Lender",
    "digest",
    "kept_globals",
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
    return {name: _READ[name]() for name in names}


def write_globals(states: Mapping[str, Any]) -> None:
    """Put the process-wide generators where `read_globals` found them; other entries are left alone."""
    for name, write in _WRITE.items():
        if name in states:
            write(states[name])


def digest(states: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(states, sort_keys=True).encode(), digest_size=8).hexdigest()


class Lender:
    """While entered, the process-wide generators continue from `states`; after it, from where they were.

    What is drawn inside moves `states` on, so that the next entry continues where this one ended.

    Args:
        states: see `read_globals`.
        stays: leave the process-wide generators where they are at the end.
    """

    def __init__(self, states: Mapping[str, Any], *, stays: bool = False) -> None:
        self.states = dict(states)
        self._stays = stays
        self._kept: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._kept = read_globals(self.states)
        write_globals(self.states)

    def __exit__(self, *_: object) -> None:
        self.states = read_globals(self.states)
        if not self._stays:
            write_globals(self._kept)


@contextmanager
def kept_globals() -> Iterator[None]:
    """What is drawn or seeded inside leaves the process-wide generators where they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _pack(numbers: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(numbers.tobytes())).decode()


def _unpack(text: str, dtype: Any) -> np.ndarray[Any, Any]:
    return np.array(np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype))


def _read_python() -> list[Any]:
    version, numbers, gauss = random.getstate()
    return [version, _pack(np.array(numbers, np.uint32)), gauss]


def _write_python(state: list[Any]) -> None:
    version, numbers, gauss = state
    random.setstate((version, tuple(_unpack(numbers, np.uint32).tolist()), gauss))


def _read_numpy() -> list[Any]:
    name, numbers, *rest = np.random.get_state(legacy=True)
    return [name, _pack(np.asarray(numbers)), *rest]


def _write_numpy(state: list[Any]) -> None:
    name, numbers, *rest = state
    np.random.set_state((name, _unpack(numbers, np.uint32), *rest))


_READ = {
    "torch": lambda: read_generator(torch.default_generator),
    "python": _read_python,
    "numpy": _read_numpy,
}
_WRITE = {
    "torch": lambda state: write_generator(torch.default_generator, state),
    "python": _write_python,
    "numpy": _write_numpy,
}
