"""What the launcher tells of this node."""

from __future__ import annotations

import os

__all__ = ["local_ranks"]

# torchrun; Open MPI; MPICH and Intel MPI; SLURM's srun
_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


def local_ranks() -> int:
    """How many ranks of this job run on this node; 1 where no launcher says so."""
    for name in _VARIABLES:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return 1
