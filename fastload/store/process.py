"""Values that belong to one process: a forked child must not use its parent's clients, threads and locks.

`ProcessLocal` is the rule for values. Five modules need more than that when a process forks, and register
hooks of their own:

* `store.client_process` closes the parent's connections in the child, so that the client process can see its
  trainer end.
* `cache.registry` lets no LMDB transaction be open at a fork, and closes the environment in the child.
* `metrics.counters` starts the child's counters at zero.
* `workers.channel` and `workers.slot_map` close the trainer's ends of pipes and mappings in the child.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["ProcessLocal", "speaks"]

T = TypeVar("T")

# Forks between the first process and this one. Process ids were rejected: the system uses them again.
_generation = 0
# Values of parent processes. They stay alive: the destructor of a client would talk to threads that exist in
# the parent only.
_inherited: list[Any] = []


class ProcessLocal(Generic[T]):
    """A value of which each process has its own. Pickles without the value. Threads may share it.

    Args:
        make: called for this process's value at its first use, and again after a fork.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}  # by generation
        self._locks: dict[int, threading.RLock] = {}  # a thread of the parent may have held an older one

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessLocal, (self._make,)

    @property
    def inherited(self) -> bool:
        """Whether a process that this one was forked from has a value, and this one has none yet."""
        return bool(self._values) and _generation not in self._values

    def get(self) -> T:
        """The value of this process, made at first use."""
        try:
            return self._values[_generation]
        except KeyError:
            pass
        with self._lock():
            if _generation not in self._values:
                self._keep(self._make())
            return self._values[_generation]

    def peek(self) -> T | None:
        """The value of this process, or None if it was not made or set yet."""
        return self._values.get(_generation)

    def set(self, value: T) -> None:
        """Replace the value of this process."""
        with self._lock():
            self._keep(value)

    def drop(self) -> T | None:
        """Forget the value of this process and return it; `get` then makes a new one."""
        with self._lock():
            return self._values.pop(_generation, None)

    def _lock(self) -> threading.RLock:
        return self._locks.setdefault(_generation, threading.RLock())

    def _keep(self, value: T) -> None:
        _inherited.extend(old for generation, old in self._values.items() if generation != _generation)
        self._values = {_generation: value}


def _count_fork() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_count_fork)


def speaks() -> bool:
    """Whether this process speaks for all workers of its loader."""
    torch_data = sys.modules.get("torch.utils.data")  # else this is no worker
    worker = torch_data.get_worker_info() if torch_data is not None else None
    return worker is None or worker.id == 0
