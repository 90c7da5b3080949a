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
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fastload.cache.cache import Cache
from fastload.cache.directory import Directory
from fastload.cache.pack import Pack, Record
from fastload.cache.published import REQUESTS, Published
from fastload.cache.segment import KEY_SIZE, checksum
from fastload.errors import CacheError, NotFoundError, ObjectChangedError, StoreError
from fastload.store import Store

__all__ = ["Pulled", "pull"]

Chosen: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"  # some records of a pack

RANGE_BYTES = 8 << 20  # of one request; with REQUESTS of them in flight, 64 MB
_GAP_BYTES = 256 << 10  # that are read in vain rather than with another request
_SPAN_RECORDS = 250  # of one request: each is locked meanwhile, and each lock goes through all that are held
_LOOKED_UP = 10_000  # keys at once
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
        near = record.offset - self.stop <= _GAP_BYTES and len(self.records) < _SPAN_RECORDS
        return near and record.offset + record.length - self.start <= RANGE_BYTES


def pull(
    cache: Cache,
    store: Store,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    only: Set[bytes] | None = None,
    settled: Iterable[str] = (),
    sources: frozenset[str] = frozenset(),
) -> Pulled:
    """Put the published records into a cache that it lacks. Other processes may use it meanwhile.

    Args:
        progress: called with (bytes done, bytes in all).
        only: keys of the records that are wanted; None: all.
        settled: names of packs that are not looked at.
        sources: what the cache is for, as `sources_of` says; not given: whatever is published.

    Raises:
        NotFoundError: there are no packs at the URL.
        CacheError: the cache cannot be written, or records of other data are there.
        StoreError: the store failed. What was pulled stays, and a second pull goes on there.
    """
    published = Published(store, settled)
    published.refresh()
    if not published.names:
        other = f", but {published.foreign[0]!r}" if published.foreign else ""
        raise NotFoundError(
            f"{store.url} holds no packs of a cache{other}: fastload cache push writes them", stage="list"
        )
    published.refuse_others(sources)
    directory = cache.open_or_raise()
    if directory.readonly:
        raise CacheError(f"cache {cache.path} {directory.readonly}: nothing can be pulled into it")
    packs = list(published.packs.values())
    wanted = _wanted(packs, only)
    missing = [each & _lacked(directory, pack) for pack, each in zip(packs, wanted, strict=True)]
    done = Pulled(packs=len(packs), damaged=dict(published.damaged))
    done.present = _count(wanted) - _count(missing)
    total = sum(int(pack.lengths[each].sum()) for pack, each in zip(packs, missing, strict=True))
    pulling = _Pulling(cache, store, done)
    spans = chain.from_iterable(map(_spans, packs, missing))
    pulling.run(spans, lambda: progress(done.bytes + pulling.spared, total))
    if directory.writer is not None and directory.writer.error is not None:
        raise CacheError(f"cache {cache.path}: {directory.writer.error}")
    left = [each & _lacked(directory, pack) for pack, each in zip(packs, wanted, strict=True)]
    done.left = _count(left)
    done.records = _count(missing) - done.left
    done.settled = [pack.name for pack, lacked in zip(packs, left, strict=True) if not lacked.any()]
    return done


def _count(chosen: Iterable[Chosen]) -> int:
    return sum(int(each.sum()) for each in chosen)


def _wanted(packs: list[Pack], only: Set[bytes] | None) -> list[Chosen]:
    """The records of each pack that are wanted, and that no pack before it has."""
    if not packs:
        return []
    keys = np.concatenate([pack.keys for pack in packs]).view(f"S{KEY_SIZE}")
    found = np.zeros(len(keys), np.bool_)
    found[np.unique(keys, return_index=True)[1]] = True
    firsts = np.split(found, np.cumsum([len(pack) for pack in packs[:-1]]))
    if only is None:
        return firsts
    chosen = ([key in only for key in pack.keys.tolist()] for pack in packs)
    return [each & ours for each, ours in zip(firsts, chosen, strict=True)]


def _lacked(directory: Directory, pack: Pack) -> Chosen:
    """The records of a pack that the cache lacks."""
    lacked = np.zeros(len(pack), np.bool_)
    for start in range(0, len(pack), _LOOKED_UP):
        some = slice(start, start + _LOOKED_UP)
        lacked[some] = [entry is None for entry in directory.index.packed(pack.keys[some].tolist())]
    return lacked


def _spans(pack: Pack, chosen: Chosen) -> Iterator[_Span]:
    """The requests for some records of a pack."""
    span = _Span(pack, [])
    for record in pack.chosen(np.flatnonzero(chosen)):
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
            written = self._write(span, locked)
            self._cache.flush(_WRITE_SECONDS)  # else small records would queue up, each with its lock
            return written
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
