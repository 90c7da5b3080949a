"""The disk of a cache: how fast it is, and how much of it free memory holds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fastload.cache.directory import FOLDER
from fastload.store.files import whole_file

__all__ = ["MEASURED", "Disk", "known_disk", "measure_disk", "memory_for_pages"]

MEASURED = "disk.json"  # in the folder of a cache: the speed that one of its processes measured
_BYTES = 64 << 20
_VALID = 24 * 3600.0  # seconds
_PATIENCE = 30.0  # seconds that a slow disk may take


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


def known_disk(path: str) -> Disk | None:
    """The speed of the disk of the cache at `path`, measured once a day by one of the processes that use it.

    The others wait for it: side by side, each would see its share of the disk. None: it cannot be measured,
    or the process that does it is at it for too long.
    """
    folder = Path(path) / FOLDER
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        _lock(fd)
        known = _kept(folder / MEASURED)
        if known is None:
            known = measure_disk(folder)
            with whole_file(MEASURED, folder=fd) as file:
                file.write(json.dumps(known._asdict()).encode())
        return known
    except OSError:
        return None
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    """Lock the folder. It is the measurement's alone, and ends with the descriptor.

    Raises:
        OSError: another process holds it for too long.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _kept(file: Path) -> Disk | None:
    try:
        if abs(time.time() - file.stat().st_mtime) > _VALID:
            return None
        found = json.loads(file.read_bytes())
        disk = Disk(float(found["write"]), float(found["read"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return disk if min(disk) > 0 else None


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
