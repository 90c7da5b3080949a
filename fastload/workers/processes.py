"""The trainer's side of the worker processes: it starts them, sends work, notices deaths and ends them."""

from __future__ import annotations

import atexit
import functools
import math
import multiprocessing
import os
import pickle
import select
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any, ClassVar

import torch.multiprocessing

from fastload.errors import WorkerError, warn
from fastload.metrics.counters import BadSamples, Counters
from fastload.workers.memory_limit import MemoryUse
from fastload.workers.protocol import Channel, EpochStart, Exclude, Result, Work, WorkerSetup
from fastload.workers.slots import Pin, SlotMap
from fastload.workers.worker import worker_main
from fastload.workers.workers import Arrival, Workers

# By the fork server; obstore starts its threads with its first request, not on import.
PRELOADED = ("torch", "fastload.workers.worker", "fastload.datasets.objects", "obstore.store")

_LIVENESS_INTERVAL = 0.5  # seconds between checks of the processes while waiting for a batch
# torch's wording, which scripts may filter or tests expect.
_CANNOT_PICKLE = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)
_FORK_MAY_STOP = sys.version_info < (3, 11, 10)
_FORK_PATIENCE = 10.0  # seconds
_SHUTDOWN_GRACE = 5.0  # seconds for a worker to finish its batch and write out its cache


@dataclass
class _Handle:
    """One worker, as the trainer sees it."""

    process: Any
    channel: Channel
    slots: SlotMap
    consumed: int = 0
    answered: bool = False


