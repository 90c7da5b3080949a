"""The cache's tier in memory: records that all processes of a node read where they lie.

    Cache.read ─▶ Memory.find ─▶ a read-only view of the mapped file          (no copy, no checksum, no disk)
                      └─ None ─▶ the directory: read, copy, verify ─▶ Memory.keep

A file without a name (`memfd_create`), of fixed and sealed size, mapped read-only by every process:

    0        bytes of the data part in use
    4096     table: rows of key (16 bytes), offset, length, xxh3_64 of these 32 bytes
    ...      data: payloads, each at a multiple of 64

What is in it was verified when it was read from the directory, or has just come from the store. Nothing is
ever changed or moved: a row is written after its bytes, under a lock, and read without one; a row that is
being written does not have its checksum yet, and is none.

The page cache of the segments is shared memory too. What this adds: a read of a record there costs a system
call, a copy and a checksum, here a look into the table; and nothing else on the machine can push it out. (A
mapping of the segments themselves was rejected: where one is truncated, it kills the process with SIGBUS.)

The process that makes the `Cache` (the trainer) makes the file and holds it. Its workers, however they were
started, open it through /proc/<pid>/fd; so do the node's other ranks, which find it by a note in the cache
directory. It has no name anywhere, so it is gone with the last process that has it open, whatever ends that.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from fastload.cache.record import Entry
from fastload.errors import ArgumentError

__all__ = ["IN_MEMORY", "NOTE", "Memory", "clear_noted"]

# The "segment" of an entry whose record lies here. Its "checksum" says in which file, by the file's number.
IN_MEMORY = 0xFFFFFFFF
NOTE = "memory"  # the file in the cache directory that says where the node's memory is

_HEAD = 4096
_ALIGN = 64
_USED = struct.Struct("<Q")
_ROW = struct.Struct("<16sQQQ")
_PLACE = struct.Struct("<QQQ")
_ROW_BYTES = _ROW.size
_NO_ROW = bytes(_ROW_BYTES)
_BYTES_PER_ROW = 4096  # of the budget, so the table takes 1 % of it, and half of it is used at 8 KiB a record
_PROBES = 64  # rows after the one that a key names; behind them the table is full
_TRIES = 20  # to get the lock, which is held for microseconds
_WAIT = 0.0002  # seconds between them


class _File(NamedTuple):
    """Where a memory file can be opened. The name has 128 random bits: a pid used again finds no other."""

    pid: int
    fd: int
    name: str

    def open(self) -> int:
        """A descriptor with a lock state of its own, -1 if the file is not there any more."""
        link = Path(f"/proc/{self.pid}/fd/{self.fd}")
        try:
            if str(link.readlink()) != f"/memfd:{self.name} (deleted)":
                return -1
            return os.open(link, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return -1


class Memory:
    """Records in memory, shared by the processes of a node. Fills, then stops. Threads may share it.

    Args:
        budget: bytes, at most.

    Raises:
        ArgumentError: this machine, or this container, does not have as much.
    """

    def __init__(self, budget: int) -> None:
        total = _total()
        if budget > total:
            raise ArgumentError(f"memory={budget} bytes, of {total} that there are: give less")
        name = f"fastload-{secrets.token_hex(16)}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._held = weakref.finalize(self, _close, fd)
        self._held.atexit = False
        os.ftruncate(fd, max(budget, _data_start(0)))  # takes no memory yet
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._file = _File(os.getpid(), fd, name)
        self.detach()

    def __getstate__(self) -> dict[str, object]:
        return {"_file": self._file}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.detach()

    def detach(self) -> None:
        """As before `attach`, also after a fork. Views that were handed out stay valid."""
        self._mapped: _Mapped | None = None
        self._lock = threading.Lock()

    def attach(self, root_fd: int | None) -> None:
        """Map the node's memory: the one that the cache directory names and that still exists, else our own.

        Where neither can be opened, this process reads and fills the directory only.
        """
        with self._lock:
            if self._mapped is None:
                fd = self._join(root_fd) if root_fd is not None else self._file.open()
                with contextlib.suppress(OSError):  # address space is short
                    self._mapped = _Mapped(fd) if fd >= 0 else None

    def _join(self, root_fd: int) -> int:
        """Open the memory that the directory's note names; where it is gone, ours, and note that."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            note = os.open(NOTE, flags, 0o600, dir_fd=root_fd)
        except OSError:  # a directory that can only be read
            return self._file.open()
        try:
            if not _lock_soon(note):
                return self._file.open()
            with contextlib.suppress(ValueError):
                pid, number, name = os.pread(note, 200, 0).decode("ascii", "replace").split()
                fd = _File(int(pid), int(number), name).open()
                if fd >= 0:
                    return fd
            fd = self._file.open()
            if fd >= 0:
                text = " ".join(map(str, self._file)).encode()
                with contextlib.suppress(OSError):  # the disk is full: the other ranks fill their own
                    os.pwrite(note, text, 0)
                    os.ftruncate(note, len(text))
            return fd
        finally:
            os.close(note)

    def clear(self) -> None:
        """Forget all records, in every process that shares them.

        Views that were handed out stay valid. So the bytes come free only with the file, and records kept
        from here on have what is left of the budget.
        """
        mapped = self._mapped
        for fd in (self._file.open(), os.dup(mapped.fd) if mapped is not None else -1):
            _empty(fd)

    def find(self, key: bytes) -> Entry | None:
        """Where the record of `key` lies, or None."""
        mapped = self._mapped
        return None if mapped is None else mapped.find(key)

    def read(self, entry: Entry) -> memoryview | None:
        """The payload, read-only, where it lies; it stays there as long as the view is held.

        None where this process has another file open by now than the one that the entry was found in.
        """
        mapped = self._mapped
        if mapped is None or entry.checksum != mapped.id:
            return None
        return mapped.view[entry.offset : entry.offset + entry.length]

    def keep(self, key: bytes, payload: memoryview) -> bool:
        """Copy a verified payload in. False when it is full, or was busy: nothing waits for it."""
        mapped = self._mapped
        return mapped is not None and mapped.keep(key, payload)


