"""A listed prefix as arrays over one mapping: a file, or memory that all workers share.

A million keys take the bytes of their names and 40 more each, once per node: no worker has a Python list of
them, and nothing of that size is sent to a worker. The bytes are

    header | table | key offsets | sizes | labels | version offsets | keys | versions | facts (JSON)

All numbers are little-endian; sections begin at multiples of 8. Keys and versions are UTF-8, one after the
other, and their offsets are uint64 of count + 1. Labels may be of length 0. The header holds a checksum
(xxh3, 64 bits) of all that follows.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from fastload.errors import CacheError
from fastload.store.base import Page, Store
from fastload.store.node import SharedFile, open_kept, save_kept

_log = logging.getLogger("fastload")

_MAGIC = b"fastload"
_FORMAT = 2  # 2: classes are all folders, also those without images
_SECTIONS = ("key_offsets", "sizes", "labels", "version_offsets", "keys", "versions", "facts")
# magic, format, size of both headers, checksum of all that follows
_HEADER = struct.Struct("<8sIIQ")
# count, then offset and length of each section
_TABLE = struct.Struct("<Q" + "QQ" * len(_SECTIONS))


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts as bytes, one behind the other, and their edges.

    The n-th one is `data[offsets[n]:offsets[n + 1]]`.
    """

    data: memoryview
    offsets: npt.NDArray[np.uint64]

    def __getitem__(self, index: int) -> memoryview:
        start, stop = self.offsets[index : index + 2].tolist()
        return self.data[start:stop]

    def between(self, start: int, stop: int) -> Iterator[memoryview]:
        return (self.data[a:b] for a, b in pairwise(self.offsets[start : stop + 1].tolist()))


