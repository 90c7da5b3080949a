"""Datasets and functions for the loader's tests, in a module that a spawned worker can import quickly."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

Point = namedtuple("Point", "x y")


@dataclass
class Record:
    name: str
    data: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)


class Subclass(torch.Tensor):
    """A tensor subclass."""


class Numbers(Dataset[Any]):
    """`length` samples, sample i is `make(i)`."""

    def __init__(self, length: int, make: Callable[[int], Any] = int) -> None:
        self.length = length
        self.make = make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Bulk(Numbers):
    """Offers `__getitems__`, and shows what it was asked for."""

    def __getitems__(self, indices: Any) -> list[Any]:
        return [(i, len(indices), type(indices).__name__) for i in indices]


class Stream(IterableDataset[Any]):
    """`lengths[worker]` samples from each worker."""

    def __init__(self, lengths: list[int], reported: int | None = None) -> None:
        self.lengths = lengths
        self.reported = reported

    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        for i in range(self.lengths[worker]):
            yield worker, i

    def __len__(self) -> int:
        if self.reported is None:
            raise TypeError("no length")
        return self.reported


class Imported(Dataset[Any]):
    """Whether the process that makes the samples has imported these modules."""

    def __init__(self, modules: list[str]) -> None:
        self.modules = modules

    def __len__(self) -> int:
        return len(self.modules)

    def __getitem__(self, index: int) -> bool:
        return self.modules[index] in sys.modules


class RecordingSampler:
    """Counts what is drawn from it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.drawn = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for i in range(self.length):
            self.drawn += 1
            yield i


def identity(samples: Any) -> Any:
    return samples


def told(batch: Any) -> Any:
    """A batch as lists, to be compared."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: told(part) for name, part in batch.items()}
    return [told(part) for part in batch] if isinstance(batch, list | tuple) else batch


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


@contextmanager
def default(name: str) -> Iterator[None]:
    """Let torch have another default dtype; or, with "meta", another default device."""
    if name == "meta":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def seed_all(number: int) -> None:
    """Seed the process's generators of torch, Python and numpy."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def randomness(_: int) -> tuple[Any, ...]:
    info = get_worker_info()
    who = (info.id, info.num_workers, info.seed) if info is not None else None
    return who, torch.initial_seed(), torch.rand(2).tolist(), random.random(), float(np.random.rand())


def picture(_: int) -> torch.Tensor:
    """300 KB: a batch of it lies in a slot."""
    return torch.ones(3, 160, 160)


def numbered(index: int) -> torch.Tensor:
    """100 KB that say which sample it is."""
    return torch.full((25_000,), index, dtype=torch.float32)


@dataclass
class Gate:
    """Sample 0 waits for a file."""

    path: Path

    def __call__(self, index: int) -> int:
        while index == 0 and not self.path.exists():
            time.sleep(0.01)
        return index


@dataclass
class At:
    """Does something bad at one index."""

    index: int
    deed: str
    also: Any = None

    def __call__(self, index: int) -> Any:
        if index == self.index and get_worker_info() is not None:
            _deeds[self.deed](self.also)
        return index


def _raise(error: BaseException) -> None:
    raise error


_deeds: dict[str, Callable[[Any], Any]] = {
    "raise": _raise,
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda code: raise_exit(code),
    "_exit": lambda code: os._exit(code),
    "sleep": lambda seconds: time.sleep(seconds),
}


def raise_exit(code: int) -> None:
    raise SystemExit(code)


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


class FormatsItself(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class HoldsLambda(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.hook = lambda: text


class HoldsTensor(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.box = torch.zeros(4)
