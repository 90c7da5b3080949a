"""One job: the ranks that one launcher started, and that live at the same time.

A job is recognised by what its ranks have in common and no other job has: a word in the key-value store of
torch.distributed, where that is initialized; else the process that started them. Nothing here waits for
another rank: a rank may ask for what the others never ask for.
"""

from __future__ import annotations

import contextlib
import os
import platform
import uuid
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch.utils.data

from fastload.distributed.agreement import can_agree
from fastload.distributed.launcher import find_rank, launched_as, restarts
from fastload.errors import ArgumentError
from fastload.metrics.torch_private import default_store

__all__ = ["Job", "find_job", "is_alive", "this_process"]

_forked = False  # the connection of a store belongs to the process that opened it


def _note_fork() -> None:
    global _forked
    _forked = True
    this_process.cache_clear()


os.register_at_fork(after_in_child=_note_fork)


class Job(NamedTuple):
    """This rank's part in a job of several ranks.

    word: all ranks have it in common. Another job may only have it after this one.
    rank: the number of this rank.
    process: see `this_process`.
    restarts: how often the launcher has started all ranks of this job again.
    """

    word: str
    rank: int
    process: str
    restarts: int

    def first(self, name: str, text: str) -> str:
        """What the first rank of the job has said under this name; it is `text` if this is the first."""
        if not _has_store():
            return text
        return str(default_store().compare_set(f"fastload/{self.word}/{name}", "", text).decode())


def find_job() -> Job | None:
    """The job that this process is a rank of; None where it is alone, or nothing tells who the others are."""
    with contextlib.suppress(ArgumentError):  # raised where the rank itself is needed
        rank, ranks = find_rank()
        # A worker has the environment of its rank, and would be taken for it.
        if ranks > 1 and torch.utils.data.get_worker_info() is None:
            word = _starter()
            if _has_store():
                word = default_store().compare_set("fastload/job", "", word or uuid.uuid4().hex).decode()
            return Job(word, rank, this_process(), restarts()) if word else None
    return None


def _has_store() -> bool:
    return can_agree() and not _forked


def _starter() -> str:
    """The process that started this one, and what it said about the job; "" if it is gone."""
    parent = _process(os.getppid())
    return f"{parent} {launched_as()}" if parent else ""


@cache
def this_process() -> str:
    """A name that no other process has, on any machine."""
    return _process(os.getpid())


def is_alive(process: str) -> bool:
    """Whether the process of this name may still run: one of another machine may."""
    machine, _, rest = process.rpartition(":")
    return machine != _machine() or _process(int(rest.partition("-")[0])) == process


def _process(number: int) -> str:
    """The name of a process of this machine; "" if there is none."""
    try:
        # The name of the program, in brackets, may have spaces and brackets of its own.
        state, *fields = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else f"{_machine()}:{number}-{fields[18]}"  # the 22nd: when it was started


@cache
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = Path("/proc/self/ns/pid").readlink()  # a container numbers its processes by itself
    except OSError:
        return platform.node()
    return f"{platform.node()} {boot} {names}"