class WorkerProcesses(Workers):
    """Batches from worker processes.

    Args:
        setup: see `WorkerSetup`.
        context: of the loader: a multiprocessing context, or None for Python's default.
        counters, bad: get what the workers report.
        memory: gets what they measure; None: they have no limit.
        pin: registers the memory of slots with a device, see `SlotMap`.
        start: number of workers, or of threads of the kernel, to start now; `scale` starts others.
    """

    concurrent = True
    _alive: ClassVar[weakref.WeakSet[WorkerProcesses]] = weakref.WeakSet()

    def __init__(
        self,
        setup: WorkerSetup,
        context: Any,
        counters: Counters,
        bad: BadSamples,
        memory: MemoryUse | None,
        *,
        pin: Pin | None,
        start: int,
    ) -> None:
        self._workers: list[_Handle] = []
        self._setup = setup
        self._context = _context(context)
        self._counters, self._bad, self._memory = counters, bad, memory
        self._pin = pin
        self._epoch: EpochStart | None = None  # the current one
        self._ahead = setup.prefetch_factor
        self.lanes = setup.num_workers
        self._share_threads(start)
        self._open = True
        self._owner = os.getpid()
        self._alive.add(self)
        try:
            for worker_id in range(setup.num_workers if self.kernel_threads else start):
                self._workers.append(self._start(worker_id))
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[Any]:
        return [worker.process for worker in self._workers]

    def scale(self, workers: int, ahead: int) -> None:
        self._ahead = ahead
        if self.kernel_threads:
            self._share_threads(workers)
            return
        while len(self._workers) < workers:
            try:
                worker = self._start(len(self._workers))
            except OSError as error:
                warn(
                    f"num_workers='auto' stays at {len(self._workers)}: another worker cannot be started "
                    f"({error}); raise the limit of processes or of memory"
                )
                return
            self._workers.append(worker)
            if self._epoch is not None:
                self._send(worker, self._epoch)

    def _share_threads(self, count: int) -> None:
        """Let `count` threads of the kernel be busy, as many in each process."""
        self.kernel_threads = -(-count // self._setup.num_workers) if self._setup.kernel_threads else 0

    def _start(self, worker_id: int) -> _Handle:
        ours, theirs = Channel.pair()
        try:
            with self._interrupts_held():
                process = self._launch((self._setup, worker_id, theirs, os.getpid()))
        except BaseException as error:
            ours.close()
            if isinstance(error, TypeError | AttributeError | pickle.PicklingError):
                warnings.warn(_CANNOT_PICKLE, stacklevel=2)
            raise
        finally:
            # Only the worker may hold this end: otherwise its death would not be an end-of-file here.
            theirs.close()
        return _Handle(process, ours, SlotMap(self._pin))

    def _launch(self, arguments: tuple[Any, ...]) -> Any:
        """Return a process that runs `worker_main`.

        In Python before 3.11.10, a fork can stop in the child for ever if a thread of C++ begins or ends at
        that moment, as gloo's do (CPython's issue 112275). There the child says that it runs, or is replaced.
        """
        if not (_FORK_MAY_STOP and self._context.get_start_method() == "fork"):
            return self._start_process(worker_main, arguments)
        runs, tells = os.pipe()
        poll = select.poll()
        poll.register(runs, select.POLLIN)
        try:
            while True:
                process = self._start_process(_tell_and_run, ((runs, tells), arguments))
                if poll.poll(1000 * _FORK_PATIENCE):
                    return process
                process.kill()
                process.join()
        finally:
            os.close(runs)
            os.close(tells)

    def _start_process(self, target: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
        process = self._context.Process(target=target, args=arguments, daemon=True)
        process.start()
        return process

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

    def begin(self, start: EpochStart) -> None:
        self._epoch = start
        for worker in self._workers:
            worker.consumed = 0
            self._send(worker, start)

    def exclude(self, samples: frozenset[int]) -> None:
        assert self._epoch is not None
        self._epoch = self._epoch._replace(excluded=samples)  # for workers that are started later
        for worker in self._workers:
            self._send(worker, Exclude(samples))

    def submit(self, worker_id: int, seq: int, index: Any, *, encoded: bool, again: bool = False) -> None:
        self._tell(self._workers[worker_id], seq, index, encoded, again)

    def consume(self, worker_id: int) -> None:
        self._workers[worker_id].consumed += 1

    def report(self, worker_id: int) -> None:
        self._tell(self._workers[worker_id], -1, None)

    def end_work(self) -> None:
        for worker in self._workers:
            self._tell(worker, -1, None)

    def discard(self, arrival: Arrival) -> None:
        if arrival.load is not None and self._open:
            arrival.load()  # the slots go back when the batch that views them dies, which is now

    def interrupted(self) -> list[int]:
        self.close()  # what had come in by then may be lost, and would be waited for
        return []

    def _tell(
        self, worker: _Handle, seq: int, index: Any, encoded: bool = False, again: bool = False
    ) -> None:
        returned = worker.slots.take_returned()
        ahead, threads = self._ahead, self.kernel_threads
        self._send(worker, Work(worker.consumed, *returned, seq, index, encoded, ahead, threads, again))

    def _send(self, worker: _Handle, message: EpochStart | Exclude | Work) -> None:
        # A death is reported when the worker's batch is due, after the batches that it sent before.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.channel.send(message)

    def receive(
        self, timeout: float, tick: Callable[[], None] | None, awaited: Callable[[], str]
    ) -> list[Arrival]:
        self.check_open()
        deadline = time.monotonic() + (timeout or math.inf)
        while True:
            left = max(0.0, deadline - time.monotonic())
            arrivals = self._poll(min(_LIVENESS_INTERVAL, left))
            if arrivals:
                return arrivals
            for worker in self._workers:
                if not worker.process.is_alive():
                    raise self._death_error(worker)
            if tick is not None:
                tick()
            if left == 0:
                raise _timed_out(timeout, awaited())

    def check_open(self) -> None:
        if not self._open:
            raise WorkerError("the workers of this iterator were ended by an earlier error: start a new one")

    def arrived(self) -> list[Arrival]:
        with suppress(WorkerError):  # `receive` reports a death
            return self._poll(0) if self._open else []
        return []

    def _poll(self, seconds: float) -> list[Arrival]:
        poll = select.poll()
        by_fd = {}
        for worker_id, worker in enumerate(self._workers):
            by_fd[worker.channel.fileno()] = worker_id
            poll.register(worker.channel, select.POLLIN | (select.POLLOUT if worker.channel.pending else 0))
        arrivals = []
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
                    arrivals.append(self._arrival(by_fd[fd], result))
            except (EOFError, ConnectionError):
                dead = worker
        if dead is not None and not arrivals:
            raise self._death_error(dead)
        return arrivals

    def _arrival(self, worker_id: int, result: Result) -> Arrival:
        self._counters.merge(result.counters)
        self._bad.extend(result.bad)
        if self._memory is not None:
            self._memory.report(worker_id, result.memory)
        load = None
        if result.packed is not None:
            load = functools.partial(self._workers[worker_id].slots.unpack, result.packed)
        return Arrival(
            result.seq,
            worker_id,
            load,
            result.failure,
            result.exhausted,
            None if result.before is None else pickle.loads(result.before),
            None if result.after is None else pickle.loads(result.after),
            result.fingerprint,
        )

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

    def close(self) -> None:
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
        for worker in self._workers:
            worker.slots.close()  # who has an exhausted iterator does not need their memory


def _tell_and_run(pipe: tuple[int, int], arguments: tuple[Any, ...]) -> None:
    os.write(pipe[1], b"1")
    for end in pipe:
        os.close(end)
    worker_main(*arguments)


@atexit.register
def _shutdown_all() -> None:
    # Before multiprocessing's own exit handler, which would terminate workers that still write their cache.
    for workers in list(WorkerProcesses._alive):
        workers.close()


def _context(chosen: Any) -> Any:
    """Return the user's start method, or torch's default."""
    context = chosen or multiprocessing.get_context()
    if chosen is None and context.get_start_method() == "fork":
        return torch.multiprocessing
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(_preloaded())
    return context


def _preloaded() -> list[str]:
    """Return what the fork server imports once for all workers: modules that the user has set, and ours."""
    chosen: list[str] = list(forkserver._forkserver._preload_modules)  # type: ignore[attr-defined]
    if chosen == ["__main__"]:  # Python's default; the main script may have no `__main__` guard
        chosen = []
    return chosen + [module for module in PRELOADED if module not in chosen]


def _timed_out(timeout: float, awaited: str) -> RuntimeError:
    error = RuntimeError(f"DataLoader timed out after {timeout} seconds")  # the words of torch
    error.add_note(awaited)
    return error
