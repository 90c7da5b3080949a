"""One table of launchers: the rank, the ranks of the node and the node are read from the same variables."""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch

from fastload import DistributedSampler
from fastload.distributed import find_rank, local_ranks
from fastload.errors import ArgumentError
from fastload.fetch.threads import process_share
from fastload.store import open_store
from fastload.workers.autoscale import ceiling

_PREFIXES = ("SLURM_", "OMPI_", "HOROVOD_", "PMI_", "MPI_", "LOCAL_", "GROUP_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name in ("RANK", "WORLD_SIZE") or name.startswith(_PREFIXES):
            monkeypatch.delenv(name)


def slurm(rank: int, tasks: int, node: int, nodes: int, local: int, **others: str) -> dict[str, str]:
    """What srun sets for every task, `--ntasks-per-node` or not."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NODEID": str(node),
        "SLURM_NNODES": str(nodes),
        "SLURM_LOCALID": str(local),
    } | {f"SLURM_{name}": value for name, value in others.items()}


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
HOROVOD = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
BATCH_STEP = slurm(0, 1, 0, 1, 0, TASKS_PER_NODE="1")  # a script's own variables, which its children inherit


@pytest.mark.parametrize(
    ("variables", "rank", "ranks_here"),
    [
        (TORCHRUN, (5, 8), 4),
        (HOROVOD, (5, 8), 4),
        (OPEN_MPI, (5, 8), 4),
        (MPICH, (5, 8), 4),
        (slurm(5, 16, 0, 2, 5, NTASKS_PER_NODE="8"), (5, 16), 8),
        (slurm(5, 16, 0, 2, 5, TASKS_PER_NODE="8(x2)"), (5, 16), 8),
        (slurm(9, 11, 2, 3, 1, TASKS_PER_NODE="4(x2),3"), (9, 11), 3),
        (slurm(5, 11, 1, 3, 1, TASKS_PER_NODE="4(x2),3"), (5, 11), 4),
        (slurm(1, 4, 0, 2, 1, STEP_TASKS_PER_NODE="2(x2)", TASKS_PER_NODE="8(x2)"), (1, 4), 2),
        (slurm(1, 4, 0, 2, 1, STEP_NUM_NODES="1", TASKS_PER_NODE="garbage"), (1, 4), 4),
        (slurm(5, 16, 0, 2, 5), (5, 16), 8),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "16"}, (5, 16), 1),
        ({"LOCAL_WORLD_SIZE": "2"}, (0, 1), 2),
        ({}, (0, 1), 1),
        # One inside another: the inner one's is right.
        (TORCHRUN | slurm(1, 2, 1, 2, 0, TASKS_PER_NODE="1(x2)"), (5, 8), 4),
        (OPEN_MPI | BATCH_STEP, (5, 8), 4),
        (OPEN_MPI | slurm(0, 8, 0, 8, 0, TASKS_PER_NODE="1(x8)"), (5, 8), 4),
        # A script that exports torch's variables in a task of srun, and one that starts ranks by itself.
        ({"RANK": "5", "WORLD_SIZE": "16"} | slurm(5, 16, 0, 2, 5, TASKS_PER_NODE="8(x2)"), (5, 16), 8),
        ({"RANK": "5", "WORLD_SIZE": "16"} | slurm(0, 2, 0, 2, 0, TASKS_PER_NODE="1(x2)"), (5, 16), 1),
    ],
)
def test_rank_and_ranks_of_the_node_come_from_the_launcher(
    variables: dict[str, str], rank: tuple[int, int], ranks_here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_rank() == rank
    sampler = DistributedSampler(range(100))
    assert (sampler.rank, sampler.num_replicas) == rank
    given = DistributedSampler(range(100), num_replicas=1, rank=0)
    assert (given.rank, given.num_replicas) == (0, 1)
    assert local_ranks() == ranks_here
    assert ceiling(64) == ceiling(64 / ranks_here, 1)
    limit, _ = process_share(open_store("memory://shared", max_requests=64))
    assert limit.value == 64 // ranks_here


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (HOROVOD, (1, 1, 2)),
        (TORCHRUN, (1, 1, 2)),
        (slurm(5, 8, 1, 2, 2), (1, 2, 2)),
        (slurm(5, 8, 1, 4, 1, STEP_NUM_NODES="2", STEP_TASKS_PER_NODE="4(x2)"), (1, 1, 2)),
    ],
    ids=["Horovod", "torchrun", "srun -m cyclic", "a step on some of the nodes"],
)
def test_node_comes_from_the_launcher(
    variables: dict[str, str], place: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sampler = DistributedSampler(range(80), partition="node")
    assert sampler._place == place
    shares = [DistributedSampler(range(80), 2, node, partition="node", num_nodes=2) for node in range(2)]
    assert set(sampler) <= set(shares[1]), "of the second node"
    assert DistributedSampler(range(80), 8, 6, partition="node", num_nodes=4)._place == (3, 0, 4)


@pytest.mark.parametrize(
    ("variables", "cores", "most"),
    [
        # Bound by srun to 12 cores of its own; not bound: 8 ranks share 96; torchrun in a task of 96.
        (slurm(5, 8, 5, 1, 0, STEP_TASKS_PER_NODE="8", CPUS_PER_TASK="12"), 12, 11),
        (slurm(5, 8, 5, 1, 0, STEP_TASKS_PER_NODE="8", CPUS_PER_TASK="12"), 96, 11),
        (slurm(5, 8, 5, 1, 0, STEP_TASKS_PER_NODE="8"), 96, 11),
        (TORCHRUN | slurm(1, 2, 0, 2, 1, STEP_TASKS_PER_NODE="1(x2)", CPUS_PER_TASK="96"), 96, 22),
    ],
)
def test_cores_that_slurm_binds_to_a_rank_are_not_divided(
    variables: dict[str, str], cores: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ceiling(cores) == most


def test_ray_train_says_rank_and_node(monkeypatch: pytest.MonkeyPatch) -> None:
    context = types.SimpleNamespace(
        get_world_rank=lambda: 5,
        get_world_size=lambda: 8,
        get_local_rank=lambda: 1,
        get_local_world_size=lambda: 4,
        get_node_rank=lambda: 1,
    )
    train = types.ModuleType("ray.train")
    train.get_context = lambda: context  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.train", train)
    for name, value in (BATCH_STEP | {"PMI_RANK": "0", "PMI_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)  # of the daemon
    assert find_rank() == (5, 8) and local_ranks() == 4
    assert DistributedSampler(range(80), partition="node")._place == (1, 1, 2)


def test_ranks_that_a_script_starts_do_not_take_their_parents_variables_for_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in slurm(0, 2, 0, 2, 0, TASKS_PER_NODE="1(x2)", NTASKS_PER_NODE="1").items():
        monkeypatch.setenv(name, value)
    assert local_ranks() == 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    assert find_rank() == (3, 8) and local_ranks() == 1


def test_variables_that_are_no_numbers_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert local_ranks() == 1
    with pytest.raises(ArgumentError, match=r"RANK='first'.*pass rank and num_replicas"):
        DistributedSampler(range(10))
