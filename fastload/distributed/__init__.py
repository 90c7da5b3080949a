"""The ranks of a job: who started them, which one this is, and which samples are its own."""

from fastload.distributed.launcher import Launched, find_launched, find_rank, local_ranks

__all__ = ["Launched", "find_launched", "find_rank", "local_ranks"]
