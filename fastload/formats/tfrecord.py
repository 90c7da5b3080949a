"""TFRecord framing, read in pieces.

    uint64 length | uint32 masked CRC32C of the length | data | uint32 masked CRC32C of the data

Little-endian. A CRC is masked by a rotation and a constant (tensorflow/core/lib/hash/crc32c.h). Both are
always checked. After a good CRC of the length the offset of the next record is certain, so bad data costs one
record. A bad one ends the shard: the format has no mark by which to find the next record.

The crc32c package is used. google-crc32c was rejected: it takes `bytes` only, and a copy of every record
costs more than its checksum (8.4 against 5.1 us for 138 KB).
"""

from __future__ import annotations

import struct
from typing import Any

from fastload.errors import DecodeError
from fastload.formats.compression import HEAD, hint, masked_crc
from fastload.formats.pieces import Record, Splitter, too_large

__all__ = ["FOOTER", "HEADER", "TFRecordSplitter", "frame", "masked_crc", "unframe"]

HEADER = 12
FOOTER = 4
_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")


def frame(data: Any) -> tuple[bytes, bytes]:
    """(header, footer) of a record with this data."""
    length = struct.pack("<Q", len(data))
    return length + _FOOTER.pack(masked_crc(length)), _FOOTER.pack(masked_crc(data))


def unframe(record: memoryview) -> memoryview:
    """The data of one whole record.

    Raises:
        DecodeError: `record` is not exactly one record.
    """
    if len(record) < HEADER + FOOTER:
        raise DecodeError(f"a TFRecord has at least {HEADER + FOOTER} bytes, found {len(record)}")
    length = _checked_length(record[:HEADER])
    if length != len(record) - HEADER - FOOTER:
        raise DecodeError(
            f"the record has {length:,} bytes of data, but the index says {len(record) - HEADER - FOOTER:,}: "
            "the index does not belong to this shard; write it again"
        )
    return _checked_data(record)


class TFRecordSplitter(Splitter):
    """See `Splitter`."""

    def __init__(self, offset: int, end: int | None) -> None:
        super().__init__(offset, end)
        self._size = 0  # of the record whose header was read

    def next(self) -> Record | None:
        pieces = self._pieces
        if self.over:
            return None
        if not self._size:
            header = pieces.peek(HEADER)
            if header is None:
                return self._cut() if pieces.closed and pieces.available else None
            try:
                self._size = self._fitting(_checked_length(header)) + HEADER + FOOTER
            except DecodeError as error:
                head = pieces.peek(min(HEAD, pieces.available)) if not pieces.offset else None
                return self._last(DecodeError(error.message + hint(head)) if head is not None else error)
        size = self._size
        record = pieces.peek(size)
        if record is None:
            return self._cut() if pieces.closed else None
        self._size = 0
        offset = pieces.offset
        pieces.skip(size)
        try:
            return Record(offset, size, _checked_data(record))
        except DecodeError as error:
            return Record(offset, size, None, error)

    def _fitting(self, length: int) -> int:
        if self._end is None:
            if length > self.max_inflated:
                raise DecodeError(too_large("a record", length, self.max_inflated))
        elif length > self._end - self._pieces.offset - HEADER - FOOTER:
            raise DecodeError(
                f"a record of {length:,} bytes begins {self._end - self._pieces.offset:,} bytes before the "
                "end of the shard: the shard was cut"
            )
        return length

    def _cut(self) -> Record:
        return self._last(
            DecodeError(
                f"the shard was cut: it ends {self._pieces.available:,} bytes into a record"
                + (f" of {self._size:,}" if self._size else "")
            )
        )


def _checked_length(header: memoryview) -> int:
    length, crc = _HEADER.unpack(header)
    if masked_crc(header[:8]) != crc:
        raise DecodeError("bad CRC of a record's length, so the start of the next record is unknown")
    return int(length)


def _checked_data(record: memoryview) -> memoryview:
    data = record[HEADER:-FOOTER]
    if masked_crc(data) != _FOOTER.unpack(record[-FOOTER:])[0]:
        raise DecodeError(f"bad CRC of a record's {len(data):,} bytes of data")
    return data
