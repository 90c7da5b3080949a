"""The disk of a cache: how fast it is, and how much of it free memory holds."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_BYTES = 64 << 20


class Disk(NamedTuple):
    """Bytes per second, sequential, without the page cache."""

    write: float
    read: float


def measure_disk(directory: Path) -> Disk:
    """Write 64 MiB to a file in `directory`, made if absent, and read it back.

    Raises:
        OSError: the directory is not writable, or the disk is full.
    """
    directory.mkdir(parents=True, exist_ok=True)
    block = os.urandom(1 << 20)
    with _scratch_file(directory) as fd:
        start = time.perf_counter()
        for _ in range(_BYTES // len(block)):
            os.write(fd, block)
        os.fsync(fd)
        written = time.perf_counter() - start
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        for place in range(0, _BYTES, len(block)):
            os.pread(fd, len(block), place)
        return Disk(_BYTES / written, _BYTES / (time.perf_counter() - start))


@contextlib.contextmanager
def _scratch_file(directory: Path) -> Iterator[int]:
    fd, path = tempfile.mkstemp(prefix="fastload-disk-", dir=directory)
    try:
        Path(path).unlink()  # now, so that a killed process leaves nothing
        yield fd
    finally:
        os.close(fd)


def memory_for_pages(root: str = "/") -> int:
    """Bytes of memory that can hold pages of files: what is free, or the pages of other files.

    Where a control group (version 2) has a limit, no more than what that leaves.
    """
    memory = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (Path(root) / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                memory = int(line.split()[1]) << 10
    group = Path(root) / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):  # no limit reads as "max"
        limit = int((group / "memory.max").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat.get("file", 0))
        memory = min(memory, max(0, limit - used))
    return memory
