"""Records of several shards in turn, shuffled in blocks; in the same order whenever the arguments are.

    spans ─▶ lanes, `cycle_length` open at once ─▶ `block_length` records from each in turn ─▶ shuffled blocks

A shuffle buffer in which every record that leaves makes room for one has a state as large as itself. Blocks
(read so many, permute them, hand them out while the next ones are on their way) have one of a few numbers:
where the lanes stood when the block began, and how many of it were handed out. So a stream that resumes reads
one block again and goes on with the very next record.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from fastload.formats.pieces import Record

__all__ = ["AnyLane", "Blocks", "Interleave", "OpenLane", "Span", "StreamedRecord"]

_FIRST_BLOCK = 64  # records; each block may have twice as many as the one before


class Span(NamedTuple):
    """Records [first, stop) of a shard; `stop` None: to its end."""

    shard: int
    first: int = 0
    stop: int | None = None


class AnyLane(Protocol):
    """An open span.

    `ready`: payloads are as the cache keeps them; `compressed`: their shard has to be inflated up to them;
    `requested`: no more will be asked for.
    """

    @property
    def ready(self) -> bool: ...

    @property
    def compressed(self) -> bool: ...

    @property
    def requested(self) -> bool: ...

    def next(self) -> Record | None: ...

    def close(self) -> None: ...


# (span, ordinal of the next record, its offset or None where the lane has to find it) -> lane
OpenLane = Callable[[Span, int, "int | None"], AnyLane]


class StreamedRecord(NamedTuple):
    """A record on its way to the batch."""

    shard: int
    ordinal: int
    record: Record
    ready: bool
    compressed: bool


class _Open:
    """A lane and where it is."""

    def __init__(self, number: int, span: Span, ordinal: int, offset: int | None, lane: AnyLane) -> None:
        self.number = number
        self.span = span
        self.ordinal = ordinal
        self.offset = offset
        self.lane = lane

    def next(self) -> StreamedRecord | None:
        if self.span.stop is not None and self.ordinal >= self.span.stop:
            return None
        record = self.lane.next()
        if record is None:
            return None
        found = StreamedRecord(self.span.shard, self.ordinal, record, self.lane.ready, self.lane.compressed)
        self.ordinal += 1
        self.offset = record.offset + record.size
        return found


class Interleave:
    """Takes records from the lanes in turn. A lane that ends makes room for the next span, in its place.

    Args:
        spans: in order.
        open_lane: starts reading a span.
        cycle_length: spans open at once.
        block_length: records from each in turn.
        position: where to go on, by `position`; None: at the beginning.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        open_lane: OpenLane,
        *,
        cycle_length: int,
        block_length: int,
        position: dict[str, Any] | None = None,
    ) -> None:
        self._spans = spans
        self._open_lane = open_lane
        self._block_length = block_length
        self._spare: deque[_Open] = deque()  # opened before their turn, while others are at their end
        self._turn, self._left = 0, block_length
        if position is None:
            self._next = min(cycle_length, len(spans))
            self._lanes = [self._open(number) for number in range(self._next)]
        else:
            self._turn, self._left, self._next = position["turn"], position["left"], position["next"]
            self._lanes = [self._open(*place) for place in position["lanes"]]

    def position(self) -> dict[str, Any]:
        """Where it is, as JSON."""
        return {
            "turn": self._turn,
            "left": self._left,
            "next": self._next,
            "lanes": [[lane.number, lane.ordinal, lane.offset] for lane in self._lanes],
        }

    def next(self) -> StreamedRecord | None:
        """The next record, or None when all spans are over."""
        while self._lanes:
            lane = self._lanes[self._turn]
            found = lane.next()
            if found is None:
                self._replace(lane)
                continue
            self._left -= 1
            if not self._left:
                self._advance()
                if lane.lane.requested:
                    self._open_ahead()
            return found
        return None

    def close(self) -> None:
        """Let go of all lanes."""
        for lane in (*self._lanes, *self._spare):
            lane.lane.close()
        self._lanes, self._next = [], len(self._spans)
        self._spare.clear()

    def _open(self, number: int, ordinal: int | None = None, offset: int | None = None) -> _Open:
        span = self._spans[number]
        ordinal = span.first if ordinal is None else ordinal
        return _Open(number, span, ordinal, offset, self._open_lane(span, ordinal, offset))

    def _advance(self) -> None:
        self._turn = (self._turn + 1) % len(self._lanes)
        self._left = self._block_length

    def _replace(self, lane: _Open) -> None:
        lane.lane.close()
        self._left = self._block_length
        if self._next < len(self._spans):
            self._lanes[self._turn] = self._spare.popleft() if self._spare else self._open(self._next)
            self._next += 1
            return
        del self._lanes[self._turn]
        if self._turn == len(self._lanes):
            self._turn = 0

    def _open_ahead(self) -> None:
        """Start the next spans while lanes have nothing left to ask for: the line to the store stays full."""
        ending = sum(lane.lane.requested for lane in self._lanes)
        while len(self._spare) < ending and self._next + len(self._spare) < len(self._spans):
            self._spare.append(self._open(self._next + len(self._spare)))


class Blocks:
    """Shuffles an interleave in blocks.

    Args:
        interleave: opened at `state`'s position, where there is a state.
        seed: anything with a `repr`; with the block's number it makes the order. None: nothing is shuffled.
        most_records, most_bytes: of a block. The first blocks are smaller, so that the first batch is early.
        state: by `state`; None: at the beginning.
    """

    def __init__(
        self,
        interleave: Interleave,
        *,
        seed: Any,
        most_records: int,
        most_bytes: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._interleave = interleave
        self._seed = seed
        self._most_records = most_records
        self._most_bytes = most_bytes
        self._number = 0 if state is None else state["block"]
        self._given = 0 if state is None else state["given"]
        self._begin = interleave.position()
        self._block: deque[StreamedRecord] = deque()
        self._read = False  # whether the block was read

    def take(self, n: int) -> list[StreamedRecord]:
        """The next `n` records; fewer at the end."""
        taken: list[StreamedRecord] = []
        while len(taken) < n:
            while not self._block:
                if not self._next_block():
                    return taken
            taken.append(self._block.popleft())
            self._given += 1
        return taken

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON."""
        return {"block": self._number, "given": self._given, "position": self._begin}

    def close(self) -> None:
        """Let go of everything."""
        self._block.clear()
        self._interleave.close()

    def _next_block(self) -> bool:
        """Read one; False at the end."""
        if self._read:
            self._begin = self._interleave.position()
            self._number += 1
            self._given = 0
        block = self._fill()
        self._read = True
        if self._seed is not None:
            # blake2b and Mersenne Twister: the same in every version of Python, as the order must be.
            digest = hashlib.blake2b(repr((self._seed, self._number)).encode(), digest_size=16)
            random.Random(int.from_bytes(digest.digest(), "little")).shuffle(block)
        self._block.extend(block[self._given :])
        return bool(block)

    def _fill(self) -> list[StreamedRecord]:
        most = min(self._most_records, _FIRST_BLOCK << min(self._number, 32))
        block: list[StreamedRecord] = []
        size = 0
        while len(block) < most and size < self._most_bytes:
            found = self._interleave.next()
            if found is None:
                break
            block.append(found)
            size += found.record.size
        return block
