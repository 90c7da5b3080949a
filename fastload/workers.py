"""Worker processes: index batches in, filled slots out, and a watch on who is alive.

    trainer                                             worker (x num_workers)
    WorkerPool.submit ── Work(seq, index) ───────────▶  reads ahead for every index batch it knows,
                      ── consumed, released slots ──▶   makes at most `prefetch_factor` batches in advance
    WorkerPool.receive ◀─ Result(seq, slots, counters) ─ makes them in order

Each worker has a socket of its own, so an end-of-file names the one that died. The trainer's process runs no
thread. A worker watches the trainer through a pidfd and leaves when it is gone, whatever it is busy with.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import random
import select
import signal
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, graph_settings
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from fastload.allocator import keep_freed_memory
from fastload.channel import Channel
from fastload.collate import BatchMaker, collate_into
from fastload.errors import WorkerError
from fastload.failure import Failure
from fastload.slots import PackedBatch, SlotMap, SlotPool
from fastload.state import dataset_state, load_dataset, resume_fetcher

__all__ = ["Result", "WorkerPool", "WorkerSetup"]

_LIVENESS_INTERVAL = 0.5  # seconds between looks at the processes while waiting for a batch
# Torch's words, which scripts may filter or tests expect.
_CANNOT_PICKLE = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)
_SHUTDOWN_GRACE = 5.0  # seconds a worker has to finish its batch and write out its cache


@dataclass(frozen=True)
class WorkerSetup:
    """All that a worker needs to know; inherited under fork, pickled otherwise."""

    dataset: Any
    collate_fn: Any
    auto_collation: bool
    drop_last: bool
    worker_init_fn: Any
    num_workers: int
    prefetch_factor: int
    base_seed: int
    on_error: str
    seeded: bool
    batch_size: int
    positions: list[dict[str, Any]] | None  # where each worker takes up the dataset; see `Progress`


class _Epoch(NamedTuple):
    first: int  # sequence number of its first batch: what is older is not wanted any more
    seed: int
    epoch: int
    shared_seed: int | None  # of all workers and ranks, for torch's iterable data pipes


class _Work(NamedTuple):
    consumed: int  # batches of this worker that were taken out of the loader, or dropped, so far
    released: list[int]
    seq: int  # -1: there are no more index batches in this epoch
    index: Any


class Result(NamedTuple):
    """What came of one index batch."""

    seq: int
    packed: PackedBatch | None
    failure: Failure | None
    exhausted: bool  # an iterable dataset has no more
    counters: dict[str, float]
    bad: list[tuple[str, str]]
    before: Any = None  # the state of a dataset that has one, with the worker's first result of an epoch
    after: Any = None  # the state with this batch made


# --- in the worker -----------------------------------------------------------------------------------------


def _worker_main(setup: WorkerSetup, worker_id: int, channel: Channel, trainer: int) -> None:
    # Ctrl-C reaches the whole process group; the trainer alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _leave_with(trainer)
    signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    keep_freed_memory()
    worker = _Worker(setup, worker_id, channel)
    try:
        worker.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        if isinstance(worker.maker, BatchMaker):
            worker.maker.close_cache()


def _leave_with(trainer: int) -> None:
    """End this process when the trainer's does, even if a dataset sleeps for ever.

    PR_SET_PDEATHSIG was rejected: it follows the thread that started us, under forkserver another process.
    """

    def watch() -> None:
        try:
            select.select([os.pidfd_open(trainer)], [], [])
        except ProcessLookupError:
            pass
        except OSError:  # no pidfd in this kernel or sandbox
            while Path(f"/proc/{trainer}").exists():
                time.sleep(_LIVENESS_INTERVAL)
        os._exit(1)

    threading.Thread(target=watch, name="fastload-trainer-watch", daemon=True).start()


class _Worker:
    """The loop of one worker process."""

    def __init__(self, setup: WorkerSetup, worker_id: int, channel: Channel) -> None:
        self._setup = setup
        self._id = worker_id
        self._channel = channel
        self._slots = SlotPool(keep=setup.prefetch_factor + 2)
        self._work: deque[tuple[int, Any]] = deque()
        self._made = self._consumed = 0
        self._idle = 0.0
        self._last_known = False
        self._fresh = True  # nothing was made in this epoch
        self._broken: Failure | None = None
        self.maker: Any = None

    def run(self) -> None:
        try:
            self._prepare()
        except Exception as error:
            self._broken = Failure.of(error)
        while True:
            while not self._work or self._made - self._consumed >= self._setup.prefetch_factor:
                self._listen(wait=True)
            self._listen(wait=False)
            if self._work:  # a new epoch may just have emptied it
                self._make(*self._work.popleft())

    def _prepare(self) -> None:
        """Seed this process as torch does, and run the user's worker_init_fn."""
        setup, seed = self._setup, self._setup.base_seed + self._id
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(torch_worker._generate_state(setup.base_seed, self._id))  # type: ignore[no-untyped-call]
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._id, num_workers=setup.num_workers, seed=seed, dataset=setup.dataset
        )
        collate_into(self._slots.allocate)
        if setup.worker_init_fn is not None:
            setup.worker_init_fn(self._id)
        position = setup.positions[self._id] if setup.positions is not None else None
        load_dataset(setup.dataset, position)
        self._new_maker(position)

    def _new_maker(self, position: dict[str, Any] | None = None) -> None:
        setup = self._setup
        if isinstance(setup.dataset, IterableDataset):
            self.maker = _IterableDatasetFetcher(
                setup.dataset, setup.auto_collation, setup.collate_fn, setup.drop_last
            )
            resume_fetcher(self.maker, position, setup.batch_size)
        else:
            self.maker = BatchMaker(
                setup.dataset,
                collate_fn=setup.collate_fn,
                auto_collation=setup.auto_collation,
                on_error=setup.on_error,
                seeded=setup.seeded,
                allocate=self._slots.allocate,
            )

    def _listen(self, *, wait: bool) -> None:
        """Take every message that is there; with `wait`, at least one."""
        start = time.perf_counter()
        received = self._channel.receive(wait=wait)
        if wait:
            self._idle += time.perf_counter() - start
        while received is not None:
            self._obey(received[0])
            received = self._channel.receive(wait=False)

    def _obey(self, message: _Epoch | _Work) -> None:
        if isinstance(message, _Epoch):
            self._start_epoch(message)
            return
        self._consumed = message.consumed
        for slot_id in message.released:
            self._slots.release(slot_id)
        self._last_known = message.seq < 0
        if message.seq >= 0:
            self._work.append((message.seq, message.index))
            if isinstance(self.maker, BatchMaker):
                self.maker.prefetch(message.index)
        elif not self._work:
            self._flush_cache()

    def _flush_cache(self) -> None:
        if isinstance(self.maker, BatchMaker):
            self.maker.flush_cache()

    def _start_epoch(self, message: _Epoch) -> None:
        self._fresh = True
        if self._broken is not None:
            return
        if isinstance(self.maker, BatchMaker):
            for _, index in self._work:
                self.maker.cancel(index)
            self.maker.start_epoch(message.seed, message.epoch)
        elif message.first > 0:
            try:
                if message.shared_seed is not None:
                    rng = torch.Generator().manual_seed(message.shared_seed)
                    graph_settings.apply_random_seed(self._setup.dataset, rng)
                self._new_maker()
            except Exception as error:
                self._broken = Failure.of(error)
        self._work.clear()

    def _make(self, seq: int, index: Any) -> None:
        packed, fds, failure, exhausted = None, list[int](), self._broken, False
        before = after = None
        if failure is None:
            try:
                before = dataset_state(self._setup.dataset, self.maker) if self._fresh else None
                batch = self.maker(index) if isinstance(self.maker, BatchMaker) else self.maker.fetch(index)
                if self._last_known and not self._work:
                    self._flush_cache()
                packed, fds = self._slots.pack(batch)
                del batch
            except Exception as error:
                self._slots.abandon()
                exhausted = isinstance(error, StopIteration) and not isinstance(self.maker, BatchMaker)
                failure = None if exhausted else Failure.of(error)
            after = dataset_state(self._setup.dataset, self.maker)
        self._fresh = False
        self._made += 1
        counters, bad = self._report()
        self._channel.send(Result(seq, packed, failure, exhausted, counters, bad, before, after), fds)
        self._channel.flush(wait=True)

    def _report(self) -> tuple[dict[str, float], list[tuple[str, str]]]:
        idle, self._idle = {"idle.seconds": self._idle}, 0.0
        if not isinstance(self.maker, BatchMaker):
            return idle, []
        bad, self.maker.bad = self.maker.bad, []
        return self.maker.counters.drain() | idle, bad


