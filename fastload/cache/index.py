"""The index: an LMDB environment with key -> entry, segment number -> file name, and the byte counter.

A key is a digest of whatever tells two payloads apart.

The index is derived data. Each record describes and verifies itself, so an index that is lost, stale or wrong
costs misses, never wrong bytes. So commits are not synced (`sync=False`).

py-lmdb forbids an environment to be open twice in one process, or to be used after a fork; `access.py`
prevents both. No read transaction outlives the call that began it: an open one pins old pages, and the file
grows without bound.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lmdb
import numpy as np
from numpy.typing import NDArray

from fastload.cache.codecs import CacheCodec
from fastload.cache.segment import KEY_SIZE, CorruptRecordError, Entry
from fastload.errors import CacheError

# Address space, not memory or disk: about 200 million entries. Fixed, because growing a map while other
# processes use it is where LMDB reports corruption; a full map means pass-through.
MAP_SIZE = 16 << 30
MAX_READERS = 1024  # processes and threads that look up in the same microsecond; LMDB's default is 126
LOCK_BYTES = 128 << 10  # LMDB takes 64 for each of the readers and 192; a larger file has more readers

Reserved = Literal["reserved", "known", "full"]

_NUMBER = struct.Struct(">I")
_COUNT = struct.Struct("<Q")
_BYTES = b"bytes"
_NEXT_SEGMENT = b"next_segment"


class SegmentGoneError(Exception):
    """The segment is not in the index any more: another process cleared the cache."""


class Index:
    """LMDB behind the cache. Reads are safe in any thread; each write is one transaction."""

    def __init__(self, folder: Path, *, readonly: bool = False) -> None:
        self._read_lock = threading.Lock()  # close() waits for lookups: LMDB crashes under them
        self._write_lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._env = _open_environment(folder, readonly)
        try:
            self._refuse_truncated(folder)
            create = not readonly
            self._entries = self._env.open_db(b"entries", create=create)
            self._segments = self._env.open_db(b"segments", create=create)
            self._meta = self._env.open_db(b"meta", create=create)
        except BaseException:
            self._env.close()
            raise

    def _refuse_truncated(self, folder: Path) -> None:
        # LMDB maps its file: a page behind the end of the file would be a SIGBUS.
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        size = (folder / "data.mdb").stat().st_size
        if size < needed:
            raise lmdb.CorruptedError(f"data.mdb has {size} bytes, its meta page promises {needed}")

    # -- lookups

    def _get(self, key: bytes, db: Any) -> bytes | None:
        with self._read_lock, self._env.begin(db=db) as txn:
            value: bytes | None = txn.get(key)
            return value

    def get(self, key: bytes) -> Entry | None:
        value = self._get(key, self._entries)
        return None if value is None else Entry.unpack(value)

    def packed(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """Return the packed entry of each key. One transaction costs as much as five lookups."""
        with self._read_lock, self._env.begin(db=self._entries) as txn:
            return [txn.get(key) for key in keys]

    def segment_name(self, number: int) -> str:
        """Return the file name of a segment; CorruptRecordError when the index has no such segment."""
        name = self._names.get(number)
        if name is None:
            value = self._get(_NUMBER.pack(number), self._segments)
            if value is None:
                raise CorruptRecordError(f"no segment {number}")
            name = self._names[number] = value.decode("ascii", "replace")
        return name

    def has_segment(self, number: int) -> bool:
        """Return whether a segment is still registered; clearing the cache ends that."""
        return self._get(_NUMBER.pack(number), self._segments) is not None

    def used_bytes(self) -> int:
        """Return the bytes in all segments, by all processes, including records that are being written."""
        return _count(self._get(_BYTES, self._meta))

    def count(self) -> int:
        with self._read_lock, self._env.begin() as txn:
            return int(txn.stat(self._entries)["entries"])

    def segments(self) -> dict[int, str]:
        with self._read_lock, self._env.begin(db=self._segments) as txn:
            return {_NUMBER.unpack(k)[0]: v.decode("ascii", "replace") for k, v in txn.cursor()}

    def items(self) -> list[tuple[bytes, bytes]]:
        """Return every (key, packed entry) as of now. A list, so that no transaction stays open meanwhile."""
        with self._read_lock, self._env.begin(db=self._entries) as txn:
            return list(txn.cursor())

    def some(self, count: int) -> dict[bytes, bytes]:
        """Return up to `count` entries as key -> packed entry, from all over the index: keys are digests."""
        entries, rng = dict[bytes, bytes](), random.Random(0)
        with self._read_lock, self._env.begin(db=self._entries) as txn:
            cursor = txn.cursor()
            for _ in range(count):
                if cursor.set_range(rng.randbytes(KEY_SIZE)) or cursor.first():
                    entries[cursor.key()] = cursor.value()
        return entries

    # -- writes, one transaction each

    @contextmanager
    def _write(self) -> Iterator[Any]:
        with self._write_lock, self._env.begin(write=True) as txn:
            yield txn

    def add_segment(self, name: str) -> int:
        """Register a segment, unless it is, and return its number. Numbers are never used twice.

        Two processes may find the same segment. A second number would never get entries, and the segment
        would look like one that holds nothing of use.
        """
        with self._write() as txn:
            for known, found in txn.cursor(self._segments):
                if found == name.encode("ascii"):
                    return int(_NUMBER.unpack(known)[0])
            number = _count(txn.get(_NEXT_SEGMENT, db=self._meta))
            txn.put(_NEXT_SEGMENT, _COUNT.pack(number + 1), db=self._meta)
            txn.put(_NUMBER.pack(number), name.encode("ascii"), db=self._segments)
        return number

    def reserve(self, number: int, wanted: Sequence[tuple[bytes, int, int | None]]) -> list[Reserved]:
        """Reserve room for records of (key, bytes on disk, limit of the cache or None).

        "reserved": counted as used, write it; "known": another process was first; "full": over the limit.
        Counting before writing keeps all processes together under the limit.
        """
        answers: list[Reserved] = []
        with self._write() as txn:
            self._check_segment(txn, number)
            used = _count(txn.get(_BYTES, db=self._meta))
            for key, size, limit in wanted:
                if txn.get(key, db=self._entries) is not None:
                    answers.append("known")
                elif limit is not None and used + size > limit:
                    answers.append("full")
                else:
                    used += size
                    answers.append("reserved")
            txn.put(_BYTES, _COUNT.pack(used), db=self._meta)
        return answers

    def publish(self, number: int, entries: Sequence[tuple[bytes, Entry]]) -> int:
        """Make written records visible; the first writer of a key wins. Returns how many were new."""
        with self._write() as txn:
            self._check_segment(txn, number)
            return sum(txn.put(key, e.pack(), overwrite=False, db=self._entries) for key, e in entries)

    def _check_segment(self, txn: Any, number: int) -> None:
        if txn.get(_NUMBER.pack(number), db=self._segments) is None:
            raise SegmentGoneError(number)

    def drop(self, bad: Sequence[tuple[bytes, bytes]]) -> int:
        """Remove entries (key, packed entry), unless a better one has taken their place meanwhile."""
        with self._write() as txn:
            held = [key for key, value in bad if txn.get(key, db=self._entries) == value]
            return sum(txn.delete(key, db=self._entries) for key in held)

    def remove_segments(self, numbers: Sequence[int], freed: int) -> None:
        """Forget segments, and give back room: theirs, or what was reserved and not written."""
        with self._write() as txn:
            for number in numbers:
                txn.delete(_NUMBER.pack(number), db=self._segments)
            used = _count(txn.get(_BYTES, db=self._meta))
            txn.put(_BYTES, _COUNT.pack(max(0, used - freed)), db=self._meta)

    def set_used_bytes(self, used: int) -> None:
        with self._write() as txn:
            txn.put(_BYTES, _COUNT.pack(used), db=self._meta)

    def clear(self) -> list[str]:
        """Forget all entries and segments; the numbers of segments go on. Returns the segments' names."""
        with self._write() as txn:
            names = [name.decode("ascii", "replace") for _, name in txn.cursor(db=self._segments)]
            txn.drop(self._entries, delete=False)
            txn.drop(self._segments, delete=False)
            txn.put(_BYTES, _COUNT.pack(0), db=self._meta)
        return names

    # -- life

    def check_readers(self) -> None:
        """Free the slots of readers that died."""
        self._env.reader_check()

    def sync(self) -> None:
        self._env.sync(True)

    def close(self) -> None:
        with self._write_lock, self._read_lock:
            self._env.close()

    def hold(self, timeout: float) -> bool:
        """Let no transaction be open, before a fork. Returns False if one did not end in time."""
        if not self._write_lock.acquire(timeout=timeout):
            return False
        if not self._read_lock.acquire(timeout=timeout):
            self._write_lock.release()
            return False
        return True

    def release(self) -> None:
        self._read_lock.release()
        self._write_lock.release()

    def close_inherited(self) -> None:
        """Close it in a forked child, only if `hold` succeeded. LMDB closes what this process mapped and
        opened; locks and reader slots belong to the parent's pid and stay."""
        self._env.close()


