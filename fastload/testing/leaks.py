"""What this process holds that something may have left behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

__all__ = ["Held", "held", "left_behind"]

Held = dict[str, set[object]]  # kind -> what there is of it
_LOOK_SECONDS = 0.05
_SHARED = ("torch", "fastload", "psm_")  # the last: multiprocessing.shared_memory


def held() -> Held:
    """Child processes, threads, open files and shared memory. Elsewhere than on Linux: threads.

    What multiprocessing keeps on purpose until the end of this process does not count.
    """
    found: Held = {"threads": {thread.ident for thread in threading.enumerate()}}
    if sys.platform != "linux":
        return found
    servers, pipes = _multiprocessing_servers()
    on_linux: Held = {
        "processes": _children() - servers,
        "descriptors": {
            told
            for fd in Path("/proc/self/fd").iterdir()
            if int(fd.name) not in pipes and (told := _describe(fd)) is not None
        },
        "shared memory": {
            path for path in Path("/dev/shm").iterdir() if path.name.startswith(_SHARED) and _is_mine(path)
        },
    }
    return found | on_linux


def left_behind(before: Held, seconds: float, still: Callable[[], Held] = held) -> Held:
    """What is there now and was not before; what goes within `seconds` does not count."""
    deadline = time.monotonic() + seconds
    while True:
        gc.collect()
        now = still()
        left = {kind: now[kind] - before[kind] for kind in now if now[kind] - before[kind]}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_LOOK_SECONDS)


def _children() -> set[object]:
    """The children of this process, and theirs."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text()
            except OSError:  # it has ended meanwhile
                continue
            # The name stands in brackets and may have any character in it: the fields begin behind it.
            parents.setdefault(int(status.rpartition(")")[2].split()[1]), []).append(int(folder.name))
    found: set[object] = set()
    todo = [os.getpid()]
    while todo:
        children = parents.get(todo.pop(), [])
        found.update(children)
        todo += children
    return found


def _multiprocessing_servers() -> tuple[set[Any], set[Any]]:
    """(processes, descriptors) that multiprocessing keeps on purpose until this process ends."""
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    return {server._forkserver_pid, tracker._pid}, {server._forkserver_alive_fd, tracker._fd}


def _is_mine(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:  # it has gone meanwhile
        return False


def _describe(fd: Path) -> tuple[str, str] | None:
    try:
        target = str(fd.readlink())
    except OSError:
        return None
    # obstore's runtime has three of these for the life of a process that used it.
    return None if target in ("anon_inode:[eventpoll]", "anon_inode:[eventfd]") else (fd.name, target)
