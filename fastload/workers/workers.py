"""The makers of batches: worker processes (`processes`), or this process. Both take work and return arrivals.

    begin(EpochStart) ─▶ submit(worker, seq, index) ─▶ receive() ─▶ Arrival(seq): a batch, an error,
                                                    or the end of an iterable dataset or of a stream

The batches of one worker arrive in the order in which they were submitted. With `num_workers=0`, this process
makes a batch when one is asked for, and reads ahead what is submitted.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.data import IterableDataset

from fastload.datasets.views import Allocate
from fastload.metrics.counters import BadSamples, Counters
from fastload.metrics.machine import limit_payloads
from fastload.order.state import WorkerState
from fastload.workers.batch import open_source
from fastload.workers.collate import note_sample
from fastload.workers.protocol import EpochStart, Failure, Fingerprint, Work, WorkerSetup
from fastload.workers.sample_threads import GeneratorStates
from fastload.workers.streams import StreamOver


@dataclass(slots=True)
class Arrival:
    """The result of one piece of work."""

    seq: int
    worker_id: int
    load: Callable[[], Any] | None  # gives the batch, once; None where there is none
    failure: Failure | Exception | None = None
    exhausted: bool = False  # an iterable dataset or a stream has no more; this is not a batch
    before: Any = None  # the state of a dataset that has one, with the worker's first arrival of an epoch
    after: Any = None  # the state after this batch; the stream's, where the epoch is read as streams
    fingerprint: Fingerprint | None = None  # what it was made of; None for an error, or without an index

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


class Workers:
    """The makers of batches of one iterator. `seq` numbers pieces of work, over all epochs.

    The methods that need not be written do nothing: this process makes a batch when one is asked for.

    Attributes:
        concurrent: batches are made while the consumer works.
        lanes: how many of them there may be: each makes batches in its own order.
        kernel_threads: in a process, that share the rows of a batch; 0: the thread that makes a batch makes
            its rows.
        processes: the worker processes, those that have ended too.
    """

    concurrent: ClassVar[bool]
    lanes = 1
    kernel_threads = 0

    @property
    def processes(self) -> list[Any]:
        return []

    def begin(self, start: EpochStart) -> None:
        """Begin an epoch. Work older than its first is not wanted any more."""
        raise NotImplementedError

    def exclude(self, samples: frozenset[int]) -> None:
        """Let these samples replace no bad ones, from the next batches on."""
        raise NotImplementedError

    def submit(self, worker_id: int, seq: int, index: Any, *, encoded: bool, again: bool = False) -> None:
        """Ask a worker for the batch of `index`; with `encoded`, for its images as `EncodedImages`.

        Args:
            again: this batch was made, and is discarded: make it once more, before all other work.
        """
        raise NotImplementedError

    def receive(
        self, timeout: float, tick: Callable[[], None] | None, awaited: Callable[[], str]
    ) -> list[Arrival]:
        """Wait for at least one arrival. `tick` is called now and then meanwhile.

        Args:
            awaited: says what is waited for.

        Raises:
            WorkerError: a worker died.
            RuntimeError: nothing arrived within `timeout` seconds (0: no limit).
        """
        raise NotImplementedError

    def end_work(self) -> None:
        """Tell that there is no more work in this epoch."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of all that is running or announced. To be called from `__del__` too."""
        raise NotImplementedError

    def revise(self, seq: int, index: Any) -> bool:
        """Make submitted work of `index` instead (None: not at all). Returns False where it may be made."""
        return False

    def arrived(self) -> list[Arrival]:
        """Return what is here, without waiting."""
        return []

    def consume(self, worker_id: int) -> None:
        """Note that a batch of this worker and epoch has left the loader: it may make another one."""

    def report(self, worker_id: int) -> None:
        """Tell a worker which batches left the loader, where it gets no new work in their place."""

    def discard(self, arrival: Arrival) -> None:
        """Release the memory of a result that is not wanted."""

    def scale(self, workers: int, ahead: int) -> None:
        """Have at least so many workers, or threads of the kernel where these make the rows.

        Where a process cannot be started, fewer do as well.

        Args:
            ahead: batches that each worker may make ahead, where they are small.
        """

    def take_up(self, position: WorkerState | None) -> Any:
        """Go to a place in an iterable dataset; return the state of the dataset there.

        Worker processes do so when they start.
        """
        return None

    def interrupted(self) -> list[int]:
        """Return the work that will not be answered, after `receive` has raised an exception."""
        return []

    def check_open(self) -> None:
        """Raise WorkerError if nothing can be made any more."""