class Manifest:
    """The objects below a URL: key, size and version of each, and labels if asked for. Immutable.

    Made by `listing.list_objects`. Forked processes share it; pickling it for a process that is being spawned
    passes a file descriptor, any other pickle has the bytes.

    Attributes:
        sizes: int64, shape (n,), bytes of each object.
        labels: int64, shape (n,), index into `classes`; None without labels.
        classes: sorted class names, of those without images too; or None.
        identity: the `identity` of the store that was listed.
        listed_at: when, as an ISO 8601 UTC time.
        total_bytes: the sum of `sizes`.
        unversioned: how many objects have no version. No change of these is ever noticed.
    """

    def __init__(self, file: SharedFile) -> None:
        """Open the manifest in a file with the bytes of `Columns.write`."""
        self._file = file
        _, *table = _TABLE.unpack_from(file.map, _HEADER.size)
        view = memoryview(file.map)
        part = {
            name: view[table[2 * i] : table[2 * i] + table[2 * i + 1]] for i, name in enumerate(_SECTIONS)
        }
        self._keys = _Texts(part["keys"], np.frombuffer(part["key_offsets"], dtype="<u8"))
        self._versions = _Texts(part["versions"], np.frombuffer(part["version_offsets"], dtype="<u8"))
        self.sizes: npt.NDArray[np.int64] = np.frombuffer(part["sizes"], dtype="<i8")
        facts = json.loads(bytes(part["facts"]))
        self.identity: str = facts["identity"]
        self.listed_at: str = facts["listed_at"]
        self.classes: list[str] | None = facts["classes"]
        self.labels: npt.NDArray[np.int64] | None = None
        if self.classes is not None:
            self.labels = np.frombuffer(part["labels"], dtype="<i8")
        self.total_bytes = int(self.sizes.sum())
        self.unversioned = int(np.count_nonzero(np.diff(self._versions.offsets) == 0))
        # Of objects that were asked for. Forked processes share them, and each is computed once for all.
        shared = mmap.mmap(-1, max(1, 8 * len(self)))
        self._identities: npt.NDArray[np.uint64] = np.frombuffer(shared, np.uint64, len(self))
        self._changed: dict[int, int] = {}  # of objects that this process read in another version

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        return f"<Manifest of {len(self):,} objects, {self.total_bytes:,} bytes, listed {self.listed_at}>"

    def key(self, index: int) -> str:
        """Return the key of object `index`, relative to the URL."""
        return str(self._keys[index], "utf-8", "surrogateescape")

    def keys(self, start: int, stop: int) -> list[str]:
        """Return the keys of the objects [start, stop)."""
        return [str(key, "utf-8", "surrogateescape") for key in self._keys.between(start, stop)]

    def find(self, keys: Iterable[str]) -> dict[str, list[int]]:
        """Return key -> the objects with that key, perhaps several; keys without an object are left out.

        One pass in numpy over the last bytes of all keys. A search by halves was rejected: a manifest of
        given keys has their order, and one with labels sorts by folder before the name.
        """
        wanted = {key: key.encode("utf-8", "surrogateescape") for key in keys}
        ends = np.cumsum([len(name) for name in wanted.values()], dtype=np.int64)
        sought = _marks(b"".join(wanted.values()), np.concatenate([[0], ends]))
        objects: dict[str, list[int]] = {}
        for index in np.flatnonzero(np.isin(_marks(self._keys.data, self._keys.offsets), sought)).tolist():
            key = self.key(index)
            if key in wanted:
                objects.setdefault(key, []).append(index)
        return objects

    def version(self, index: int) -> str:
        """Return the version of object `index` when it was listed."""
        return str(self._versions[index], "utf-8")

    def size(self, index: int) -> int:
        """Return the size of object `index` in bytes."""
        return int(self.sizes[index])

    def label(self, index: int) -> int:
        """Return the label of object `index`; only for a manifest with labels."""
        assert self.labels is not None, "this manifest was made without labels"
        return int(self.labels[index])

    def identities(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return a number for each of these objects: a digest of its key and its version, wherever the store
        is."""
        numbers = self._identities[indices]
        if not numbers.all():
            for position in np.flatnonzero(numbers == 0).tolist():
                index = int(indices[position])
                numbers[position] = self._identity(index, self._versions[index])
            self._identities[indices] = numbers
        for index, identity in self._changed.items():
            numbers[indices == index] = identity
        return numbers

    def read_anew(self, index: int, version: str) -> None:
        """Note that this process reads object `index` in a version that is not the listed one."""
        self._changed[index] = self._identity(index, version.encode())

    def _identity(self, index: int, version: bytes | memoryview) -> int:
        digest = xxhash.xxh3_64(self._keys[index])
        digest.update(b"\0")  # no key has it
        digest.update(version)
        return int(digest.intdigest())

    def why_not_cached(self, store: Store) -> str:
        """Return the reason why nothing of this store may be cached, in words; "" where it may."""
        if self.unversioned:
            return (
                f"the store gives no version of {self.unversioned:,} of {len(self):,} objects (no ETag, "
                "checksum or modification time), so their changes cannot be detected: nothing is cached"
            )
        return f"{store.unidentified}: nothing is cached" if store.unidentified else ""

    @cached_property
    def digests(self) -> tuple[str, str]:
        """Short texts: (the keys in their order, with labels and classes; the versions of the objects)."""
        keys, versions = xxhash.xxh3_128(self._keys.data), xxhash.xxh3_128(self._versions.data)
        keys.update(json.dumps(self.classes).encode())
        for part in (self._keys.offsets, self.labels):
            keys.update(b"" if part is None else np.ascontiguousarray(part).data)
        versions.update(self._versions.offsets.data)
        return keys.hexdigest()[:16], versions.hexdigest()[:16]

    def changes_since(self, before: Manifest) -> str:
        """Say what differs from an earlier listing: how many objects, and the first of each sort."""
        old, new = before._by_key(), self._by_key()
        changes = {
            "added": [key for key in new if key not in old],
            "removed": [key for key in old if key not in new],
            "changed": [key for key, version in new.items() if old.get(key, version) != version],
        }
        told = [f"{len(keys):,} {what} (first {keys[0]!r})" for what, keys in changes.items() if keys]
        return f"objects were {', '.join(told)}" if told else ""

    def _by_key(self) -> dict[str, str]:
        return dict(zip(self.keys(0, len(self)), map(self.version, range(len(self))), strict=True))

    def save(self, path: Path) -> None:
        """Write the manifest to `path`, whole or not at all.

        Raises:
            OSError: the directory cannot be made or written to, or others can write to it.
        """
        save_kept(path, self._file.map)

    @classmethod
    def load(cls, path: Path, identity: str | None = None) -> Manifest | None:
        """Return the manifest saved at `path`; None if there is none, or it is damaged, old or another's.

        Args:
            identity: of the store that it must be of; None: of any.
        """
        try:
            descriptor = open_kept(path)
        except CacheError as error:
            _log.warning("a kept manifest is not used, and the url is listed again: %s", error.message)
            return None
        except OSError:
            return None
        if not _is_whole(descriptor):
            os.close(descriptor)
            _log.warning("manifest %s is damaged or of another version: listing again", path)
            return None
        manifest = cls(SharedFile(descriptor))
        return manifest if identity in (None, manifest.identity) else None

    def __fingerprint__(self) -> Any:
        """Return all that it says but when it was listed: see `datasets.fingerprint`."""
        keys, versions = self._keys, self._versions
        arrays = (keys.offsets, self.sizes, self.labels, versions.offsets)
        return self.identity, self.classes, *arrays, bytes(keys.data), bytes(versions.data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Manifest:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest, (self._file,)


def _marks(names: bytes | memoryview, offsets: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return a number for each name, of its last 24 bytes: few different names have the same."""
    edges = np.asarray(offsets).astype(np.int64)
    ends, lengths = edges[1:], np.diff(edges)
    padded = np.concatenate([np.zeros(24, np.uint8), np.frombuffer(names, np.uint8)])
    words = np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,))  # one begins at each byte
    marks = np.zeros(len(ends), np.uint64)
    for back in (0, 8, 16):
        missing = (8 - np.clip(lengths - back, 0, 8)).astype(np.uint64)  # bytes that are not of this name
        word = words[ends + (16 - back)]
        word = np.where(missing < 8, word >> (missing % np.uint64(8) * np.uint64(8)), 0)
        marks = marks * np.uint64(0x9E3779B97F4A7C15) + word
    return marks


