"""One stream of an epoch over shards: `SampleStream` for `ShardDataset`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload.fetch.interleave import Blocks, Found
from fastload.fetch.pool import ReadPool

__all__ = ["ShardStream"]


class ShardStream:
    """See `SampleStream`.

    Args:
        plan: JSON that names the stream; goes into the state as it is.
        interleave: opened where the state says.
        blocks: shuffles it.
        pool: the lanes' threads, which end with the stream.
        hold: keeps a record's payload until it is asked for; returns its id.
    """

    def __init__(
        self, plan: dict[str, Any], blocks: Blocks, pool: ReadPool, hold: Callable[[Found], int]
    ) -> None:
        self._plan = plan
        self._blocks = blocks
        self._pool = pool
        self._hold = hold
        self._closed = False

    def take(self, n: int) -> list[int]:
        found = [] if self._closed else self._blocks.take(n)
        return [self._hold(one) for one in found]

    def state(self) -> dict[str, Any]:
        return {"plan": self._plan, "at": self._blocks.state()}

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._blocks.close()
            self._pool.close()