class ThisProcess(Workers):
    """Batches that this process makes, one when one is asked for. What is submitted is read ahead.

    Args:
        setup: as for workers.
        counters, bad: get what is counted.
        allocate: where batches are made.
    """

    concurrent = False

    def __init__(self, setup: WorkerSetup, counters: Counters, bad: BadSamples, allocate: Allocate) -> None:
        # A seed sets the generators for each sample of a map-style dataset, and here they are the trainer's.
        self._keeps_globals = setup.seeded and not isinstance(setup.dataset, IterableDataset)
        self._counters = counters
        self._bad = bad
        self._work: deque[Work] = deque()
        self._announced = 0  # of these, the first ones
        self._refused: dict[int, Exception] = {}  # work that could not be announced
        self._lost: list[int] = []
        self._last_known = False  # nothing more will be submitted
        self._owner = os.getpid()
        self._source = open_source(setup, allocate)
        if setup.memory_limit is not None:
            # A payload on its way is here and twice in the client process: measured 1.9 times its bytes.
            limit_payloads(self, setup.memory_limit.share // 4)

    def begin(self, start: EpochStart) -> None:
        self._source.start_epoch(start)

    def exclude(self, samples: frozenset[int]) -> None:
        self._source.exclude(samples)

    def submit(self, worker_id: int, seq: int, index: Any, *, encoded: bool, again: bool = False) -> None:
        work = Work(0, [], [], seq, index, encoded)
        if not again:
            self._work.append(work)
            return
        self._prefetch(work)
        self._work.appendleft(work)
        self._announced += 1

    def revise(self, seq: int, index: Any) -> bool:
        position = next((position for position, work in enumerate(self._work) if work.seq == seq), None)
        if position is None:
            return False
        announced, work = position < self._announced, self._work[position]
        if announced:
            self._source.cancel(work.index)
            self._refused.pop(seq, None)
        if index is None:
            del self._work[position]
            self._announced -= announced
        else:
            self._work[position] = work = work._replace(index=index)
            if announced:
                self._prefetch(work)
        return True

    def receive(
        self, timeout: float, tick: Callable[[], None] | None, awaited: Callable[[], str]
    ) -> list[Arrival]:
        self._announce()  # before anything is taken from the queue: Ctrl-C takes it from nobody
        work = self._work[0]
        try:
            arrival = self._make(work)
            if arrival.exhausted or (self._last_known and len(self._work) == 1):
                self._source.flush_cache()
            counters, bad = self._source.drain()
            self._counters.merge(counters)
            self._bad.extend(bad)
        except BaseException:  # Ctrl-C: as torch's, the iterator goes on with the batch after it
            self._lost.append(work.seq)
            raise
        finally:
            self._forget()
        return [arrival]

    def _announce(self) -> None:
        while self._announced < len(self._work):
            self._prefetch(self._work[self._announced])
            self._announced += 1

    def _prefetch(self, work: Work) -> None:
        try:
            self._source.prefetch(work.index)
        except Exception as error:
            self._refused[work.seq] = error

    def _forget(self) -> None:
        self._work.popleft()
        self._announced -= 1

    def _make(self, work: Work) -> Arrival:
        arrival = Arrival(work.seq, 0, None, self._refused.pop(work.seq, None))
        if arrival.failure is None:
            states = GeneratorStates() if self._keeps_globals else None
            try:
                with states or contextlib.nullcontext():
                    batch = self._source.make_batch(work.index, encoded=work.encoded)
                arrival.load = lambda: batch
                arrival.fingerprint = self._source.fingerprint
            except StreamOver:
                arrival.exhausted = True
            except Exception as error:
                note_sample(error)
                arrival.failure = error
        arrival.after = copy.deepcopy(self._source.state())
        return arrival

    def end_work(self) -> None:
        self._last_known = True
        if not self._work:
            self._source.flush_cache()  # a dataset that is not read ahead shows its last batch only now

    def take_up(self, position: WorkerState | None) -> Any:
        self._source.resume(position)
        return copy.deepcopy(self._source.state())

    def interrupted(self) -> list[int]:
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        if self._owner != os.getpid():  # a fork has the locks, but not the threads that may hold them
            return
        self._source.end_iteration()
        while self._work:
            self._source.cancel(self._work.popleft().index)
        self._announced = 0


def allocator(*, pinned: bool) -> Allocate:
    """Return ordinary host memory for batches that this process makes."""

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned)

    return allocate
