"""One open shard, or a part of one, read ahead in ranges and cut into records.

store ─ ranged reads, side by side, by threads ─▶ pieces in order ─▶ splitter ─▶ next()
store ─ ranged reads, one by one ─▶ inflated, by the same thread ─┘     (a compressed shard)

Which of the two it is, the first piece says; the others are asked for by the thread that has read it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from fastload.errors import DecodeError, FastloadError
from fastload.fetch.threads import ReadPool
from fastload.formats.compression import HEAD, is_compressed
from fastload.formats.inflate import Inflater
from fastload.formats.pieces import Record, Splitter
from fastload.metrics.counters import Counters
from fastload.store import Store

__all__ = ["Lane", "Reach", "Shard"]

# The first bytes of a lane are asked for in a small range, so that its first record is there early.
_FIRST_PIECE = 1 << 20
_LEAST_PIECE = 1 << 20
_USUAL_PIECE = 8 << 20


class Shard(NamedTuple):
    """An object of many records, as it was listed. `compressed` None: its first bytes say it."""

    key: str
    size: int
    version: str
    compressed: bool | None


class Reach(NamedTuple):
    """How far lanes read ahead: bytes of a piece, and pieces that are asked for or waiting, per lane."""

    piece: int
    ahead: int

    @classmethod
    def of(cls, most_bytes: int, lanes: int) -> Reach:
        """The reach with which so many lanes hold at most `most_bytes` that nobody has taken yet.

        Large pieces cost the fewest requests. But it takes two per lane for one to be on its way while the
        other is cut up, and more where few lanes have to fill a long line.
        """
        piece = max(_LEAST_PIECE, min(_USUAL_PIECE, most_bytes // (3 * lanes)))
        return cls(piece, max(1, min(4, most_bytes // (piece * lanes) - 1)))


class Lane:
    """Records of one shard from a place on.

    Args:
        store, shard: what to read.
        offset: where the next record begins; in a compressed shard, in what it inflates to.
        stop: where to end; None: at the end of the shard. Only the latter where the shard may be compressed.
        splitter: (offset, end or None where that is not known) -> what cuts the bytes from that offset on.
        reach: how far to read ahead.
        pool: reads.
        counters: get.* are added here.

    Attributes:
        compressed: whether the shard is; False as long as that is not known.
    """

    ready = False  # payloads are as the store has them

    def __init__(
        self,
        store: Store,
        shard: Shard,
        offset: int,
        stop: int | None,
        splitter: Callable[[int, int | None], Splitter],
        *,
        reach: Reach,
        pool: ReadPool,
        counters: Counters,
    ) -> None:
        self._store = store
        self._shard = shard
        self._stop = shard.size if stop is None else stop
        self._make_splitter = splitter
        self._splitter: Splitter | None = None  # None: its first bytes are not here yet
        self._pool = pool
        self._counters = counters
        self._reach = reach
        self._pieces: deque[Future[Any]] = deque()
        self._at = offset  # of what comes next, for an error that has no record
        self._over = False
        self._left: deque[tuple[int, int]] = deque()  # ranges that nobody has asked for
        self._inflate: Inflater | None = None
        self.compressed = False
        if shard.compressed is None and shard.size:
            self._pieces.append(pool.submit(self._look))
        else:
            self._begin(bool(shard.compressed))

    @property
    def requested(self) -> bool:
        """Whether all of it was asked for."""
        return self._over or (self._splitter is not None and not self._left)

    def next(self) -> Record | None:
        """The next record, or None at the end. Blocks until its bytes are here.

        Raises:
            StoreError: they cannot be read.
        """
        while not self._over:
            record = None if self._splitter is None else self._splitter.next()
            if record is not None:
                self._at = record.offset + record.size
                return record
            if not self._pieces or (self._splitter is not None and self._splitter.over):
                self.close()
                return None
            try:
                piece = self._pool.wait(self._pieces.popleft())
            except DecodeError as error:  # of the decompression: nothing that follows can be read
                self.close()
                return Record(self._at, 0, None, DecodeError(error.message))
            assert self._splitter is not None
            if piece is not None:
                self._splitter.feed(piece)
                self._request()
            if not self._pieces:
                self._splitter.close()
        return None

    def close(self) -> None:
        """Give up what was asked for and not taken."""
        self._over = True
        while self._pieces:  # to which `_look` may still add
            self._pieces.popleft().cancel()

    def _look(self) -> Any:
        """The first piece. A thread of the pool does this, so that a lane reads ahead before its turn."""
        first = not self._at
        piece = _ranges(0, self._stop, self._reach.piece)[0] if first else (0, min(HEAD, self._shard.size))
        head = self._read(*piece)
        self._begin(is_compressed(head), head if first else None)
        return head if first and not self.compressed else memoryview(b"")

    def _begin(self, compressed: bool, first: Any = None) -> None:
        """Ask for the shard's bytes; `first` are those of the first range, where they are here."""
        ranges = _ranges(0 if compressed else self._at, self._stop, self._reach.piece)
        self._left.extend(ranges if first is None else ranges[1:])
        self.compressed = compressed
        if compressed:
            self._inflate = Inflater(self._chain(first), skip=self._at)
        self._splitter = self._make_splitter(self._at, None if compressed else self._stop)
        self._request()

    def _chain(self, first: Any) -> Callable[[], Any]:
        """The compressed bytes, range by range."""
        given = [] if first is None else [first]

        def more() -> Any:
            if given:
                return given.pop()
            return self._read(*self._left.popleft()) if self._left else None

        return more

    def _request(self) -> None:
        """Ask for what may be asked for."""
        if self._inflate is not None:  # in order: the next bytes begin where the last ones ended
            if not self._pieces:
                self._pieces.append(self._pool.submit(self._inflate))
            return
        while self._left and not self._over and len(self._pieces) < self._reach.ahead:
            self._pieces.append(self._pool.submit(functools.partial(self._read, *self._left.popleft())))

    def _read(self, start: int, stop: int) -> Any:
        """A range of the shard, of the version that was listed. Called by the pool's threads."""
        self._counters.add("get.requests")
        shard = self._shard
        try:
            body = self._store.read_range(shard.key, start, stop, shard.version, wait=self._pool.pause)
        except FastloadError as error:
            if error.key is None:
                error.key = shard.key
            raise
        self._counters.add("get.bytes", stop - start)
        return memoryview(body)


def _ranges(start: int, stop: int, piece: int) -> list[tuple[int, int]]:
    """[start, stop) in pieces: a small one, then one of half the size, then equal ones."""
    ranges = []
    for size in (min(_FIRST_PIECE, piece), max(_LEAST_PIECE, piece // 2)):
        if stop - start > 2 * piece:
            ranges.append((start, start + size))
            start += size
    count = -(-(stop - start) // piece)
    edges = [start + (stop - start) * number // max(1, count) for number in range(count + 1)]
    return ranges + [(edges[i], edges[i + 1]) for i in range(count)]
