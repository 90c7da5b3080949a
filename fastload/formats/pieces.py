"""Bytes that arrive in pieces: inflated, read as one sequence and split into records.

tar        a header that holds its own checksum         gzip     1f 8b 08
tfrecord   a length with its CRC behind it              zlib     78 01, 78 5e, 78 9c or 78 da (RFC 1950)

The kinds with a checksum are tested first, because only they are certain: the length of a TFRecord, or the
first name in a tar, may begin with the bytes of zlib data. Names of files do not count.

A shard is gzip or zlib; where a format allows these, also zstd or bzip2. A LitData chunk of zstd frames
begins with a table, which is passed over:

    "LDFZ01" 0 0 | uint16 version, flags | uint32 n, rows of a frame, frames | uint32 (n + 1) | 24 bytes a
    frame
"""

from __future__ import annotations

import bz2
import re
import struct
import sys
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from fastload.errors import DecodeError

HEAD = 512  # bytes that are enough
_OCTAL = re.compile(rb"[ \0]*([0-7]+)[ \0]*")
_ZSTD, _BZIP2 = b"\x28\xb5\x2f\xfd", b"BZh"
_MAGIC = {
    b"\x1f\x8b\x08": "gzip",
    **dict.fromkeys((b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), "zlib"),
    _BZIP2: "bzip2",
    b"\xfd7zXZ\0": "xz",
    _ZSTD: "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_READ = ("gzip", "zlib")
_READERS = {"tar": ("tar", "TarDataset"), "tfrecord": ("TFRecord file", "TFRecordDataset")}


def kind_of(head: Any) -> str:
    """Return "tar", "tfrecord", "gzip", "zlib", "bzip2", "xz", "zstd", "lz4", or "" for anything else.

    Args:
        head: the file's first 512 bytes or more, or all of a smaller file.
    """
    begin = bytes(head[:HEAD])
    if is_tar(begin):
        return "tar"
    if len(begin) >= 12 and masked_crc(begin[:8]) == int.from_bytes(begin[8:12], "little"):
        return "tfrecord"
    return next((kind for magic, kind in _MAGIC.items() if begin.startswith(magic)), "")


def is_compressed(head: Any) -> bool:
    """Return whether a shard that begins like this has to be inflated."""
    return kind_of(head) in _READ


def hint(head: Any) -> str:
    """Advice for a file that is read as the wrong kind; "" where its kind is unknown."""
    kind = kind_of(head)
    if kind in _READERS:
        name, reader = _READERS[kind]
        return f"; it is a {name}: read it with fastload.{reader}"
    if kind in _READ:
        return f"; these are {kind} data: decompress the file once and upload it again"
    return f"; it is compressed by {kind}, which is not read: write it plain or as gzip" if kind else ""


def masked_crc(data: Any) -> int:
    """Return the masked CRC32C of TFRecord, of anything with the buffer protocol."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_tar(begin: bytes) -> bool:
    """Return whether this is a header of tar. Its checksum is the sum of its bytes, its own as spaces."""
    if len(begin) < HEAD:
        return False
    match = _OCTAL.fullmatch(begin[148:156])
    return match is not None and int(match[1], 8) == sum(begin) - sum(begin[148:156]) + 256


FRAMED = b"LDFZ01\0\0"
FRAMED_HEAD = struct.Struct("<8sHHIII")

_AUTOMATIC = 47  # zlib's window bits that recognise both headers
_MOST = 16 << 20  # bytes inflated at once: the bound on memory, also for a decompression bomb
# Compressed bytes that are given at first. The end of a member copies what was given beyond it. So a member
# begins with few bytes and gets twice as many each time: many small members take linear time too.
_FIRST = 1024


def zstd() -> Any:
    """Return the module of zstd: Python has it from 3.14 on.

    Raises:
        DecodeError: it is not installed.
    """
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd as module
        else:
            from backports import zstd as module  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise DecodeError("the data are compressed by zstd: pip install 'torch-fastload[zstd]'") from None
    return module


def framed_size(count: int, frames: int) -> int:
    """Return the bytes before the frames of a LitData chunk of zstd frames, see the module."""
    return FRAMED_HEAD.size + 4 * (count + 1) + 24 * frames


class _Zlib:
    """zlib's object with the methods that those of bz2 and zstd have."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(_AUTOMATIC)
        self._rest: bytes = b""

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._rest

    def decompress(self, data: Any, most: int) -> bytes:
        inflated = self._zlib.decompress(data if len(data) else self._rest, most)
        self._rest = self._zlib.unconsumed_tail
        return inflated


class Inflater:
    """The inflated bytes of a compressed shard. Called by one thread at a time.

    Args:
        more: the next bytes of the compressed shard, in order; None at its end.
        skip: inflated bytes at the start to leave out.
    """

    def __init__(self, more: Callable[[], Any], skip: int = 0) -> None:
        self._more = more
        self._skip = skip
        self._new: Callable[[], Any] | None = None  # makes what inflates; None: nothing was read yet
        self._now: Any = None  # inflates the current member, where one has begun
        self._table = 0  # bytes that are passed over
        self._piece = memoryview(b"")  # compressed bytes
        self._at = 0  # of the next byte of it that nobody has taken
        self._given = _FIRST  # compressed bytes that the current member gets next
        self._ended = False  # whether a member has ended and no other one has begun

    def __call__(self) -> memoryview | None:
        """Return the next inflated bytes, 16 MiB at most; None at the end.

        Raises:
            DecodeError: the compressed data is damaged or was cut.
            Exception: any that `more` raises.
        """
        while True:
            if self._at == len(self._piece) and (self._now is None or self._now.needs_input):
                piece = self._more()
                if piece is None and (self._now is not None or self._table):
                    raise DecodeError("the compressed shard was cut: it ends before its own end mark")
                if piece is None:
                    return None
                self._piece, self._at = memoryview(piece), 0
                continue
            data = self._step()
            wanted = memoryview(data)[min(self._skip, len(data)) :]
            self._skip -= len(data) - len(wanted)
            if len(wanted):
                return wanted

    def _step(self) -> bytes:
        if self._new is None:
            self._new = self._kind(self._piece)
        if self._table:
            passed = min(self._table, len(self._piece) - self._at)
            self._table, self._at = self._table - passed, self._at + passed
            return b""
        if self._ended:  # zeros after the last member are padding
            self._skip_zeros()
            if self._at == len(self._piece):
                return b""
        self._ended = False
        if self._now is None:
            self._now, self._given = self._new(), _FIRST
        data = self._take() if self._now.needs_input else b""
        try:
            inflated: bytes = self._now.decompress(data, _MOST)
        except (zlib.error, OSError, ValueError, EOFError) as error:
            raise DecodeError(f"the shard cannot be decompressed: {error}") from None
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise DecodeError(f"the shard cannot be decompressed: {error}") from None
        if self._now.eof:  # gzip, bzip2 and zstd allow several members, one after the other
            self._at -= len(self._now.unused_data)  # of the last bytes that it was given
            self._now, self._ended = None, True
        return inflated

    def _take(self) -> memoryview:
        """Return the next compressed bytes of the piece, at most as many as the current member gets."""
        data = self._piece[self._at : self._at + self._given]
        self._at += len(data)
        self._given *= 2
        return data

    def _skip_zeros(self) -> None:
        step = 16
        while self._at < len(self._piece):
            head = bytes(self._piece[self._at : self._at + step])
            zeros = len(head) - len(head.lstrip(b"\0"))
            self._at += zeros
            if zeros < len(head):
                return
            step = min(2 * step, 1 << 20)

    def _kind(self, head: bytes | memoryview) -> Callable[[], Any]:
        """Return an object that inflates data that begin like this."""
        begin = bytes(head[: FRAMED_HEAD.size])
        if begin.startswith(FRAMED) and len(begin) == FRAMED_HEAD.size:
            _, _, _, count, _, frames = FRAMED_HEAD.unpack(begin)
            self._table = framed_size(count, frames)
        if self._table or begin.startswith(_ZSTD):
            decompressor: Callable[[], Any] = zstd().ZstdDecompressor
            return decompressor
        return bz2.BZ2Decompressor if begin.startswith(_BZIP2) else _Zlib


# Bytes that compressed or encoded data may become: a record of a compressed shard, a row group, a table. The
# storage option "max_inflated" sets it.
MAX_INFLATED = 512 << 20
# (offset, size) of each record of one shard, in order: uint64, shape (n, 2).
Offsets = NDArray[np.uint64]
_LARGE = 32 << 20  # bytes of a request whose pieces are moved together, not copied


def too_large(what: str, size: int, most: int) -> str:
    """Return the words for data that would become larger than the storage option allows."""
    return (
        f"{what} would be {size:,} bytes inflated, more than max_inflated={most:,}: if the data is sound, "
        f"give storage_options={{'max_inflated': {size}}}"
    )


class Record(NamedTuple):
    """One record of a shard: the bytes [offset, offset + size), framing included.

    Attributes:
        offset, size: in the shard; of the inflated bytes, where it is compressed.
        payload: the content, a view of the piece it came in; None where `error` says why.
        lasting: the error follows from headers with sound checksums, so reading again finds the same. Any
            other damage may have happened in transfer.
    """

    offset: int
    size: int
    payload: memoryview | None
    error: DecodeError | None = None
    lasting: bool = False


class Pieces:
    """A queue of bytes.

    Attributes:
        offset: of the next byte, in the shard.
        available: bytes that have arrived.
        closed: whether no more will arrive.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.available = 0
        self.closed = False
        self._first = memoryview(b"")
        self._at = 0  # of the next byte, in the first piece
        self._others: deque[memoryview] = deque()
        self._joined = memoryview(b"")  # a copy of the next bytes, where a request spanned two pieces

    def feed(self, piece: memoryview) -> None:
        """Append a piece, which must not change any more."""
        self.available += len(piece)
        if self._at == len(self._first):
            self._first, self._at = piece, 0
        else:
            self._others.append(piece)

    def peek(self, n: int) -> memoryview | None:
        """Return the next `n` bytes, which stay in the queue; None where fewer have arrived."""
        stop = self._at + n
        if stop <= len(self._first):
            return self._first[self._at : stop]
        if n > self.available:
            return None
        if n > _LARGE:
            self._move_together(n)
            return self._first[:n]
        if n > len(self._joined):
            # Twice as many as before: a request that grows by a header at a time would copy all at each.
            self._joined = self._join(min(self.available, max(n, 2 * len(self._joined))))
        return self._joined[:n]

    def skip(self, n: int) -> None:
        """Drop the next `n` bytes, which must have arrived."""
        self.offset += n
        self.available -= n
        self._joined = memoryview(b"")
        left = len(self._first) - self._at
        while n >= left and self._others:
            n -= left
            self._first, self._at = self._others.popleft(), 0
            left = len(self._first)
        self._at += n

    def _move_together(self, n: int) -> None:
        """Make one piece of those with the next `n` bytes. Each is let go once it is copied."""
        whole, size = [self._first[self._at :]], len(self._first) - self._at
        while size < n:
            whole.append(self._others.popleft())
            size += len(whole[-1])
        self._first, self._at, self._joined = memoryview(bytearray(size)), 0, memoryview(b"")
        at = 0
        for number, piece in enumerate(whole):
            self._first[at : at + len(piece)] = piece
            at += len(piece)
            whole[number] = memoryview(b"")

    def _join(self, n: int) -> memoryview:
        """Return a copy of the next `n` bytes. The pieces stay, so that later bytes are not copied too."""
        parts = [self._first[self._at :]]
        n -= len(parts[0])
        for piece in self._others:
            if n <= 0:
                break
            parts.append(piece[:n])
            n -= len(piece)
        return memoryview(b"".join(parts))


class Splitter(ABC):
    """Cuts the bytes of one shard into records, in order. One shard, one splitter.

    Args:
        offset: of the first record, in the shard.
        end: of the shard; None where it is unknown (a compressed shard).

    Attributes:
        over: no record follows, whatever bytes may.
        max_inflated: bytes of a record where the end of the shard is unknown.
    """

    def __init__(self, offset: int, end: int | None) -> None:
        self._pieces = Pieces(offset)
        self._end = end
        self.max_inflated = MAX_INFLATED
        self.over = False

    def feed(self, piece: memoryview) -> None:
        """Take the next bytes of the shard."""
        self._pieces.feed(piece)

    def close(self) -> None:
        """End the bytes: this is the end of the shard, or of the wanted part of it."""
        self._pieces.closed = True

    @abstractmethod
    def next(self) -> Record | None:
        """Return the next record; None where more bytes are needed, or, after `close`, where none is left.

        A damaged record whose end is known has an `error`, and the next one follows. Where the start of the
        next record is not known, the record with the error reaches to the end of the shard and is the last:
        the splitter does not search for another.
        """

    def _last(self, error: DecodeError) -> Record:
        """Return a record with an error, after which no other can be found."""
        self.over = True
        offset = self._pieces.offset
        end = self._end if self._end is not None else offset + self._pieces.available
        return Record(offset, end - offset, None, error)


def varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return a varint and the position after it. IndexError: the bytes end before it does."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + 1
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than 10 bytes")


def check_offsets(offsets: Offsets, shard_size: int, *, whole: bool) -> Offsets:
    """Raise unless the records follow one another within the shard and, with `whole`, fill it."""
    starts, sizes = offsets[:, 0], offsets[:, 1]
    if len(offsets):
        most = np.uint64(shard_size)
        inside = bool((sizes <= most).all() and (starts <= most).all() and (starts + sizes <= most).all())
        if not inside or not (sizes > 0).all() or not (starts[1:] >= starts[:-1] + sizes[:-1]).all():
            raise DecodeError(
                f"the index does not fit a shard of {shard_size:,} bytes: it belongs to another shard "
                "or is out of date"
            )
    end = int(starts[-1] + sizes[-1]) if len(offsets) else 0
    if whole and end != shard_size:
        raise DecodeError(f"the index ends at byte {end:,} of a shard of {shard_size:,}: write it again")
    return offsets


class Sink(Protocol):
    """The destination of a shard's bytes, such as a file."""

    def write(self, data: Any, /) -> Any: ...
