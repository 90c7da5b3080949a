"""`memory_limit=`: the budget of a loader, as shares of its worker processes.

    limit ─▶ a share of each worker = the process itself, measured when it is ready
                                    + batches in slots       at most half of the room that is left
                                    + payloads read ahead    the rest of the room,
                                    + all else               which is measured after each batch

Payloads give way first: their limit follows the measured memory. So do batches made ahead, once the first
batch has shown its size. A payload that is larger than its limit is read all the same, alone, and each worker
always makes one batch: so nothing waits for memory that nobody frees.

Shares that move between workers were rejected: a worker cannot take memory back that another one uses.
"""

from __future__ import annotations

import logging
import multiprocessing
import re
import time
from typing import Any, NamedTuple

from fastload.checks import format_size, parse_size
from fastload.distributed import known_local_ranks
from fastload.errors import ArgumentError
from fastload.fetch.threads import budgeted_bytes
from fastload.metrics.machine import anonymous_bytes, limit_payloads, private_bytes, trim, usable_bytes
from fastload.workers.autoscale import ceiling

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", re.ASCII)

_log = logging.getLogger("fastload")

_MB = 1_000_000
_LEAST_ROOM = 24 * _MB  # for batches and payloads, beside the process itself
_AUTO_ROOM = 160 * _MB  # the same for num_workers="auto": four batches of 256 images of 224 pixels
_LEAST_PAYLOADS = 1 * _MB
# A forked worker copies inherited pages as it writes to them: an allowance, with room to spare.
_COPIED = 16 * _MB
# The process itself, before it is measured: with torch's modules of its own where it was not forked.
_PROCESS = {"fork": 24 * _MB, "forkserver": 48 * _MB, "spawn": 200 * _MB}
_FORK_SERVER = 200 * _MB  # it has imported torch once for all workers
# For `num_workers=0`: the process that reads from the store, and the heaps of this process's threads, which
# cannot be measured beside the trainer's own memory. 115-136 MB by four runs of the stress test.
_CLIENT = 136 * _MB
# More batches than `prefetch_factor` are made ahead as long as they take no more. Small batches vary most in
# what they cost; 12 workers on each of 8 ranks take 6 GB at most.
_AHEAD = 64 * _MB
_COUNT_EVERY = 5.0  # seconds; a dataset of many Python objects is copied page by page as it is read
_FILL = 0.9  # of the room; the rest is for what happens between two measurements


class MemoryLimit(NamedTuple):
    """The argument of a loader, checked.

    Attributes:
        given: as it was given.
        bytes: of all processes.
        workers: that share it; 0: this process makes the batches.
        method: that starts them.
    """

    given: int | str
    bytes: int
    workers: int
    method: str

    @classmethod
    def of(cls, given: Any, workers: int, context: Any) -> MemoryLimit:
        """Return the argument `memory_limit` of a loader with these workers and this multiprocessing context.

        Raises:
            ArgumentError: it is no size, or below the smallest one that is possible; or it is a part of the
                node's memory, and nobody knows among how many ranks.
        """
        method = context if isinstance(context, str) else _start_method(context)
        limit = cls(given, _bytes_of_rank(given), workers, method)
        limit.check(limit.least())
        return limit

    @property
    def common(self) -> int:
        """Return bytes of processes that serve all workers."""
        if not self.workers:
            return _CLIENT
        return _FORK_SERVER if self.method == "forkserver" else 0

    @property
    def share(self) -> int:
        """Return bytes of each worker."""
        return max(0, self.bytes - self.common) // max(1, self.workers)

    def least(self, process: int = 0, room: int = _LEAST_ROOM) -> int:
        """Return the smallest limit, where each worker takes `process` bytes by itself (0: a usual one)."""
        if not self.workers:
            return self.common + room
        return self.common + self.workers * ((process or _PROCESS.get(self.method, 0)) + room)

    def check(self, least: int) -> None:
        """Raise ArgumentError where the limit is below the smallest one that is possible."""
        if self.bytes >= least:
            return
        processes = f"{self.workers} worker process{'es' if self.workers > 1 else ''}"
        who = f"{processes} (start method {self.method!r})" if self.workers else "num_workers=0"
        if isinstance(self.given, str) and "%" in self.given:
            who += f" with {format_size(self.bytes)} of this node"
        fewer = ", fewer workers or smaller batches" if self.workers else ""
        raise ArgumentError(
            f"memory_limit={self.given!r} is too little for {who}: give at least {-(-least // _MB)} MB{fewer}"
        )


