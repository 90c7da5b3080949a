"""Segments: append-only files of self-verifying records, each written by one process and read by any.

A record is a 64-byte header, the payload, and zeros up to the next multiple of 64:

    offset  size  field
         0     4  magic "FLR1"
         4     2  format version
         6     2  zero
         8    16  segment id: the random part of the segment's file name
        24    16  key digest
        40     8  payload length
        48     8  xxh3_64 of the payload
        56     8  xxh3_64 of the 56 bytes before

All numbers are little-endian. The version of the source object has no field: it is a part of the key
digest, so another version has another key. The segment id makes a header unforgeable: an object that imitates
a record cannot know the 128 random bits of its segment, so a scan never takes a payload for a header.

A segment is named `<host>-<pid>-<32 hex digits>.seg`. Its writer holds an flock on it for life. After the
writer's end, also by kill -9, the segment stays readable. No byte is ever changed in place.

Records are read with pread, not through a mapping: a mapped file that is truncated kills the process with
SIGBUS, where a short pread is a miss. Measured for 138 KB in the page cache, pread costs 10 us.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

FORMAT = 1
HEADER_SIZE = 64
KEY_SIZE = 16
SEGMENT_ID_SIZE = 16

# One pread and one pwritev move at most 2^31 - 4096 bytes on Linux; half of that keeps every record one call.
MAX_PAYLOAD = 1 << 30

_MAGIC = b"FLR1"
_FIELDS = struct.Struct("<4sHH16s16sQQ")
_SUM = struct.Struct("<Q")
_ENTRY = struct.Struct("<IQQQ")
_ENTRY_FIELDS = np.dtype([("segment", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("checksum", "<u8")])
# Where a record lies and what its header must say, as the kernel takes it: fastload/images/segment.h.
PLACE = np.dtype(
    [
        ("fd", "<i4"),
        ("segment", f"V{SEGMENT_ID_SIZE}"),
        ("key", f"V{KEY_SIZE}"),
        ("length", "<u8"),
        ("checksum", "<u8"),
        ("offset", "<u8"),
    ]
)
_ZEROS = bytes(HEADER_SIZE)

_NAME = re.compile(r"[A-Za-z0-9.-]{1,64}-[0-9]+-([0-9a-f]{32})\.seg", re.ASCII)
_SCAN_BYTES = 1 << 20
MAX_OPEN_SEGMENTS = 128


Buffers = Sequence[bytes | memoryview]


class CorruptRecordError(Exception):
    """The bytes on disk are not the record that the index promises. A miss; never leaves the cache."""


class Entry(NamedTuple):
    """Where a record lies: segment number, offset of its header, payload length and checksum (xxh3_64)."""

    segment: int
    offset: int
    length: int
    checksum: int

    def pack(self) -> bytes:
        return _ENTRY.pack(*self)

    @classmethod
    def unpack(cls, value: bytes) -> Entry:
        """Read an entry; raises CorruptRecordError when `value` is not an index value of this format."""
        if len(value) != _ENTRY.size:
            raise CorruptRecordError(f"index value of {len(value)} bytes")
        return cls._make(_ENTRY.unpack(value))


def checksum(payload: bytes | memoryview, head: bytes = b"") -> int:
    """Return xxh3_64 of the payload, of which `head` is the first part."""
    if not head:
        return int(xxhash.xxh3_64_intdigest(payload))
    digest = xxhash.xxh3_64(head)
    digest.update(payload)
    return int(digest.intdigest())


def record_size(length: int) -> int:
    """Return the bytes on disk of a record whose payload has `length` bytes."""
    return HEADER_SIZE + length + -length % HEADER_SIZE


def padding(length: int) -> bytes:
    return _ZEROS[: -length % HEADER_SIZE]


def pack_header(segment_id: bytes, key: bytes, length: int, payload_sum: int) -> bytes:
    fields = _FIELDS.pack(_MAGIC, FORMAT, 0, segment_id, key, length, payload_sum)
    return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))


def verify(data: memoryview, segment_id: bytes, key: bytes, entry: Entry) -> memoryview:
    """Return the payload inside `data` (header and payload, as read), or CorruptRecordError.

    The header is compared with the one this entry must have: one comparison checks every field.
    """
    if data[:HEADER_SIZE] != pack_header(segment_id, key, entry.length, entry.checksum):
        raise CorruptRecordError("header differs from what the index promises")
    payload = data[HEADER_SIZE:]
    if len(payload) != entry.length or checksum(payload) != entry.checksum:
        raise CorruptRecordError("payload differs from its checksum")
    return payload


def parse_header(header: bytes, segment_id: bytes) -> tuple[bytes, int, int] | None:
    """Return (key, length, payload checksum) of a sound header of this segment, None for anything else."""
    if len(header) != HEADER_SIZE or header[:4] != _MAGIC:
        return None
    fields, (header_sum,) = header[: _FIELDS.size], _SUM.unpack(header[_FIELDS.size :])
    _, version, _, found_id, key, length, payload_sum = _FIELDS.unpack(fields)
    sound = version == FORMAT and found_id == segment_id and length <= MAX_PAYLOAD
    if not sound or xxhash.xxh3_64_intdigest(fields) != header_sum:
        return None
    return key, length, payload_sum


def is_segment_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def segment_id(name: str) -> bytes:
    """Return the random part of a segment's name, which every record header in it repeats."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise CorruptRecordError(f"{name!r} is not a segment name")
    return bytes.fromhex(match[1])


