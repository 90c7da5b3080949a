"""Submitted work and its arrived results, until they are returned in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from fastload.workers.workers import Arrival


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
        """Pieces of work that are due, arrived or not."""
        return len(self._expected)

    def expect(self, seq: int, lane: int) -> None:
        """This work is given out to a lane."""
        self._expected[seq] = lane

    def forget(self, seq: int) -> int:
        """It will not arrive. Returns its lane."""
        return self._expected.pop(seq)

    def put(self, arrival: Arrival) -> bool:
        """Keep an arrived result; False if it is no longer expected."""
        if arrival.seq not in self._expected:
            return False
        self._arrived[arrival.seq] = arrival
        return True

    def due(self) -> int | None:
        """What is to be handed over next; None where nothing was given out."""
        first: Iterable[int] = self._arrived if self._arrived and not self._in_order else self._expected
        return next(iter(first), None)

    def has(self, seq: int) -> bool:
        """Whether it has arrived."""
        return seq in self._arrived

    def first(self, count: int) -> Iterator[Arrival]:
        """What is here and is handed over next, at most so many."""
        due: Iterable[int] = self._expected if self._in_order else self._arrived
        here = itertools.takewhile(self._arrived.__contains__, due)
        return (self._arrived[seq] for seq in itertools.islice(here, count))

    def ready(self) -> int:
        """How many batches are here that will be handed over."""
        return sum(not arrival.exhausted for arrival in self._arrived.values())

    def look(self, seq: int) -> Arrival:
        """What has arrived, which stays here."""
        return self._arrived[seq]

    def expected(self) -> list[int]:
        """What was given out, the oldest first."""
        return list(self._expected)

    def expect_again(self, seq: int) -> None:
        """It has arrived, and will arrive once more."""
        del self._arrived[seq]

    def take(self, seq: int) -> int:
        """It is handed over now. Returns its lane."""
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
        """The lane of the oldest work; 0 where there is none."""
        return next(iter(self._expected.values()), 0)

    def waits_for_lanes(self) -> bool:
        """Whether there is a lane of which nothing has arrived."""
        here = {self._expected[seq] for seq in self._arrived}
        return bool(set(self._expected.values()) - here)
