"""Records of several shards in turn, shuffled in blocks. The same arguments give the same order.

    spans ─▶ readers, `cycle_length` at once ─▶ `block_length` records from each in turn ─▶ shuffled blocks

A sliding shuffle buffer can only be saved with all its contents. Shuffling in blocks (read so many records,
permute them, hand them out while the next ones are on their way) needs a few integers: the position of the
readers when the block began, and how many of its records were handed out. A stream that resumes reads one
block again and goes on with the very next record.

`PendingRecords` wait to be decoded: their payloads, or the futures of these. They do not wait in the
prefetcher with the records that are read at random, for three reasons. A record of a shard that is not
indexed yet has an offset that only the stream knows, and errors name it. Its payload was counted by the
stream's own budget. And it is prepared by as many threads as there are cores, where the prefetcher has as
many as there are requests in flight.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch.utils.data import get_worker_info

from fastload.errors import ArgumentError
from fastload.fetch.threads import ReadPool
from fastload.formats.pieces import Record
from fastload.metrics.counters import Counters

T = TypeVar("T")


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
        """The next record; None at the end."""

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
        block_length: records from each in turn.
        spare: spans that may be opened before their turn; None: as many as are open at once.
        position: by `position`, where to go on; None: at the beginning.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        open_reader: OpenReader,
        *,
        cycle_length: int,
        block_length: int,
        spare: int | None = None,
        position: dict[str, Any] | None = None,
    ) -> None:
        self._most_spare = cycle_length if spare is None else spare
        self._spans = spans
        self._open_reader = open_reader
        self._block_length = block_length
        self._spare: deque[tuple[int, Reader]] = deque()  # opened before their turn, while others end
        self._turn, self._left = 0, block_length
        if position is None:
            self._next = min(cycle_length, len(spans))
            self._open = [self._open_span(number) for number in range(self._next)]
        else:
            self._turn, self._left, self._next = position["turn"], position["left"], position["next"]
            self._open = [self._open_span(*at) for at in position["open"]]

    def position(self) -> dict[str, Any]:
        """Where it is, as JSON. "open" has the open spans: number, ordinal and offset of the next record."""
        return {
            "turn": self._turn,
            "left": self._left,
            "next": self._next,
            "open": [[number, reader.ordinal, reader.offset] for number, reader in self._open],
        }

    def next(self) -> StreamedRecord | None:
        """The next record; None when all spans are over."""
        while self._open:
            number, reader = self._open[self._turn]
            ordinal, record = reader.ordinal, reader.next()
            if record is None:
                self._replace(reader)
                continue
            self._left -= 1
            if not self._left:
                self._turn = (self._turn + 1) % len(self._open)
                self._left = self._block_length
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
        self._left = self._block_length
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


class ShuffledStream(Generic[T]):
    """See `SampleStream`: records of an interleave, shuffled in blocks.

    Args:
        plan: JSON that names the stream; it goes into the state as it is.
        interleave: opened at the position of `at`.
        pool: the threads of the readers; they end with the stream.
        hold: called with each record that is handed out; what it returns is handed out in its place.
        size: of a block.
        seed: anything with a `repr`; with the block's number it makes the order. None: nothing is shuffled.
        at: `state()["at"]`, where to go on; None: at the beginning.
    """

    def __init__(
        self,
        plan: dict[str, Any],
        interleave: Interleave,
        pool: ReadPool,
        hold: Callable[[StreamedRecord], T],
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

    def take(self, n: int) -> list[T]:
        """The next `n` records; fewer at the end."""
        taken: list[StreamedRecord] = []
        while len(taken) < n and not self.closed and (self._block or self._read_block()):
            taken.append(self._block.popleft())
            self._given += 1
            if not self._block:
                self._begin_block()
        return [self._hold(record) for record in taken]

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON."""
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
        """Read the block that has begun, less what was handed out of it; False at the end."""
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


class PendingRecords:
    """The pending records of one dataset in one process.

    Args:
        prepare: payload -> what is cached and used; None: the payload itself. Runs in threads, while other
            records are decoded.
        keep: writes a record's prepared payload to the cache.
        counters: get.* are added here.
    """

    def __init__(
        self,
        prepare: Callable[[Any], Any] | None,
        keep: Callable[[StreamedRecord, Any], None],
        counters: Counters,
    ) -> None:
        self._prepare = prepare
        self._keep = keep
        self._counters = counters
        self._values: dict[int, Any] = {}
        self._offsets: dict[int, int] = {}
        self._more: dict[int, int] = {}  # record -> how often it is pending, beyond once
        self._pool: ReadPool | None = None

    def __contains__(self, record: int) -> bool:
        return record in self._values

    def __len__(self) -> int:
        return len(self._values)

    def add(self, record: int, found: StreamedRecord) -> None:
        """Keep a record until `get` and `drop` were called as often as this."""
        if record in self._values:
            self._more[record] = self._more.get(record, 0) + 1
            return
        payload: Any = found.record.payload
        if found.record.error is not None:
            payload = found.record.error
            self._counters.add("bad.bytes", found.record.size)
        elif not found.ready:
            self._counters.add("get.samples")
            if self._prepare is not None:
                payload = self._threads().submit(functools.partial(self._ready, found))
            else:
                self._keep(found, payload)
        self._values[record] = payload
        self._offsets[record] = found.record.offset

    def offset(self, record: int) -> int:
        """The record's offset in its shard."""
        return self._offsets[record]

    def get(self, record: int) -> Any:
        """The payload of a record, which is then pending once less.

        Raises:
            DecodeError: the record is damaged, or cannot be prepared.
        """
        value = self.drop(record)
        if isinstance(value, Future):
            value = self._threads().wait(value)
        if isinstance(value, Exception):
            raise value
        return value

    def drop(self, record: int) -> Any:
        """Let go of a record, once; returns its payload, the future of that, or its error."""
        if record not in self._more:
            del self._offsets[record]
            return self._values.pop(record)
        self._more[record] -= 1
        if not self._more[record]:
            del self._more[record]
        return self._values[record]

    def settle(self) -> None:
        """Wait until all payloads were prepared and written to the cache."""
        for value in list(self._values.values()):
            if isinstance(value, Future):
                value.exception()

    def close(self) -> None:
        """Let go of all records, and end the threads."""
        self._values.clear()
        self._offsets.clear()
        self._more.clear()
        if self._pool is not None:
            self._pool.close()

    def _ready(self, found: StreamedRecord) -> Any:
        assert self._prepare is not None
        payload = self._prepare(found.record.payload)
        self._keep(found, payload)
        return payload

    def _threads(self) -> ReadPool:
        if self._pool is None:
            worker = get_worker_info()
            processes = 1 if worker is None else worker.num_workers
            self._pool = ReadPool(max(1, (os.cpu_count() or 1) // processes), self._counters)
        return self._pool
