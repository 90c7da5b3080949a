"""The limits of reading in one process: requests in flight, bytes ahead, requests sent a second time.

Both numbers begin small and are found by measuring. More requests go out while that makes a consumer wait
less, and fewer when the store asks for it. The bytes double while a consumer waits although nothing but they
hold the next reads back: workers that decode as fast as the store answers keep the first budget, because more
samples would only lie in memory.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fastload.distributed import local_ranks
from fastload.metrics.machine import payload_limit
from fastload.store import Store
from fastload.store.process import ProcessLocal


@dataclass(frozen=True)
class ReadSettings:
    """Limits of reading.

    Attributes:
        large_object: bytes from which on an object is read in ranges, side by side.
        range_size: bytes of such a range at most.
        process_requests: in flight at most from one process. More threads cost more than they bring.
        node_requests: in flight at most from all processes of a node, unless the user gives `max_requests`.
        process_bytes: at most, of samples that were read or are being read and were not delivered.
        node_bytes: the same for all processes of a node.
        inflight_patience: seconds that another run gets for an object that it is reading into our cache.
        hedge_after: reads that are measured before one of them is requested a second time.
        hedge_share: of the reads that may be requested a second time, 0 to 1.
    """

    large_object: int = 16 << 20
    range_size: int = 8 << 20
    process_requests: int = 128
    node_requests: int = 1024
    process_bytes: int = 256 << 20
    node_bytes: int = 4 << 30
    inflight_patience: float = 2.0
    hedge_after: int = 64
    hedge_share: float = 0.03


# The settings of prefetchers that are given none of their own.
SETTINGS = ReadSettings()


_FIRST_REQUESTS = 32
_GLANCE = 4  # reads, after which
_FAR = 0.06  # seconds are far away
_HOLD = 5.0  # seconds until growth that did not help is tried again
_CUT = 1.0  # seconds for a cut to show: the refusals of one moment are one
_RECOVERY = 0.5  # seconds per request more after a cut
_QUANTILE = 0.95  # of the latest reads: one that takes longer is late
_REMEMBERED = 512  # reads of which the latency is kept


class ConcurrencyLimiter:
    """The number of requests in flight that this process may have.

    By Little's law the rate is requests in flight / latency. So more requests help as long as the latency
    stays; once it grows as they do, something is full, and more of them only wait in a longer queue.

    * A consumer that waits, while every request allowed is in flight, doubles the limit, once per two rounds
      of `value` reads. If a longer latency cancels most of that, the step is undone for a while. If the first
      answers come from far away, the first step is made at once.
    * A store that asks for fewer requests halves it, at most once a second; from then on it grows by one per
      half second. All processes of a node meet the same store and do the same, so their shares stay fair
      without a word between them, and nothing is left behind by one that dies.

    Args:
        most: never more than this.
        pinned: start at `most` and go below only when the store asks for it.

    Every call gets the time `now` in seconds, by any clock.
    """

    def __init__(self, most: int, *, pinned: bool = False) -> None:
        self.most = most
        self._pinned = pinned
        self.value = most if pinned else min(_FIRST_REQUESTS, most)
        self._reads, self._seconds = 0, 0.0  # since the limit's last change
        self._before: tuple[int, float] | None = None  # the limit before it grew, and its latency
        self._far = self._stepped = False
        self._hold = -1.0  # no growth until then
        self._cut_at: float | None = None
        self._recovered_at = 0.0

    def finished(self, seconds: float) -> None:
        """Note how long a read took."""
        self._reads += 1
        if self._reads == _GLANCE:
            self._far = seconds > _FAR
        # The first round after a step is still that of the step before, or opens connections.
        if self._reads > self.value:
            self._seconds += seconds

    def grow(self, now: float) -> None:
        """Grow where it helps: the consumer waits, and `value` requests are in flight."""
        if self._cut_at is not None:
            self._recover(now)
        elif self._far and not self._pinned and not self._stepped:
            self._stepped = True
            self._set(min(self.most, 2 * self.value))
        elif not self._pinned and self._reads >= 2 * self.value and now >= self._hold:
            self._step(self._seconds / (self._reads - self.value), now)

    def slow_down(self, now: float) -> None:
        """Halve the limit: the store asked for fewer requests."""
        if self._cut_at is None or now - self._cut_at >= _CUT:
            self._cut_at = self._recovered_at = now
            self._set(max(1, self.value // 2))

    def _step(self, latency: float, now: float) -> None:
        before, self._before, self._stepped = self._before, None, True
        if before is not None and latency / before[1] > 1 + 0.7 * (self.value / before[0] - 1):
            self._hold = now + _HOLD
            self._set(before[0])
        elif self.value < self.most:
            self._before = self.value, latency
            self._set(min(self.most, 2 * self.value))

    def _recover(self, now: float) -> None:
        steps = int((now - self._recovered_at) / _RECOVERY)
        if steps:
            self._recovered_at += steps * _RECOVERY
            self._set(min(self.most, self.value + steps))

    def _set(self, value: int) -> None:
        self.value = value
        self._reads, self._seconds = 0, 0.0


class Hedging:
    """Decides which late reads are requested a second time. Arithmetic on what was measured, no clock.

    Only reads that a consumer waits for are worth it.
    """

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._latencies: deque[float] = deque(maxlen=_REMEMBERED)
        self._reads = self._hedged = 0

    def finished(self, seconds: float) -> None:
        """Note how long a read took."""
        self._latencies.append(seconds)
        self._reads += 1

    def due(self, seconds: float) -> bool:
        """Return whether to repeat a request that has taken `seconds` so far. True counts as a repeat."""
        settings = self._settings
        if self._reads < settings.hedge_after or self._hedged + 1 > settings.hedge_share * self._reads:
            return False
        late = sorted(self._latencies)[int(_QUANTILE * len(self._latencies))]
        if seconds <= late:
            return False
        self._hedged += 1
        return True


def process_share(store: Store, settings: ReadSettings | None = None) -> tuple[ConcurrencyLimiter, int]:
    """Return this process's part of the node's limit of requests and bytes in flight."""
    from torch.utils.data import get_worker_info

    settings = settings or SETTINGS
    worker = get_worker_info()
    processes = local_ranks() * (1 if worker is None else worker.num_workers)
    size = min(settings.process_bytes, settings.node_bytes // processes)
    pinned = store.reading.max_requests
    if pinned is not None:
        return ConcurrencyLimiter(max(1, pinned // processes), pinned=True), size
    requests = min(settings.process_requests, settings.node_requests // processes)
    return ConcurrencyLimiter(max(1, requests)), size


_FIRST_BYTES = 8 << 20
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
        self._wanted = self.value = min(most, _FIRST_BYTES)
        self._passed, self._waited = 0, 0.0  # bytes delivered, seconds waited for since it was set
        self._since = clock()
        _budgets.get().add(self)

    def bytes(self, size: int) -> int:
        """Return the bytes that may be held, where the next sample has this size."""
        share = payload_limit() // max(1, len(_budgets.get()))
        self.value = min(self._most, share, max(self._wanted, _LEAST_READS * size))
        return self.value

    def delivered(self, size: int) -> None:
        """Note that a sample has left."""
        self._passed += size

    def grow(self, size: int, seconds: float) -> bool:
        """Grow where a consumer has waited for a sample of this size, which the budget holds back.

        Each step has to show its effect first: at the start of an epoch, every sample is waited for.

        Args:
            seconds: the wait since the last call.

        Returns:
            Whether the budget has grown.
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
    """Return the sum of the budgets of this process's prefetchers, never above the process's limit."""
    return min(payload_limit(), sum(budget.value for budget in list(_budgets.get())))