def _is_whole(descriptor: int) -> bool:
    """Return whether the file has our header, and all that follows has the checksum in it."""
    size = os.fstat(descriptor).st_size
    if size < _HEADER.size + _TABLE.size:
        return False
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
        magic, version, header_size, checksum = _HEADER.unpack_from(content)
        if (magic, version, header_size) != (_MAGIC, _FORMAT, _HEADER.size + _TABLE.size):
            return False
        with memoryview(content) as view, view[_HEADER.size :] as body:
            return bool(xxhash.xxh3_64_intdigest(body) == checksum)


class Columns:
    """A manifest in the making: flat arrays, which take the memory of the names and numbers alone."""

    def __init__(self, *, labels: bool) -> None:
        self.keys, self.versions = bytearray(), bytearray()
        self.key_lengths, self.version_lengths = array("Q"), array("Q")
        self.sizes, self.labels = array("q"), array("q")
        self.classes: list[str] = []  # in order of appearance, until arranged
        self.labelled = labels
        self._class_of: dict[str, int] = {}
        self._ordered, self._last = True, b""

    def add(self, page: Page) -> None:
        """Append the objects of a page."""
        keys = [info.key.encode("utf-8", "surrogateescape") for info in page]
        versions = [info.version.encode() for info in page]
        self.keys += b"".join(keys)
        self.versions += b"".join(versions)
        self.key_lengths.extend(map(len, keys))
        self.version_lengths.extend(map(len, versions))
        self.sizes.extend(info.size for info in page)
        if self.labelled:
            self.labels.extend(self._label(info.key) for info in page)
        for rank in map(self._rank, keys):
            self._ordered = self._ordered and self._last <= rank
            self._last = rank

    def number_classes(self, folders: set[str]) -> None:
        """Number the classes, which are these folders, by name."""
        names = sorted(folders)
        if names != self.classes:
            position = {name: index for index, name in enumerate(names)}
            renumber = np.array([position[name] for name in self.classes], dtype=np.int64)
            self.labels = array("q", renumber[np.frombuffer(self.labels, dtype=np.int64)].tobytes())
            self.classes = names

    def arrange(self) -> None:
        """Put the rows in order unless they came so."""
        if self._ordered:
            return
        keys = _split(self.keys, self.key_lengths)
        ranks = [self._rank(key) for key in keys]
        order = sorted(range(len(keys)), key=ranks.__getitem__)
        del ranks
        versions = _split(self.versions, self.version_lengths)
        self.keys = bytearray().join(keys[i] for i in order)
        self.versions = bytearray().join(versions[i] for i in order)
        for name in ("key_lengths", "version_lengths", "sizes", *(["labels"] if self.labelled else [])):
            old = getattr(self, name)
            setattr(self, name, array(old.typecode, (old[i] for i in order)))

    def write(self, descriptor: int, identity: str) -> None:
        """Write the bytes of a manifest of these objects to an empty file, open for writing."""
        facts = {
            "identity": identity,
            "classes": self.classes if self.labelled else None,
            "listed_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        parts: dict[str, Any] = {
            "key_offsets": _offsets(self.key_lengths),
            "sizes": self.sizes,
            "labels": self.labels,
            "version_offsets": _offsets(self.version_lengths),
            "keys": self.keys,
            "versions": self.versions,
            "facts": json.dumps(facts).encode(),
        }
        pieces: list[memoryview] = []
        table: list[int] = []
        position = _HEADER.size + _TABLE.size
        for name in _SECTIONS:
            data = memoryview(parts[name]).cast("B")
            padding = bytes(-data.nbytes % 8)
            table += [position, data.nbytes]
            pieces += [data, memoryview(padding)]
            position += data.nbytes + len(padding)
        pieces.insert(0, memoryview(_TABLE.pack(len(self.sizes), *table)))
        checksum = xxhash.xxh3_64()
        for piece in pieces:
            checksum.update(piece)
        header = _HEADER.pack(_MAGIC, _FORMAT, _HEADER.size + _TABLE.size, checksum.intdigest())
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(header)
            file.writelines(pieces)

    def _label(self, key: str) -> int:
        name = key.partition("/")[0]
        label = self._class_of.setdefault(name, len(self.classes))
        if label == len(self.classes):
            self.classes.append(name)
        return label

    def _rank(self, key: bytes) -> bytes:
        """Return the sort key of a row. UTF-8 sorts as the strings do; 0 comes before every character."""
        if not self.labelled:
            return key
        if not key.isascii():  # a byte of no UTF-8 sorts as the surrogate that stands for it in a string
            key = key.decode("utf-8", "surrogateescape").encode("utf-8", "surrogatepass")
        directory, _, name = key.rpartition(b"/")
        return b"\0".join((key.partition(b"/")[0], directory, name))


def _split(joined: bytearray, lengths: array[int]) -> list[bytes]:
    stops = list(accumulate(lengths, initial=0))
    return [bytes(joined[start:stop]) for start, stop in pairwise(stops)]


def _offsets(lengths: array[int]) -> npt.NDArray[np.uint64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.uint64)
    np.cumsum(np.frombuffer(lengths, dtype=np.uint64), out=offsets[1:])
    return offsets
