"""A large object as a stream of pieces, some of which are read ahead; and the records of a shard from it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

from fastload.errors import DecodeError, StoreError
from fastload.formats.compression import is_compressed
from fastload.formats.inflate import Inflater
from fastload.formats.pieces import Record, Splitter
from fastload.formats.tar import TarSplitter
from fastload.formats.tfrecord import TFRecordSplitter
from fastload.store import ObjectInfo, Store

__all__ = ["PieceReader"]

PIECE = 8 << 20


class PieceReader:
    """Reads objects of one store in pieces, on threads of its own that end with `close`.

    Args:
        store: what to read.
        ahead: pieces in flight for each object; so many times `PIECE` is the memory it takes.
        threads: pieces in flight together.
    """

    def __init__(self, store: Store, ahead: int, threads: int = 8) -> None:
        self._store, self._ahead = store, ahead
        self._pool = ThreadPoolExecutor(threads, "fastload-pieces")
        self._closing = threading.Event()

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def pieces(self, info: ObjectInfo, seen: Callable[[Any], None]) -> Iterator[memoryview]:
        """The bytes of an object, of the version that was listed; each piece is also given to `seen`."""
        starts = iter(range(0, info.size, PIECE))
        coming: deque[Future[Any]] = deque()
        while True:
            while len(coming) < self._ahead and (start := next(starts, None)) is not None:
                stop = min(start + PIECE, info.size)
                coming.append(self._pool.submit(self._read, info, start, stop))
            if not coming:
                return
            piece = memoryview(coming.popleft().result())
            seen(piece)
            yield piece

    def records(
        self, info: ObjectInfo, kind: str, seen: Callable[[Any], None] = lambda piece: None
    ) -> Iterator[Record]:
        """The records of a shard ("tar" or "tfrecord"), which may be compressed by gzip or zlib.

        Raises:
            DecodeError: a record is bad; its key says which.
        """
        pieces = self.pieces(info, seen)
        first = next(pieces, memoryview(b""))
        packed = is_compressed(first)
        end = None if packed else info.size
        splitter: Splitter = TarSplitter(0, end) if kind == "tar" else TFRecordSplitter(0, end)
        rest = chain([first], pieces)
        try:
            for piece in iter(Inflater(lambda: next(rest, None)), None) if packed else rest:
                splitter.feed(piece)
                yield from _checked(splitter, info.key)
        except DecodeError as error:
            error.key = error.key or info.key
            raise
        splitter.close()
        yield from _checked(splitter, info.key)

    def _read(self, info: ObjectInfo, start: int, stop: int) -> Any:
        return self._store.read_range(info.key, start, stop, info.version, wait=self._wait)

    def _wait(self, error: StoreError, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise error


def _checked(splitter: Splitter, shard: str) -> Iterator[Record]:
    while (record := splitter.next()) is not None:
        if record.error is not None:
            record.error.key = f"{shard} at byte {record.offset:,}"
            raise record.error
        yield record
