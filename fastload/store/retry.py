"""Retries: when one may help, after how long, and when to stop. Pure rules, and a thin loop.

The clients' own retries are switched off for reads: two loops inside each other multiply, and the prefetcher
would not see that a store asks for fewer requests.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from fastload.errors import StoreError

T = TypeVar("T")
Wait = Callable[[StoreError, float], None]  # (what failed, seconds to pause); may raise to give up


class Policy(NamedTuple):
    """How long to retry.

    Args:
        budget: seconds from the first attempt after which no further one begins.
        first, longest: seconds; attempt n + 1 comes after a pause from [0, min(longest, first * 2^(n-1))].
    """

    budget: float
    first: float = 0.2
    longest: float = 15.0


READ = Policy(budget=180.0)
CONTACT_SECONDS = 6.0  # instead of the budget, while no request of this store was ever answered
_RENEWALS = 2  # of the credentials, in one read
_random = random.SystemRandom()  # forked workers share the state of any other generator


def pause_before(attempt: int, policy: Policy, draw: Callable[[], float] = _random.random) -> float:
    """Seconds to wait before attempt number `attempt` (the second is 2): full jitter.

    Many readers that failed together come back spread over the whole interval, not in waves.
    """
    return draw() * min(policy.longest, policy.first * 2.0 ** min(attempt - 2, 60))


class Attempts:
    """The attempts made so far for one request.

    Args:
        start: when the first attempt began, by `time.monotonic`.
        policy: how long to retry.
        renew: gets new credentials unless they are newer than the given time; returns whether there are any.
        reached: whether this store ever answered. An address that never answered is wrong, not busy.
    """

    def __init__(self, start: float, policy: Policy, renew: Callable[[float], bool], reached: bool) -> None:
        self._start = self._began = start
        self._policy = policy
        self._renew = renew
        self._reached = reached
        self._failures = self._renewals = 0

    def next_pause(self, error: StoreError) -> float:
        """Seconds to wait before the next attempt after `error`.

        Raises:
            StoreError: `error` itself, where a retry cannot help or the budget is spent.
        """
        now = time.monotonic()
        began, self._began = self._began, now
        self._failures += 1
        if error.retry == "renewed" and self._renewals < _RENEWALS and self._renew(began):
            self._renewals += 1
            return 0.0
        if error.retry in ("later", "slower", "reachable"):
            seconds = pause_before(self._failures + 1, self._policy)
            known = self._reached or error.retry != "reachable"
            budget = self._policy.budget if known else min(CONTACT_SECONDS, self._policy.budget)
            if now - self._start + seconds <= budget:
                self._began += seconds
                return seconds
        if self._failures > 1:
            error.message += f" ({self._failures} attempts in {now - self._start:.1f} s)"
        raise error


def sleep(error: StoreError, seconds: float) -> None:
    """The plain way to wait."""
    time.sleep(seconds)


def retried(attempt: Callable[[], T], attempts: Callable[[float], Attempts], wait: Wait = sleep) -> T:
    """The result of `attempt`, tried as often as `attempts` allows."""
    start, tried = time.monotonic(), None
    while True:
        try:
            return attempt()
        except StoreError as caught:
            error = caught
        tried = tried or attempts(start)
        wait(error, tried.next_pause(error))
