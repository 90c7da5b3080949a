"""`push`: the records of a cache go to a URL, in packs that other nodes pull.

Any number of nodes push side by side, without a coordinator: each lists the URL before each pack, and leaves
out what another one has published meanwhile. Each begins at a random place of its cache, so that nodes with
the same records rarely pack the same ones. Where they do, a record is published twice, and pulled once.

Nothing is kept about a push: the listing says what is left to do.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import lmdb

from fastload.cache.cache import Cache
from fastload.cache.directory import Directory
from fastload.cache.packs import MOST_RECORDS, Pack, Published, pack_index, pack_name, sources_of
from fastload.cache.segment import CorruptRecordError, Entry
from fastload.errors import CacheError, FastloadError, NotFoundError
from fastload.store import Store

PACK_BYTES = 256 << 20
# A pack is a file on the cache's disk until it is sent. It takes at most half of what is free there.
_SMALLEST_PACK = 8 << 20


@dataclass
class Pushed:
    """What a push did, as far as it has come."""

    records: int = 0
    """Records that it published."""
    bytes: int = 0
    """Bytes of their payloads."""
    packs: int = 0
    """Objects that it wrote."""
    present: int = 0
    """Records that were published already."""
    bad_entries: int = 0
    """Records that could not be read, or were not as they were written. They are not published."""


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
    directory = cache.open_or_raise()
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
    """All entries in their order on disk, from a random one on."""
    found = []
    for key, value in directory.index.items():
        try:
            found.append((key, Entry.unpack(value)))
        except CorruptRecordError:  # a miss for every reader
            continue
    found.sort(key=lambda item: item[1])
    entries = deque(found)
    entries.rotate(random.randrange(max(1, len(found))))
    return entries


def _choose(
    directory: Directory, todo: deque[tuple[bytes, Entry]], published: set[bytes], done: Pushed
) -> list[tuple[bytes, Entry]]:
    """The records of the next pack, taken out of `todo`."""
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
