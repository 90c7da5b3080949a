"""Inflates a shard that is read piece by piece: gzip or zlib, and zstd and bzip2 where a format allows these.

A LitData chunk of zstd frames begins with a table, which is passed over:

    "LDFZ01" 0 0 | uint16 version, flags | uint32 n, rows of a frame, frames | uint32 (n + 1) | 24 bytes a
    frame
"""

from __future__ import annotations

import bz2
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

from fastload.errors import DecodeError

__all__ = ["FRAMED", "FRAMED_HEAD", "Inflater", "framed_size", "zstd"]

FRAMED = b"LDFZ01\0\0"
FRAMED_HEAD = struct.Struct("<8sHHIII")
_ZSTD = b"\x28\xb5\x2f\xfd"
_BZIP2 = b"BZh"

_AUTOMATIC = 47  # zlib's window bits that recognise both headers
_MOST = 16 << 20  # bytes inflated at once: the bound on memory, also for a decompression bomb
# Compressed bytes that are given at first. The end of a member copies what was given beyond it. So a member
# begins with few bytes and gets twice as many each time: many small members take linear time too.
_FIRST = 1024


def zstd() -> Any:
    """The module of zstd: Python has it from 3.14 on.

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
    """The bytes before the frames of a LitData chunk of zstd frames, see the module."""
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
        """The next inflated bytes, 16 MiB at most; None at the end.

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
        """The next compressed bytes of the piece, at most as many as the current member gets."""
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
        """What inflates data that begin like this."""
        begin = bytes(head[: FRAMED_HEAD.size])
        if begin.startswith(FRAMED) and len(begin) == FRAMED_HEAD.size:
            _, _, _, count, _, frames = FRAMED_HEAD.unpack(begin)
            self._table = framed_size(count, frames)
        if self._table or begin.startswith(_ZSTD):
            decompressor: Callable[[], Any] = zstd().ZstdDecompressor
            return decompressor
        return bz2.BZ2Decompressor if begin.startswith(_BZIP2) else _Zlib