# --- in the trainer ----------------------------------------------------------------------------------------


@dataclass
class _Handle:
    """One worker, seen from the trainer."""

    process: Any
    channel: Channel
    slots: SlotMap = field(default_factory=SlotMap)
    consumed: int = 0
    answered: bool = False


class WorkerPool:
    """The worker processes of one iterator.

    Args:
        setup: see `WorkerSetup`.
        context: a multiprocessing context.
    """

    _alive: ClassVar[weakref.WeakSet[WorkerPool]] = weakref.WeakSet()

    def __init__(self, setup: WorkerSetup, context: Any) -> None:
        self._workers: list[_Handle] = []
        self._context = context
        self._open = True
        self._owner = os.getpid()
        self._alive.add(self)
        try:
            for worker_id in range(setup.num_workers):
                self._workers.append(self._start(setup, worker_id))
        except BaseException:
            self.shutdown()
            raise

    @property
    def processes(self) -> list[Any]:
        return [worker.process for worker in self._workers]

    def _start(self, setup: WorkerSetup, worker_id: int) -> _Handle:
        ours, theirs = Channel.pair()
        process = self._context.Process(target=_worker_main, args=(setup, worker_id, theirs, os.getpid()))
        process.daemon = True
        try:
            with self._interrupts_held():
                process.start()
        except BaseException as error:
            ours.close()
            if isinstance(error, TypeError | AttributeError | pickle.PicklingError):
                warnings.warn(_CANNOT_PICKLE, stacklevel=2)
            raise
        finally:
            # Only the worker may hold this end, or its death would not be an end-of-file here.
            theirs.close()
        return _Handle(process, ours)

    @contextmanager
    def _interrupts_held(self) -> Iterator[None]:
        """A worker inherits this until it ignores Ctrl-C: one that is still importing leaves no traceback.

        Not under forkserver: it would pass the mask on to every other process that it ever starts.
        """
        method = self._context.get_start_method()
        if method == "forkserver":
            yield
            return
        if method == "spawn":
            resource_tracker.ensure_running()  # as spawn itself does, and thereby would lift the mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def start_epoch(self, first: int, seed: int, epoch: int, shared_seed: int | None = None) -> None:
        """Results older than sequence number `first` are not wanted any more."""
        for worker in self._workers:
            self._send(worker, _Epoch(first, seed, epoch, shared_seed))

    def submit(self, worker_id: int, seq: int, index: Any) -> None:
        """Ask a worker for the batch of `index`."""
        self._tell(self._workers[worker_id], seq, index)

    def consume(self, worker_id: int) -> None:
        """A batch of this worker has left the loader: it may make another one."""
        self._workers[worker_id].consumed += 1

    def finish(self, worker_id: int) -> None:
        """Tell a worker what was consumed and released, and that this epoch has no more index batches."""
        self._tell(self._workers[worker_id], -1, None)

    def unpack(self, worker_id: int, packed: PackedBatch) -> Any:
        """The batch that a worker has packed."""
        return self._workers[worker_id].slots.unpack(packed)

    def _tell(self, worker: _Handle, seq: int, index: Any) -> None:
        released = []
        while worker.slots.released:
            released.append(worker.slots.released.popleft())
        self._send(worker, _Work(worker.consumed, released, seq, index))

    def _send(self, worker: _Handle, message: _Epoch | _Work) -> None:
        # A death is reported when the worker's batch is due, with what it had sent before.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.channel.send(message)

    def receive(self, timeout: float) -> list[tuple[int, Result]]:
        """Wait for results: (worker, result), at least one.

        Raises:
            WorkerError: a worker died. RuntimeError: nothing came within `timeout` seconds (0: no limit).
        """
        if not self._open:
            raise WorkerError("the workers of this iterator were ended by an earlier error: start a new one")
        deadline = time.monotonic() + (timeout or math.inf)
        while True:
            left = max(0.0, deadline - time.monotonic())
            results = self._poll(min(_LIVENESS_INTERVAL, left))
            if results:
                return results
            for worker in self._workers:
                if not worker.process.is_alive():
                    raise self._obituary(worker)
            if left == 0:
                raise RuntimeError(f"DataLoader timed out after {timeout} seconds")

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
            raise self._obituary(dead)
        return results

    def _obituary(self, worker: _Handle) -> WorkerError:
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
        """End the workers: let them finish their batch and write out their cache, then insist."""
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
