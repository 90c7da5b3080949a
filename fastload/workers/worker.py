"""One worker process: the loop that turns index batches into filled slots."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import random
import select
import signal
import socket
import stat
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # numpy itself imports it late: 12 ms in each worker before its first request
import torch

from fastload.images.kernel import set_threads
from fastload.metrics.counters import Counters
from fastload.metrics.machine import use_one_arena
from fastload.metrics.torch_private import handle_dead_workers_signals, numpy_seed, set_worker_info
from fastload.workers.batch import BatchSource, BegunBatch, open_source
from fastload.workers.collate import collate_into
from fastload.workers.memory_limit import WorkerMemory
from fastload.workers.protocol import Channel, EpochStart, Exclude, Failure, Result, Work, WorkerSetup
from fastload.workers.slots import SlotPool
from fastload.workers.streams import StreamOver, load_dataset

# From <malloc.h>; the most that glibc allows on 64-bit machines is 32 MiB for the second.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 16 << 20, 32 << 20
_LOOK_INTERVAL = 0.5  # seconds between checks of the trainer, on kernels without pidfd


def worker_main(setup: WorkerSetup, worker_id: int, channel: Channel, trainer: int) -> None:
    """Run one worker until the trainer's process closes the channel or ends.

    Args:
        trainer: the process id of the trainer.
    """
    # Only the trainer may collect its garbage (a DALI pipeline, a client, their threads): a forked worker
    # that collected its copy would crash, or wait for threads that it does not have.
    gc.freeze()
    # Ctrl-C reaches the whole process group; the trainer alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    use_one_arena()
    _keep_freed_memory()
    _leave_with(trainer)
    _close_listening_sockets()
    handle_dead_workers_signals()
    torch.set_num_threads(1)
    worker = _Worker(setup, channel)
    try:
        worker.run(worker_id)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        worker.close()


def _leave_with(trainer: int) -> None:
    """End this process when the trainer's ends, even while a dataset sleeps.

    PR_SET_PDEATHSIG was rejected: it follows the thread that started us, under forkserver another process's.
    """

    def watch() -> None:
        try:
            poll = select.poll()  # `select.select` takes no descriptor above 1,023
            poll.register(os.pidfd_open(trainer), select.POLLIN)
            poll.poll()
        except ProcessLookupError:
            pass
        except (OSError, AttributeError):  # no pidfd in this kernel, sandbox or build of Python
            while Path(f"/proc/{trainer}").exists():
                time.sleep(_LOOK_INTERVAL)
        os._exit(1)

    threading.Thread(target=watch, name="fastload-trainer-watch", daemon=True).start()


def _close_listening_sockets() -> None:
    """Close what the trainer's servers listen on, such as the port of its metrics: a fork inherits it.

    Otherwise the port would stay taken when a server ends before the workers do, and its clients would wait
    for ever. The descriptors stay open, on an empty file, as the objects that own them may close them later.
    """
    try:
        descriptors = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    except OSError:  # some sandboxes have none
        return
    for fd in descriptors:
        with suppress(OSError):  # that of the listing itself is closed by now
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and _listens(fd):
                empty = os.open(os.devnull, os.O_RDWR)
                os.dup2(empty, fd, inheritable=False)
                os.close(empty)


def _listens(fd: int) -> bool:
    """Return whether it is the socket of a TCP server. Those with a path are no ports."""
    server = socket.socket(fileno=fd)
    try:
        inet = server.family in (socket.AF_INET, socket.AF_INET6)
        return inet and bool(server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        server.detach()


def _keep_freed_memory() -> None:
    """Let this process keep up to 16 MiB of freed memory for what it allocates next. With glibc only.

    By default glibc returns blocks of the size of a decoded image to the kernel, and every next image costs
    page faults: measured 100 us for 360 KB, as much as reading, verifying and resizing it. A pool of our own
    buffers was rejected: it would not help users' transforms, which gain 13 % this way.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def _pickled(state: Any) -> bytes | None:
    """Return the state of a dataset as it is now: the dataset may go on changing what it returned."""
    try:
        return None if state is None else pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        error.add_note("state_dict() of the dataset returned what cannot be pickled: return plain values")
        raise


