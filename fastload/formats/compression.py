"""Compression of files: which one it is, by the first bytes, and inflating a shard that is read in pieces.

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
from collections.abc import Callable
from typing import Any

from crc32c import crc32c

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
