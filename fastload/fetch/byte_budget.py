"""The bytes that a prefetcher may hold of samples that it reads ahead.

The budget begins small, and doubles while a consumer waits although nothing but the budget holds the next
reads back. Workers that decode as fast as the store answers keep the first one: more samples would only lie
in memory.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from fastload.metrics.memory import payload_limit
from fastload.store.process import ProcessLocal

__all__ = ["ByteBudget", "budgeted_bytes"]

_FIRST = 8 << 20
_LEAST_READS = 32  # of large samples, that are begun at first
_WAITED = 0.1  # of the time; a consumer that waits less has enough


class ByteBudget:
    """The budget of one prefetcher. Callers hold its lock.

    Args:
        most: never more than this, nor more than this prefetcher's part of the process's limit.
        clock: in seconds.

    Attributes:
        value: as it was when it was last asked for.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._wanted = self.value = min(most, _FIRST)
        self._passed, self._waited = 0, 0.0  # bytes handed out, seconds waited for since it was set
        self._since = clock()
        _budgets.get().add(self)

    def bytes(self, size: int) -> int:
        """The bytes that may be held, where the next sample has this size."""
        share = payload_limit() // max(1, len(_budgets.get()))
        self.value = min(self._most, share, max(self._wanted, _LEAST_READS * size))
        return self.value

    def handed_out(self, size: int) -> None:
        """A sample has left."""
        self._passed += size

    def grow(self, size: int, seconds: float) -> bool:
        """The budget holds back a sample of this size, and a consumer has waited so long since the last call.

        Returns whether the budget has grown. Each step has to show its effect first: at the start of an
        epoch, every sample is waited for.
        """
        self._waited += seconds
        before, now = self.bytes(size), self._clock()
        if self._passed < before:
            return False
        is_short = self._waited > _WAITED * (now - self._since)
        self._passed, self._waited, self._since = 0, 0.0, now
        if is_short:
            self._wanted = max(self._wanted, min(self._most, 2 * before))
        return self.bytes(size) > before


_budgets: ProcessLocal[weakref.WeakSet[ByteBudget]] = ProcessLocal(weakref.WeakSet)


def budgeted_bytes() -> int:
    """The sum of the budgets of all prefetchers of this process, which is never above the process's limit."""
    return min(payload_limit(), sum(budget.value for budget in list(_budgets.get())))
