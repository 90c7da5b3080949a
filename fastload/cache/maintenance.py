"""Inspect, verify, clear and measure a cache directory. Unlike reads and writes, these functions raise."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from fastload.cache.directory import FOLDER, MANIFESTS, MARKER, PULLING, PUSHING, Directory
from fastload.cache.segment import CorruptRecordError, Entry, record_size
from fastload.cache.writer import LOCK_FILES
from fastload.errors import CacheError
from fastload.store.node import is_ours, is_part, nearest_existing

_INDEX_FILES = {"data.mdb", "lock.mdb"}
_KEPT = {".manifest", ".listings", ".lock", ".places"}  # endings of files of datasets
_LOOKED_AT = 64  # records
_MEASURED_BYTES = 64 << 20
_ROOT_FILES = {MARKER, "lock", "index", "segments", *LOCK_FILES, PULLING, PUSHING}


@dataclasses.dataclass
class Report:
    """What `Cache.check` found."""

    entries: int = 0
    """Entries whose record was read and verified."""
    bytes: int = 0
    """Their bytes on disk."""
    bad_entries: int = 0
    """Entries whose record is missing or wrong. They cost a miss each, never wrong bytes."""
    orphaned_bytes: int = 0
    """Bytes in segments that no entry points to, left by a killed process. Not an error."""
    foreign_files: list[str] = dataclasses.field(default_factory=list)
    """Files that fastload did not write, relative to the cache's path. Never touched."""
    dropped_entries: int = 0
    """With `fix`: bad entries removed."""
    recovered_entries: int = 0
    """With `fix`: sound records put back into the index."""
    freed_bytes: int = 0
    """With `fix`: bytes of deleted segments."""

    @property
    def ok(self) -> bool:
        """No bad entry is left."""
        return self.bad_entries == self.dropped_entries

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and `ok`, for JSON."""
        return dataclasses.asdict(self) | {"ok": self.ok}


def inspect(path: str, directory: Directory | None) -> dict[str, Any]:
    """Return the size of a cache directory (None: it does not exist) and the free bytes of its disk.

    Raises:
        CacheError: it cannot be read.
    """
    disk = os.statvfs(nearest_existing(path))
    sizes = {"exists": False, "entries": 0, "bytes": 0, "index_bytes": 0, "segments": 0}
    sizes["disk_free"] = disk.f_bavail * disk.f_frsize
    if directory is None:
        return sizes
    with _as_cache_errors(directory):
        names = directory.segment_names()
        return sizes | {
            "exists": True,
            "entries": directory.index.count(),
            "bytes": sum(_sizes(directory, names).values()),
            "index_bytes": (directory.path / "index" / "data.mdb").stat().st_size,
            "segments": len(names),
        }


def share_containing(directory: Directory, pattern: bytes) -> float | None:
    """Return the share of the records with these bytes in them, estimated from a few; None: no record."""
    matches = []
    with _as_cache_errors(directory):
        for key, value in directory.index.some(_LOOKED_AT).items():
            with contextlib.suppress(CorruptRecordError):
                payload = directory.read(key, Entry.unpack(value))
                if payload is not None:
                    matches.append(pattern in bytes(payload))
    return sum(matches) / len(matches) if matches else None


def verify(directory: Directory, fix: bool, progress: Callable[[int, int], None] | None) -> Report:
    """Read and verify every record; see `Cache.check`."""
    if fix and directory.readonly:
        raise CacheError(f"cache {directory.path.parent} {directory.readonly}: check without fix")
    with _as_cache_errors(directory):
        report = Report(foreign_files=_foreign(directory))
        bad = _verify_entries(directory, report, progress)
        on_disk = sum(_sizes(directory, directory.segment_names()).values())
        if fix:
            report.dropped_entries = report.bad_entries - len(bad) + directory.index.drop(bad)
            _recover(directory, report)
            _delete_useless(directory, report)
        report.orphaned_bytes = max(0, on_disk - report.bytes - report.freed_bytes)
    return report


def clear(directory: Directory) -> int:
    """Delete every record and the listings kept beside them; the bytes freed. See `Cache.clear`."""
    if directory.readonly:
        raise CacheError(f"cache {directory.path.parent} {directory.readonly} and cannot be cleared")
    with _as_cache_errors(directory):
        known = directory.index.clear()  # first: from here on no lookup leads to a file that is deleted below
        listed = directory.segment_names()
        newer = set(directory.index.segments().values())  # registered since then, before their files are made
        directory.files.clear()
        freed = 0
        for name, size in _sizes(directory, [n for n in listed if n in known or n not in newer]).items():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory.segments_fd)
                freed += size
        for manifest in _manifests(directory):
            with contextlib.suppress(FileNotFoundError):
                freed += manifest.stat(follow_symlinks=False).st_size
                manifest.unlink()
    return freed


@contextlib.contextmanager
def _as_cache_errors(directory: Directory) -> Iterator[None]:
    try:
        yield
    except (OSError, lmdb.Error) as error:
        if isinstance(error, CacheError):
            raise
        raise CacheError(f"cache {directory.path.parent}: {error}") from error


def _verify_entries(
    directory: Directory, report: Report, progress: Callable[[int, int], None] | None
) -> list[tuple[bytes, bytes]]:
    """Verify all entries in their order on disk; the bad ones, as (key, packed entry)."""
    bad = []
    items = directory.index.items()
    items.sort(key=_position)
    for done, (key, value) in enumerate(items):
        try:
            entry = Entry.unpack(value)
            if directory.read(key, entry) is None:
                raise CorruptRecordError("no such segment")
        except (CorruptRecordError, OSError):
            if directory.index.packed([key]) == [value]:  # else it was cleared or replaced meanwhile
                report.bad_entries += 1
                bad.append((key, value))
        else:
            report.entries += 1
            report.bytes += record_size(entry.length)
        if progress is not None and (done % 64 == 0 or done + 1 == len(items)):
            progress(done + 1, len(items))
    return bad


def _position(item: tuple[bytes, bytes]) -> tuple[int, int]:
    try:
        return Entry.unpack(item[1])[:2]
    except CorruptRecordError:
        return (0, 0)


def _recover(directory: Directory, report: Report) -> None:
    for number, reader, key, entry in directory.unindexed():
        try:
            reader.read(key, entry)
        except (CorruptRecordError, OSError):
            continue
        if directory.publish(number, [(key, entry)]):
            report.recovered_entries += 1
            report.bytes += record_size(entry.length)
    report.entries += report.recovered_entries


def _delete_useless(directory: Directory, report: Report) -> None:
    """Delete segments that no entry points to and no living process writes."""
    used = _used_segments(directory)
    with contextlib.ExitStack() as locked:
        useless = {}
        for number, name in directory.index.segments().items():
            if number not in used:
                with contextlib.suppress(OSError):
                    useless[number] = name, locked.enter_context(_locked_segment(directory, name))
        # Once more: until its segment was locked, a process may have written to it.
        used = _used_segments(directory) if useless else used
        names = set(directory.segment_names())
        for number, (name, size) in useless.items():
            if number not in used and name in names:
                with contextlib.suppress(OSError):
                    directory.index.remove_segments([number], size)
                    os.unlink(name, dir_fd=directory.segments_fd)
                    report.freed_bytes += size


def _used_segments(directory: Directory) -> set[int]:
    """Return the numbers of the segments that entries point to."""
    used = set()
    for _, value in directory.index.items():
        with contextlib.suppress(CorruptRecordError):
            used.add(Entry.unpack(value).segment)
    return used


@contextlib.contextmanager
def _locked_segment(directory: Directory, name: str) -> Iterator[int]:
    """Hold the lock of a segment, and return its size. Raises `OSError` where a process writes it."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory.segments_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(fd).st_size
    finally:
        os.close(fd)


