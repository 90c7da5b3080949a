"""A pack: one object in a store that holds many records of a cache.

    payloads, one behind the other
    index: one line of JSON, {"sources": [...]}; then 28 bytes a record: key, length, xxh3_64 of its payload
    trailer, 24 bytes: magic "FLPK", format version, zero, length of the index, xxh3_64 of the index

A pack is named `<digest of its index>-<bytes of index and trailer>.pack`: a reader finds the index with one
listing and one request, and two nodes that push the same records write the same object.

Data and index are one object, because a store shows an object whole or not at all: a push that is killed
leaves nothing to clean up. An index object beside each data object was rejected: it needs a rule for data
without an index, and a clock that all nodes agree on.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from fastload.cache.segment import KEY_SIZE, MAX_PAYLOAD
from fastload.errors import CacheError

__all__ = ["Pack", "Record", "is_pack_name", "pack_index", "pack_name", "tail_size"]

VERSION = 1
_MAGIC = b"FLPK"
_RECORD = struct.Struct(f"<{KEY_SIZE}sIQ")
_TRAILER = struct.Struct("<4sHHQQ")
_NAME = re.compile(r"[0-9a-f]{32}-([0-9]{1,12})\.pack", re.ASCII)


class Record(NamedTuple):
    """Where a pack has a payload, and what it must be."""

    key: bytes
    offset: int
    length: int
    checksum: int


def is_pack_name(key: str) -> bool:
    return _NAME.fullmatch(key) is not None


def tail_size(name: str) -> int:
    """The bytes of index and trailer of a pack, which its name tells."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def pack_index(sources: Sequence[str], records: Sequence[tuple[bytes, int, int]]) -> bytes:
    """Index and trailer of a pack of records, as (key, length, checksum) in the order of their payloads."""
    head = json.dumps({"sources": sorted(sources)}).encode() + b"\n"
    index = head + b"".join(_RECORD.pack(*record) for record in records)
    return index + _TRAILER.pack(_MAGIC, VERSION, 0, len(index), xxhash.xxh3_64_intdigest(index))


def pack_name(tail: bytes) -> str:
    """The name of the pack that ends with these bytes."""
    return f"{hashlib.blake2b(tail, digest_size=16).hexdigest()}-{len(tail)}.pack"


class Pack:
    """The index of a published pack.

    Args:
        name: of the object.
        version: of the object, as listed.
        size: of the object, as listed.
        tail: its last bytes, as many as the name tells.

    Raises:
        CacheError: this is not a whole pack, or one of a format that this fastload does not know.
    """

    def __init__(self, name: str, version: str, size: int, tail: bytes) -> None:
        self.name = name
        self.version = version
        index = tail[: -_TRAILER.size]
        if len(tail) < _TRAILER.size:
            raise CacheError("is not a pack of a cache: it is too short", key=name)
        magic, found, _, length, index_sum = _TRAILER.unpack(tail[-_TRAILER.size :])
        if magic != _MAGIC:
            raise CacheError("is not a pack of a cache: its last bytes say otherwise", key=name)
        if found != VERSION:
            raise CacheError(
                f"has pack format {found}, and this fastload knows {VERSION}: use the version that pushed it",
                key=name,
            )
        if length != len(index) or xxhash.xxh3_64_intdigest(index) != index_sum:
            raise CacheError("is damaged: its index differs from its checksum", key=name)
        try:
            head, _, self._records = index.partition(b"\n")
            self.sources = frozenset(str(source) for source in json.loads(head)["sources"])
            fits = sum(record.length for record in self) == size - len(tail)
        except (ValueError, LookupError, TypeError, struct.error):
            fits = False
        if not fits:
            raise CacheError("is damaged: its index and its size do not agree", key=name)

    def __iter__(self) -> Iterator[Record]:
        offset = 0
        for key, length, payload_sum in _RECORD.iter_unpack(self._records):
            if length > MAX_PAYLOAD:
                raise ValueError(length)
            yield Record(key, offset, length, payload_sum)
            offset += length

    def __len__(self) -> int:
        return len(self._records) // _RECORD.size
