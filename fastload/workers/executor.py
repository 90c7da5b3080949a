"""Where batches are made: in worker processes, or in this one. Each executor takes work and returns arrivals.

    submit(worker, seq, index) ──▶ ProcessExecutor: a `WorkerPool`    `inline.InlineExecutor`: on demand
    receive() ──▶ Arrival(seq): a batch, an error, or the end of an iterable dataset or a stream

The batches of one worker arrive in the order in which they were submitted.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any, Protocol

import torch.multiprocessing

from fastload.metrics.counters import BadSamples, Counters
from fastload.workers.memory_limit import MemoryUse
from fastload.workers.pool import WorkerPool
from fastload.workers.protocol import Failure, Result, WorkerSetup
from fastload.workers.slot_memory import Pin
from fastload.workers.witness import Witness

# By the fork server; obstore starts its threads with its first request, not on import.
PRELOADED = ("torch", "fastload.workers.worker", "fastload.datasets.image_folder", "obstore.store")


@dataclass(slots=True)
class Arrival:
    """What came of one piece of work."""

    seq: int
    worker_id: int
    load: Callable[[], Any] | None  # gives the batch, once; None where there is none
    failure: Failure | Exception | None = None
    exhausted: bool = False  # an iterable dataset or a stream has no more; this is not a batch
    before: Any = None  # the state of a dataset that has one, with the worker's first arrival of an epoch
    after: Any = None  # the state after this batch; the stream's, where the epoch is read as streams
    witness: Witness | None = None  # what the batch was made of; None for an error, or without an index

    def reraise(self) -> None:
        """Raise the error in whose place this came, if it is one."""
        failure, self.failure = self.failure, None
        try:
            if isinstance(failure, Failure):
                failure.reraise(f"in DataLoader worker process {self.worker_id}")
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback holds this frame, and that the batches of the iterator


class Executor(Protocol):
    """Makes batches. `seq` numbers pieces of work, over all epochs."""

    concurrent: bool  # batches are made while the consumer works

    @property
    def processes(self) -> list[Any]:
        """The worker processes, those that have ended too."""

    def start_epoch(
        self, first: int, seed: int, epoch: int, *, streamed: bool, shared_seed: int | None
    ) -> None:
        """Work older than `first` is not wanted any more. `seed` is that of the samples' randomness."""

    def leave_out(self, samples: frozenset[int]) -> None:
        """From the next batches on, these samples replace no bad ones."""

    def submit(self, worker_id: int, seq: int, index: Any, *, encoded: bool, again: bool = False) -> None:
        """Ask a worker for the batch of `index`; with `encoded`, for its images as `EncodedImages`.

        Args:
            again: this batch was made, and is discarded: make it once more, before all other work.
        """

    def revise(self, seq: int, index: Any) -> bool:
        """Make work that was submitted of `index` instead; None: do not make it. False: it may be made."""

    def receive(self, timeout: float, tick: Callable[[], None] | None) -> list[Arrival]:
        """At least one arrival. `tick` is called now and then while it is waited for."""

    def arrived(self) -> list[Arrival]:
        """What is here, without waiting."""

    def consume(self, worker_id: int) -> None:
        """A batch of this worker and epoch has left the loader: it may make another one."""

    def discard(self, arrival: Arrival) -> None:
        """This result is not wanted: release its memory."""

    def finish(self, worker_id: int) -> None:
        """Tell a worker which batches left the loader, if it gets no new work in their place."""

    def end_work(self) -> None:
        """There is no more work in this epoch."""

    def allow_ahead(self, batches: int) -> None:
        """Each worker may make so many batches ahead, where they are small."""

    def grow(self) -> None:
        """Start one worker more, in the epoch that runs."""

    def take_up(self, position: dict[str, Any] | None) -> Any:
        """Go to a place in an iterable dataset; return the state of the dataset there."""

    def interrupted(self) -> list[int]:
        """`receive` raised an exception. Returns the work that will not be answered."""

    def check_open(self) -> None:
        """Raise WorkerError if nothing can be made any more."""

    def close(self) -> None:
        """Let go of all that is running or announced. To be called from `__del__` too."""


class ProcessExecutor:
    """Batches from worker processes.

    Args:
        setup: what the workers need to know.
        context: of the loader: a multiprocessing context, or None for Python's default.
        counters, bad, memory: get what the workers report.
        pin: registers the memory of slots with a device, see `SlotMap`.
        start: how many workers to start now.
    """

    concurrent = True

    def __init__(
        self,
        setup: WorkerSetup,
        context: Any,
        counters: Counters,
        bad: BadSamples,
        memory: MemoryUse,
        *,
        pin: Pin | None,
        start: int,
    ) -> None:
        self.pool = WorkerPool(setup, _context(context), pin, start=start)
        self._counters = counters
        self._bad = bad
        self._memory = memory
        self.start_epoch = self.pool.start_epoch
        self.leave_out = self.pool.leave_out
        self.submit = self.pool.submit
        self.consume = self.pool.consume
        self.finish = self.pool.finish
        self.allow_ahead = self.pool.allow_ahead
        self.grow = self.pool.grow
        self.check_open = self.pool.check_open
        self.close = self.pool.shutdown

    @property
    def processes(self) -> list[Any]:
        return self.pool.processes

    def receive(self, timeout: float, tick: Callable[[], None] | None) -> list[Arrival]:
        return [self._arrival(*one) for one in self.pool.receive(timeout, tick)]

    def arrived(self) -> list[Arrival]:
        return [self._arrival(*one) for one in self.pool.arrived()]

    def _arrival(self, worker_id: int, result: Result) -> Arrival:
        self._counters.merge(result.counters)
        self._bad.extend(result.bad)
        self._memory.report(worker_id, result.memory)
        load = None
        if result.packed is not None:
            load = functools.partial(self.pool.unpack, worker_id, result.packed)
        return Arrival(
            result.seq,
            worker_id,
            load,
            result.failure,
            result.exhausted,
            result.before,
            result.after,
            result.witness,
        )

    def revise(self, seq: int, index: Any) -> bool:
        return False

    def end_work(self) -> None:
        for worker_id in range(len(self.processes)):
            self.pool.finish(worker_id)

    def discard(self, arrival: Arrival) -> None:
        if arrival.load is not None:
            arrival.load()  # the slots go back when the batch that views them dies, which is now

    def take_up(self, position: dict[str, Any] | None) -> Any:
        return None  # each worker does when it starts, by its setup

    def interrupted(self) -> list[int]:
        self.close()  # what had come in by then may be lost, and would be waited for
        return []


def _context(chosen: Any) -> Any:
    """The user's start method, or torch's default."""
    context = chosen or multiprocessing.get_context()
    if chosen is None and context.get_start_method() == "fork":
        return torch.multiprocessing
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(_preloaded())
    return context


def _preloaded() -> list[str]:
    """What the fork server imports once for all workers: the modules that the user has set, and ours."""
    chosen: list[str] = list(forkserver._forkserver._preload_modules)  # type: ignore[attr-defined]
    if chosen == ["__main__"]:  # Python's default; the main script may have no `__main__` guard
        chosen = []
    return chosen + [module for module in PRELOADED if module not in chosen]