def _manifests(directory: Directory) -> list[Path]:
    """Return the files that datasets keep beside the segments, in `Cache._manifests`."""
    folder = directory.path.parent / MANIFESTS
    if not is_ours(folder):
        return []
    return sorted(p for p in folder.iterdir() if p.suffix in _KEPT or is_part(p.name))


def _sizes(directory: Directory, names: list[str]) -> dict[str, int]:
    sizes = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            sizes[name] = os.stat(name, dir_fd=directory.segments_fd, follow_symlinks=False).st_size
    return sizes


def _foreign(directory: Directory) -> list[str]:
    parent, root = directory.path.parent, directory.path
    ours = is_ours(parent / MANIFESTS)
    paths = [p for p in parent.iterdir() if p.name != FOLDER and not (ours and p.name == MANIFESTS)]
    if ours:
        paths += set((parent / MANIFESTS).iterdir()) - set(_manifests(directory))
    paths += [path for path in root.iterdir() if path.name not in _ROOT_FILES and not is_part(path.name)]
    paths += [path for path in (root / "index").iterdir() if path.name not in _INDEX_FILES]
    segments = set(directory.segment_names())
    paths += [path for path in (root / "segments").iterdir() if path.name not in segments]
    return sorted(str(path.relative_to(parent)) for path in paths)


class Disk(NamedTuple):
    """Bytes per second, sequential, without the page cache."""

    write: float
    read: float


def measure_disk(directory: Path) -> Disk:
    """Write 64 MiB to a file in `directory`, made if absent, and read it back.

    Raises:
        OSError: the directory is not writable, or the disk is full.
    """
    directory.mkdir(parents=True, exist_ok=True)
    block = os.urandom(1 << 20)
    with _scratch_file(directory) as fd:
        start = time.perf_counter()
        for _ in range(_MEASURED_BYTES // len(block)):
            os.write(fd, block)
        os.fsync(fd)
        written = time.perf_counter() - start
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        for place in range(0, _MEASURED_BYTES, len(block)):
            os.pread(fd, len(block), place)
        return Disk(_MEASURED_BYTES / written, _MEASURED_BYTES / (time.perf_counter() - start))


@contextlib.contextmanager
def _scratch_file(directory: Path) -> Iterator[int]:
    fd, path = tempfile.mkstemp(prefix="fastload-disk-", dir=directory)
    try:
        Path(path).unlink()  # now, so that a killed process leaves nothing
        yield fd
    finally:
        os.close(fd)
