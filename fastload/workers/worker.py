"""One worker process: the loop that turns index batches into filled slots."""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, graph_settings

from fastload.metrics.counters import Counters
from fastload.metrics.torch_private import (
    IterableFetcher,
    handle_dead_workers_signals,
    numpy_seed,
    set_worker_info,
)
from fastload.workers.allocator import keep_freed_memory
from fastload.workers.batch import BatchCounters, BatchMaker
from fastload.workers.channel import Channel
from fastload.workers.collate import collate_into
from fastload.workers.dataset_state import dataset_state, load_dataset, resume_fetcher
from fastload.workers.failure import Failure
from fastload.workers.messages import Epoch, Result, Work, WorkerSetup
from fastload.workers.slots import SlotPool
from fastload.workers.stream_reader import StreamOver, StreamReader, TakeNext

__all__ = ["worker_main"]

_LOOK_INTERVAL = 0.5  # seconds between looks at the trainer, where the kernel cannot tell


def worker_main(setup: WorkerSetup, worker_id: int, channel: Channel, trainer: int) -> None:
    # What the trainer has left to its garbage collector (a DALI pipeline, a client, their threads) is the
    # trainer's to take apart: a forked worker that collected its copy would crash, or wait for those threads.
    gc.freeze()
    # Ctrl-C reaches the whole process group; the trainer alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _leave_with(trainer)
    handle_dead_workers_signals()
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
            poll = select.poll()  # `select.select` takes no descriptor above 1,023
            poll.register(os.pidfd_open(trainer), select.POLLIN)
            poll.poll()
        except ProcessLookupError:
            pass
        except OSError:  # no pidfd in this kernel or sandbox
            while Path(f"/proc/{trainer}").exists():
                time.sleep(_LOOK_INTERVAL)
        os._exit(1)

    threading.Thread(target=watch, name="fastload-trainer-watch", daemon=True).start()


