"""`push` and `pull`: the records of a cache go to a URL in packs, and come from there into another cache.

    cache ─▶ records that are not published yet ─▶ a pack on the cache's disk ─▶ one write to the URL
    packs ─▶ records that the cache lacks ─▶ large ranges ─▶ verify each record ─▶ Cache.write

Any number of nodes push side by side, without a coordinator: each lists the URL before each pack, and leaves
out what another one has published meanwhile. Each begins at a random place of its cache, so that nodes with
the same records rarely pack the same ones. Where they do, a record is published twice, and pulled once.
Nothing is kept about a push: the listing says what is left to do.

A training may read the objects that a pull brings. It never waits for a range, which has dozens of records
and takes seconds: the pull takes no in-flight locks. Each range is planned when its request goes out, from
what the cache lacks then, so that only what is in flight may be read twice, and that is kept small. A record
of another version of its object has another key: it is pulled, and never found.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import lmdb
import numpy as np

from fastload.cache.cache import Cache
from fastload.cache.directory import Directory
from fastload.cache.packs import (
    MOST_RECORDS,
    REQUESTS,
    Pack,
    Published,
    Record,
    pack_index,
    pack_name,
    sources_of,
)
from fastload.cache.segment import KEY_SIZE, CorruptRecordError, Entry, checksum
from fastload.errors import CacheError, FastloadError, NotFoundError, ObjectChangedError, StoreError
from fastload.store import Store

PACK_BYTES = 256 << 20
# A pack is a file on the cache's disk until it is sent. It takes at most half of what is free there.
_SMALLEST_PACK = 8 << 20


@dataclass
class Pushed:
    """What a push did, as far as it has come."""

    records: int = 0  # records published now
    bytes: int = 0  # bytes of their payloads
    packs: int = 0  # objects written
    present: int = 0  # records that were published already
    bad_entries: int = 0  # records that are damaged on this disk, and were left out


def push(
    cache: Cache, store: Store, progress: Callable[[Pushed, int], None] = lambda done, total: None
) -> Pushed:
    """Publish the records of a cache that are not published yet. Other processes may fill it meanwhile.

    Args:
        progress: called after each pack with what is done and the number of records in the cache.

    Raises:
        CacheError: there is no cache, its disk has no room for a pack, or the URL holds other data.
        StoreError: the store failed, or takes no writes.
    """
    directory = cache._open_or_raise()
    published, sources, done = Published(store), sources_of(cache), Pushed()
    keys = set[bytes]()  # of what is published
    todo = _entries(directory)
    total = len(todo)
    while True:
        with contextlib.suppress(NotFoundError):  # a directory to be made; of a bucket, the write says so
            keys.update(*(pack.keys.tolist() for pack in published.refresh()))
        published.refuse_foreign()
        published.refuse_others(sources)
        chosen = _choose(directory, todo, keys, done)
        if chosen:
            pack = _write(directory, store, sources, chosen, done)
            if pack is not None:  # its index need not be read
                published.packs[pack.name] = pack
        progress(done, total)
        if not todo:
            return done


def _entries(directory: Directory) -> deque[tuple[bytes, Entry]]:
    """Return all entries in their order on disk, from a random one on."""
    entries_on_disk = []
    for key, value in directory.index.items():
        try:
            entries_on_disk.append((key, Entry.unpack(value)))
        except CorruptRecordError:  # a miss for every reader
            continue
    entries_on_disk.sort(key=lambda item: item[1])
    entries = deque(entries_on_disk)
    entries.rotate(random.randrange(max(1, len(entries_on_disk))))
    return entries


def _choose(
    directory: Directory, todo: deque[tuple[bytes, Entry]], published: set[bytes], done: Pushed
) -> list[tuple[bytes, Entry]]:
    """Return the records of the next pack, taken out of `todo`."""
    disk = os.fstatvfs(directory.root_fd)
    room = min(PACK_BYTES, max(_SMALLEST_PACK, disk.f_bavail * disk.f_frsize // 2))
    chosen: list[tuple[bytes, Entry]] = []
    while todo and (not chosen or (todo[0][1].length <= room and len(chosen) < MOST_RECORDS)):
        key, entry = todo.popleft()
        if key in published:
            done.present += 1
        else:
            chosen.append((key, entry))
            room -= entry.length
    return chosen


def _write(
    directory: Directory,
    store: Store,
    sources: frozenset[str],
    chosen: list[tuple[bytes, Entry]],
    done: Pushed,
) -> Pack | None:
    """Write a pack of the chosen records, as far as they verify; None: none of them does."""
    try:
        # The file has no name in the directory: nothing is left of it where this process is killed.
        with tempfile.TemporaryFile(dir=directory.path) as file:
            records = _fill(directory, file, chosen, done)
            if not records:
                return None
            tail = pack_index(sorted(sources), records)
            file.write(tail)
            file.flush()
            size = file.tell()
            name = pack_name(tail)
            store.write(name, Path(f"/proc/{os.getpid()}/fd/{file.fileno()}"))
    except (OSError, lmdb.Error) as error:
        if isinstance(error, FastloadError):  # of the store
            raise
        raise CacheError(f"cache {directory.path.parent}: a pack cannot be made there: {error}") from error
    done.packs += 1
    done.records += len(records)
    done.bytes += size - len(tail)
    return Pack(name, "", size, tail)


def _fill(
    directory: Directory, file: IO[bytes], chosen: list[tuple[bytes, Entry]], done: Pushed
) -> list[tuple[bytes, int, int]]:
    """Write the payloads that verify; their (key, length, checksum)."""
    records = []
    for key, entry in chosen:
        try:
            payload = directory.read(key, entry)
        except (CorruptRecordError, OSError):
            done.bad_entries += 1
            continue
        if payload is not None:  # else it was cleared meanwhile
            file.write(payload)
            records.append((key, entry.length, entry.checksum))
    return records


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
        """Return whether one request for this record too is worth its bytes."""
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
        beside_training: few bytes are in flight, as a training script may read at the same time.

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
    directory = cache._open_or_raise()
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
    if total and cache._fits(average) == "yes":
        spans = chain.from_iterable(map(pulling.spans, packs, missing))
        pulling.run(spans, lambda: progress(done.bytes + pulling.spared, total))
    if directory.writer is not None and directory.writer.error is not None:
        raise CacheError(f"cache {cache.path}: {directory.writer.error}")
    left = [each & _lacked(directory, pack) for pack, each in zip(packs, wanted, strict=True)]
    done.left = _count(left)
    done.records = min(done.records, _count(missing) - done.left)  # the writer may have dropped the last ones
    full = cache._fits(average) != "yes"
    done.settled = [pack.name for pack, lacked in zip(packs, left, strict=True) if full or not lacked.any()]
    return done


def _count(chosen: Iterable[Chosen]) -> int:
    return sum(int(each.sum()) for each in chosen)


def _wanted(packs: list[Pack], only: bytes | None) -> list[Chosen]:
    """Return the records of each pack that are wanted, and that no pack before it has."""
    if not packs:
        return []
    keys = np.concatenate([pack.keys for pack in packs]).view(f"S{KEY_SIZE}")
    wanted = np.zeros(len(keys), np.bool_)
    wanted[np.unique(keys, return_index=True)[1]] = True
    if only is not None:
        wanted &= np.isin(keys, np.frombuffer(only, keys.dtype))
    return np.split(wanted, np.cumsum([len(pack) for pack in packs[:-1]]))


def _lacked(directory: Directory, pack: Pack) -> Chosen:
    """Return the records of a pack that the cache lacks."""
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
        """Yield requests for some records of a pack, each for what the cache lacks when it goes out."""
        numbers = np.flatnonzero(chosen)
        stops = np.cumsum(pack.lengths)
        while len(numbers):
            # As many as one request may take, if the cache lacks all of them.
            reach = stops[numbers] <= stops[numbers[0]] + self._pace.range_bytes
            ahead = numbers[: min(_SPAN_RECORDS, max(1, int(reach.sum())))]
            entries = self._directory.index.packed(pack.keys[ahead].tolist())
            span = _Span(pack, [])
            count = 0
            for record, entry in zip(pack.chosen(ahead), entries, strict=True):
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
            data = self._store.read_range(pack.name, span.start, span.stop, pack.version, wait=self._pause)
        except (NotFoundError, ObjectChangedError) as error:
            self._done.damaged[pack.name] = error.message
            return written
        body = memoryview(data)
        for record in span.records:
            begin = record.offset - span.start
            payload = body[begin : begin + record.length]
            if checksum(payload) != record.checksum:
                self._done.damaged[pack.name] = "is damaged: a record differs from its checksum"
                continue
            if self._cache.write(record.key, payload, _WRITE_SECONDS):
                written.append(record.length)
            elif self._cache._fits(record.length) != "too large":
                self._full = True
                break
        self._cache.flush(_WRITE_SECONDS)  # its bytes are in memory until then
        return written
