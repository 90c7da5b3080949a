"""A process's part of what its node may have in flight."""

from __future__ import annotations

from fastload.distributed import local_ranks
from fastload.fetch.limit import ConcurrencyLimiter
from fastload.store import Store

__all__ = ["process_share"]

_NODE_REQUESTS = 1024  # in flight at most, unless the user says
_PROCESS_REQUESTS = 128  # more threads than that cost more than they bring
_NODE_BYTES = 4 << 30  # read, or being read, and not yet taken
_PROCESS_BYTES = 256 << 20


def process_share(store: Store) -> tuple[ConcurrencyLimiter, int]:
    """This process's part of what the node may have in flight: requests, and bytes."""
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    processes = local_ranks() * (1 if worker is None else worker.num_workers)
    size = max(_PROCESS_BYTES // 8, min(_PROCESS_BYTES, _NODE_BYTES // processes))
    pinned = store.reading.max_requests
    if pinned is not None:
        return ConcurrencyLimiter(max(1, pinned // processes), pinned=True), size
    return ConcurrencyLimiter(max(1, min(_PROCESS_REQUESTS, _NODE_REQUESTS // processes))), size
