"""`pull`: the records that a URL has in packs come into a cache, in large ranges.

    packs ─▶ the records that the cache lacks ─▶ ranges ─▶ verify each record ─▶ Cache.write

A record of another version of its object has another key: it is pulled, and never found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from fastload.cache.cache import Cache
from fastload.cache.directory import Directory
from fastload.cache.pack import Pack, Record
from fastload.cache.published import REQUESTS, Published
from fastload.cache.segment import checksum
from fastload.errors import CacheError, NotFoundError, ObjectChangedError, StoreError
from fastload.store import Store

__all__ = ["Pulled", "pull"]

RANGE_BYTES = 8 << 20  # of one request; with REQUESTS of them in flight, 64 MB
_GAP_BYTES = 256 << 10  # that are read in vain rather than with another request
_WRITE_SECONDS = 60.0  # that a disk gets for the records before


@dataclass
class Pulled:
    """What a pull did, as far as it has come."""

    records: int = 0
    """Records that it put into the cache."""
    bytes: int = 0
    """Bytes of the records that it read."""
    packs: int = 0
    """Packs at the URL."""
    present: int = 0
    """Records that the cache had already."""
    left: int = 0
    """Records that the cache does not have: it is full, or they are damaged."""
    settled: list[str] = field(default_factory=list)
    """Packs all of whose records the cache has."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Packs with something wrong, and what; training reads those objects from the store."""


class _Span(NamedTuple):
    """One request: records of one pack that lie close together."""

    pack: Pack
    records: list[Record]

    @property
    def start(self) -> int:
        return self.records[0].offset

    @property
    def stop(self) -> int:
        return self.records[-1].offset + self.records[-1].length

    def takes(self, record: Record) -> bool:
        """Whether one request for this record too is worth its bytes."""
        near = record.offset - self.stop <= _GAP_BYTES
        return near and record.offset + record.length - self.start <= RANGE_BYTES


def pull(
    cache: Cache,
    store: Store,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    first: Set[bytes] = frozenset(),
    settled: Iterable[str] = (),
) -> Pulled:
    """Put all published records into a cache that it lacks. Other processes may use it meanwhile.

    Args:
        progress: called with (bytes done, bytes in all).
        first: keys of records that are pulled before all others.
        settled: names of packs that are not looked at.

    Raises:
        NotFoundError: there are no packs at the URL.
        CacheError: the cache cannot be written.
        StoreError: the store failed. What was pulled stays, and a second pull goes on there.
    """
    published = Published(store, settled)
    published.refresh()
    if not published.names and not published.damaged:
        other = f", but {published.foreign[0]!r}" if published.foreign else ""
        raise NotFoundError(
            f"{store.url} holds no packs of a cache{other}: fastload cache push writes them", stage="list"
        )
    directory = cache.open_or_raise()
    if directory.readonly:
        raise CacheError(f"cache {cache.path} {directory.readonly}: nothing can be pulled into it")
    missing = _missing(directory, published)
    done = Pulled(packs=len(published.packs), damaged=dict(published.damaged))
    done.present = len(published.keys) - len(missing)
    total = sum(missing.values())
    wanted = first & missing.keys()
    spans = chain(_spans(published, wanted), _spans(published, missing.keys() - wanted))
    pulling = _Pulling(cache, store, done)
    pulling.run(spans, lambda: progress(done.bytes + pulling.spared, total))
    cache.flush(_WRITE_SECONDS)
    if directory.writer is not None and directory.writer.error is not None:
        raise CacheError(f"cache {cache.path}: {directory.writer.error}")
    left = _missing(directory, published)
    done.left = len(left)
    done.records = len(missing) - done.left
    done.settled = [
        pack.name for pack in published.packs.values() if not any(record.key in left for record in pack)
    ]
    return done


def _missing(directory: Directory, published: Published) -> dict[bytes, int]:
    """key -> length of the published records that the cache lacks."""
    keys = list(published.keys)
    entries = directory.index.packed(keys)
    absent = {key for key, entry in zip(keys, entries, strict=True) if entry is None}
    return {
        record.key: record.length
        for pack in published.packs.values()
        for record in pack
        if record.key in absent
    }


def _spans(published: Published, missing: set[bytes]) -> Iterator[_Span]:
    """The requests for the records that are missing. Each is taken from the first pack that has it."""
    for pack in published.packs.values():
        span = _Span(pack, [])
        for record in pack:
            if record.key not in missing:
                continue
            missing.remove(record.key)
            if span.records and not span.takes(record):
                yield span
                span = _Span(pack, [])
            span.records.append(record)
        if span.records:
            yield span


class _Pulling:
    """The requests of one pull, some of them in flight.

    Attributes:
        spared: bytes of records that were not read, because they had come into the cache meanwhile.
    """

    def __init__(self, cache: Cache, store: Store, done: Pulled) -> None:
        self._cache = cache
        self._store = store
        self._done = done
        self.spared = 0
        self._full = False
        self._ended = threading.Event()

    def run(self, spans: Iterator[_Span], after_each: Callable[[], None]) -> None:
        """Read all spans, until the cache takes no more."""
        flying = set[Future[int | None]]()
        with ThreadPoolExecutor(REQUESTS, "fastload-pull") as pool:
            try:
                flying.update(pool.submit(self._read, span) for span in islice(spans, REQUESTS))
                while flying:
                    ended, flying = wait(flying, return_when=FIRST_COMPLETED)
                    written = [future.result() for future in ended]
                    self._done.bytes += sum(filter(None, written))
                    self._full = self._full or None in written
                    if not self._full:
                        flying.update(pool.submit(self._read, span) for span in islice(spans, len(ended)))
                    after_each()
            finally:  # after an error or Ctrl-C, no request is tried again
                self._ended.set()

    def _pause(self, error: StoreError, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise error

    def _read(self, span: _Span) -> int | None:
        """Read one span into the cache: the bytes of its records; None: the cache takes no more.

        Meanwhile it has the in-flight locks of these records, so that a training on this node waits for them
        instead of reading their objects.
        """
        locked = {record.key for record in span.records if self._cache.lock_inflight(record.key)}
        if not locked:  # a training has read, or is reading, all of them
            self.spared += sum(record.length for record in span.records)
            return 0
        try:
            return self._write(span, locked)
        finally:
            for key in locked:
                self._cache.unlock_inflight(key)

    def _write(self, span: _Span, locked: set[bytes]) -> int | None:
        """As `_read`. Takes out of `locked` what is handed to the cache, which gives these locks back."""
        pack, written = span.pack, 0
        try:
            found = self._store.read_range(pack.name, span.start, span.stop, pack.version, wait=self._pause)
        except (NotFoundError, ObjectChangedError) as error:
            self._done.damaged[pack.name] = error.message
            return 0
        body = memoryview(found)
        for record in span.records:
            begin = record.offset - span.start
            payload = body[begin : begin + record.length]
            if checksum(payload) != record.checksum:
                self._done.damaged[pack.name] = "is damaged: a record differs from its checksum"
                continue
            locked.discard(record.key)
            if self._cache.write(record.key, payload, _WRITE_SECONDS):
                written += record.length
            elif self._cache.fits(record.length) != "too large":
                return None
        return written
