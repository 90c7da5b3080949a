"""Records of several shards in turn, shuffled in blocks. The same arguments give the same order.

    spans ─▶ readers, `cycle_length` at once ─▶ a record from each in turn ─▶ shuffled blocks

A sliding shuffle buffer can only be saved with all its contents. Shuffling in blocks (read so many records,
permute them, hand them out while the next ones are on their way) needs a few integers: the position of the
readers when the block began, and how many of its records were delivered. A stream that resumes reads one
block again and goes on with the very next record.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from fastload.errors import ArgumentError
from fastload.fetch.threads import ReadPool
from fastload.formats.pieces import Record


class Reader(Protocol):
    """Gives the records of a span in order: a `ShardReader`, `CachedReader` or `RowGroupReader`.

    Attributes:
        ordinal, offset: of the next record.
        ready: whether payloads are as the cache keeps them.
        compressed: whether the cache should wait for its writer rather than drop a record: to read one again
            costs much more than the record.
        all_requested: whether nothing is left to ask the store for.
    """

    ordinal: int
    offset: int

    @property
    def ready(self) -> bool: ...

    @property
    def compressed(self) -> bool: ...

    @property
    def all_requested(self) -> bool: ...

    def next(self) -> Record | None:
        """Return the next record; None at the end."""

    def close(self) -> None:
        """Drop all requests whose results were not taken."""


class Span(NamedTuple):
    """Records [first, stop) of a shard; `stop` None: to its end."""

    shard: int
    first: int = 0
    stop: int | None = None


class StreamedRecord(NamedTuple):
    """A record on its way to the batch.

    `ready`: the payload is as the cache keeps it. `compressed`: its shard has to be inflated up to it.
    """

    shard: int
    ordinal: int
    record: Record
    ready: bool
    compressed: bool


# (span, ordinal of the first record, its offset or None where the reader has to find it) -> reader
OpenReader = Callable[[Span, int, "int | None"], Reader]


class Interleave:
    """Takes records from open spans in turn. A span that ends makes room for the next one, in its place.

    Args:
        spans: in order.
        open_reader: starts reading a span.
        cycle_length: spans open at once.
        spare: spans that may be opened before their turn; None: as many as are open at once.
        position: by `position`, where to go on; None: at the beginning.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        open_reader: OpenReader,
        *,
        cycle_length: int,
        spare: int | None = None,
        position: dict[str, Any] | None = None,
    ) -> None:
        self._most_spare = cycle_length if spare is None else spare
        self._spans = spans
        self._open_reader = open_reader
        self._spare: deque[tuple[int, Reader]] = deque()  # opened before their turn, while others end
        self._turn = 0
        if position is None:
            self._next = min(cycle_length, len(spans))
            self._open = [self._open_span(number) for number in range(self._next)]
        else:
            self._turn, self._next = position["turn"], position["next"]
            self._open = [self._open_span(*at) for at in position["open"]]

    def position(self) -> dict[str, Any]:
        """Return where it is, as JSON. "open": number, ordinal and offset of the next record of each span."""
        return {
            "turn": self._turn,
            "next": self._next,
            "open": [[number, reader.ordinal, reader.offset] for number, reader in self._open],
        }

    def next(self) -> StreamedRecord | None:
        """Return the next record; None when all spans are over."""
        while self._open:
            number, reader = self._open[self._turn]
            ordinal, record = reader.ordinal, reader.next()
            if record is None:
                self._replace(reader)
                continue
            self._turn = (self._turn + 1) % len(self._open)
            if reader.all_requested:
                self._open_ahead()
            shard = self._spans[number].shard
            return StreamedRecord(shard, ordinal, record, reader.ready, reader.compressed)
        return None

    def close(self) -> None:
        """Close all readers."""
        for _, reader in (*self._open, *self._spare):
            reader.close()
        self._open, self._next = [], len(self._spans)
        self._spare.clear()

    def _open_span(
        self, number: int, ordinal: int | None = None, offset: int | None = None
    ) -> tuple[int, Reader]:
        span = self._spans[number]
        return number, self._open_reader(span, span.first if ordinal is None else ordinal, offset)

    def _replace(self, reader: Reader) -> None:
        """Put the next span in the place of the one that is over."""
        reader.close()
        if self._next < len(self._spans):
            self._open[self._turn] = self._spare.popleft() if self._spare else self._open_span(self._next)
            self._next += 1
            return
        del self._open[self._turn]
        if self._turn == len(self._open):
            self._turn = 0

    def _open_ahead(self) -> None:
        """Open the next spans while readers have nothing left to ask for, so that the line stays full."""
        left = min(self._most_spare, len(self._spans) - self._next)
        while len(self._spare) < left:
            if sum(reader.all_requested for _, reader in (*self._open, *self._spare)) <= len(self._spare):
                break
            self._spare.append(self._open_span(self._next + len(self._spare)))


