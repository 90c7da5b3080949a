"""The machine that this process runs on: its system, and the cores, memory and device that the process uses.

Cores and memory follow the affinity mask and the control groups: in a container, the machine has more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fastload.errors import PlatformError

if TYPE_CHECKING:
    import torch

# Public names that need nothing of POSIX.
ANYWHERE = (
    "BudgetSampler",
    "ByEpoch",
    "CenterCrop",
    "DistributedSampler",
    "Normalize",
    "RandomResizedCrop",
    "ShardSampler",
    "fuse",
)

_MFD_CLOEXEC = 1


def why_not_linux() -> str:
    """Return one sentence if this is not Linux; else ""."""
    system = f"this is {sys.platform}"
    if str(sys.platform) == "linux":
        return ""
    if str(sys.platform) == "darwin":
        return (
            f"fastload's loader, datasets and cache run on Linux, and {system}: here datasets read local "
            "files with num_workers=0 and without a cache; for the rest use a Linux container"
        )
    return (
        f"fastload's loader, datasets and cache run on Linux, and {system}: here only its transforms and "
        f"samplers can be imported ({', '.join(ANYWHERE)}); for the rest use a Linux container, or WSL 2"
    )


def need_linux() -> None:
    """Raise `PlatformError` where this is no Linux."""
    why = why_not_linux()
    if why:
        raise PlatformError(why)


def importable(name: str) -> bool:
    """Return whether a public name can be imported. On macOS all can; some raise when they are used."""
    return name in ANYWHERE or str(sys.platform) in ("linux", "darwin")


def call_in_forks(function: Callable[[], object]) -> None:
    """Call a function in every process that is forked from this one, where processes can be forked."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def memory_file(name: str) -> int:
    """Return a descriptor of a new file in memory, which has no path that could stay behind.

    Pythons that were built for an old glibc, as conda's are, lack `os.memfd_create`, and then glibc itself is
    asked. macOS has nothing like it: there the file is a deleted one on disk.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    if str(sys.platform) == "linux":
        descriptor: int = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC)
        if descriptor < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return descriptor
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


def default_device() -> torch.device:
    """Return torch's default device. After `set_default_device(None)`, torch 2.8 and 2.9 raise instead."""
    import torch  # this module works without it

    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def usable_cores() -> int:
    """Return the whole cores of `Cores`, at least 1: as many processes can run at a time."""
    return max(1, int(Cores().usable))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


class Cores:
    """The cores that this process shares with others, and their use.

    Args:
        root: the folder of /proc and /sys.

    Attributes:
        usable: the number of cores in the affinity mask, or fewer (perhaps a fraction) where a control group
            of version 1 or 2 has a CPU quota. `os.cpu_count()` ignores both: in a container it is the number
            of the machine.
    """

    def __init__(self, root: str = "/") -> None:
        self._root = Path(root)
        self._cpus = _affinity()
        self.usable = float(len(self._cpus))
        self._group: Path | None = None  # the folder whose quota binds
        for folder in control_groups("cpu", self._root):
            quota = _quota(folder)
            if quota is not None and quota < self.usable:
                self.usable, self._group = quota, folder

    def busy_seconds(self) -> float:
        """Return how long these cores have worked, for all processes; only differences have a meaning.

        Where a quota binds, the core-seconds of the control group.
        """
        used = _usage(self._group) if self._group is not None else None
        return self._machine_seconds() if used is None else used

    def _machine_seconds(self) -> float:
        usable = {f"cpu{cpu}" for cpu in self._cpus}
        ticks = 0
        for line in _lines(self._root / "proc/stat"):  # without it no core counts as busy
            name, *fields = line.split()
            if name in usable:
                user, nice, system, _, _, irq, soft = map(int, fields[:7])
                ticks += user + nice + system + irq + soft
        return ticks / os.sysconf("SC_CLK_TCK")


