"""A pack: one object in a store that holds many records of a cache.

    payloads, one behind the other
    index: one line of JSON, {"sources": [...]}; then 28 bytes per record: key, length, xxh3_64 of its payload
    trailer, 24 bytes: magic "FLPK", format version, zero, length of the index, xxh3_64 of the index

A pack is named `<digest of its index>-<bytes of index and trailer>.pack`: a reader finds the index with one
listing and one request, and two nodes that push the same records write the same object.

Data and index are one object, because a store shows an object whole or not at all: a push that is killed
leaves nothing to clean up. An index object beside each data object was rejected: it needs a rule for data
without an index, and a clock that all nodes agree on.

`Published` is what a URL has of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import xxhash

from fastload.cache.cache import Cache
from fastload.cache.listings import latest
from fastload.cache.segment import KEY_SIZE, MAX_PAYLOAD
from fastload.errors import CacheError, NotFoundError, ObjectChangedError
from fastload.store import ObjectInfo, Store
from fastload.store.base import Buffer

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
    """Return the bytes of index and trailer of a pack, which its name tells."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def pack_index(sources: Sequence[str], records: Sequence[tuple[bytes, int, int]]) -> bytes:
    """Return index and trailer of a pack of records: (key, length, checksum), in the payloads' order."""
    head = json.dumps({"sources": sorted(sources)}).encode() + b"\n"
    if len(head) > _MOST_HEAD:  # of thousands of places; whoever reads the pack takes them for unknown
        head = b'{"sources": []}\n'
    index = head + np.array(records, _RECORDS).tobytes()
    return index + _TRAILER.pack(_MAGIC, VERSION, 0, len(index), xxhash.xxh3_64_intdigest(index))


def pack_name(tail: Buffer) -> str:
    """Return the name of the pack that ends with these bytes."""
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
        magic, pack_format, _, length, index_sum = _TRAILER.unpack(view[-_TRAILER.size :])
        if magic != _MAGIC:
            raise CacheError("is not a pack of a cache: its last bytes say otherwise", key=name)
        if pack_format != VERSION:
            raise CacheError(
                f"has pack format {pack_format}, and this fastload knows {VERSION}: use the version that "
                "pushed it",
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
        """Yield some records, by their numbers in this pack."""
        offsets = np.cumsum(self.lengths) - self.lengths
        for number in numbers:
            key, length, payload_sum = self._records[number].item()
            yield Record(key, int(offsets[number]), length, payload_sum)

    def __len__(self) -> int:
        return len(self._records)


REQUESTS = 8  # in flight


class Published:
    """What is published at a URL, as of the last `refresh`.

    Args:
        store: the URL, opened.
        settled: names of packs whose index is not read.

    Attributes:
        names: of all packs.
        store: the URL, opened.
        packs: name -> index, in the order of names.
        damaged: name -> what is wrong with an object that is named like a pack.
        foreign: names of other objects.
    """

    def __init__(self, store: Store, settled: Iterable[str] = ()) -> None:
        self.store = store
        self._settled = frozenset(settled)
        self.names: list[str] = []
        self.packs: dict[str, Pack] = {}
        self.damaged: dict[str, str] = {}
        self.foreign: list[str] = []

    def refresh(self) -> list[Pack]:
        """List the URL, and read the index of each pack that was not there before: these packs.

        Raises:
            NotFoundError: there is no such directory or bucket.
            StoreError: the store failed.
        """
        packs: list[ObjectInfo] = []
        foreign: list[str] = []
        for page in self.store.list():
            for info in page:
                if is_pack_name(info.key):
                    packs.append(info)
                else:
                    foreign.append(info.key)
        self.foreign, self.names = sorted(foreign), [info.key for info in packs]
        known = self._settled | self.packs.keys() | self.damaged.keys()
        new = [info for info in packs if info.key not in known]
        with ThreadPoolExecutor(self.store.reading.at_once(REQUESTS), "fastload-packs") as pool:
            new_packs = [pack for pack in pool.map(self._read, sorted(new)) if pack is not None]
        self.packs |= {pack.name: pack for pack in new_packs}
        return new_packs

    def _read(self, info: ObjectInfo) -> Pack | None:
        size = tail_size(info.key)
        try:
            if size > MOST_TAIL:
                raise CacheError(
                    f"promises an index of {size:,} bytes, and at most {MOST_TAIL:,} are read", key=info.key
                )
            if size > info.size:
                raise CacheError("is cut: it is shorter than its name tells", key=info.key)
            tail = self.store.read_range(info.key, info.size - size, info.size, info.version)
            return Pack(info.key, info.version, info.size, tail)
        except CacheError as error:
            self.damaged[info.key] = error.message
        except (NotFoundError, ObjectChangedError):  # deleted or written again meanwhile
            pass
        return None

    def refuse_foreign(self) -> None:
        """Refuse a URL at which other objects are.

        Raises:
            CacheError: names the first of them.
        """
        if self.foreign:
            raise CacheError(
                f"{self.store.url} holds objects that are no packs of a cache: give a prefix of its own",
                key=self.foreign[0],
            )

    def refuse_others(self, sources: frozenset[str]) -> None:
        """Refuse a URL that is not for records of these sources; see `sources_of`.

        A pack or a cache whose sources are not known passes: its keys tell its records apart anyway.

        Raises:
            CacheError: packs of other data are there.
        """
        for pack in self.packs.values():
            if sources and pack.sources and not sources & pack.sources:
                raise CacheError(
                    f"{self.store.url} holds records of {_named(pack.sources)}, and this cache is of "
                    f"{_named(sources)}: give a prefix of its own",
                    key=pack.name,
                )


def sources_of(cache: Cache) -> frozenset[str]:
    """Return the identities of the places that the datasets of this cache list."""
    folder = cache._manifests
    if folder is None or not folder.is_dir():
        return frozenset()
    return frozenset(manifest.identity for manifest in latest(folder))


def _named(sources: frozenset[str]) -> str:
    return ", ".join(repr(source) for source in sorted(sources))
