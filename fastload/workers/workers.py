"""Who makes batches: worker processes, or this process. Both take work and return arrivals.

    begin(EpochStart) ─▶ submit(worker, seq, index) ─▶ receive() ─▶ Arrival(seq): a batch, an error,
                                                    or the end of an iterable dataset or of a stream

The batches of one worker arrive in the order in which they were submitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fastload.order.state import WorkerState
from fastload.workers.protocol import EpochStart, Failure
from fastload.workers.witness import Witness


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

    def leave_out(self, samples: frozenset[int]) -> None:
        """Let these samples replace no bad ones, from the next batches on."""
        raise NotImplementedError

    def submit(self, worker_id: int, seq: int, index: Any, *, encoded: bool, again: bool = False) -> None:
        """Ask a worker for the batch of `index`; with `encoded`, for its images as `EncodedImages`.

        Args:
            again: this batch was made, and is discarded: make it once more, before all other work.
        """
        raise NotImplementedError

    def receive(self, timeout: float, tick: Callable[[], None] | None) -> list[Arrival]:
        """Wait for at least one arrival. `tick` is called now and then meanwhile.

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
