"""One cache record: a 64-byte header, the payload, zeros up to the next multiple of 64.

    offset  size  field
         0     4  magic "FLR1"
         4     2  format version
         6     2  zero
         8    16  segment id: the random part of the segment's file name
        24    16  key digest
        40     8  payload length
        48     8  xxh3_64 of the payload
        56     8  xxh3_64 of the 56 bytes before

All little-endian. The version of the source object is not a field of its own: it is one of the parts the key
digest is made of, so a record of another version is a record of another key.

The segment id makes a header unforgeable from outside: an object whose bytes imitate a record cannot know the
128 random bits of the segment it will land in, so a scan for records never takes payload for a header.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import xxhash

__all__ = ["FORMAT", "HEADER_SIZE", "MAX_PAYLOAD", "CorruptRecordError", "Digest", "Entry", "record_size"]

Digest = hashlib.blake2b  # of the first parts of a key

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
_ZEROS = bytes(HEADER_SIZE)


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
        """Raises CorruptRecordError when `value` is not an index value of this format."""
        if len(value) != _ENTRY.size:
            raise CorruptRecordError(f"index value of {len(value)} bytes")
        return cls._make(_ENTRY.unpack(value))


def checksum(payload: bytes | memoryview) -> int:
    """xxh3_64 of the payload."""
    return int(xxhash.xxh3_64_intdigest(payload))


def record_size(length: int) -> int:
    """Bytes on disk of a record whose payload has `length` bytes."""
    return HEADER_SIZE + length + -length % HEADER_SIZE


def padding(length: int) -> bytes:
    return _ZEROS[: -length % HEADER_SIZE]


def pack_header(segment_id: bytes, key: bytes, length: int, payload_sum: int) -> bytes:
    fields = _FIELDS.pack(_MAGIC, FORMAT, 0, segment_id, key, length, payload_sum)
    return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))


def verify(data: memoryview, segment_id: bytes, key: bytes, entry: Entry) -> memoryview:
    """The payload inside `data` (header and payload, as read), or CorruptRecordError.

    The header is compared with the one this entry must have: one comparison checks every field.
    """
    if data[:HEADER_SIZE] != pack_header(segment_id, key, entry.length, entry.checksum):
        raise CorruptRecordError("header differs from what the index promises")
    payload = data[HEADER_SIZE:]
    if len(payload) != entry.length or checksum(payload) != entry.checksum:
        raise CorruptRecordError("payload differs from its checksum")
    return payload


def parse_header(header: bytes, segment_id: bytes) -> tuple[bytes, int, int] | None:
    """(key, length, payload checksum) of a sound header of this segment, None for anything else."""
    if len(header) != HEADER_SIZE or header[:4] != _MAGIC:
        return None
    fields, (header_sum,) = header[: _FIELDS.size], _SUM.unpack(header[_FIELDS.size :])
    _, version, _, found_id, key, length, payload_sum = _FIELDS.unpack(fields)
    sound = version == FORMAT and found_id == segment_id and length <= MAX_PAYLOAD
    if not sound or xxhash.xxh3_64_intdigest(fields) != header_sum:
        return None
    return key, length, payload_sum