class _Worker:
    """The loop of one worker process."""

    def __init__(self, setup: WorkerSetup, channel: Channel) -> None:
        self._setup = setup
        self._channel = channel
        self._memory = WorkerMemory(setup.memory_limit, setup.prefetch_factor)
        self._slots = SlotPool(keep=setup.prefetch_factor + 2, check=self._memory.check_batch)
        self._work: deque[Work] = deque()
        self._made = self._consumed = 0
        self._kernel_threads = 0
        self._begun: dict[int, tuple[BegunBatch | None, Any]] = {}  # sequence number -> (batch, its slots)
        self._counters = Counters()
        self._last_known = False
        self._fresh = True  # no batch was made in this epoch
        self._flushed = True  # the cache, since the last batch was made
        self._broken: Failure | None = None  # for good: the process could not be prepared
        self._epoch_failure: Failure | None = None  # in place of each batch of this epoch
        self._refused: dict[int, Failure] = {}  # index batches that could not be announced to the dataset
        self.source: BatchSource | None = None

    def run(self, worker_id: int) -> None:
        """Make batches in the order of the work, and no more ahead of the consumer than it may."""
        try:
            self._prepare(worker_id)
        except Exception as error:
            self._broken = Failure.of(error)
        while True:
            while not self._work or self._is_ahead():
                self._listen(wait=True)
            self._listen(wait=False)
            if self._work:  # a new epoch may just have emptied it
                self._answer(self._work.popleft())

    def _is_ahead(self) -> bool:
        return self._made - self._consumed >= self._memory.ahead

    def _prepare(self, worker_id: int) -> None:
        """Seed this process as torch does, run the user's worker_init_fn, and open the dataset."""
        setup, seed = self._setup, self._setup.base_seed + worker_id
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(numpy_seed(setup.base_seed, worker_id))
        set_worker_info(worker_id, setup.num_workers, seed, setup.dataset)
        collate_into(self._slots.allocate)
        if setup.worker_init_fn is not None:
            setup.worker_init_fn(worker_id)
        position = setup.positions[worker_id] if setup.positions is not None else None
        load_dataset(setup.dataset, position)
        self.source = open_source(setup, self._slots.allocate)
        self.source.resume(position)
        self._memory.begin()

    def _listen(self, *, wait: bool) -> None:
        """Handle every message that has arrived; with `wait`, at least one."""
        start, full = time.perf_counter(), self._is_ahead()
        between_epochs = self._last_known and not self._work
        received = self._channel.receive(wait=wait)
        if wait and not between_epochs:
            waited = time.perf_counter() - start
            for stage in ("idle", "slot")[: 1 + full]:
                self._counters.add(f"{stage}.seconds", waited)
        while received is not None:
            message = received[0]
            if isinstance(message, EpochStart):
                self._start_epoch(message)
            elif isinstance(message, Exclude):
                if self.source is not None:
                    self.source.exclude(message.samples)
            else:
                self._accept(message)
            received = self._channel.receive(wait=False)

    def _accept(self, work: Work) -> None:
        """Queue an index batch, and announce it to the dataset."""
        self._consumed = work.consumed
        self._memory.allow_ahead(work.ahead)
        if work.kernel_threads != self._kernel_threads:
            self._kernel_threads = set_threads(work.kernel_threads)
        self._slots.keep = max(self._setup.prefetch_factor, work.ahead) + 2
        for slot_id in work.released:
            self._slots.release(slot_id)
        for slot_id in work.given_up:
            self._slots.give_up(slot_id)
        if not work.again:
            self._last_known = work.seq < 0
        if work.seq >= 0:
            (self._work.appendleft if work.again else self._work.append)(work)
            if self.source is not None:
                try:
                    self.source.prefetch(work.index)
                except Exception as error:
                    self._refused[work.seq] = Failure.of(error)
        elif not self._work:
            self._flush_cache()

    def _start_epoch(self, start: EpochStart) -> None:
        source = self.source if self._broken is None else None
        unwanted, self._work = self._work, deque()
        if source is not None:
            for work in unwanted:
                self._pass_over(source, work)
        # Batches of an earlier epoch that are still on their way do not count in this one: no message would
        # report that they left the loader.
        self._made = self._consumed = 0
        self._fresh = True
        self._refused.clear()
        self._epoch_failure = None
        if source is None:
            return
        try:
            source.start_epoch(start)
        except Exception as error:
            self._epoch_failure = Failure.of(error)

    def _pass_over(self, source: BatchSource, work: Work) -> None:
        """Make and drop a batch of an epoch that was left, where the next ones depend on it; else cancel it.

        torch's workers make all that they were given before they begin an epoch. So what comes next does not
        depend on how far this one had come.
        """
        begun = self._take_begun(work)
        refused = self._epoch_failure is not None or work.seq in self._refused
        if source.remembers and not refused and not self._is_ahead():
            self._made += 1
            with suppress(Exception):  # nobody waits for it
                source.make_batch(work.index, encoded=work.encoded, begun=begun)
        elif begun is not None:
            source.end_batch(begun)
        self._slots.abandon()
        source.cancel(work.index)

    def _begin(self, work: Work) -> BegunBatch | None:
        """Let other threads fill this batch and the next one; return this one, if they do.

        So the threads of the kernel have work while this one is packed and sent, and while it waits for a
        sample. The next one takes a slot more, for which there may be no room under a limit.
        """
        self._begin_one(work)
        in_room = self._setup.memory_limit is None or self._made + 1 - self._consumed < self._memory.ahead
        if self._work and in_room:
            self._begin_one(self._work[0])
        return self._take_begun(work)

    def _begin_one(self, work: Work) -> None:
        known = work.seq in self._begun or work.seq in self._refused
        if self.source is None or not self._kernel_threads or known:
            return
        try:
            batch = self.source.begin_batch(work.index)
        except Exception:  # `make_batch` raises it again, when that batch is due
            self._slots.abandon()
        else:
            self._begun[work.seq] = batch, self._slots.set_aside()

    def _take_begun(self, work: Work) -> BegunBatch | None:
        """Return a batch that was begun, which becomes the current one of the slots; None: it was not."""
        batch, slots = self._begun.pop(work.seq, (None, []))
        self._slots.resume(slots)
        return batch

    def _answer(self, work: Work) -> None:
        """Make a batch and send it, packed into slots; or send its error.

        While it is packed and sent, the threads of the kernel have the next one to work on.
        """
        self._flushed = False
        packed, fds, exhausted = None, list[int](), False
        failure = self._broken or self._epoch_failure or self._refused.pop(work.seq, None)
        before = after = fingerprint = None
        source = self.source
        if failure is None and source is not None:
            try:
                before = _pickled(source.state()) if self._fresh else None
                begun = self._begin(work)
                try:
                    batch = source.make_batch(work.index, encoded=work.encoded, begun=begun)
                finally:  # an error takes the place of the batch
                    after = _pickled(source.state())
                del begun
                if self._last_known and not self._work:
                    self._flush_cache()
                with self._counters.timed("collate"):
                    packed, fds = self._slots.pack(batch)
                del batch
                fingerprint = source.fingerprint
                self._memory.look(self._slots.nbytes)
            except StreamOver:
                self._slots.abandon()
                self._flush_cache()
                exhausted = True
            except Exception as error:
                self._slots.abandon()
                failure = Failure.of(error)
        self._fresh = False
        self._made += not exhausted
        counters, bad = ({}, []) if source is None else source.drain()
        self._counters.merge(counters)
        sums, used = self._counters.drain(), self._memory.used
        result = Result(work.seq, packed, failure, exhausted, sums, bad, used, before, after, fingerprint)
        self._channel.send(result, fds)
        self._channel.flush(wait=True)

    def close(self) -> None:
        """Write out the cache. Batches that were begun are not finished, which would read their samples."""
        for begun, _ in self._begun.values():
            if begun is not None:
                begun.stop.set()
        if self.source is not None:
            self.source.close_cache()

    def _flush_cache(self) -> None:
        if self.source is not None and not self._flushed:
            self._flushed = True
            self.source.flush_cache()
