"""The way of a batch, from the sampler to the consumer: `LoaderIterator._next_data` is that way on one page.

    schedule ──▶ workers ───────────▶ reorder ──▶ delivery ──▶ the consumer
    (sampler,    (processes,          (in turn)   (copy, batch_transform, ahead;
     streams)     or this one)                     or pinned; or as it is)

In a worker `fastload.workers.batch.BatchMaker` makes the batch: the prefetcher reads the samples from the
cache or the store, they are decoded and transformed, and collated into a slot of shared memory.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import torch

from fastload.errors import FastloadError, LimitError, WorkerError, shorten_errors
from fastload.gpu.transfer import DevicePrefetcher
from fastload.loader.context import Delivery, LoaderContext, new_device, new_workers
from fastload.loader.resume import filter_of
from fastload.loader.schedule import ReorderBuffer, Schedule, follow_exclusions, new_schedule, scale
from fastload.metrics.counters import stage
from fastload.metrics.torch_private import TorchIterator, is_exiting, pin_memory
from fastload.order.position import Position
from fastload.order.state import WorkerState, reading_state
from fastload.workers.protocol import EpochStart
from fastload.workers.reading import name_sample
from fastload.workers.streams import share_seed
from fastload.workers.workers import Arrival, Workers

_HANGS = (
    "Your own code or the store hangs, or takes longer than timeout=. To see the line, run with "
    "num_workers=0 and without timeout=, and press Ctrl-C"
)


class LoaderIterator(TorchIterator):
    """One iteration over a loader, or with persistent workers all of them, for any number of workers.

    It derives from torch's private base class, for three reasons. Frameworks and scripts ask
    `isinstance(iterator, _BaseDataLoaderIter)`. The base draws the seeds of an epoch from torch's generator,
    in the order of the torch that is installed. It warns in torch's words about pinned memory, and about
    iterable datasets that are longer than they say. To repeat all of that here was rejected. `__init__`,
    `_reset` and `__next__` of the base are used; `__next__` calls `_next_data`.
    """

    _engine: Workers  # not there before `__init__` comes to it; `_workers` is torch's name of its processes
    _device: DevicePrefetcher | None = None
    _schedule: Schedule
    _position: Position

    def __init__(self, loader: Any, context: LoaderContext) -> None:
        # Persistent workers end with their loader, so there must be no cycle: no reference back to it.
        self._context = context
        self._sent = self._first = 0  # sequence numbers: of the next work, of the first of this epoch
        self._reorder = ReorderBuffer(in_order=loader.in_order)
        self._outdated: set[int] = set()  # work that may be made by rules which have changed
        self.broken = False
        self._ended_by: FastloadError | None = None
        inline, start = loader.num_workers == 0, context.position.start
        if inline:
            self._position = context.position.begin(loader)
        with start.seeding(loader):
            super().__init__(loader)
        seed = None if start.resumed is None else start.resumed.shared_seed
        if self._shared_seed is not None and seed is not None:  # a data pipe draws from the one of its state
            self._shared_seed = seed
            share_seed(self._dataset, seed)
        self._base_seed = int(self._base_seed) if start.base_seed is None else start.base_seed
        self._encoded = context.decoding is not None  # whether workers send images as they are
        self._device = new_device(loader, context)
        if self._device is not None and self._device.copies:
            self._pin_memory = False
        self._engine = new_workers(
            loader,
            context,
            self._device,
            base_seed=int(self._base_seed),
            pinned=self._pin_memory,
            part=(self._world_size, self._rank),
        )
        pin = partial(pin_memory, device=self._pin_memory_device) if self._pin_memory else None
        self._delivery = Delivery(self._device, context, self._engine, pin)
        if inline:
            if start.order_was_undone:
                self._sampler_iter = iter(self._index_sampler)
            self._take_position(loader)
            self._start_epoch(loader)
        else:
            self._reset(loader, first_iter=True)

    @property
    def _workers(self) -> list[Any]:
        """Return the worker processes. torch's own tests and many scripts look here."""
        return self._engine.processes if hasattr(self, "_engine") else []

    # --- the way of a batch

    @shorten_errors
    def _next_data(self) -> Any:
        if self._ended_by is not None:
            raise copy.copy(self._ended_by)
        if self.broken:
            self._engine.check_open()
        self._context.meter.asked()
        if self._device is not None:
            self._device.mark_wait()
        follow_exclusions(self._position, self._reorder, self._engine, self._first, self._outdated)
        while (seq := self._next_due()) is not None:  # schedule -> workers
            arrival = self._wait_for(seq)  # workers -> reorder
            if arrival.seq in self._outdated:
                self._make_again(arrival)
                continue
            self._start_copies()  # reorder -> delivery
            if not arrival.exhausted and not self._schedule.goes_on(self._reorder.ready):
                break
            lane = self._reorder.take(arrival.seq)
            if not arrival.exhausted:
                return self._hand_over(lane, arrival)  # delivery -> the consumer
            self._retire(lane, arrival)
        self._finish()
        raise StopIteration

    def _next_due(self) -> int | None:
        """Return the work to hand over next, given out now where none is; None at the end of the epoch."""
        if not self._engine.concurrent:
            self._fill()
        while (seq := self._reorder.due()) is None:
            if not self._fill() and not self._schedule.next_lap():
                return None
        return seq

    def _fill(self) -> bool:
        """Give out as much work as the lanes may have at a time. Returns whether there was any."""
        before = self._sent
        while len(self._reorder) < self._schedule.ahead * len(self._schedule.turn):
            if self._submit() is None:
                break
        return self._sent > before

    def _submit(self, left: int | None = None) -> int | None:
        """Give out the next work. Returns the worker that gets it; None where there is none.

        Args:
            left: the lane of the batch that has just left the loader.
        """
        schedule = self._schedule
        if not schedule.turn:
            return None
        lane = schedule.choose(left)
        try:
            with self._context.counters.timed("sampler"):
                index = schedule.work(lane)
        except StopIteration:
            schedule.turn.clear()
            self._engine.end_work()
            return None
        worker_id = lane % self._engine.lanes
        seq, self._sent = self._sent, self._sent + 1
        self._reorder.expect(seq, lane)
        try:
            self._engine.submit(worker_id, seq, index, encoded=self._encoded)
        except BaseException:  # an index that cannot be pickled, Ctrl-C: nobody may wait for this batch
            self._reorder.forget(seq)
            raise
        return worker_id

    def _wait_for(self, seq: int) -> Arrival:
        """Wait for the next result: the one that is due, or the first one if order does not matter."""
        while not self._reorder.has(seq):
            self._receive()
            due = self._reorder.due()
            assert due is not None
            seq = due
        return self._reorder.look(seq)

    def _receive(self, *, wait: bool = True) -> None:
        """Receive arrived results; with `wait`, at least one."""
        start = time.perf_counter()
        try:
            if wait:
                with stage("wait"):
                    arrivals = self._engine.receive(self._timeout, self._context.meter.tick, self._awaited)
                self._context.meter.waited(time.perf_counter() - start)
            else:
                arrivals = self._engine.arrived()
            for arrival in arrivals:
                if self._reorder.put(arrival):
                    self._position.began(arrival.worker_id, arrival.before)
                else:
                    self._discard(arrival)
        except BaseException:  # Ctrl-C too
            self.broken = self._engine.concurrent
            for seq in self._engine.interrupted():
                self._schedule.lost(self._reorder.forget(seq))
            raise

    def _awaited(self) -> str:
        """Return what is waited for, and what to do if it does not come, below the text of an error."""
        seq = self._reorder.due()
        given = None if seq is None else self._position.given_out(seq - self._first)
        index = None if given is None else given.edited.index
        step = "a batch" if given is None else f"step {given.step}"
        if isinstance(index, list) and index:
            first = ", ".join(name_sample(self._dataset, one) for one in index[:3])
            step += f": {first}" + (f" and {len(index) - 3} more" if len(index) > 3 else "")
        return f"(waited for {step}. {_HANGS})"

    def _start_copies(self) -> None:
        """Start what is here and due next on its way to the device, before it is asked for."""
        if not self._delivery.ahead:
            return
        self._receive(wait=False)
        try:
            for arrival in self._reorder.first(1 + self._delivery.ahead):
                if arrival.seq not in self._outdated:
                    self._delivery.start(arrival)
        except BaseException:  # Ctrl-C; the batch that it met may be half transformed
            self._ended_by = WorkerError("an interruption ended this iterator: start a new one")
            self.broken = True
            raise

    def _hand_over(self, lane: int, arrival: Arrival) -> Any:
        """Return the batch as the user gets it. Raises what its worker, the device or the pinning raised."""
        self._engine.consume(arrival.worker_id)
        try:
            arrival.reraise()
            batch = self._delivery.load(arrival)
        except LimitError as error:  # whoever resumes with a higher limit gets this batch once more
            # A copy: the traceback of `error` leads back here, and workers end with the last reference.
            self._ended_by, self.broken = copy.copy(error), self._engine.concurrent
            raise
        except BaseException as error:
            self._give_more(lane, arrival.worker_id)
            if isinstance(error, Exception):  # after Ctrl-C, whoever resumes gets this batch once more
                arrival.fingerprint = None  # a step without samples
                self._count(lane, arrival, failed=True)
            raise
        self._give_more(lane, arrival.worker_id)
        self._context.meter.delivered()
        if scale(self._schedule, self._context, self._engine, len(self._reorder)):
            self._fill()
        self._count(lane, arrival)  # last, for the same reason
        return batch

    def _give_more(self, lane: int, worker_id: int) -> None:
        """Give out new work in the place of a batch that leaves the loader, and say that it does."""
        if not self._engine.concurrent:
            return  # not before it is asked for: its work would hold up this batch
        turn = self._schedule.turn
        parked = bool(turn) and lane not in turn
        if parked or self._submit(lane) != worker_id:
            # It is told at once that it may make another batch: with other workers coming and going, its next
            # work may come late, and nobody would make a batch that is waited for.
            self._engine.report(worker_id)

    def _count(self, lane: int, arrival: Arrival, *, failed: bool = False) -> None:
        step = self._position.delivered(arrival.seq - self._first, lane, arrival.after, failed=failed)
        self._context.delivered(self._position.epoch, step, arrival.fingerprint)
        self._position.next_worker = self._reorder.next_lane()

    def _make_again(self, arrival: Arrival) -> None:
        """Discard what was made under older exclusions, and make it again unless it is skipped now.

        Now, when it is due, and not when the rules change: a worker makes no other batch before those that it
        has made leave the loader, so it could wait for ever.
        """
        seq, worker_id = arrival.seq, arrival.worker_id
        given = self._position.given_out(seq - self._first)
        if given is None:
            lane = self._reorder.take(seq)
            self._outdated.discard(seq)
            self._discard(arrival)
            self._give_more(lane, worker_id)
            return
        try:
            self._reorder.expect_again(seq)
            self._outdated.discard(seq)
            self._discard(arrival)
            index = given.edited.index
            self._engine.submit(worker_id, seq, index, encoded=self._encoded, again=True)
        except BaseException:  # Ctrl-C: nobody may wait for this batch, which whoever resumes gets
            self._reorder.forget(seq)
            raise

    # --- what ends before the epoch does

    def _retire(self, lane: int, arrival: Arrival) -> None:
        """End a stream, or this worker's part of an iterable dataset."""
        self._position.ended(lane, arrival.after)
        for dropped in self._reorder.drop(lane):
            self._discard(dropped)
        if self._schedule.retire(lane):
            self._submit()

    def _discard(self, arrival: Arrival) -> None:
        """Give back the memory of a batch that nobody waits for any more."""
        if arrival.seq >= self._first and not arrival.exhausted:
            self._engine.consume(arrival.worker_id)
        self._delivery.discard(arrival)

    # --- epochs

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin an epoch with the workers that there are; called by torch's loader."""
        previous = None if first_iter else self._position
        self._position = self._context.position.begin(loader, previous)
        shared_seed, resumed = self._shared_seed, self._context.position.start.resumed
        with torch.random.fork_rng(devices=[], enabled=resumed is not None and shared_seed is not None):
            super()._reset(loader, first_iter)
        if first_iter:  # the workers have begun with the seed of `__init__`
            self._shared_seed = shared_seed
        self._take_position(loader)
        self._start_epoch(loader)
        if previous is not None and previous.ran_on:
            # These workers' datasets went on after the break: only they know where this epoch begins.
            while self._reorder.waits_for_lanes():
                self._receive()

    def _take_position(self, loader: Any) -> None:
        context, base_seed = self._context, int(self._base_seed)
        self._seed = base_seed if loader.seed is None else int(loader.seed)
        self._position.shared_seed = self._shared_seed
        self._sampler_iter = context.position.started(self._position, base_seed, self._sampler_iter)
        with reading_state("state_dict", "load it as state_dict() returned it"):  # which may have been loaded
            context.history.begin(self._position)
        self._position.filter = filter_of(loader, self._position, self._seed)
        self._num_yielded = self._position.batches

    def _start_epoch(self, loader: Any) -> None:
        context = self._context
        context.meter.start(context.workers_wanted(self._num_workers))
        context.start_epoch(loader)
        if context.autoscaler is not None:
            context.autoscaler.start_epoch(context.counters["wait.batches"])
        for arrival in self._reorder.clear():
            self._discard(arrival)
        self._outdated.clear()
        if self._device is not None:
            self._device.end_epoch()
        self._first = self._sent
        self._schedule = new_schedule(loader, context, self._position, self._sampler_iter, self._engine)
        self._engine.begin(
            EpochStart(
                self._sent,
                self._seed,
                self._position.epoch,
                self._schedule.streamed,
                self._shared_seed,
                frozenset() if self._position.filter is None else self._position.filter.withheld,
            )
        )
        if self._engine.concurrent:
            self._fill()
        else:
            self._take_up(context.position.start.workers)

    def _take_up(self, positions: list[WorkerState] | None) -> None:
        """Go to the place in an iterable dataset that was loaded, and note where that is."""
        self._position.began(state=self._engine.take_up(positions[0] if positions else None))

    def _finish(self) -> None:
        for arrival in self._reorder.clear():
            self._discard(arrival)
        self._position.finish()
        self._context.meter.stop()
        self._context.flush_log()
        if self._context.autoscaler is not None:
            self._context.autoscaler.end_epoch()
        if not self._persistent_workers:
            self._shutdown_workers()
            if self._device is not None:
                self._device.close()  # which holds what the device was reading
            if self._context.decoding is not None:
                self._context.decoding.rest()
        self._context.remote_caches.end_epoch(self._context.counters)

    def _shutdown_workers(self) -> None:
        """End the workers. torch's own tests call this."""
        if hasattr(self, "_engine"):
            self._engine.close()

    def __del__(self) -> None:
        if is_exiting is not None and not is_exiting():
            if self._device is not None:
                self._device.close()
            self._shutdown_workers()
