"""The trainer's side of its workers: starts them, sends them work, notices their deaths, ends them."""

from __future__ import annotations

import atexit
import math
import os
import pickle
import select
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, ClassVar

from fastload.errors import WorkerError
from fastload.workers.protocol import Channel, EpochStart, LeaveOut, Result, Work, WorkerSetup
from fastload.workers.slot_memory import PackedBatch, Pin
from fastload.workers.slots import SlotMap, forking_a_worker
from fastload.workers.worker import worker_main

_LIVENESS_INTERVAL = 0.5  # seconds between checks of the processes while waiting for a batch
# torch's wording, which scripts may filter or tests expect.
_CANNOT_PICKLE = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)
_SHUTDOWN_GRACE = 5.0  # seconds for a worker to finish its batch and write out its cache


@dataclass
class _Handle:
    """One worker, as the trainer sees it."""

    process: Any
    channel: Channel
    slots: SlotMap
    consumed: int = 0
    answered: bool = False


class WorkerPool:
    """The worker processes of one iterator.

    Args:
        setup: see `WorkerSetup`.
        context: a multiprocessing context.
        pin: registers the memory of slots with a device, see `SlotMap`.
        start: number of workers to start now; `grow` starts another one. None: `setup.num_workers`.
    """

    _alive: ClassVar[weakref.WeakSet[WorkerPool]] = weakref.WeakSet()

    def __init__(
        self,
        setup: WorkerSetup,
        context: Any,
        pin: Pin | None = None,
        start: int | None = None,
    ) -> None:
        self._workers: list[_Handle] = []
        self._setup = setup
        self._epoch: EpochStart | None = None  # the current one
        self._ahead = setup.prefetch_factor
        self._context = context
        self._pin = pin
        self._open = True
        self._owner = os.getpid()
        self._alive.add(self)
        try:
            for worker_id in range(setup.num_workers if start is None else start):
                self._workers.append(self._start(setup, worker_id))
        except BaseException:
            self.shutdown()
            raise

    @property
    def processes(self) -> list[Any]:
        return [worker.process for worker in self._workers]

    def allow_ahead(self, batches: int) -> None:
        """From its next work on, each worker may make so many batches ahead, where they are small."""
        self._ahead = batches

    def grow(self) -> None:
        """Start one more worker, in the current epoch."""
        worker = self._start(self._setup, len(self._workers))
        self._workers.append(worker)
        if self._epoch is not None:
            self._send(worker, self._epoch)

    def _start(self, setup: WorkerSetup, worker_id: int) -> _Handle:
        ours, theirs = Channel.pair()
        process = self._context.Process(target=worker_main, args=(setup, worker_id, theirs, os.getpid()))
        process.daemon = True
        try:
            with self._interrupts_held(), forking_a_worker():
                process.start()
        except BaseException as error:
            ours.close()
            if isinstance(error, TypeError | AttributeError | pickle.PicklingError):
                warnings.warn(_CANNOT_PICKLE, stacklevel=2)
            raise
        finally:
            # Only the worker may hold this end: otherwise its death would not be an end-of-file here.
            theirs.close()
        return _Handle(process, ours, SlotMap(self._pin))

    @contextmanager
    def _interrupts_held(self) -> Iterator[None]:
        """Block Ctrl-C while a worker starts; it inherits this, so that its imports leave no traceback.

        Not under forkserver, which would pass the mask on to all its later processes.
        """
        method = self._context.get_start_method()
        if method == "forkserver":
            yield
            return
        if method == "spawn":
            resource_tracker.ensure_running()  # spawn itself would do it, and lift the mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def start_epoch(
        self, first: int, seed: int, epoch: int, *, streamed: bool = False, shared_seed: int | None = None
    ) -> None:
        """Start an epoch. Results older than sequence number `first` are void from now on."""
        self._epoch = EpochStart(first, seed, epoch, streamed, shared_seed)
        for worker in self._workers:
            worker.consumed = 0
            self._send(worker, self._epoch)

    def leave_out(self, samples: frozenset[int]) -> None:
        """From the next batches on, these samples replace no bad ones."""
        assert self._epoch is not None
        self._epoch = self._epoch._replace(left_out=samples)  # for workers that are started later
        for worker in self._workers:
            self._send(worker, LeaveOut(samples))

    def submit(
        self, worker_id: int, seq: int, index: Any, *, encoded: bool = False, again: bool = False
    ) -> None:
        """Ask a worker for the batch of `index`; with `encoded`, for its images as `EncodedImages`.

        Args:
            again: before all its other work.
        """
        self._tell(self._workers[worker_id], seq, index, encoded, again)

    def consume(self, worker_id: int) -> None:
        """A batch of this epoch and worker has left the loader: it may make another one."""
        self._workers[worker_id].consumed += 1

    def finish(self, worker_id: int) -> None:
        """Report consumed batches and free slots to a worker, and the end of the epoch's index batches."""
        self._tell(self._workers[worker_id], -1, None)

    def unpack(self, worker_id: int, packed: PackedBatch) -> Any:
        """The batch that a worker packed."""
        return self._workers[worker_id].slots.unpack(packed)

    def _tell(
        self, worker: _Handle, seq: int, index: Any, encoded: bool = False, again: bool = False
    ) -> None:
        returned = worker.slots.take_returned()
        self._send(worker, Work(worker.consumed, *returned, seq, index, encoded, self._ahead, again))

    def _send(self, worker: _Handle, message: EpochStart | LeaveOut | Work) -> None:
        # A death is reported when the worker's batch is due, after the batches that it sent before.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.channel.send(message)

    def receive(self, timeout: float, tick: Callable[[], None] | None = None) -> list[tuple[int, Result]]:
        """Wait for results: (worker, result), at least one. Calls `tick` about twice a second meanwhile.

        Raises:
            WorkerError: a worker died.
            RuntimeError: no result came within `timeout` seconds (0: no limit).
        """
        self.check_open()
        deadline = time.monotonic() + (timeout or math.inf)
        while True:
            left = max(0.0, deadline - time.monotonic())
            results = self._poll(min(_LIVENESS_INTERVAL, left))
            if results:
                return results
            for worker in self._workers:
                if not worker.process.is_alive():
                    raise self._death_error(worker)
            if tick is not None:
                tick()
            if left == 0:
                raise RuntimeError(f"DataLoader timed out after {timeout} seconds")

    def check_open(self) -> None:
        """Raise WorkerError if the workers were ended."""
        if not self._open:
            raise WorkerError("the workers of this iterator were ended by an earlier error: start a new one")

    def arrived(self) -> list[tuple[int, Result]]:
        """The results that have arrived, without waiting. `receive` reports a death."""
        with suppress(WorkerError):
            return self._poll(0) if self._open else []
        return []

    def _poll(self, seconds: float) -> list[tuple[int, Result]]:
        poll = select.poll()
        by_fd = {}
        for worker_id, worker in enumerate(self._workers):
            by_fd[worker.channel.fileno()] = worker_id
            poll.register(worker.channel, select.POLLIN | (select.POLLOUT if worker.channel.pending else 0))
        results = []
        dead = None
        for fd, event in poll.poll(seconds * 1000):
            worker = self._workers[by_fd[fd]]
            try:
                if event & select.POLLOUT:
                    worker.channel.flush(wait=False)
                while (received := worker.channel.receive(wait=False)) is not None:
                    worker.answered = True
                    result, fds = received
                    if result.packed is not None:
                        worker.slots.attach(result.packed, fds)
                    results.append((by_fd[fd], result))
            except (EOFError, BrokenPipeError):
                dead = worker
        if dead is not None and not results:
            raise self._death_error(dead)
        return results

    def _death_error(self, worker: _Handle) -> WorkerError:
        process = worker.process
        process.join(timeout=1)
        code = process.exitcode
        if code is not None and code < 0:
            what = f"{signal.strsignal(-code)} ({signal.Signals(-code).name})"
            text = f"DataLoader worker (pid {process.pid}) is killed by signal: {what}."
            if -code == signal.SIGKILL:
                text += " The kernel does this when memory runs out: look at dmesg, or use fewer workers."
        else:
            text = f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly (exit code {code})."
            if not worker.answered and self._context.get_start_method() != "fork":
                text += (
                    " It ended while it was starting. Workers started by "
                    f"{self._context.get_start_method()!r} import the main script: put its code under"
                    ' `if __name__ == "__main__":`, and look at the traceback above.'
                )
        return WorkerError(text)

    def shutdown(self) -> None:
        """End the workers: give them time to finish their batch and write out their cache, then kill them."""
        if not self._open or self._owner != os.getpid():
            return
        self._open = False
        for worker in self._workers:
            worker.channel.close()
        deadline = time.monotonic() + _SHUTDOWN_GRACE
        for worker in self._workers:
            worker.process.join(timeout=max(0.0, deadline - time.monotonic()))
        for end in ("terminate", "kill"):
            for worker in self._workers:
                if worker.process.is_alive():
                    getattr(worker.process, end)()
                    worker.process.join(timeout=1)


@atexit.register
def _shutdown_all() -> None:
    # Before multiprocessing's own exit handler, which would terminate workers that still write their cache.
    for pool in list(WorkerPool._alive):
        pool.shutdown()
