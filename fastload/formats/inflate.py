"""Inflates a gzip or zlib shard that is read piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from fastload.errors import DecodeError

__all__ = ["Inflater"]

_AUTOMATIC = 47  # zlib's window bits that recognise both headers
_MOST = 16 << 20  # bytes inflated at once: the bound on memory, also for a decompression bomb


class Inflater:
    """The inflated bytes of a compressed shard. Called by one thread at a time.

    Args:
        more: the next bytes of the compressed shard, in order; None at its end.
        skip: inflated bytes at the start to leave out.
    """

    def __init__(self, more: Callable[[], Any], skip: int = 0) -> None:
        self._more = more
        self._skip = skip
        self._zlib = zlib.decompressobj(_AUTOMATIC)
        self._rest: bytes | memoryview = b""  # compressed bytes that were read but not inflated
        self._begun = False  # whether any byte of the current member was read
        self._ended = False  # whether a member has ended and no other one has begun

    def __call__(self) -> memoryview | None:
        """The next inflated bytes, 16 MiB at most; None at the end.

        Raises:
            DecodeError: the compressed data is damaged or was cut.
            Exception: any that `more` raises.
        """
        while True:
            if not len(self._rest):
                piece = self._more()
                if piece is None and self._begun:
                    raise DecodeError("the compressed shard was cut: it ends before its own end mark")
                if piece is None:
                    return None
                self._rest = memoryview(piece)
                continue
            data = self._step()
            wanted = memoryview(data)[min(self._skip, len(data)) :]
            self._skip -= len(data) - len(wanted)
            if len(wanted):
                return wanted

    def _step(self) -> bytes:
        if self._ended:  # zeros after the last member are padding
            self._rest = bytes(self._rest).lstrip(b"\0")
            if not self._rest:
                return b""
        try:
            data = self._zlib.decompress(self._rest, _MOST)
        except zlib.error as error:
            raise DecodeError(f"the shard cannot be decompressed: {error}") from None
        self._begun, self._ended = True, False
        self._rest = self._zlib.unconsumed_tail
        if self._zlib.eof:  # gzip allows several members, one after the other
            self._rest = self._zlib.unused_data
            self._zlib, self._begun, self._ended = zlib.decompressobj(_AUTOMATIC), False, True
        return data
