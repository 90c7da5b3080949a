"""One cache directory as a process has it open: folders, locks, and repair of what a crash left.

    <path>/v1/                       0700; the number is the format: another format lives beside it, unread
        fastload-cache.json          marks the folder as ours; how it was left (see `_State`)
        lock                         flock: shared while open, exclusive for the first in and the last out
        index/data.mdb, lock.mdb     LMDB
        segments/<host>-<pid>-<id>.seg
        claims0, claims1, ...        no bytes, only locks: see `InflightLocks`
        pulling, pushing             locks of background pulls and pushes: see `remote`

The first process to open the directory (no other holds the lock) repairs the traces of a crash:

* a killed process leaves bytes that no index entry names, and reserved bytes never written: recount;
* a machine that went down may have written the pages of the index in any order, and LMDB trusts its file:
  after an unclean stop and another boot, the index is thrown away and rebuilt from the segments, in the
  background;
* so is an index that LMDB calls corrupt.

It then marks the directory as in use. Where the disk has no room for that, the directory is only read.

Network file systems are not supported (LMDB needs coherent mappings); a cache belongs on a local disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import lmdb

from fastload.cache.index import Index, SegmentGoneError, reserve_lock_file
from fastload.cache.segment import (
    FORMAT,
    CorruptRecordError,
    Entry,
    SegmentFiles,
    SegmentReader,
    is_segment_name,
)
from fastload.cache.writer import FULL, InflightLocks, Writer
from fastload.errors import CacheError
from fastload.store.node import DIR_FLAGS, is_part, make_root, whole_file

MARKER = "fastload-cache.json"
FOLDER = f"v{FORMAT}"
MANIFESTS = "manifests"  # beside it, of any format: the listings that datasets keep
PULLING, PUSHING = "pulling", "pushing"  # locked by the process that does it
LOCK_DEADLINE = 10.0  # seconds; the exclusive lock is held for milliseconds, or for a slow fsync
CLOSE_DEADLINE = 10.0
REINDEX_BATCH = 1000

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_DAMAGED_BOOT = "damaged"  # in the place of a boot: a new index is needed, whichever process leaves later

# LMDB's errors when the bytes of its file are wrong, as opposed to a full disk or too many readers.
DAMAGED = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
)


class _State(NamedTuple):
    """How the directory was left, kept in the marker file."""

    boot: str = ""  # the boot of the machine in which it was last written
    clean: bool = False  # the last process to leave had synced the index
    reindex: bool = False  # the segments hold records that the index may not know yet


class LockedError(CacheError):
    """Another process holds the exclusive lock of the directory, which ends: see `LOCK_DEADLINE`."""


class Directory:
    """Index, segments and writer of one cache directory in this process.

    Raises OSError, lmdb.Error or CacheError when it cannot be opened at all, LockedError if another process
    holds its lock for `patience` seconds. A directory that can be read but not written has `writer` None, and
    `readonly` says why; it is "" where it can be written.
    """

    def __init__(self, path: str, root_fd: int, patience: float = LOCK_DEADLINE) -> None:
        self.path = Path(path) / FOLDER
        self.identity = identity(root_fd)
        self._patience = patience
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self.root_fd = root_fd
        self._reindexes = False
        self._damaged = False
        self._lock_fd = -1
        self.segments_fd = -1
        self.inflight: InflightLocks | None = None
        try:
            self.readonly = "" if self._open_files() else "is read-only"
            self.index = self._open_readonly() if self.readonly else self._open_writable()
        except BaseException:
            self._close_fds()
            raise
        self.files = SegmentFiles(self.segments_fd, self.index.segment_name)
        self.writer: Writer | None = None
        if not self.readonly:
            first_job = self._reindex if self._reindexes else None
            self.inflight = InflightLocks(self.root_fd)
            self.writer = Writer(self.index, self.files, self.inflight, self.segments_fd, first_job)

    # -- opening

    def _open_files(self) -> bool:
        """Make or open the folders and the lock file. False if nothing can be written."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            for name in ("segments", "index"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=self.root_fd)
            self._lock_fd = os.open("lock", flags, 0o600, dir_fd=self.root_fd)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
        self.segments_fd = os.open("segments", DIR_FLAGS, dir_fd=self.root_fd)
        os.close(os.open("index", DIR_FLAGS, dir_fd=self.root_fd))
        for name in ("data.mdb", "lock.mdb"):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(self.path / "index" / name).st_mode):
                    raise CacheError(f"{self.path}/index/{name} is not a regular file; remove it")
        return self._lock_fd >= 0

    def _open_readonly(self) -> Index:
        state = self._read_state()
        if not state.clean and state.boot != _boot_id():
            raise CacheError(
                f"cache {self.path} is read-only and was not closed before the machine stopped; "
                "open it once from a process that can write to it, or fill another cache"
            )
        return Index(self.path / "index", readonly=True)

    def _open_writable(self) -> Index:
        """Open to read and write; where the disk has no room for the mark that it is in use, to read."""
        try:
            return self._open_locked()
        except (OSError, lmdb.DiskError) as error:
            if isinstance(error, OSError) and error.errno not in FULL:
                raise
            self.readonly = "has no room left on its disk"
            # Unmarked, it must not look like in use: the next process is again the first one.
            os.close(self._lock_fd)
            self._lock_fd = -1
            try:
                return self._open_readonly()
            except (OSError, lmdb.Error):  # it holds nothing yet, or what needs repair
                raise error from None

    def _open_locked(self) -> Index:
        deadline = time.monotonic() + self._patience
        while True:
            for how in (fcntl.LOCK_EX, fcntl.LOCK_SH):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(self._lock_fd, how | fcntl.LOCK_NB)
                    if how == fcntl.LOCK_SH:
                        return Index(self.path / "index")
                    index = self._open_first()
                    fcntl.flock(self._lock_fd, fcntl.LOCK_SH)
                    return index
            if time.monotonic() > deadline:
                raise LockedError(
                    f"cache {self.path}: another process held its lock for {self._patience:.0f} s"
                )
            time.sleep(0.005)

    def _open_first(self) -> Index:
        """Open as the only process: repair, then mark as in use."""
        state = self._read_state()
        for name in filter(is_part, os.listdir(self.root_fd)):  # noqa: PTH208 (a descriptor, not a path)
            os.unlink(name, dir_fd=self.root_fd)
        if not state.clean and state.boot != _boot_id():
            self._discard_index()
        try:
            index = self._make_index()
        except DAMAGED:
            self._discard_index()
            index = self._make_index()
        try:
            sizes = [os.stat(name, dir_fd=self.segments_fd).st_size for name in self.segment_names()]
            self._reindexes = bool(sizes) and (state.reindex or index.count() == 0)
            self._write_state(_State(_boot_id(), clean=False, reindex=self._reindexes))
            index.check_readers()
            index.set_used_bytes(sum(sizes))
        except BaseException:
            index.close()  # LMDB does not open it twice
            raise
        return index

    def _make_index(self) -> Index:
        reserve_lock_file(self.path / "index")
        return Index(self.path / "index")

    def _discard_index(self) -> None:
        # Unlinked, not truncated: processes that have it open keep a consistent but orphaned index.
        for name in ("data.mdb", "lock.mdb"):
            with contextlib.suppress(FileNotFoundError):
                (self.path / "index" / name).unlink()

    # -- state

    def _read_state(self) -> _State:
        try:
            fd = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.root_fd)
            with os.fdopen(fd, "rb") as file:
                state = json.loads(file.read(4096))
            return _State(str(state["boot"]), state["clean"] is True, state["reindex"] is True)
        except (OSError, ValueError, LookupError, TypeError):
            return _State()

    def _write_state(self, state: _State) -> None:
        text = json.dumps({"about": "a fastload cache; safe to delete", "format": FORMAT} | state._asdict())
        with whole_file(MARKER, folder=self.root_fd, durable=True) as file:
            file.write(text.encode())

    def mark_damaged(self) -> None:
        """Let the next process that opens the directory alone make a new index: LMDB called it corrupt."""
        self._damaged = True
        if not self.readonly:
            with contextlib.suppress(OSError):
                self._write_state(self._read_state()._replace(boot=_DAMAGED_BOOT, clean=False))

    # -- records

    def read(self, key: bytes, entry: Entry) -> memoryview | None:
        """Return the verified payload; None when the cache was cleared since the lookup.

        Raises CorruptRecordError when the bytes are not what the entry promises, OSError or lmdb.Error when
        they cannot be read.
        """
        try:
            return self.files.get(entry.segment).read(key, entry)
        except CorruptRecordError:
            if self.index.has_segment(entry.segment):
                raise
            return None

    def segment_names(self) -> list[str]:
        """Return the names of the segment files on disk: regular files with a name of ours."""
        names = []
        for name in os.listdir(self.segments_fd):  # noqa: PTH208 (a descriptor, not a path)
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=self.segments_fd, follow_symlinks=False)
                if is_segment_name(name) and stat.S_ISREG(status.st_mode):
                    names.append(name)
        return names

    def unindexed(
        self, stopping: threading.Event | None = None
    ) -> Iterator[tuple[int, SegmentReader, bytes, Entry]]:
        """Yield records that the index does not point to; registers segments it does not know.

        It ends once `stopping` is set, also among records that the index points to.
        """
        numbers = {name: number for number, name in self.index.segments().items()}
        for name in self.segment_names():
            with contextlib.suppress(CorruptRecordError, OSError):
                reader = SegmentReader(self.segments_fd, name)
                number = numbers[name] if name in numbers else self.index.add_segment(name)
                for key, entry in reader.scan(number):
                    if stopping is not None and stopping.is_set():
                        return
                    if self.index.get(key) is None:
                        yield number, reader, key, entry

    def _reindex(self, stopping: threading.Event) -> None:
        """Index all segments: the writer's first job after a lost index. Reads verify payloads."""
        batch: dict[int, list[tuple[bytes, Entry]]] = {}
        for number, _, key, entry in self.unindexed(stopping):
            records = batch.setdefault(number, [])
            records.append((key, entry))
            if len(records) >= REINDEX_BATCH:
                self.publish(number, batch.pop(number))
        for number, records in batch.items():
            self.publish(number, records)
        if not stopping.is_set():  # else another process goes on with it
            self._write_state(self._read_state()._replace(reindex=False))

    def publish(self, number: int, records: list[tuple[bytes, Entry]]) -> int:
        """Index records of a segment. Returns how many were new; of a cleared segment, none."""
        with contextlib.suppress(SegmentGoneError):
            return self.index.publish(number, records)
        return 0

    # -- closing

    def close(self) -> bool:
        """Write out, sync, leave. False if the writer is stuck: then everything stays open."""
        if self.writer is not None and not self.writer.close(CLOSE_DEADLINE):
            return False
        try:
            if not self.readonly:
                self._leave()
        finally:
            self.index.close()
            self.files.clear()
            self._close_fds()
        return True

    def _leave(self) -> None:
        self.index.sync()
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Notes of other processes stay: that the index is damaged, or does not know all records yet.
            state = self._read_state()
            if not self._damaged and state.boot != _DAMAGED_BOOT:
                self._write_state(state._replace(boot=_boot_id(), clean=True))

    def _close_fds(self) -> None:
        if self.inflight is not None:
            self.inflight.close()
        for fd in (self.segments_fd, self._lock_fd, self.root_fd):
            if fd >= 0:
                os.close(fd)
        self.segments_fd = self._lock_fd = self.root_fd = -1

    def forget(self, held: bool) -> None:
        """Let go of the parent's files, touching none of its locks: after a fork, in the child."""
        self.files.forget()
        if self.writer is not None:
            self.writer.forget()
        if held:
            self.index.close_inherited()
        self._close_fds()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return "unknown"


def identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def is_readonly(path: str) -> bool:
    """Return whether a cache directory is there that this process may not write, without opening it."""
    root = Path(path) / FOLDER
    return root.is_dir() and not os.access(root, os.W_OK)


def open_root(path: str) -> int:
    """Return the file descriptor of `<path>/v1`, made if absent, refused if it is not ours alone."""
    make_root(path)
    root = Path(path) / FOLDER
    with contextlib.suppress(FileExistsError):
        try:
            root.mkdir(0o700)
        except OSError as error:  # a read-only file system may say so before it says "exists"
            if error.errno not in _READ_ONLY or not root.is_dir():
                raise
    fd = os.open(root, DIR_FLAGS)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise CacheError(
                f"{root} belongs to or can be written by other users; remove it or use another path"
            )
        names = os.listdir(fd)  # noqa: PTH208 (a descriptor, not a path)
        if names and MARKER not in names:
            raise CacheError(f"{root} exists and is not a fastload cache; use another path")
        if not names:  # the marker comes first, so that a crash in between leaves nothing that looks foreign
            os.close(os.open(MARKER, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=fd))
    except BaseException:
        os.close(fd)
        raise
    return fd
