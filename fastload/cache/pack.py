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
from typing import Any, NamedTuple

import numpy as np
import xxhash

from fastload.cache.segment import KEY_SIZE, MAX_PAYLOAD
from fastload.errors import CacheError
from fastload.store.base import Buffer

__all__ = [
    "MOST_RECORDS",
    "MOST_TAIL",
    "Pack",
    "Record",
    "is_pack_name",
    "pack_index",
    "pack_name",
    "tail_size",
]

VERSION = 1
_MAGIC = b"FLPK"
_RECORDS = np.dtype([("key", f"V{KEY_SIZE}"), ("length", "<u4"), ("checksum", "<u8")])
_TRAILER = struct.Struct("<4sHHQQ")
_NAME = re.compile(r"[0-9a-f]{32}-([0-9]{1,12})\.pack", re.ASCII)
_MOST_HEAD = 64 << 10  # bytes of the line of JSON, from `push` and from anybody
MOST_TAIL = 32 << 20  # bytes of index and trailer that are read; a pack may be anybody's
MOST_RECORDS = (MOST_TAIL - _MOST_HEAD) // _RECORDS.itemsize - 1


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
    if len(head) > _MOST_HEAD:  # of thousands of places; whoever reads the pack takes them for unknown
        head = b'{"sources": []}\n'
    index = head + np.array(records, _RECORDS).tobytes()
    return index + _TRAILER.pack(_MAGIC, VERSION, 0, len(index), xxhash.xxh3_64_intdigest(index))


def pack_name(tail: Buffer) -> str:
    """The name of the pack that ends with these bytes."""
    return f"{hashlib.blake2b(tail, digest_size=16).hexdigest()}-{len(tail)}.pack"


class Pack:
    """The index of a published pack.

    Args:
        name: of the object.
        version: of the object, as listed.
        size: of the object, as listed.
        tail: its last bytes, as many as the name tells; they are kept.

    Raises:
        CacheError: this is not a whole pack, or one of a format that this fastload does not know.
    """

    def __init__(self, name: str, version: str, size: int, tail: Buffer) -> None:
        self.name = name
        self.version = version
        view = memoryview(tail)
        index = view[: -_TRAILER.size]
        if len(view) < _TRAILER.size:
            raise CacheError("is not a pack of a cache: it is too short", key=name)
        magic, found, _, length, index_sum = _TRAILER.unpack(view[-_TRAILER.size :])
        if magic != _MAGIC:
            raise CacheError("is not a pack of a cache: its last bytes say otherwise", key=name)
        if found != VERSION:
            raise CacheError(
                f"has pack format {found}, and this fastload knows {VERSION}: use the version that pushed it",
                key=name,
            )
        if length != len(index) or xxhash.xxh3_64_intdigest(index) != index_sum:
            raise CacheError("is damaged: its index differs from its checksum", key=name)
        if pack_name(view) != name:
            raise CacheError("is damaged: its index is not the one that its name tells", key=name)
        try:
            head = bytes(index[:_MOST_HEAD])
            start = head.index(b"\n") + 1
            self.sources = frozenset(str(source) for source in json.loads(head[:start])["sources"])
            self._records = np.frombuffer(index, _RECORDS, offset=start)  # an object each takes far more
            fits = int(self.lengths.sum()) == size - len(view) and not (self.lengths > MAX_PAYLOAD).any()
        except (ValueError, LookupError, TypeError, RecursionError):
            fits = False
        if not fits:
            raise CacheError("is damaged: its index and its size do not agree", key=name)

    @property
    def keys(self) -> np.ndarray[Any, Any]:
        """Of all records, as bytes of `KEY_SIZE`."""
        return self._records["key"]

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Of the payloads of all records."""
        return self._records["length"].astype(np.int64)

    def __iter__(self) -> Iterator[Record]:
        return self.chosen(np.arange(len(self)))

    def chosen(self, numbers: np.ndarray[Any, Any]) -> Iterator[Record]:
        """Some records, by their numbers in this pack."""
        offsets = np.cumsum(self.lengths) - self.lengths
        for number in numbers:
            key, length, payload_sum = self._records[number].item()
            yield Record(key, int(offsets[number]), length, payload_sum)

    def __len__(self) -> int:
        return len(self._records)
