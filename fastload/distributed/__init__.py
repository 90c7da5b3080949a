"""Several ranks: who started them, and which one this is."""

from fastload.distributed.launcher import Launched, find_launched, find_rank, local_ranks

__all__ = ["Launched", "find_launched", "find_rank", "local_ranks"]