def new_segment_name() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(SEGMENT_ID_SIZE)}.seg"


class SegmentWriter:
    """Appends records to a new segment. One process, one thread."""

    def __init__(self, folder_fd: int, name: str) -> None:
        self.name = name
        self.id = segment_id(name)
        self.size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self.name, flags, 0o600, dir_fd=folder_fd)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def append(self, number: int, records: Sequence[tuple[bytes, Buffers, int]]) -> list[Entry]:
        """Write records of (key, parts of the payload, checksum) with one call, and return their entries.

        On failure (OSError) the segment ends where it ended before.
        """
        buffers: list[bytes | memoryview] = []
        entries = []
        end = self.size
        for key, parts, payload_sum in records:
            length = sum(map(len, parts))
            buffers += (pack_header(self.id, key, length, payload_sum), *parts, padding(length))
            entries.append(Entry(number, end, length, payload_sum))
            end += record_size(length)
        try:
            _pwrite_all(self.fd, buffers, self.size, end - self.size)
        except OSError:
            os.ftruncate(self.fd, self.size)  # no index entry points behind it
            raise
        self.size = end
        return entries

    def is_unlinked(self) -> bool:
        return os.fstat(self.fd).st_nlink == 0

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _pwrite_all(fd: int, buffers: Buffers, offset: int, size: int) -> None:
    written = os.pwritev(fd, buffers, offset)
    if written < size:  # a full disk or a signal: rare enough to join the rest
        rest = memoryview(b"".join(buffers))
        while written < size:
            step = os.pwrite(fd, rest[written:], offset + written)
            if step == 0:
                raise OSError(errno.EIO, "wrote nothing")
            written += step


