"""One shard, or a part of one, read ahead in ranges and cut into records.

store ─ ranged reads, side by side, by threads ─▶ pieces in order ─▶ splitter ─▶ next()
store ─ ranged reads, one by one ─▶ inflated by the same thread ─┘     (a compressed shard)
cache ─ record by record ─▶ next()                                     (a shard that the cache has completely)

The first piece says whether a shard is compressed. The thread that has read it asks for the others.
"""

from __future__ import annotations

import contextlib
import functools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from fastload.cache import Cache
from fastload.errors import DecodeError, FastloadError
from fastload.fetch.threads import ReadPool
from fastload.formats.pieces import HEAD, Inflater, Record, Splitter, is_compressed
from fastload.shards.index import Fault, RecordOffsets
from fastload.store import Store
from fastload.store.base import Buffer
from fastload.store.failures import Wait


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Give errors the key of the object that is being read, unless they have one."""
    try:
        yield
    except FastloadError as error:
        error.key = key if error.key is None else error.key
        raise


class PieceSizes(NamedTuple):
    """Bytes of a range that is asked for: of the first one of a shard, at least, and usually."""

    first: int = 1 << 20  # small, so that the first record is there early
    least: int = 1 << 20
    usual: int = 8 << 20


PIECES = PieceSizes()


class Shard(NamedTuple):
    """An object of many records, as it was listed. `compressed` None: its first bytes say it."""

    key: str
    size: int
    version: str
    compressed: bool | None


def read_in_turn(
    store: Store, shard: Shard, ranges: Iterable[tuple[int, int]], wait: Wait
) -> Callable[[], Buffer | None]:
    """Return a function that reads the next one of these ranges of a shard; None behind the last.

    Args:
        wait: as in `Store.read`.
    """
    following = iter(ranges)

    def read_next() -> Buffer | None:
        for start, stop in following:
            return store.read_range(shard.key, start, stop, shard.version, wait=wait)
        return None

    return read_next


class ReadAhead(NamedTuple):
    """How far a reader reads ahead: bytes of a piece, and pieces that are on their way or not yet taken."""

    piece: int
    pieces: int

    @classmethod
    def of(cls, most_bytes: int, readers: int) -> ReadAhead:
        """Return the read-ahead with which so many readers together hold at most `most_bytes`.

        Large pieces cost the fewest requests. But a reader needs two, so that one is on its way while the
        other is cut into records, and more where few readers have to fill a long line.
        """
        piece = max(PIECES.least, min(PIECES.usual, most_bytes // (3 * readers)))
        return cls(piece, max(1, min(4, most_bytes // (piece * readers) - 1)))

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return [start, stop) in pieces: a small one, then one of half the size, then equal ones."""
        ranges = []
        for size in (min(PIECES.first, self.piece), max(PIECES.least, self.piece // 2)):
            if stop - start > 2 * self.piece:
                ranges.append((start, start + size))
                start += size
        count = -(-(stop - start) // self.piece)
        edges = [start + (stop - start) * number // max(1, count) for number in range(count + 1)]
        return ranges + [(edges[i], edges[i + 1]) for i in range(count)]


class ShardBytes:
    """The bytes of a shard in order, piece by piece; inflated, where it is compressed.

    Args:
        store, shard: what to read.
        start: the first byte; in a compressed shard, of what it inflates to.
        stop: where to end. The end of the shard, where it may be compressed.
        ahead: how far to read ahead.
        pool: reads; get.* are added to its counters.

    Attributes:
        compressed: whether the shard is; None as long as that is not known.
    """

    def __init__(
        self,
        store: Store,
        shard: Shard,
        start: int,
        stop: int,
        *,
        ahead: ReadAhead,
        pool: ReadPool,
    ) -> None:
        self._store = store
        self._shard = shard
        self._start = start
        self._stop = stop
        self._ahead = ahead
        self._pool = pool
        self._pieces: deque[Future[Any]] = deque()
        self._left: deque[tuple[int, int]] = deque()  # ranges that were not asked for yet
        self._inflate: Inflater | None = None
        self._closed = False
        self.compressed: bool | None = None
        if shard.compressed is None and shard.size:
            self._pieces.append(pool.submit(self._look))
        else:
            self._begin(bool(shard.compressed))

    @property
    def all_requested(self) -> bool:
        """Whether nothing is left to ask for."""
        return self._closed or (self.compressed is not None and not self._left)

    def next(self) -> memoryview | None:
        """Return the next piece, which may be empty; None at the end. Blocks until it is here.

        Raises:
            StoreError: it cannot be read. DecodeError: it cannot be inflated.
        """
        if not self._pieces:
            return None
        piece: memoryview | None = self._pool.wait(self._pieces.popleft())
        if piece is not None:
            self._request()
        return piece

    def close(self) -> None:
        """Drop all requests whose results were not taken."""
        self._closed = True
        while self._pieces:  # to which `_look` may still add
            self._pieces.popleft().cancel()

    def _look(self) -> Any:
        """Return the first piece. A thread of the pool does this, so that reading begins before its turn."""
        at_start = not self._start
        head_only = (0, min(HEAD, self._shard.size))
        first = self._ahead.ranges(0, self._stop)[0] if at_start else head_only
        head = self._read(*first)
        self._begin(is_compressed(head), head if at_start else None)
        return head if at_start and not self.compressed else memoryview(b"")

    def _begin(self, compressed: bool, first: Any = None) -> None:
        """Ask for the shard's bytes; `first` are those of the first range, where they are here."""
        ranges = self._ahead.ranges(0 if compressed else self._start, self._stop)
        self._left.extend(ranges if first is None else ranges[1:])
        if compressed:
            self._inflate = Inflater(self._raw_pieces(first), skip=self._start)
        self.compressed = compressed  # after `_left`: other threads ask for `all_requested`
        self._request()

    def _raw_pieces(self, first: Any) -> Callable[[], Any]:
        """Return a function that gives the compressed bytes, range by range; None at their end."""
        given = [] if first is None else [first]

        def more() -> Any:
            if given:
                return given.pop()
            return self._read(*self._left.popleft()) if self._left else None

        return more

    def _request(self) -> None:
        """Ask for pieces up to the limit of the read-ahead."""
        if self._inflate is not None:  # one at a time: the next bytes begin where the last ones ended
            if not self._pieces:
                self._pieces.append(self._pool.submit(self._inflate))
            return
        while self._left and not self._closed and len(self._pieces) < self._ahead.pieces:
            self._pieces.append(self._pool.submit(functools.partial(self._read, *self._left.popleft())))

    def _read(self, start: int, stop: int) -> Any:
        """Return a range of the shard, of the version that was listed. Called by the pool's threads."""
        self._pool.counters.add("get.requests")
        shard = self._shard
        with naming(shard.key):
            body = self._store.read_range(shard.key, start, stop, shard.version, wait=self._pool.pause)
        self._pool.counters.add("get.bytes", stop - start)
        return memoryview(body)


class ShardReader:
    """Records of one shard in order, from a record on, out of the store.

    Args:
        store, shard: what to read.
        splitter: (offset, end or None where that is not known) -> what cuts the bytes from that offset on.
        ahead, pool: see `ShardBytes`.
        ordinal, offset: of the first record; in a compressed shard, the offset in what it inflates to.
        stop: the ordinal at which to end, and the offset there. None: at the end of the shard; always so
            where the shard may be compressed.
        on_piece: called with each piece in order, inflated if need be, before it is cut into records.
        on_end: called with what was found, when the shard was read to its end from its first record on.

    Attributes:
        ordinal, offset: of the next record.
        ready: whether payloads are as the cache keeps them; here they are as the store has them.
    """

    ready = False

    def __init__(
        self,
        store: Store,
        shard: Shard,
        splitter: Callable[[int, int | None], Splitter],
        *,
        ahead: ReadAhead,
        pool: ReadPool,
        ordinal: int = 0,
        offset: int = 0,
        stop: tuple[int, int] | None = None,
        on_piece: Callable[[memoryview], None] | None = None,
        on_end: Callable[[RecordOffsets], None] | None = None,
    ) -> None:
        self.ordinal, self.offset = ordinal, offset
        self._stop = None if stop is None else stop[0]
        self._end = shard.size if stop is None else stop[1]
        self._make_splitter, self._max_inflated = splitter, store.reading.max_inflated
        self._splitter: Splitter | None = None  # None: it is not known yet whether the shard is compressed
        self._on_piece = on_piece
        self._on_end = on_end
        self._found = array("Q")  # offset and size of each record, for `on_end`
        self._bad: dict[int, Fault] = {}
        self._drained = False
        self._bytes = ShardBytes(store, shard, offset, self._end, ahead=ahead, pool=pool)

    @property
    def compressed(self) -> bool:
        """Whether the shard is compressed; False as long as that is not known."""
        return bool(self._bytes.compressed)

    @property
    def all_requested(self) -> bool:
        """Whether nothing is left to ask the store for."""
        return self._bytes.all_requested

    def next(self) -> Record | None:
        """Return the next record, or None at the end. Blocks until its bytes are here.

        Raises:
            StoreError: they cannot be read.
        """
        record = None
        if self._stop is None or self.ordinal < self._stop:
            record = self._cut()
        if record is None:
            self._finish()
            return None
        if self._on_end is not None:
            self._found.extend((record.offset, record.size))
            if record.error is not None:
                self._bad[self.ordinal] = Fault(record.error.message, record.lasting)
        self.ordinal += 1
        self.offset = record.offset + record.size
        return record

    def close(self) -> None:
        """Drop all requests whose results were not taken. `on_end` is not called any more."""
        self._on_end = None
        self._drained = True
        self._splitter = None
        self._bytes.close()

    def _cut(self) -> Record | None:
        while True:
            record = None if self._splitter is None else self._splitter.next()
            over = self._drained or (self._splitter is not None and self._splitter.over)
            if record is not None or over:
                return record
            try:
                piece = self._bytes.next()
            except DecodeError as error:  # of the decompression: nothing that follows can be read
                self._drained = True
                return Record(self.offset, 0, None, DecodeError(error.message))
            if self._splitter is None:
                self._splitter = self._make_splitter(self.offset, None if self.compressed else self._end)
                self._splitter.max_inflated = self._max_inflated
            if piece is None:
                self._drained = True
                self._splitter.close()
                continue
            if self._on_piece is not None:
                self._on_piece(piece)
            self._splitter.feed(piece)

    def _finish(self) -> None:
        on_end = self._on_end
        if on_end is not None:
            offsets = np.frombuffer(self._found, np.uint64) if self._found else np.empty(0, np.uint64)
            on_end(RecordOffsets(offsets.reshape(-1, 2), self._bad, self.compressed))
        self.close()


class CachedReader:
    """Records of one shard in order, out of the cache: the shard is not read again.

    Args:
        records: of the shard, by its index.
        ordinal, offset: of the first record.
        stop: the ordinal at which to end.
        cache, key: offset -> cache key.
        read: ordinal -> payload, of a record that the cache lost, or that was damaged in its shard.

    Attributes: as of `ShardReader`.
    """

    ready = True
    compressed = False
    all_requested = True

    def __init__(
        self,
        records: RecordOffsets,
        ordinal: int,
        offset: int,
        stop: int,
        cache: Cache,
        key: Callable[[int], bytes],
        read: Callable[[int], memoryview],
    ) -> None:
        self.ordinal, self.offset = ordinal, offset
        self._records = records
        self._stop = stop
        self._cache = cache
        self._key = key
        self._read = read

    def complete(self) -> bool:
        """Return whether the cache has all of them."""
        for ordinal in range(self.ordinal, self._stop):
            if ordinal not in self._records.bad and not self._cache.has(self._key_of(ordinal)):
                return False
        return True

    def next(self) -> Record | None:
        """Return the next record, or None at the end."""
        if self.ordinal >= self._stop:
            return None
        ordinal = self.ordinal
        offset, size = self._records.offsets[ordinal].tolist()
        self.ordinal, self.offset = ordinal + 1, offset + size
        bad = ordinal in self._records.bad
        payload = None if bad else self._cache.read(self._key_of(ordinal))
        if payload is None:
            try:
                payload = self._read(ordinal)
            except DecodeError as error:
                return Record(offset, size, None, error)
        return Record(offset, size, payload)

    def close(self) -> None:
        """End at the record that was read last."""
        self._stop = self.ordinal

    def _key_of(self, ordinal: int) -> bytes:
        return self._key(int(self._records.offsets[ordinal, 0]))