def control_groups(kind: str, root: Path) -> Iterator[Path]:
    """Yield the folders of our control group and of its parents, for "cpu" or "memory".

    A container sees its own group as the root of the file system, whatever its path on the host is.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / (kind if kinds else "")
        inside = top / path.lstrip("/")
        yield from [inside, *(parent for parent in inside.parents if parent.is_relative_to(top))]


def _quota(folder: Path) -> float | None:
    """Return the quota in cores; None where there is none, or the files have an unknown form."""
    try:
        if (folder / "cpu.max").exists():  # version 2: "max 100000" or "150000 100000"
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        cores = int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None


def _usage(folder: Path) -> float | None:
    """Return core-seconds used by the group."""
    try:
        if (folder / "cpu.stat").exists() and (folder / "cpu.max").exists():
            fields = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            return int(fields["usage_usec"]) / 1e6
        return int((folder / "cpuacct.usage").read_text()) / 1e9
    except (OSError, ValueError, KeyError):
        return None


_NONE = 1 << 62
_M_ARENA_MAX = -8  # from <malloc.h>
_limits: dict[int, int] = {}  # by the id of their owners


def limit_payloads(owner: object, most: int) -> None:
    """Let payloads that wait in this process take no more bytes than this, as long as `owner` lives.

    The lowest limit counts. Prefetchers, shard readers and the cache's writer ask for it. One payload that is
    larger passes alone.
    """
    if id(owner) not in _limits:
        weakref.finalize(owner, _limits.pop, id(owner), None).atexit = False
    _limits[id(owner)] = most


def payload_limit() -> int:
    """Return the most bytes of payloads; very large where nobody has limited them."""
    return min(list(_limits.values()), default=_NONE)


def private_bytes() -> int:
    """Count the memory that this process shares with no other, without memory files. It takes 10 ms."""
    total, counts = 0, False
    for line in _lines(Path("/proc/self/smaps")):
        if not line[:1].isupper():  # the header of a mapping
            counts = "/memfd:" not in line
        elif counts and line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1]) << 10
    return total


def usable_bytes(root: str = "/") -> int:
    """Return the memory of this machine, or less where a control group (container, job) has a limit."""
    top = Path(root)
    total = _field(top / "proc/meminfo", "MemTotal")
    if total is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _memory_limits(top))])


def memory_for_pages(root: str = "/") -> int:
    """Return bytes of memory that can hold pages of files: what is free, or the pages of other files.

    Where a control group has a limit, no more than what that leaves.
    """
    memory = _field(Path(root) / "proc/meminfo", "MemAvailable") or 0
    return min([memory, *(max(0, limit - used) for limit, used in _memory_limits(Path(root)))])


# Files of a control group, of version 2 and 1: its limit, its use; and the pages of files in memory.stat.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use without pages of files) of each control group of ours that has a limit."""
    for folder in control_groups("memory", root):
        for limit, use, pages in _MEMORY_FILES:
            used = 0
            try:
                most = int((folder / limit).read_text())  # no limit reads as "max"
                with contextlib.suppress(OSError, ValueError):
                    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    used = int((folder / use).read_text()) - int(stat.get(pages, 0))
            except (OSError, ValueError):
                continue
            yield most, used


def anonymous_bytes() -> int:
    """Return the heap and the stacks of this process. After a fork that includes what it still shares."""
    return _field(Path("/proc/self/status"), "RssAnon") or 0


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


def _lines(file: Path) -> list[str]:
    """Return the lines of a file of /proc; none where this kernel or sandbox does not have it."""
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _field(file: Path, name: str) -> int | None:
    """Return the bytes that a line "NAME: 12 kB" of a file of /proc tells; None where there is none."""
    sizes = (line.split()[1] for line in _lines(file) if line.startswith(f"{name}:"))
    return next((int(size) << 10 for size in sizes), None)


call_in_forks(_limits.clear)  # a forked worker has a limit of its own
