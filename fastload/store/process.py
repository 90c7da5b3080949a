"""What belongs to one process, and what all processes of a node share.

A forked child must not use its parent's clients, threads and locks. `ProcessLocal` is the rule for values.
Some modules need more than that when a process forks, and register hooks of their own:

* `store.client_process` closes the parent's connections in the child, so that the client process can see its
  trainer end.
* `cache.access` lets no LMDB transaction be open at a fork, and closes the environment in the child.
* `metrics.counters` starts the child's counters at zero, and `metrics.machine` lifts the limits of payloads.
* `distributed.launcher` leaves the connection of torch's key-value store to the parent.
* `workers.protocol` closes the trainer's ends of channels in the child; `workers.slots` uses the slots that
  the child can see no more.

A `SharedFile` is bytes in one file that all processes of a node map. Forked processes share the mapping. A
process that is being spawned gets a descriptor of the same file.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any, Generic, TypeVar

from fastload.metrics.machine import call_in_forks, memory_file

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
        """Return the value of this process, made at first use."""
        try:
            return self._values[_generation]
        except KeyError:
            pass
        with self._lock():
            if _generation not in self._values:
                self._keep(self._make())
            return self._values[_generation]

    def peek(self) -> T | None:
        """Return the value of this process, or None if it was not made or set yet."""
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


call_in_forks(_count_fork)


def speaks() -> bool:
    """Return whether this process speaks for all workers of its loader."""
    torch_data = sys.modules.get("torch.utils.data")  # else this is no worker
    worker = torch_data.get_worker_info() if torch_data is not None else None
    return worker is None or worker.id == 0


class SharedFile:
    """A mapped file that is only read. Pickling it for a process that is being spawned passes a descriptor.

    Any other pickle has the bytes; a copy is the file itself.

    Args:
        descriptor: of the file, with all of its content. This object owns it from here on.

    Attributes:
        map: its content.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)

    @classmethod
    def written(cls, name: str, write: Callable[[int], None]) -> SharedFile:
        """Return a file in memory with what `write(descriptor)` puts there.

        Raises:
            What `write` raises.
        """
        descriptor = memory_file(name)
        try:
            write(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedFile:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None:
            return _from_handle, (reduction.DupFd(self._descriptor),)
        return _from_bytes, (self.map[:],)


def _from_handle(handle: Any) -> SharedFile:
    return SharedFile(handle.detach())


def _from_bytes(content: bytes) -> SharedFile:
    def write(descriptor: int) -> None:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)

    return SharedFile.written("fastload-shared", write)
