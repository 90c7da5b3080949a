"""The memory of this process: what it has to itself, and the most that payloads may take of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from pathlib import Path

from fastload.metrics.cores import control_groups

__all__ = [
    "anonymous_bytes",
    "limit_payloads",
    "payload_limit",
    "private_bytes",
    "trim",
    "usable_bytes",
    "use_one_arena",
]

_NONE = 1 << 62
_M_ARENA_MAX = -8  # from <malloc.h>
_limits: dict[int, int] = {}  # by the id of their owners


def limit_payloads(owner: object, most: int) -> None:
    """As long as `owner` lives, payloads that wait in this process take no more bytes than this.

    The lowest limit counts. Prefetchers, shard readers and the cache's writer ask for it. One payload that is
    larger passes alone.
    """
    if id(owner) not in _limits:
        weakref.finalize(owner, _limits.pop, id(owner), None).atexit = False
    _limits[id(owner)] = most


def payload_limit() -> int:
    """The most bytes of payloads; very large where nobody has limited them."""
    return min(list(_limits.values()), default=_NONE)


def private_bytes() -> int:
    """The memory that this process shares with no other, without memory files. It takes 10 ms to count it."""
    total, counts = 0, False
    for line in _lines("smaps"):
        if not line[:1].isupper():  # the header of a mapping
            counts = "/memfd:" not in line
        elif counts and line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1]) << 10
    return total


def usable_bytes(root: str = "/") -> int:
    """The memory of this machine, or less where a control group (of a container, of a job) has a limit."""
    top = Path(root)
    try:
        total = next(
            int(line.split()[1]) << 10
            for line in (top / "proc/meminfo").read_text().splitlines()
            if line.startswith("MemTotal:")
        )
    except (OSError, StopIteration):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in control_groups("memory", top):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2: "max" is no limit; version 1
            with contextlib.suppress(OSError, ValueError):
                total = min(total, int((folder / name).read_text()))
    return total


def anonymous_bytes() -> int:
    """The heap and the stacks of this process. After a fork that includes what it still shares."""
    line = next((line for line in _lines("status") if line.startswith("RssAnon:")), "RssAnon: 0 kB")
    return int(line.split()[1]) << 10


def use_one_arena() -> None:
    """Let all threads of this process take memory from one heap, before the first one starts. glibc only.

    By default glibc has eight heaps a core, and each keeps what its threads free.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    """Return freed memory to the system. With glibc only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _lines(file: str) -> list[str]:
    """The lines of a file of /proc/self; none where this kernel or sandbox does not have it."""
    try:
        return Path("/proc/self", file).read_text(errors="replace").splitlines()
    except OSError:
        return []


# A forked worker has a limit of its own.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_limits.clear)