def most_workers(memory_limit: Any, context: Any) -> int:
    """Return the upper limit of num_workers="auto": by cores, and by memory."""
    if memory_limit is None:
        return ceiling()
    limit = MemoryLimit.of(memory_limit, 1, context)
    each = limit.least(room=_AUTO_ROOM) - limit.common
    return min(ceiling(), max(1, (limit.bytes - limit.common) // each))


def _bytes_of_rank(given: Any) -> int:
    """Return bytes, from what `parse_size` takes or from "50%": that part of the node's memory for its ranks.

    Shares that move between ranks were rejected, as those that move between workers are.
    """
    match = _PERCENT.fullmatch(given) if isinstance(given, str) else None
    if match is None or not 0 < (percent := float(match[1])) <= 100:
        return parse_size(given, "memory_limit")
    ranks = known_local_ranks()
    if ranks is None:
        raise ArgumentError(
            f"memory_limit={given!r} is shared by the ranks of this node, and this launcher does not tell "
            "how many there are: set LOCAL_WORLD_SIZE, or give this rank's bytes"
        )
    return int(usable_bytes() * percent / 100) // ranks


def _start_method(context: Any) -> str:
    if context is not None:
        return str(context.get_start_method())
    # To ask for the default method would also fix it.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


class MemoryUse:
    """The memory of a loader's processes under a limit, as its workers report it."""

    def __init__(self) -> None:
        self._limit: MemoryLimit | None = None
        self._workers: dict[int, int] = {}
        self._peak = 0
        self._warned = False

    def start(self, limit: MemoryLimit) -> None:
        """Note that an iterator starts, with workers of its own."""
        self._limit, self._workers = limit, {}

    def report(self, worker_id: int, used: int) -> None:
        """Note what a worker has measured of itself."""
        self._workers[worker_id] = used
        self._peak = max(self._peak, self._sum())
        limit = self._limit
        if limit is not None and used > limit.share and not self._warned:
            self._warned = True
            _log.warning(
                "worker %d uses %s, more than its share of memory_limit=%r, which is %s: batches that the "
                "training keeps, the dataset's own memory, shuffle_buffer= or threads= may take it, or "
                "single samples are too large. Raise the limit, or use fewer workers",
                worker_id,
                format_size(used),
                limit.given,
                format_size(limit.share),
            )

    def stats(self) -> dict[str, int]:
        """Return the value of `stats()["memory"]`."""
        if self._limit is None:
            return {}
        if not self._limit.workers:
            return {"limit": self._limit.bytes}
        return {"limit": self._limit.bytes, "used": self._sum(), "peak": self._peak}

    def _sum(self) -> int:
        common = 0 if self._limit is None else self._limit.common
        return common + sum(self._workers.values())


class WorkerMemory:
    """The memory of one worker under a limit; without one, nothing is measured.

    Args:
        limit: of the loader, or None.
        prefetch_factor: finished batches that may wait for the trainer at first, however large they are.

    Attributes:
        ahead: finished batches that may wait now.
        used: bytes of this process and its slots at the last measurement; 0 without a limit.
    """

    def __init__(self, limit: MemoryLimit | None, prefetch_factor: int) -> None:
        self._limit = limit
        self._prefetch_factor = self._allowed = prefetch_factor
        self._process = self._before = self._room = 0
        self._copied = 0  # inherited pages that were written to, beyond the usual
        self._count_at = 0.0
        self._largest = 0  # batch
        self.used = 0
        self.ahead = prefetch_factor if limit is None else 1

    def begin(self) -> None:
        """Note that the process is ready to make batches: what it takes by itself is known.

        Raises:
            ArgumentError: its share leaves no room for batches.
        """
        if self._limit is None:
            return
        self._process = private_bytes() + (0 if self._limit.method == "spawn" else _COPIED)
        self._before = anonymous_bytes()
        self._limit.check(self._limit.least(self._process))
        self._room = self._limit.share - self._process
        self.used = self._process
        limit_payloads(self, self._room // 4)

    def allow_ahead(self, batches: int) -> None:
        """Let so many finished batches wait, if they are small."""
        self._allowed = batches
        if self._limit is None:
            self.ahead = self._most_ahead()

    def _most_ahead(self) -> int:
        return max(self._prefetch_factor, min(self._allowed, _AHEAD // max(1, self._largest)))

    def check_batch(self, nbytes: int) -> None:
        """Check the bytes of slots that a batch takes, which is about to be handed over.

        Raises:
            ArgumentError: it is the first one, and another one would not fit beside it.
        """
        if self._limit is not None and not self._largest:
            self._limit.check(self._limit.least(self._process, max(_LEAST_ROOM, 4 * nbytes)))
        self._largest = max(self._largest, nbytes)

    def look(self, slots: int) -> None:
        """Measure, after a batch was made, and adapt what is read ahead and made ahead.

        Args:
            slots: bytes of all slots of this worker.
        """
        if self._limit is None:
            self.ahead = self._most_ahead()
            return
        room = int(_FILL * self._room)
        grown = anonymous_bytes() - self._before
        if grown + self._copied + slots > room:  # freed memory counts until it is returned
            trim()
            grown = self._grown_by_count()
        elif grown < 0:
            grown = self._grown_by_count()
        if time.monotonic() > self._count_at:
            self._count_at = time.monotonic() + _COUNT_EVERY
            self._copied = max(0, private_bytes() - self._process - grown)
        grown += self._copied
        self.used = self._process + grown + slots
        left = room - grown - slots
        # While a payload arrives, the client holds it twice. At the end of an epoch the budget is not used,
        # and what it is for seems to be left.
        payloads = budgeted_bytes() + (left // 2 if left > 0 else left)
        limit_payloads(self, max(_LEAST_PAYLOADS, min(payloads, (room - slots) // 2)))
        batches = room // 2 // max(1, self._largest)
        self.ahead = min(self._most_ahead(), max(1, batches - 1))

    def _grown_by_count(self) -> int:
        """Return what this process has taken since `begin`, counted where the heaps' difference misleads.

        Returned memory may be what a forked worker has inherited and still shares: its heaps then shrink, and
        what it has to itself does not.
        """
        grown = max(0, private_bytes() - self._process)
        self._before, self._copied = anonymous_bytes() - grown, 0  # the count includes what was copied
        return grown
