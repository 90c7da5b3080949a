"""`pull`: the records that a URL has in packs come into a cache, in large ranges.

    packs ─▶ the records that the cache lacks ─▶ ranges ─▶ verify each record ─▶ Cache.write

A training on this node reads the same objects meanwhile. It never waits for a range, which has dozens of
records and takes seconds: the pull takes no in-flight locks. Each range is planned when its request goes out,
from what the cache lacks then, so that only what is in flight may be read twice, and that is kept small.

A record of another version of its object has another key: it is pulled, and never found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fastload.cache.cache import Cache
from fastload.cache.directory import Directory
from fastload.cache.packs import REQUESTS, Pack, Published, Record
from fastload.cache.segment import KEY_SIZE, checksum
from fastload.errors import CacheError, NotFoundError, ObjectChangedError, StoreError
from fastload.store import Store

Chosen: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"  # some records of a pack

_GAP_BYTES = 256 << 10  # that are read in vain rather than with another request
_SPAN_RECORDS = 1000  # of one request; the index is asked for so many when it is planned
_LOOKED_UP = 10_000  # keys at once
_WRITE_SECONDS = 60.0  # that a disk gets for the records before


class Pace(NamedTuple):
    """Requests in flight, and bytes of one. They bound the memory, to which one larger record may come."""

    requests: int
    range_bytes: int


ALONE = Pace(REQUESTS, 8 << 20)
BESIDE_TRAINING = Pace(3, 2 << 20)


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
    """Packs that have nothing more for the cache: it has all of their records, or no room for more."""
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

    def takes(self, record: Record, range_bytes: int) -> bool:
        """Whether one request for this record too is worth its bytes."""
        near = record.offset - self.stop <= _GAP_BYTES
        return near and record.offset + record.length - self.start <= range_bytes


def pull(
    cache: Cache,
    store: Store,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    only: bytes | None = None,
    settled: Iterable[str] = (),
    sources: frozenset[str] = frozenset(),
    beside_training: bool = False,
) -> Pulled:
    """Put the published records into a cache that it lacks. Other processes may use it meanwhile.

    Args:
        progress: called with (bytes done, bytes in all).
        only: keys of the records that are wanted, one behind the other; None: all.
        settled: names of packs that are not looked at.
        sources: what the cache is for, as `sources_of` says; not given: whatever is published.
        beside_training: few bytes are in flight, for a training may read them too.

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
    lengths = [pack.lengths[each] for pack, each in zip(packs, missing, strict=True)]
    total, average = sum(int(each.sum()) for each in lengths), int(np.mean(np.concatenate([[0], *lengths])))
    pulling = _Pulling(cache, directory, store, done, BESIDE_TRAINING if beside_training else ALONE)
    if total and cache.fits(average) == "yes":
        spans = chain.from_iterable(map(pulling.spans, packs, missing))
        pulling.run(spans, lambda: progress(done.bytes + pulling.spared, total))
    if directory.writer is not None and directory.writer.error is not None:
        raise CacheError(f"cache {cache.path}: {directory.writer.error}")
    left = [each & _lacked(directory, pack) for pack, each in zip(packs, wanted, strict=True)]
    done.left = _count(left)
    done.records = min(done.records, _count(missing) - done.left)  # the writer may have dropped the last ones
    full = cache.fits(average) != "yes"
    done.settled = [pack.name for pack, lacked in zip(packs, left, strict=True) if full or not lacked.any()]
    return done


def _count(chosen: Iterable[Chosen]) -> int:
    return sum(int(each.sum()) for each in chosen)


def _wanted(packs: list[Pack], only: bytes | None) -> list[Chosen]:
    """The records of each pack that are wanted, and that no pack before it has."""
    if not packs:
        return []
    keys = np.concatenate([pack.keys for pack in packs]).view(f"S{KEY_SIZE}")
    found = np.zeros(len(keys), np.bool_)
    found[np.unique(keys, return_index=True)[1]] = True
    if only is not None:
        found &= np.isin(keys, np.frombuffer(only, keys.dtype))
    return np.split(found, np.cumsum([len(pack) for pack in packs[:-1]]))


