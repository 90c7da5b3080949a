"""The next work and its lane: index batches of a sampler, or the next samples of streams.

Lanes make batches in turn. A lane is a worker, or a stream that worker `lane mod workers` reads. The
`ReorderBuffer` holds what was given out, and its results, until they are handed over in order.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from fastload.datasets.wrappers import view_of
from fastload.loader.context import LoaderContext
from fastload.loader.stream_epoch import StreamEpoch
from fastload.order.position import Position
from fastload.workers.workers import Arrival, Workers

# How far ahead samples are announced to a dataset that can read ahead: enough for 100 requests in flight, and
# more than `prefetch_factor` batches where batches are small. It does not make more finished batches wait.
_READ_AHEAD = 256
_READ_AHEAD_THREADS = 4  # of the kernel, beyond which no more is announced: the requests in flight are enough


class Schedule:
    """The work of one epoch, and the lanes that it is dealt to in turn.

    Args:
        lanes: the lanes that take part.
        ahead: pieces of work that a lane may have at a time.

    Attributes:
        turn: the lanes that take part, the next one first. Empty: there is no more work.
        ahead: see above.
        streamed: index batches are `TakeNext`.
    """

    streamed: ClassVar[bool]

    def __init__(self, lanes: Iterable[int], ahead: int) -> None:
        self.turn = deque(lanes)
        self.ahead = ahead

    def choose(self, lane: int | None) -> int:
        """Return the lane of the next work, after a batch of `lane` has left the loader (None: none has)."""
        if lane is None or lane not in self.turn:
            lane = self.turn[0]
            self.turn.rotate(-1)
        return lane

    def work(self, lane: int) -> Any:
        """Return the next index batch, for this lane.

        Raises:
            StopIteration: there is none. Whatever the sampler raises.
        """
        raise NotImplementedError

    def goes_on(self, ready: Callable[[], int]) -> bool:
        """Return whether a batch that is here is to be delivered; `ready()` are here."""
        return True

    def next_lap(self) -> bool:
        """Return whether the lanes, which are all at their end, begin once more."""
        return False

    def retire(self, lane: int) -> bool:
        """End a lane. Return whether another one may have its work."""
        if lane in self.turn:
            self.turn.remove(lane)
        return not self.streamed

    def lost(self, lane: int) -> None:
        """Note that work of this lane was given out and will not be answered."""


class IndexSchedule(Schedule):
    """Index batches, dealt to workers in turn.

    Args:
        index_batches: those of the sampler.
        workers: number of workers that take part.
        first: the worker whose turn it is.
        now: index batches that each has to work on, beside those that it knows in advance.
        ahead: index batches that each knows in advance, at least.
        samples: that these have together, or more. A sampler need not say how large its batches are, so that
            is learned from those that it gives.
        sized: an index batch has a length; else it is one sample.
        in_order: batch i goes to worker i mod workers; else to the one that is free.
    """

    streamed = False

    def __init__(
        self,
        index_batches: Iterator[Any],
        *,
        workers: int,
        first: int,
        now: int,
        ahead: int,
        samples: int,
        sized: bool,
        in_order: bool,
    ) -> None:
        super().__init__(range(workers), now + ahead)
        self.turn.rotate(-first)
        self._index_batches = index_batches
        self._now, self._least, self._samples, self._sized = now, ahead, samples, sized
        self._drawn = self._drawn_samples = 0
        self._in_order = in_order

    def park(self, wanted: int) -> None:
        """Have no more workers than these take part."""
        while len(self.turn) > wanted:
            self.turn.remove(max(self.turn))

    def missing(self, wanted: int) -> list[int]:
        """Return those of the wanted workers that take no part yet; none where there is no more work."""
        return sorted(set(range(wanted)) - set(self.turn)) if 0 < len(self.turn) < wanted else []

    def choose(self, lane: int | None) -> int:
        return super().choose(None if self._in_order else lane)

    def work(self, lane: int) -> Any:
        index = next(self._index_batches)
        self._drawn += 1
        self._drawn_samples += operator.length_hint(index, 1) if self._sized else 1
        batches = -(-self._samples * self._drawn // max(1, self._drawn_samples))
        self.ahead = self._now + max(self._least, batches)
        return index

    def allow(self, ahead: int) -> bool:
        """Let each have at least so many index batches. Return whether that is more than before."""
        before, self._least = self.ahead, max(self._least, ahead - self._now)
        self.ahead = max(before, ahead)
        return self.ahead > before


class StreamSchedule(Schedule):
    """The streams of an epoch, in the order in which their batches are delivered.

    A stream of which a batch was delivered is given its next work: so they stay in turn.

    Args:
        streams: their state.
        ahead: batches that each may have at a time. A stream reads ahead by itself.
    """

    streamed = True

    def __init__(self, streams: StreamEpoch, *, ahead: int) -> None:
        super().__init__(streams.live, ahead)
        self._streams = streams

    def work(self, lane: int) -> Any:
        return self._streams.work(lane)

    def goes_on(self, ready: Callable[[], int]) -> bool:
        return self._streams.goes_on(ready())

    def next_lap(self) -> bool:
        while self._streams.goes_on(ready=0):
            self.turn = deque(self._streams.live)
            if self.turn:  # else these streams are empty, and the next rank's are tried
                return True
        return False

    def lost(self, lane: int) -> None:
        self._streams.lost(lane)


class ReorderBuffer:
    """Sequence numbers name pieces of work.

    Args:
        in_order: hand over in the order in which work was given out; else as it arrives.
    """

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._expected: dict[int, int] = {}  # seq -> lane, oldest first
        self._arrived: dict[int, Arrival] = {}

    def __len__(self) -> int:
        """Return how many pieces of work are due, arrived or not."""
        return len(self._expected)

    def expect(self, seq: int, lane: int) -> None:
        """Note that work is given out to a lane."""
        self._expected[seq] = lane

    def forget(self, seq: int) -> int:
        """Forget work that will not arrive, and return its lane."""
        return self._expected.pop(seq)

    def put(self, arrival: Arrival) -> bool:
        """Keep an arrived result; False if it is no longer expected."""
        if arrival.seq not in self._expected:
            return False
        self._arrived[arrival.seq] = arrival
        return True

    def due(self) -> int | None:
        """Return what is to be handed over next; None where nothing was given out."""
        first: Iterable[int] = self._arrived if self._arrived and not self._in_order else self._expected
        return next(iter(first), None)

    def has(self, seq: int) -> bool:
        """Return whether it has arrived."""
        return seq in self._arrived

    def first(self, count: int) -> Iterator[Arrival]:
        """Return what is here and is handed over next, at most so many."""
        due: Iterable[int] = self._expected if self._in_order else self._arrived
        here = itertools.takewhile(self._arrived.__contains__, due)
        return (self._arrived[seq] for seq in itertools.islice(here, count))

    def ready(self) -> int:
        """Return how many batches are here that will be handed over."""
        return sum(not arrival.exhausted for arrival in self._arrived.values())

    def look(self, seq: int) -> Arrival:
        """Return what has arrived, which stays here."""
        return self._arrived[seq]

    def expected(self) -> list[int]:
        """Return what was given out, the oldest first."""
        return list(self._expected)

    def expect_again(self, seq: int) -> None:
        """Expect work that has arrived to arrive once more."""
        del self._arrived[seq]

    def take(self, seq: int) -> int:
        """Forget work that is handed over now, and return its lane."""
        del self._arrived[seq]
        return self._expected.pop(seq)

    def drop(self, lane: int) -> list[Arrival]:
        """Expect nothing more from a lane; returns its arrived results."""
        seqs = [seq for seq, owner in self._expected.items() if owner == lane]
        for seq in seqs:
            del self._expected[seq]
        return [self._arrived.pop(seq) for seq in seqs if seq in self._arrived]

    def clear(self) -> list[Arrival]:
        """Expect nothing more; returns the arrived results."""
        self._expected.clear()
        arrived, self._arrived = list(self._arrived.values()), {}
        return arrived

    def next_lane(self) -> int:
        """Return the lane of the oldest work; 0 where there is none."""
        return next(iter(self._expected.values()), 0)

    def waits_for_lanes(self) -> bool:
        """Return whether there is a lane of which nothing has arrived."""
        here = {self._expected[seq] for seq in self._arrived}
        return bool(set(self._expected.values()) - here)


def new_schedule(
    loader: Any, context: LoaderContext, position: Position, indices: Iterator[Any], workers: Workers
) -> Schedule:
    """Return the schedule of one epoch.

    Args:
        position: of that epoch.
        indices: of its batches, from the sampler.
        workers: that make them.
    """
    inline = not loader.num_workers
    if isinstance(position.streams, StreamEpoch):  # each reads ahead by itself, so no more is announced
        return StreamSchedule(position.streams, ahead=1 if inline else loader.prefetch_factor)
    ahead = 0 if inline else context.batches_ahead(loader.prefetch_factor)
    samples = 2 * loader.threads
    if view_of(loader.dataset).reads_ahead:
        ahead, samples = ahead or 2, _READ_AHEAD * max(1, min(workers.kernel_threads, _READ_AHEAD_THREADS))
    # Of workers that were wanted at the end of an epoch, some may not have been started.
    taking_part = min(context.workers_wanted(loader.num_workers), len(workers.processes))
    return IndexSchedule(
        indices,
        workers=max(1, taking_part),
        first=position.next_worker,
        now=int(inline),
        ahead=ahead,
        samples=samples,
        sized=loader._auto_collation,
        in_order=loader.in_order,
    )


def scale(schedule: Schedule, context: LoaderContext, workers: Workers, in_flight: int) -> bool:
    """Let as many workers make batches as num_workers="auto" wants; without it, all of them.

    A worker that is parked finishes its work, and waits.

    Returns:
        whether more work may be given out than before.
    """
    autoscaler, threads = context.autoscaler, workers.kernel_threads
    # Where there is no more work, more threads still help with what was given out.
    if autoscaler is None or not isinstance(schedule, IndexSchedule) or not (threads or schedule.turn):
        return False
    wanted = autoscaler.look(context.counters, in_flight)
    missing: list[int] = []
    if threads:
        workers.scale(wanted, autoscaler.ahead)
    else:
        schedule.park(wanted)
        missing = schedule.missing(wanted)
        workers.scale(max(missing, default=-1) + 1, autoscaler.ahead)
        count = len(workers.processes)
        if missing and missing[-1] >= count:
            wanted = autoscaler.refused(count)
            missing = [worker for worker in missing if worker < count]
    schedule.turn.extend(missing)
    context.meter.workers = wanted
    return schedule.allow(autoscaler.ahead) or bool(missing)


def follow_exclusions(
    position: Position, reorder: ReorderBuffer, workers: Workers, first: int, outdated: set[int]
) -> None:
    """Edit once more what was given out and was not delivered, where more or less is left out now.

    Args:
        first: sequence number of the first work of this epoch.
        outdated: gets the work that may be made as it was before.
    """
    older = position.filter
    if older is None or not older.changed:
        return
    before, newer = older.withheld, older.newer(position.batches)
    if newer.withheld != before:
        workers.exclude(newer.withheld)
    for seq in reorder.expected():
        given = position.given_out(seq - first)
        if given is None:
            continue
        edited = newer(given.step, given.index)
        same = edited is not None and edited.replaced == given.edited.replaced
        if same and not newer.may_choose(given.edited, before):
            continue
        index = None if edited is None else edited.index
        if reorder.has(seq) or not workers.revise(seq, index):
            outdated.add(seq)
        elif edited is None:
            reorder.forget(seq)
        position.edit(seq - first, edited)
    position.filter = newer  # last: after Ctrl-C all of this is done again
