"""The ranks of a job: their launcher, the number of this rank, and what they agree on."""

from fastload.distributed.launcher import (
    Launched,
    cores_of_rank,
    find_launched,
    find_rank,
    known_local_ranks,
    local_ranks,
)

__all__ = ["Launched", "cores_of_rank", "find_launched", "find_rank", "known_local_ranks", "local_ranks"]
