"""The index of a dataset's shards: the offset of every record, from index files or found while streaming.

One file per shard, kept in the cache's folder of listings. The process that reads a shard to its end writes
the file, and all other processes find it there. See `seal` for its form.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import CacheError
from fastload.formats.pieces import Offsets
from fastload.formats.sample import dump, load
from fastload.store.node import open_kept, save_kept

_log = logging.getLogger("fastload")


def digest_of(text: str, size: int = 8) -> str:
    """Return a short text that stands for another one."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()


def seal(identity: str, value: Any) -> bytes:
    """Return a value that is kept: as `formats.sample` has it, with what it is of, and a checksum behind."""
    body = dump((identity, value))
    return b"".join((body, xxhash.xxh3_64_digest(body)))


def unseal(data: bytes, identity: str) -> Any:
    """Return the value that `seal` made bytes of, of the same; None for anything else."""
    body = memoryview(data)[:-8]
    if xxhash.xxh3_64_digest(body) != data[-8:]:
        return None
    found, value = load(body, readonly=True)
    return value if found == identity else None


class Fault(NamedTuple):
    """What is wrong with a record. Unless `lasting`, it may have happened on the way: see `Record`."""

    why: str
    lasting: bool


class RecordOffsets(NamedTuple):
    """The records of one shard.

    offsets: (offset, size) of each in bytes, framing included; in a compressed shard, after inflating.
    bad: ordinal -> fault, of the records that could not be read.
    compressed: whether the shard is.
    doubted: the time at which the shard was found to have other records; 0: never.
    heads: uint8 (n, k), the bytes that the shard keeps elsewhere for each record, put before its own; None:
        there are none.
    """

    offsets: Offsets
    bad: Mapping[int, Fault]
    compressed: bool
    doubted: float = 0.0
    heads: NDArray[np.uint8] | None = None

    def offset_of(self, ordinal: int) -> int:
        """Return where a record begins; 0 at the end of the shard, where there is nothing to read."""
        return int(self.offsets[ordinal, 0]) if ordinal < len(self.offsets) else 0

    def dump(self, shard: str) -> bytes:
        """As bytes; `shard` names the shard, its version and its format."""
        bad = {ordinal: tuple(fault) for ordinal, fault in self.bad.items()}
        return seal(shard, (self.offsets, bad, self.compressed, self.doubted, self.heads))

    @classmethod
    def load(cls, data: bytes, shard: str) -> RecordOffsets | None:
        """Return what `dump` wrote for that shard; None for anything else."""
        found = unseal(data, shard)
        if found is None:
            return None
        records = cls(*found)
        return records._replace(bad={ordinal: Fault(*fault) for ordinal, fault in records.bad.items()})