def clear_noted(root_fd: int) -> None:
    """Forget all records in the memory that a cache directory names, whichever process holds it."""
    with contextlib.suppress(OSError, ValueError):
        note = os.open(NOTE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
        with os.fdopen(note, "rb") as file:
            pid, number, name = file.read(200).decode("ascii", "replace").split()
        _empty(_File(int(pid), int(number), name).open())


def _empty(fd: int) -> None:
    """Make a table without rows of a file's table, and close it. -1: there is none.

    Its pages become a hole: zeros for every process that looks up, and no memory taken. A process that is
    just adding a record may finish: the record is sound.
    """
    if fd < 0:
        return
    with contextlib.suppress(OSError):
        size, page = os.fstat(fd).st_size, mmap.PAGESIZE
        first, end = _HEAD, _HEAD + _table_rows(size) * _ROW_BYTES
        start, stop = (
            -(-first // page) * page,
            end // page * page,
        )  # whole pages: data follows in the last one
        if start < stop:
            with mmap.mmap(fd, stop, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as head:
                head.madvise(mmap.MADV_REMOVE, start, stop - start)
            os.pwrite(fd, bytes(start - first), first)
            first = stop
        os.pwrite(fd, bytes(end - first), first)
    _close(fd)


class _Mapped:
    """The file, open in this process. Closed with its last user: no thread finds its descriptor reused."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.lock = threading.Lock()
        found = os.fstat(fd)
        self.id, self.size = found.st_ino, found.st_size
        self.map = mmap.mmap(fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ)
        self.view = memoryview(self.map)
        self.rows, self.data = _table_rows(self.size), _data_start(self.size)
        self.full = False

    def __del__(self) -> None:
        _close(self.fd)

    def find(self, key: bytes) -> Entry | None:
        for at in self.places(key):
            row = self.map[at : at + _ROW_BYTES]
            if row == _NO_ROW:
                return None
            if row.startswith(key):
                offset, length, row_sum = _PLACE.unpack_from(row, 16)
                sound = row_sum == xxhash.xxh3_64_intdigest(row[:32])
                inside = self.data <= offset and offset + length <= self.size
                return Entry(IN_MEMORY, offset, length, self.id) if sound and inside else None
        return None

    def places(self, key: bytes) -> Iterator[int]:
        row = int.from_bytes(key[:8], "little")
        for step in range(_PROBES):
            yield _HEAD + (row + step) % self.rows * _ROW_BYTES

    def keep(self, key: bytes, payload: memoryview) -> bool:
        if self.full:
            return False
        offset = self._reserve(key, payload.nbytes)
        if offset < 0:
            return offset == _KNOWN
        try:
            written = 0
            while written < payload.nbytes:  # the kernel copies: no page of zeros is made and mapped first
                written += os.pwrite(self.fd, payload[written:], offset + written)
        except OSError:  # memory is short
            self.full = True
            return False
        return self._publish(key, offset, payload.nbytes)

    def _reserve(self, key: bytes, nbytes: int) -> int:
        """An offset in the file for the payload; negative where it is known, or there is none."""
        with self._locked() as held:
            if not held:
                return _BUSY
            if self.find(key) is not None:
                return _KNOWN
            (used,) = _USED.unpack(os.pread(self.fd, _USED.size, 0))
            offset: int = self.data + used
            if offset + nbytes > self.size:
                self.full = offset + _ALIGN > self.size  # smaller ones may still fit
                return _BUSY
            used += -(-nbytes // _ALIGN) * _ALIGN
            os.pwrite(self.fd, _USED.pack(used), 0)
            return offset

    def _publish(self, key: bytes, offset: int, nbytes: int) -> bool:
        with self._locked() as held:
            if not held:
                return False  # its bytes are lost to the budget, which is better than to wait
            for at in self.places(key):
                row = os.pread(self.fd, _ROW_BYTES, at)
                if row == _NO_ROW:
                    fields = _ROW.pack(key, offset, nbytes, 0)[:32]
                    row = fields + _USED.pack(xxhash.xxh3_64_intdigest(fields))
                    return os.pwrite(self.fd, row, at) == _ROW_BYTES
                if row.startswith(key):
                    return True
        return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock of all threads and processes; False where that took too long."""
        with self.lock:
            held = _lock_soon(self.fd)
            try:
                yield held
            finally:
                if held:
                    fcntl.flock(self.fd, fcntl.LOCK_UN)


def _table_rows(size: int) -> int:
    return max(64, size // _BYTES_PER_ROW)


def _data_start(size: int) -> int:
    return -(-(_HEAD + _table_rows(size) * _ROW_BYTES) // _ALIGN) * _ALIGN


_KNOWN, _BUSY = -1, -2


def _lock_soon(fd: int) -> bool:
    """Lock an open file, which everybody holds for microseconds; False where somebody stopped with it."""
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_WAIT)
    return False


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def _total() -> int:
    """Bytes of memory that this machine has, or this container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in (
        "memory.max",
        "memory/memory.limit_in_bytes",
    ):  # version 2 and 1, in a container
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path("/sys/fs/cgroup", name).read_text()))
    return total
