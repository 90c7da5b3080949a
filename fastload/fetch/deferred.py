"""Samples that another run is reading into the same cache: one thread looks for all of them at once.

    lock refused ─▶ add ─▶ in the cache by now?            ─▶ found
                           its lock is free, or held long? ─▶ put_back: read it from the store

A sample that waits here has no request in flight. Another run may hang, or be far slower than we are, so
its locks count only for a while, and less where a consumer waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from fastload.fetch.cached_read import CachedReads
from fastload.fetch.reader_queues import Part, Read
from fastload.fetch.threads import ThreadTeam

__all__ = ["DeferredReads"]

_LOOK_SECONDS = 0.02
_ROUND_TRIPS = 4  # that another run gets for a sample that a consumer waits for
_WRITE_SECONDS = 0.1  # and to write it: it lingers, to write several at once


class DeferredReads:
    """The parts of such samples. The owner's lock is held in `add`, `close`, and in what is called back.

    Args:
        cached: looks into the cache, and takes the locks.
        lock: of the owner.
        patience: seconds that another run gets for a sample that nobody waits for yet.
        found: called with a read and its payload, or the error of looking for it.
        put_back: called with a part that is to be read from the store.
    """

    def __init__(
        self,
        cached: CachedReads,
        lock: threading.Lock,
        patience: float,
        *,
        found: Callable[[Read, Any, BaseException | None], None],
        put_back: Callable[[Part], None],
    ) -> None:
        self._cached = cached
        self._lock = lock
        self._patience = patience
        self._found = found
        self._put_back = put_back
        self._parts: list[Part] = []
        self._changed = threading.Condition(lock)
        self._thread = ThreadTeam(self._run, "fastload-deferred")
        self._closing = threading.Event()
        self._round_trip = 0.0  # about what our own reads take

    def add(self, part: Part) -> None:
        """Look for a sample until it is found or can be read."""
        part.read.deferred = part.read.deferred or time.monotonic()
        self._parts.append(part)
        self._thread.grow(1)
        self._changed.notify()

    def measured(self, seconds: float) -> None:
        """A read of ours took so long."""
        self._round_trip += (seconds - self._round_trip) / (8 if self._round_trip else 1)

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        self._parts.clear()
        self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while self._wait():
            self._closing.wait(_LOOK_SECONDS)
            self._look()

    def _wait(self) -> bool:
        with self._changed:
            woken = self._thread.wait(self._changed, lambda: self._parts or self._closing.is_set())
            return woken and not self._closing.is_set()

    def _look(self) -> None:
        with self._lock:
            reads = list({id(part.read): part.read for part in self._parts}.values())
        wanted = [read for read in reads if read.wanted > 0 and not read.done]
        payloads: list[Any] = [None] * len(wanted)
        error: BaseException | None = None
        ready = {id(read) for read in reads} - {id(read) for read in wanted}
        try:
            payloads = self._cached.found_meanwhile(wanted)
            absent = [read for read, payload in zip(wanted, payloads, strict=True) if payload is None]
            self._overtake(absent)
            ready |= {id(read) for read in absent if self._cached.reserve(read)}
        except BaseException as caught:  # whoever waits for these reads must hear of it
            error = caught
        with self._lock:
            for read, payload in zip(wanted, payloads, strict=True):
                if payload is not None or error is not None:
                    self._parts = [part for part in self._parts if part.read is not read]
                    self._found(read, payload, error)
            for part in [part for part in self._parts if id(part.read) in ready]:
                self._parts.remove(part)
                self._put_back(part)

    def _overtake(self, reads: list[Read]) -> None:
        """Read without the lock what another run has had long enough."""
        now = time.monotonic()
        patience = self._patience
        if self._round_trip:
            patience = min(patience, _ROUND_TRIPS * self._round_trip + _WRITE_SECONDS)
        # One that is awaited and late speaks for all: the consumer would wait for each of them in turn.
        late = [read for read in reads if now - read.deferred > patience]
        hurry = any(read.awaited for read in late)
        for read in late:
            read.overdue = hurry or now - read.deferred > self._patience