class BlockSize(NamedTuple):
    """Limits of a block: records, and their bytes. The first block has at most `first` records, each further
    one twice as many as the one before: a small first block brings the first batch early."""

    records: int
    bytes: int
    first: int = 64


class ShuffledStream:
    """See `SampleStream`: records of an interleave, shuffled in blocks.

    Args:
        plan: JSON that names the stream; it goes into the state as it is.
        interleave: opened at the position of `at`.
        pool: the threads of the readers; they end with the stream.
        hold: keeps a record that is delivered; returns its id, which is delivered in its place.
        size: of a block.
        seed: anything with a `repr`; with the block's number it makes the order. None: nothing is shuffled.
        at: `state()["at"]`, where to go on; None: at the beginning.
    """

    def __init__(
        self,
        plan: dict[str, Any],
        interleave: Interleave,
        pool: ReadPool,
        hold: Callable[[StreamedRecord], int],
        *,
        size: BlockSize,
        seed: Any,
        at: dict[str, Any] | None = None,
    ) -> None:
        self._plan = plan
        self._interleave = interleave
        self._pool = pool
        self._hold = hold
        self._size = size
        self._seed = seed
        self._number: int = 0 if at is None else at["block"]
        self._given: int = 0 if at is None else at["given"]
        self._begin = interleave.position()  # of the block
        self._block: deque[StreamedRecord] = deque()  # what is left of it; empty as long as it was not read
        self.closed = False

    def take(self, n: int) -> list[int]:
        """Return the next `n` records; fewer at the end."""
        taken: list[StreamedRecord] = []
        while len(taken) < n and not self.closed and (self._block or self._read_block()):
            taken.append(self._block.popleft())
            self._given += 1
            if not self._block:
                self._begin_block()
        return [self._hold(record) for record in taken]

    def state(self) -> dict[str, Any]:
        """Return where it is, as JSON."""
        return {
            "plan": self._plan,
            "at": {"block": self._number, "given": self._given, "position": self._begin},
        }

    def close(self) -> None:
        """Stop reading ahead, and drop the records that were read."""
        if not self.closed:
            self.closed = True
            self._block.clear()
            self._interleave.close()
            self._pool.close()

    def _begin_block(self) -> None:
        self._begin = self._interleave.position()
        self._number += 1
        self._given = 0

    def _read_block(self) -> bool:
        """Read the block that has begun, less what was delivered of it; False at the end."""
        block = self._fill()
        if not 0 <= self._given < max(1, len(block)):
            raise ArgumentError(
                f"the saved state is {self._given} records into a block that has {len(block)} here: resume "
                "with the shuffle_buffer and cycle_length of the saved run"
            )
        if self._seed is not None:
            # blake2b and Mersenne Twister: the same in every version of Python, as the order must be.
            digest = hashlib.blake2b(repr((self._seed, self._number)).encode(), digest_size=16)
            random.Random(int.from_bytes(digest.digest(), "little")).shuffle(block)
        self._block.extend(block[self._given :])
        return bool(block)

    def _fill(self) -> list[StreamedRecord]:
        most = min(self._size.records, self._size.first << min(self._number, 32))
        block: list[StreamedRecord] = []
        size = 0
        while len(block) < most and size < self._size.bytes:
            found = self._interleave.next()
            if found is None:
                break
            block.append(found)
            size += found.record.size
        return block