class _Worker:
    """The loop of one worker process."""

    def __init__(self, setup: WorkerSetup, worker_id: int, channel: Channel) -> None:
        self._setup = setup
        self._id = worker_id
        self._channel = channel
        self._slots = SlotPool(keep=setup.prefetch_factor + 2)
        self._work: deque[Work] = deque()
        self._made = self._consumed = 0
        self._counters = Counters()
        self._last_known = False
        self._fresh = True  # nothing was made in this epoch
        self._broken: Failure | None = None
        self._refused: dict[int, Failure] = {}  # index batches that could not be announced to the dataset
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
                self._make(self._work.popleft())

    def _prepare(self) -> None:
        """Seed this process as torch does, and run the user's worker_init_fn."""
        setup, seed = self._setup, self._setup.base_seed + self._id
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(numpy_seed(setup.base_seed, self._id))
        set_worker_info(self._id, setup.num_workers, seed, setup.dataset)
        collate_into(self._slots.allocate)
        if setup.worker_init_fn is not None:
            setup.worker_init_fn(self._id)
        position = setup.positions[self._id] if setup.positions is not None else None
        load_dataset(setup.dataset, position)
        self._new_maker(position)

    def _new_maker(self, position: dict[str, Any] | None = None) -> None:
        setup = self._setup
        if isinstance(setup.dataset, IterableDataset):
            self._iterable_counters = BatchCounters(setup.dataset)
            self.maker = IterableFetcher(
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
            self._streams = StreamReader(
                setup.dataset,
                auto_collation=setup.auto_collation,
                drop_last=setup.drop_last,
                cancel=self.maker.cancel,
            )

    def _listen(self, *, wait: bool) -> None:
        """Take every message that is there; with `wait`, at least one."""
        start, full = time.perf_counter(), self._made - self._consumed >= self._setup.prefetch_factor
        between_epochs = self._last_known and not self._work
        received = self._channel.receive(wait=wait)
        if wait and not between_epochs:
            waited = time.perf_counter() - start
            for stage in ("idle", "slot")[: 1 + full]:
                self._counters.add(f"{stage}.seconds", waited)
        while received is not None:
            self._obey(received[0])
            received = self._channel.receive(wait=False)

    def _obey(self, message: Epoch | Work) -> None:
        if isinstance(message, Epoch):
            self._start_epoch(message)
            return
        self._consumed = message.consumed
        for slot_id in message.released:
            self._slots.release(slot_id)
        for slot_id in message.given_up:
            self._slots.give_up(slot_id)
        self._last_known = message.seq < 0
        if message.seq >= 0:
            self._work.append(message)
            if isinstance(self.maker, BatchMaker) and not isinstance(message.index, TakeNext):
                try:
                    self.maker.prefetch(message.index)
                except Exception as error:
                    self._refused[message.seq] = Failure.of(error)
        elif not self._work:
            self._flush_cache()

    def _flush_cache(self) -> None:
        if isinstance(self.maker, BatchMaker):
            self.maker.flush_cache()

    def _start_epoch(self, message: Epoch) -> None:
        self._fresh = True
        # What was made for an earlier epoch and is still on its way fills no place in this one: nothing would
        # tell this worker that it has left the loader.
        self._made = self._consumed = 0
        self._refused.clear()
        if self._broken is not None:
            self._work.clear()  # what is left of the epoch before: answers to it fill places here
            return
        if isinstance(self.maker, BatchMaker):
            for work in self._work:
                if not isinstance(work.index, TakeNext):
                    self.maker.cancel(work.index)
            self._streams.start_epoch(streamed=message.streamed)
            self.maker.start_epoch(message.seed, message.epoch, numbered=not message.streamed)
        elif message.first > 0:
            try:
                if message.shared_seed is not None:
                    rng = torch.Generator().manual_seed(message.shared_seed)
                    graph_settings.apply_random_seed(self._setup.dataset, rng)
                self._new_maker()
            except Exception as error:
                self._broken = Failure.of(error)
        self._work.clear()

    def _make(self, work: Work) -> None:
        packed, fds, exhausted = None, list[int](), False
        failure = self._broken or self._refused.pop(work.seq, None)
        before = after = None
        streamed = isinstance(work.index, TakeNext)
        if failure is None:
            try:
                before = dataset_state(self._setup.dataset, self.maker) if self._fresh else None
                if streamed:
                    index, after = self._streams.take(work.index)
                    work = work._replace(index=index)
                batch = self._fetch(work)
                if self._last_known and not self._work:
                    self._flush_cache()
                with self._counters.timed("collate"):
                    packed, fds = self._slots.pack(batch)
                del batch
            except StreamOver:
                self._flush_cache()
                exhausted = True
            except Exception as error:
                self._slots.abandon()
                exhausted = isinstance(error, StopIteration) and not isinstance(self.maker, BatchMaker)
                failure = None if exhausted else Failure.of(error)
            if not streamed:
                after = dataset_state(self._setup.dataset, self.maker)
        self._fresh = False
        self._made += not exhausted
        counters, bad = self._report()
        self._channel.send(Result(work.seq, packed, failure, exhausted, counters, bad, before, after), fds)
        self._channel.flush(wait=True)

    def _fetch(self, work: Work) -> Any:
        if isinstance(self.maker, BatchMaker):
            return self.maker(work.index, encoded=work.encoded)
        with self._iterable_counters.timed("decode"):
            batch = self.maker.fetch(work.index)
        self._iterable_counters.made_batch(len(work.index) if self._setup.auto_collation else 1)
        return batch

    def _report(self) -> tuple[dict[str, float], list[tuple[str, str]]]:
        bad: list[tuple[str, str]] = []
        if isinstance(self.maker, BatchMaker):
            self._counters.merge(self.maker.counters.drain())
            bad, self.maker.bad = self.maker.bad, []
        elif self.maker is not None:
            self._counters.merge(self._iterable_counters.drain())
        return self._counters.drain(), bad
