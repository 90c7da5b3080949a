"""When to ask a second time for a read that is late. Pure arithmetic on what was measured."""

from __future__ import annotations

from collections import deque

__all__ = ["Hedge"]

_SHARE = 0.03  # of the reads may be asked for twice
_QUANTILE = 0.95
_REMEMBERED = 512
_ENOUGH = 64


class Hedge:
    """Decides for one process. Only reads that a consumer waits for are worth asking twice."""

    def __init__(self) -> None:
        self._latencies: deque[float] = deque(maxlen=_REMEMBERED)
        self._reads = self._hedged = 0

    def finished(self, seconds: float) -> None:
        """One read took so long."""
        self._latencies.append(seconds)
        self._reads += 1

    def due(self, seconds: float) -> bool:
        """Whether to ask again for a read that has taken `seconds` so far. True counts as done."""
        if self._reads < _ENOUGH or self._hedged + 1 > _SHARE * self._reads:
            return False
        late = sorted(self._latencies)[int(_QUANTILE * len(self._latencies))]
        if seconds <= late:
            return False
        self._hedged += 1
        return True
