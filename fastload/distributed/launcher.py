"""This process's rank, world size and position on its node, as its launcher tells them; and its job.

A launcher that runs inside another one comes first: torchrun, mpirun and Ray under SLURM leave SLURM's
variables unchanged, and these then describe another process. So a launcher's facts about the node are used
only if its rank is the rank of this process.

A `Job` is the ranks that one launcher started, and that live at the same time. It is recognised by what its
ranks have in common and no other job has: a word in the store, where torch.distributed is initialized; else
the process that started them. It waits for no other rank: a rank may ask for what the others never ask for.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch.distributed
import torch.utils.data

from fastload.errors import ArgumentError
from fastload.metrics.machine import call_in_forks
from fastload.metrics.torch_private import default_store


class Launched(NamedTuple):
    """The facts that one launcher gives. None: it does not give that one."""

    rank: int
    replicas: int
    local: int | None = None  # rank among the ranks of its node
    local_ranks: int | None = None  # number of ranks on its node
    node: int | None = None
    nodes: int | None = None


class _Variables(NamedTuple):
    """The environment variables of a launcher; "" where it has none for a fact."""

    rank: str
    replicas: str
    local: str = ""
    local_ranks: str = ""
    node: str = ""


_TORCHRUN = _Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_HOROVOD = _Variables(
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK")
)
_OPEN_MPI = _Variables(
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
_MPICH = _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # Intel MPI too
_SLURM = _Variables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", node="SLURM_NODEID")
# `srun --ntasks-per-node` alone sets the last one; the others are "4(x2),3": two nodes of 4, and one of 3.
_SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_SLURM_TASKS_EACH = "SLURM_NTASKS_PER_NODE"
_SLURM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
_SLURM_CORES = "SLURM_CPUS_PER_TASK"
# All ranks of a job have the same values. Two jobs may have them too.
_OF_THE_JOB = (
    *("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"),
)
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def can_agree() -> bool:
    """Return whether the ranks of this job have a store in common: torch.distributed is initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def find_rank() -> tuple[int, int]:
    """Return (rank, number of ranks) of this process, by torch.distributed or its launcher; else (0, 1).

    Raises:
        ArgumentError: a launcher's variables are not integers.
    """
    if can_agree():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return next(((said.rank, said.replicas) for said in _said(strict=True)), (0, 1))


def find_launched(rank: int, replicas: int) -> Iterator[Launched]:
    """Return the launchers' facts about this rank, without inherited ones about another rank."""
    return (said for said in _said(strict=False) if (said.rank, said.replicas) == (rank, replicas))


def local_ranks() -> int:
    """Return the number of ranks of this job on this node; 1 where no launcher tells it."""
    return known_local_ranks() or 1


def known_local_ranks() -> int | None:
    """Return the number of ranks of this job on this node; None where no launcher tells of several."""
    with contextlib.suppress(ArgumentError):  # raised where the rank itself is needed
        for said in find_launched(*find_rank()):
            if said.local_ranks:
                return said.local_ranks
    for names in (_TORCHRUN, _HOROVOD, _OPEN_MPI, _MPICH):  # a script may set nothing but this
        if names.rank not in os.environ and (count := _number(names.local_ranks)):
            return count
    with contextlib.suppress(ArgumentError):
        return 1 if find_rank()[1] == 1 else None
    return None


def _launched_as() -> str:
    """Return what the launcher says about the job as a whole: the same for all of its ranks."""
    return " ".join(f"{name}={os.environ[name]}" for name in _OF_THE_JOB if name in os.environ)


def _restarts() -> int:
    """Return how often torchrun has started all ranks of this job again."""
    return _number(_RESTARTS) or 0


def cores_of_rank() -> int | None:
    """Return the number of cores that SLURM gives this rank alone; None where it does not tell."""
    with contextlib.suppress(ArgumentError):
        rank = find_rank()
        for said in _from_environment(_SLURM, strict=False):
            if (said.rank, said.replicas) == rank:
                return _number(_SLURM_CORES)
    return None