class ShardIndex:
    """The record offsets of a dataset's shards, of those that are indexed.

    Args:
        count: of shards.
        identity: shard -> text that names it, its version and its format.
        directory: where the index is kept; None: nowhere, and streaming adds nothing to it.
    """

    def __init__(self, count: int, identity: Callable[[int], str], directory: Path | None) -> None:
        self._identity = identity
        self._directory = directory
        self._shards: dict[int, RecordOffsets] = {}
        self._count = count
        self._settled: set[int] = set()  # records
        self._begun = time.time()  # also of the copies in other processes
        self._stops: list[int] | None = None  # of each shard, in the numbering of all records

    @property
    def kept(self) -> bool:
        """Whether the index that streaming builds is kept."""
        return self._directory is not None

    def get(self, shard: int) -> RecordOffsets | None:
        """Return the records of a shard; None: it is not indexed yet, by no process of this node."""
        records = self._shards.get(shard)
        if records is None and self._directory is not None:
            records = self._read(shard)
            if records is not None:
                self._shards[shard] = records
        return records

    def records_of(self, shard: int) -> list[int]:
        """Return the packed ids of a shard's records; none, where it is not indexed."""
        records = self.get(shard)
        count = 0 if records is None else len(records.offsets)
        return [RecordId(shard, ordinal).pack() for ordinal in range(count)]

    def complete(self) -> bool:
        """Return whether all shards are indexed."""
        if self._stops is None and all(self.get(shard) is not None for shard in range(self._count)):
            counts = [len(self._shards[shard].offsets) for shard in range(self._count)]
            self._stops = list(itertools.accumulate(counts))
        return self._stops is not None

    def __len__(self) -> int:
        """Return the number of records; only if `complete`."""
        assert self._stops is not None
        return self._stops[-1] if self._count else 0

    def total_bytes(self) -> int:
        """Return the size of all records that are indexed."""
        return sum(int(records.offsets[:, 1].sum()) for records in self._shards.values())

    def counts(self) -> list[int]:
        """Return records of each shard; only if `complete`."""
        assert self._stops is not None
        return [len(self._shards[shard].offsets) for shard in range(self._count)]

    def record_id(self, index: int) -> int:
        """Return the packed `RecordId` of a number in 0 .. n-1; only if `complete`."""
        assert self._stops is not None
        shard = bisect.bisect_right(self._stops, index)
        first = self._stops[shard - 1] if shard else 0
        return RecordId(shard, index - first).pack()

    def record_ids(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `record_id` of many numbers. A packed id, as those of streams, stays one."""
        if self._stops is None or not len(self):
            return numbers
        stops = self._stops_array
        numbers = np.where(numbers < 0, numbers + stops[-1], numbers)
        shards = np.searchsorted(stops, numbers, side="right")
        ordinals = numbers - np.where(shards > 0, stops[shards - 1], 0)
        return np.where(numbers < stops[-1], shards << 32 | ordinals, numbers)

    @functools.cached_property
    def _stops_array(self) -> NDArray[np.int64]:
        return np.array(self._stops, np.int64)

    def locate(self, record: int) -> tuple[int, int]:
        """Return (offset, size) of the record with that id, whose shard must be indexed."""
        shard, ordinal = RecordId.unpack(record)
        offsets = self._shards[shard].offsets
        return offsets.item(ordinal, 0), offsets.item(ordinal, 1)

    def head(self, record: int) -> memoryview | None:
        """Return the bytes that are put before those of the record; None: there are none."""
        shard, ordinal = RecordId.unpack(record)
        heads = self._shards[shard].heads
        return None if heads is None else heads[ordinal].data

    def fault(self, record: int) -> Fault | None:
        """Return the fault that a record had when its shard was read; None: none."""
        shard, ordinal = RecordId.unpack(record)
        fault = self._shards[shard].bad.get(ordinal)
        return fault._replace(lasting=True) if fault is not None and record in self._settled else fault

    def settle(self, record: int, *, shard: bool = False) -> None:
        """Take the fault of a record for lasting, in this process; with `shard`, all faults of its shard."""
        number, own = RecordId.unpack(record)
        found = self._shards[number].bad if shard else [own]
        self._settled.update(RecordId(number, ordinal).pack() for ordinal in found)

    def compressed(self, shard: int | None = None) -> bool:
        """Return whether an indexed shard is compressed; None: whether any of them is."""
        if shard is not None:
            return self._shards[shard].compressed
        return any(records.compressed for records in self._shards.values())

    def doubt(self, shard: int) -> None:
        """Note that the shard has other records than the index says: its transfer was damaged.

        This dataset keeps its indices, which are those of all its processes. A dataset that is made from now
        on reads the shard again.
        """
        records = self._shards[shard]
        if not records.doubted:
            self._shards[shard] = records = records._replace(doubted=time.time())
            self._write(shard, records.dump(self._identity(shard)))

    def add(self, shard: int, records: RecordOffsets) -> None:
        """Take the records of a shard from its index file."""
        self._shards[shard] = records

    def add_and_keep(self, shard: int, records: RecordOffsets) -> None:
        """Take the records of a shard that was read, and write them for other processes; see `kept`."""
        if self._directory is not None and shard not in self._shards:
            self._shards[shard] = records
            self._write(shard, records.dump(self._identity(shard)))

    def dump(self) -> dict[int, bytes]:
        """Return the indexed shards, each in bytes."""
        return {shard: records.dump(self._identity(shard)) for shard, records in self._shards.items()}

    def load(self, indexes: Mapping[int, bytes]) -> None:
        """Add the index that another rank has dumped, without shards that this dataset does not have."""
        for shard, data in indexes.items():
            if 0 <= shard < self._count and shard not in self._shards:
                records = RecordOffsets.load(data, self._identity(shard))
                if records is not None:
                    self._shards[shard] = records
                    self._write(shard, data)

    def _path(self, shard: int) -> Path:
        assert self._directory is not None
        return self._directory / f"{digest_of(self._identity(shard), 16)}.places"

    def _read(self, shard: int) -> RecordOffsets | None:
        path = self._path(shard)
        try:
            with os.fdopen(open_kept(path), "rb") as file:
                data = file.read()
        except CacheError as error:
            _log.warning(
                "the kept index of a shard is not used, and the shard is read again: %s", error.message
            )
            return None
        except OSError:
            return None
        try:
            records = RecordOffsets.load(data, self._identity(shard))
        except (ValueError, TypeError, AttributeError):
            records = None
        if records is not None and 0 < records.doubted < self._begun:
            return None  # until the shard was read again
        if records is None:
            _log.warning("the index file %s is damaged: its shard will be read again", path)
            with contextlib.suppress(OSError):
                path.unlink()
        return records

    def _write(self, shard: int, data: bytes) -> None:
        """Keep the index of a shard. Where that fails, each process that needs it reads the shard again."""
        if self._directory is None:
            return
        path = self._path(shard)
        try:
            save_kept(path, data)
        except OSError as error:
            _log.warning("the index of a shard cannot be kept in %s: %s", path.parent, error)


_ORDINAL_BITS = 32
_ORDINAL_MASK = (1 << _ORDINAL_BITS) - 1


class RecordId(NamedTuple):
    """Record `ordinal` of shard `shard`; packed, the integer `shard << 32 | ordinal`, a sample's index."""

    shard: int
    ordinal: int

    def pack(self) -> int:
        """Return the id as one integer."""
        return self.shard << _ORDINAL_BITS | self.ordinal

    @classmethod
    def unpack(cls, record: int) -> RecordId:
        """Return the id that `pack` made an integer of. The shard of a negative integer is negative."""
        return cls(record >> _ORDINAL_BITS, record & _ORDINAL_MASK)