def _open_environment(folder: Path, readonly: bool) -> Any:
    options: dict[str, Any] = {"map_size": MAP_SIZE, "max_dbs": 3, "max_readers": MAX_READERS}
    options |= {"sync": False, "metasync": False, "mode": 0o600}
    if not readonly:
        try:
            return lmdb.open(str(folder), **options)
        except lmdb.LockError:  # of a reader, which locks the byte that its process id names
            raise CacheError(
                f"process {os.getpid()} of another container uses it too, and LMDB identifies processes by "
                "their ids: let the containers share process ids (hostPID: true, docker --pid=host), or give "
                "each a cache"
            ) from None
    try:
        reserve_lock_file(folder)
        return lmdb.open(str(folder), readonly=True, create=False, **options)
    except (OSError, lmdb.Error):
        # The lock file cannot be written either. Without it a writer elsewhere could recycle pages under a
        # lookup, which then finds nothing or something that the record's own checks refuse.
        return lmdb.open(str(folder), readonly=True, create=False, lock=False, **options)


def reserve_lock_file(folder: Path) -> None:
    """Give LMDB's lock file its place on the disk. LMDB makes it as a hole and writes into it through a
    mapping: on a full disk that ends the process with SIGBUS, where this is an error that can be caught.

    Raises:
        OSError: the disk has no room for it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(folder / "lock.mdb", flags, 0o600)
    try:
        if os.fstat(fd).st_blocks * 512 < LOCK_BYTES:
            os.posix_fallocate(fd, 0, LOCK_BYTES)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that knows no such thing
            raise
    finally:
        os.close(fd)


def _count(value: bytes | None) -> int:
    return _COUNT.unpack(value)[0] if value is not None and len(value) == _COUNT.size else 0


# --- keys

Digest = hashlib.blake2b  # of the first parts of a key


def first_digest(codec: CacheCodec) -> Digest:
    """Return the digest of a mode and its parameters, with which each key begins."""
    parts = (codec.key_mode, *codec.key_parts)
    return Digest(repr(parts).encode(), digest_size=KEY_SIZE, person=b"fastload")


def add_parts(digest: Digest, parts: tuple[str | bytes, ...]) -> Digest:
    """Return the digest of some parts more, their boundaries kept."""
    digest = digest.copy()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"%d:%b" % (len(data), data))
    return digest


class KeyTable:
    """The keys of a dataset's records, each made once: a digest takes 3 us, a place in this table 17 bytes.

    Args:
        count: number of records.
        key: makes the key of a record.
    """

    def __init__(self, count: int, key: Callable[[int], bytes]) -> None:
        self._key = key
        self._keys = np.zeros(count, f"V{KEY_SIZE}")
        self._known = np.zeros(count, np.bool_)

    def of(self, records: NDArray[np.int64]) -> list[bytes]:
        """Return the keys of these records."""
        for record in records[~self._known[records]].tolist():
            self._keys[record] = np.void(self._key(record))
            self._known[record] = True
        keys = self._keys[records].tobytes()
        return [keys[start : start + KEY_SIZE] for start in range(0, len(keys), KEY_SIZE)]