class SegmentReader:
    """Reads records of one segment; closes its file when the last user drops it, so that no thread can
    find its file descriptor closed, or worse, reused."""

    def __init__(self, folder_fd: int, name: str) -> None:
        self.fd = -1
        self.id = segment_id(name)
        # O_NONBLOCK: a FIFO planted under a segment's name must not hang us.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self.fd = os.open(name, flags, dir_fd=folder_fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                raise CorruptRecordError(f"segment {name}: {error.strerror}") from None
            raise
        found = os.fstat(self.fd)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptRecordError(f"segment {name} is not a regular file")
        self._size = found.st_size

    def __del__(self) -> None:
        self.forget()

    def forget(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def size(self) -> int:
        self._size = os.fstat(self.fd).st_size
        return self._size

    def read(self, key: bytes, entry: Entry) -> memoryview:
        """Return the verified payload, in memory of its own. Checks the length before it allocates."""
        end = entry.offset + HEADER_SIZE + entry.length
        if entry.length > MAX_PAYLOAD or (end > self._size and end > self.size()):
            raise CorruptRecordError("record extends beyond its segment")
        # Writable memory that nothing has zeroed: arrays and tensors are made of it where it lies. Copying a
        # decoded image out of read-only bytes cost as much as resizing it.
        data = np.empty(HEADER_SIZE + entry.length, np.uint8).data
        read = os.preadv(self.fd, [data], entry.offset)
        return verify(data[:read], self.id, key, entry)

    def will_need(self, entry: Entry) -> None:
        """Let the kernel read the record ahead, where its last byte is not in memory.

        The advice alone looks at every page of the record, also of one that is in memory: 6 us for pixels.
        The pages of a record come and go together; where they did not, the read waits for the disk.
        """
        end = entry.offset + HEADER_SIZE + entry.length
        try:
            os.preadv(self.fd, [bytearray(1)], end - 1, os.RWF_NOWAIT)
        except (OSError, AttributeError):  # it is not in memory, or this system cannot tell
            os.posix_fadvise(self.fd, entry.offset, end - entry.offset, os.POSIX_FADV_WILLNEED)

    def scan(self, number: int) -> Iterator[tuple[bytes, Entry]]:
        """Yield (key, entry) of every record whose header is sound and which ends inside the file.

        Reads headers only. Behind a damaged header it looks for the next sound one.
        """
        offset, size = 0, self.size()
        while offset + HEADER_SIZE <= size:
            found = parse_header(os.pread(self.fd, HEADER_SIZE, offset), self.id)
            if found is None:
                offset = self._next_header(offset + HEADER_SIZE, size)
                continue
            key, length, payload_sum = found
            if offset + HEADER_SIZE + length <= size:
                yield key, Entry(number, offset, length, payload_sum)
            offset += record_size(length)

    def _next_header(self, start: int, size: int) -> int:
        for begin in range(start, size, _SCAN_BYTES):
            block = os.pread(self.fd, _SCAN_BYTES, begin)
            for at in range(0, len(block) - HEADER_SIZE + 1, HEADER_SIZE):
                if parse_header(block[at : at + HEADER_SIZE], self.id) is not None:
                    return begin + at
        return size


class Places(NamedTuple):
    """Where a cache has the records of some keys. Their segments stay open as long as this lives.

    Attributes:
        here: of each key, whether the cache has its record.
        table: the places of these records, in the order of the keys, as an array of `PLACE`.
        readers: the segments.
    """

    here: NDArray[np.bool_]
    table: NDArray[np.void]
    readers: list[SegmentReader]

    @classmethod
    def none(cls, count: int) -> Places:
        """Return the places of `count` keys of which there is no record."""
        return cls(np.zeros(count, np.bool_), np.empty(0, PLACE), [])


class SegmentFiles:
    """The open segments of one process: a bounded number, the least recently used goes first."""

    def __init__(self, folder_fd: int, name_of: Callable[[int], str]) -> None:
        self._folder_fd = folder_fd
        self._name_of = name_of
        self._lock = threading.Lock()
        self._open: OrderedDict[int, SegmentReader] = OrderedDict()

    def get(self, number: int) -> SegmentReader:
        with self._lock:
            reader = self._open.get(number)
            if reader is not None:
                self._open.move_to_end(number)
                return reader
        reader = SegmentReader(self._folder_fd, self._name_of(number))
        with self._lock:
            self._open[number] = reader
            if len(self._open) > MAX_OPEN_SEGMENTS:
                self._open.popitem(last=False)
        return reader

    def places(self, keys: Sequence[bytes], packed: Sequence[bytes | None]) -> Places:
        """Return where the records of these keys lie, by their packed entries.

        Records whose segment cannot be opened, or whose entry is damaged, are left out as if they were not
        there: a read of such a record alone says what is wrong with it.
        """
        values = [value for value in packed if value is not None and len(value) == _ENTRY.size]
        here = np.ones(len(packed), np.bool_)
        if len(values) < len(packed):
            here[:] = [value is not None and len(value) == _ENTRY.size for value in packed]
        joined = b"".join(values)
        entries = np.frombuffer(joined, _ENTRY_FIELDS)
        numbers, segments = np.unique(entries["segment"], return_inverse=True)
        readers: list[SegmentReader] = []
        usable = np.ones(len(numbers), np.bool_)
        for position, number in enumerate(numbers.tolist()):
            try:
                readers.append(self.get(number))
            except (CorruptRecordError, OSError):
                usable[position] = False
        table = np.empty(len(entries), PLACE)
        table["key"] = np.frombuffer(b"".join(keys), PLACE["key"])[here]
        for name in ("length", "checksum", "offset"):
            table[name] = entries[name]
        if not usable.all():
            kept = usable[segments]
            here[here] = kept
            table, segments = table[kept], (np.cumsum(usable) - 1)[segments[kept]]
        if readers:
            table["fd"] = np.array([reader.fd for reader in readers], np.int32)[segments]
            ids = np.frombuffer(b"".join(reader.id for reader in readers), PLACE["segment"])
            table["segment"] = ids[segments]
        return Places(here, table, readers)

    def keep(self, numbers: Set[int]) -> None:
        """Close the segments that are none of these, once nobody reads them."""
        with self._lock:
            for number in self._open.keys() - numbers:
                del self._open[number]

    def clear(self) -> None:
        with self._lock:
            self._open.clear()

    def forget(self) -> None:
        """Close what was inherited, in a forked child. The lock may be held by a thread that is not
        here any more, so it is not taken."""
        for reader in self._open.values():
            reader.forget()
        self._open.clear()