def _said(*, strict: bool) -> Iterator[Launched]:
    """Yield the facts of each launcher, the innermost first; `strict`: raise where one is no integer."""
    for names in (_TORCHRUN, _HOROVOD, _OPEN_MPI):
        yield from _from_environment(names, strict)
    # A Ray worker inherits the variables of the node's daemon, and they describe the daemon.
    yield from _from_ray()
    yield from _from_environment(_MPICH, strict)
    yield from map(_with_slurms_nodes, _from_environment(_SLURM, strict))


def _from_environment(names: _Variables, strict: bool) -> Iterator[Launched]:
    if names.rank not in os.environ or names.replicas not in os.environ:
        return
    try:
        rank, replicas = int(os.environ[names.rank]), int(os.environ[names.replicas])
    except ValueError:
        if not strict:
            return
        raise ArgumentError(
            f"the environment has {names.rank}={os.environ[names.rank]!r} and "
            f"{names.replicas}={os.environ[names.replicas]!r}, which are not integers: correct them, or pass "
            "rank and num_replicas"
        ) from None
    each = _number(names.local_ranks)
    nodes = -(-replicas // each) if each else None
    yield Launched(rank, replicas, _number(names.local), each, _number(names.node), nodes)


def _with_slurms_nodes(said: Launched) -> Launched:
    nodes = next(filter(None, map(_number, _SLURM_NODES)), None)
    each = next(
        filter(None, (_of_node(os.environ.get(name, ""), said.node or 0) for name in _SLURM_TASKS)), None
    )
    if each is None:
        each = _number(_SLURM_TASKS_EACH) or (-(-said.replicas // nodes) if nodes else None)
    return said._replace(local_ranks=each, nodes=nodes)


def _of_node(counts: str, node: int) -> int | None:
    """Return the ranks of a node in SLURM's "4(x2),3"; None for another text, or an unlisted node."""
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        times = int(match[2] or 1)
        if node < times:
            return int(match[1])
        node -= times
    return None


def _from_ray() -> Iterator[Launched]:
    # A worker of Ray Train has it imported; to import it here would cost seconds.
    train = sys.modules.get("ray.train")
    if train is None:
        return
    try:
        context = train.get_context()
        rank, replicas = int(context.get_world_rank()), int(context.get_world_size())
    except (AttributeError, RuntimeError, TypeError):
        return  # imported, but this process is no worker of it
    try:
        local, each, node = context.get_local_rank(), context.get_local_world_size(), context.get_node_rank()
    except (AttributeError, RuntimeError, TypeError):
        yield Launched(rank, replicas)
    else:
        yield Launched(rank, replicas, int(local), int(each), int(node), -(-replicas // int(each)))


def _number(name: str) -> int | None:
    value = os.environ.get(name, "") if name else ""
    return int(value) if value.isdecimal() else None


_forked = False  # the connection of a store belongs to the process that opened it


def _note_fork() -> None:
    global _forked
    _forked = True
    this_process.cache_clear()


call_in_forks(_note_fork)


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
        """Return what the first rank of the job has said under this name: `text`, if this is the first."""
        if not _has_store():
            return text
        return str(default_store().compare_set(f"fastload/{self.word}/{name}", "", text).decode())


def find_job() -> Job | None:
    """Return the job that this process is a rank of; None where it is alone, or nothing tells the others."""
    with contextlib.suppress(ArgumentError):  # raised where the rank itself is needed
        rank, ranks = find_rank()
        # A worker has the environment of its rank, and would be taken for it.
        if ranks > 1 and torch.utils.data.get_worker_info() is None:
            word = _starter()
            if _has_store():
                word = default_store().compare_set("fastload/job", "", word or uuid.uuid4().hex).decode()
            return Job(word, rank, this_process(), _restarts()) if word else None
    return None


def _has_store() -> bool:
    return can_agree() and not _forked


def _starter() -> str:
    """Return the process that started this one, and what it said about the job; "" if it is gone."""
    parent = _process(os.getppid())
    return f"{parent} {_launched_as()}" if parent else ""


@cache
def this_process() -> str:
    """Return a name that no other process has, on any machine."""
    return _process(os.getpid())


def is_alive(process: str) -> bool:
    """Return whether the process of this name may still run: one of another machine may."""
    machine, _, rest = process.rpartition(":")
    return machine != _machine() or _process(int(rest.partition("-")[0])) == process


def _process(number: int) -> str:
    """Return the name of a process of this machine; "" if there is none."""
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
