"""One open shard, or a part of one, read ahead in ranges and cut into records.

store ─ ranged reads, side by side, by threads ─▶ pieces in order ─▶ splitter ─▶ next()
store ─ ranged reads, one by one ─▶ inflated, by the same thread ─┘     (a compressed shard)
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from fastload.errors import DecodeError, FastloadError
from fastload.fetch.inflate import Inflater
from fastload.fetch.pool import ReadPool
from fastload.formats.pieces import Record, Splitter
from fastload.stats import Counters
from fastload.store import Store

__all__ = ["Lane", "Reach", "Shard"]

# The first bytes of a lane are asked for in a small range, so that its first record is there early.
_FIRST_PIECE = 1 << 20
_LEAST_PIECE = 1 << 20
_USUAL_PIECE = 8 << 20


class Shard(NamedTuple):
    """An object of many records, as it was listed."""

    key: str
    size: int
    version: str
    compressed: bool


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
        stop: where to end; None: at the end of the shard. Only the latter for a compressed shard.
        splitter: cuts it, from that offset on.
        reach: how far to read ahead.
        pool: reads.
        counters: get.* are added here.
    """

    ready = False  # payloads are as the store has them

    def __init__(
        self,
        store: Store,
        shard: Shard,
        offset: int,
        stop: int | None,
        splitter: Splitter,
        *,
        reach: Reach,
        pool: ReadPool,
        counters: Counters,
    ) -> None:
        self._store = store
        self._shard = shard
        self._splitter = splitter
        self._pool = pool
        self._counters = counters
        self._ahead = reach.ahead
        self._pieces: deque[Future[Any]] = deque()
        self._at = offset  # of what comes next, for an error that has no record
        self._over = False
        start = 0 if shard.compressed else offset
        ranges = _ranges(start, shard.size if stop is None else stop, reach.piece)
        self._works: deque[Callable[[], Any]] = deque()
        self._inflate: Inflater | None = None
        if shard.compressed:
            self._inflate = Inflater(ranges, self._read, skip=offset)
        else:
            self._works.extend(functools.partial(self._read, *one) for one in ranges)
        self._request()

    @property
    def requested(self) -> bool:
        """Whether all of it was asked for."""
        if self._inflate is not None:
            return self._over or self._inflate.requested
        return self._over or not self._works

    def next(self) -> Record | None:
        """The next record, or None at the end. Blocks until its bytes are here.

        Raises:
            StoreError: they cannot be read.
        """
        while not self._over:
            record = self._splitter.next()
            if record is not None:
                self._at = record.offset + record.size
                return record
            if self._splitter.over or not self._pieces:
                self.close()
                return None
            try:
                piece = self._pool.wait(self._pieces.popleft())
            except DecodeError as error:  # of the decompression: nothing that follows can be read
                self.close()
                return Record(self._at, 0, None, DecodeError(error.message))
            if piece is not None:
                self._splitter.feed(piece)
                self._request()
            if not self._pieces:
                self._splitter.close()
        return None

    def close(self) -> None:
        """Give up what was asked for and not taken."""
        self._over = True
        for piece in self._pieces:
            piece.cancel()
        self._pieces.clear()

    def _request(self) -> None:
        """Ask for what may be asked for."""
        if self._inflate is not None:  # in order: the next bytes begin where the last ones ended
            self._pieces.append(self._pool.submit(self._inflate))
        while self._works and len(self._pieces) < self._ahead:
            self._pieces.append(self._pool.submit(self._works.popleft()))

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
