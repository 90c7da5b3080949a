"""What people ask of a cache: what is in it, is it sound, empty it. The methods `info`, `check` and `clear`.

Unlike reading and writing, which pass through whatever goes wrong, these fail aloud.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb

from fastload.cache import audit
from fastload.cache.audit import Report
from fastload.cache.directory import FOLDER, Directory
from fastload.cache.record import FORMAT
from fastload.errors import CacheError
from fastload.store.files import nearest_existing

if TYPE_CHECKING:
    from fastload.cache.cache import Cache

__all__ = ["check", "clear", "info"]


def info(cache: Cache) -> dict[str, Any]:
    """What the directory holds; makes nothing where there is none.

    Keys: path, mode, format, size_limit, exists, entries, bytes (on disk, payloads with headers),
    index_bytes, segments, disk_free. Which modes the entries have is not known: the mode is part of the
    digest.

    Raises:
        CacheError: the directory cannot be opened.
    """
    empty = {"exists": False, "entries": 0, "bytes": 0, "index_bytes": 0, "segments": 0}
    known = {"path": cache.path, "mode": cache.mode, "format": FORMAT, "size_limit": cache.size_limit}
    if not _exists(cache):
        return known | empty | {"disk_free": _free(cache.path)}
    with _must_open(cache) as directory:
        return known | audit.info(directory) | {"disk_free": _free(cache.path)}


def check(cache: Cache, fix: bool = False, progress: Callable[[int, int], None] | None = None) -> Report:
    """Read and verify every record. With `fix`, drop bad entries, index sound records that the index has
    lost, and delete segments of dead processes that hold nothing of use.

    Args:
        progress: called with (entries done, entries in all).

    Raises:
        CacheError: the directory cannot be opened.
    """
    if not _exists(cache):
        return Report()
    with _must_open(cache) as directory:
        return audit.check(directory, fix, progress)


def clear(cache: Cache) -> int:
    """Delete every record, in all modes, and the listings kept beside them; return the bytes freed.

    Safe while others read and write; they go on with an empty cache. Records in memory (`memory=`) are
    forgotten too, also where another process holds them; their bytes come free once the processes that share
    the memory have ended. Files that fastload did not write stay.

    Raises:
        CacheError: the directory cannot be opened, or only read.
    """
    freed = 0
    if _exists(cache):
        with _must_open(cache) as directory:
            freed = audit.clear(directory)
    if cache.memory is not None:  # which may be another one than the directory names
        cache.memory.clear()
    return freed


def _exists(cache: Cache) -> bool:
    return (Path(cache.path) / FOLDER).is_dir()


@contextlib.contextmanager
def _must_open(cache: Cache) -> Iterator[Directory]:
    try:
        yield cache.open_aloud()
    except (OSError, lmdb.Error) as error:
        if isinstance(error, CacheError):
            raise
        raise CacheError(f"cache {cache.path}: {error}") from error


def _free(path: str) -> int:
    """Free bytes on the disk that holds `path`, or would."""
    disk = os.statvfs(nearest_existing(path))
    return disk.f_bavail * disk.f_frsize
