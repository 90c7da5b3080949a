"""The CPU cores that this process may use, and how busy they are: by affinity and control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Cores", "control_groups", "usable_cores"]


def usable_cores() -> int:
    """The whole cores of `Cores`, at least 1: as many processes can run at a time."""
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
        """Core-seconds that these cores have worked, for all processes; only differences have a meaning.

        Where a quota binds, the core-seconds of the control group.
        """
        used = _usage(self._group) if self._group is not None else None
        return self._machine_seconds() if used is None else used

    def _machine_seconds(self) -> float:
        usable = {f"cpu{cpu}" for cpu in self._cpus}
        ticks = 0
        try:
            lines = (self._root / "proc/stat").read_text().splitlines()
        except OSError:  # some sandboxes have none: then no core counts as busy
            return 0.0
        for line in lines:
            name, *fields = line.split()
            if name in usable:
                user, nice, system, _, _, irq, soft = map(int, fields[:7])
                ticks += user + nice + system + irq + soft
        return ticks / os.sysconf("SC_CLK_TCK")


def control_groups(kind: str, root: Path) -> Iterator[Path]:
    """The folders of our control group and of its parents, for "cpu" or "memory".

    A container sees its own group as the root of the file system, whatever its path on the host is.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / (kind if kinds else "")
        inside = top / path.lstrip("/")
        yield from [inside, *(parent for parent in inside.parents if parent.is_relative_to(top))]


def _quota(folder: Path) -> float | None:
    """The quota in cores; None where there is none, or the files have an unknown form."""
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
    """Core-seconds used by the group."""
    try:
        if (folder / "cpu.stat").exists() and (folder / "cpu.max").exists():
            fields = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            return int(fields["usage_usec"]) / 1e6
        return int((folder / "cpuacct.usage").read_text()) / 1e9
    except (OSError, ValueError, KeyError):
        return None