def _lacked(directory: Directory, pack: Pack) -> Chosen:
    """The records of a pack that the cache lacks."""
    lacked = np.zeros(len(pack), np.bool_)
    for start in range(0, len(pack), _LOOKED_UP):
        some = slice(start, start + _LOOKED_UP)
        lacked[some] = [entry is None for entry in directory.index.packed(pack.keys[some].tolist())]
    return lacked


class _Pulling:
    """The requests of one pull, some of them in flight.

    Attributes:
        spared: bytes of records that were not read, because they had come into the cache meanwhile.
    """

    def __init__(self, cache: Cache, directory: Directory, store: Store, done: Pulled, pace: Pace) -> None:
        self._cache = cache
        self._directory = directory
        self._store = store
        self._done = done
        self._pace = pace
        self.spared = 0
        self._full = False
        self._ended = threading.Event()

    def spans(self, pack: Pack, chosen: Chosen) -> Iterator[_Span]:
        """The requests for some records of a pack: each for what the cache lacks when it is asked for."""
        numbers = np.flatnonzero(chosen)
        stops = np.cumsum(pack.lengths)
        while len(numbers):
            # As many as one request may take, if the cache lacks all of them.
            reach = stops[numbers] <= stops[numbers[0]] + self._pace.range_bytes
            ahead = numbers[: min(_SPAN_RECORDS, max(1, int(reach.sum())))]
            found = self._directory.index.packed(pack.keys[ahead].tolist())
            span = _Span(pack, [])
            count = 0
            for record, entry in zip(pack.chosen(ahead), found, strict=True):
                if entry is not None:
                    self.spared += record.length
                elif not span.records or span.takes(record, self._pace.range_bytes):
                    span.records.append(record)
                else:
                    break
                count += 1
            numbers = numbers[count:]
            if span.records:
                yield span

    def run(self, spans: Iterator[_Span], after_each: Callable[[], None]) -> None:
        """Read all spans, until the cache takes no more."""
        requests, range_bytes = self._pace
        flying = dict[Future[list[int]], int]()  # -> bytes, at least those of a range
        with ThreadPoolExecutor(requests, "fastload-pull") as pool:
            try:
                while True:
                    while not self._full and sum(flying.values()) <= (requests - 1) * range_bytes:
                        span = next(spans, None)
                        if span is None:
                            break
                        flying[pool.submit(self._read, span)] = max(range_bytes, span.stop - span.start)
                    if not flying:
                        return
                    for future in wait(flying, return_when=FIRST_COMPLETED).done:
                        del flying[future]
                        self._done.records += len(future.result())
                        self._done.bytes += sum(future.result())
                    after_each()
            finally:  # after an error or Ctrl-C, no request is tried again
                self._ended.set()

    def _pause(self, error: StoreError, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise error

    def _read(self, span: _Span) -> list[int]:
        """Read one span into the cache: the lengths of the records that it took."""
        pack, written = span.pack, list[int]()
        try:
            found = self._store.read_range(pack.name, span.start, span.stop, pack.version, wait=self._pause)
        except (NotFoundError, ObjectChangedError) as error:
            self._done.damaged[pack.name] = error.message
            return written
        body = memoryview(found)
        for record in span.records:
            begin = record.offset - span.start
            payload = body[begin : begin + record.length]
            if checksum(payload) != record.checksum:
                self._done.damaged[pack.name] = "is damaged: a record differs from its checksum"
                continue
            if self._cache.write(record.key, payload, _WRITE_SECONDS):
                written.append(record.length)
            elif self._cache.fits(record.length) != "too large":
                self._full = True
                break
        self._cache.flush(_WRITE_SECONDS)  # its bytes are in memory until then
        return written
