"""Where the records of shards are: tables, given by index files or learned while streaming, and their files.

    "fastplac" | xxh3 of what follows | its size | size of the facts | facts (JSON) | uint64 (n, 2)

One table per shard, kept in the cache's folder of listings: learned by whichever process read the shard, and
found there by all the others.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from fastload.errors import CacheError
from fastload.formats.shard_index import Offsets
from fastload.store.folder import open_kept, save_kept

__all__ = ["Fault", "ShardIndex", "Table"]

_log = logging.getLogger("fastload")

_MAGIC = b"fastplac"
_HEAD = struct.Struct("<8sQQ")
_SHARD_BITS = 32


class Fault(NamedTuple):
    """What is wrong with a record. Unless `lasting`, it may have come about on the way: see `Record`."""

    why: str
    lasting: bool


class Table(NamedTuple):
    """The records of one shard.

    places: (offset, size) of each, framing included; in a compressed shard, of what it inflates to.
    bad: ordinal -> what is wrong with it, of records that could not be read.
    compressed: whether the shard is.
    doubted: when it was found that the shard has other records; 0: never.
    """

    places: Offsets
    bad: Mapping[int, Fault]
    compressed: bool
    doubted: float = 0.0

    def dump(self, shard: str) -> bytes:
        """As bytes; `shard` names the shard, its version and its format."""
        bad = {str(ordinal): fault for ordinal, fault in self.bad.items()}
        told = {"shard": shard, "bad": bad, "compressed": self.compressed, "doubted": self.doubted}
        facts = json.dumps(told).encode()
        facts += b" " * (-len(facts) % 8)
        body = struct.pack("<Q", len(facts)) + facts + np.ascontiguousarray(self.places, "<u8").tobytes()
        return _HEAD.pack(_MAGIC, xxhash.xxh3_64_intdigest(body), len(body)) + body

    @classmethod
    def load(cls, data: bytes, shard: str) -> Table | None:
        """The table that `dump` wrote for that shard; None for anything else."""
        if len(data) < _HEAD.size + 8:
            return None
        magic, checksum, size = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if (magic, size) != (_MAGIC, len(body)) or xxhash.xxh3_64_intdigest(body) != checksum:
            return None
        (facts_size,) = struct.unpack_from("<Q", body)
        facts = json.loads(body[8 : 8 + facts_size])
        if facts["shard"] != shard:
            return None
        places = np.frombuffer(body, "<u8", offset=8 + facts_size).reshape(-1, 2)
        bad = {int(ordinal): Fault(*fault) for ordinal, fault in facts["bad"].items()}
        return cls(places, bad, facts["compressed"], facts["doubted"])


class ShardIndex:
    """The tables of a dataset's shards, as far as known.

    Args:
        count: of shards.
        identity: shard -> text that names it, its version and its format.
        directory: where learned tables are kept; None: nowhere, and none are learned.
    """

    def __init__(self, count: int, identity: Callable[[int], str], directory: Path | None) -> None:
        self._identity = identity
        self._directory = directory
        self._tables: dict[int, Table] = {}
        self._count = count
        self._settled: set[int] = set()  # records
        self._begun = time.time()  # also of the copies in other processes
        self._stops: list[int] | None = None  # of each shard, in the numbering of all records

    @property
    def learning(self) -> bool:
        """Whether learned tables are kept."""
        return self._directory is not None

    def get(self, shard: int) -> Table | None:
        """The table of a shard; looks for one that another process has learned meanwhile."""
        table = self._tables.get(shard)
        if table is None and self._directory is not None:
            table = self._read(shard)
            if table is not None:
                self._tables[shard] = table
        return table

    def complete(self) -> bool:
        """Whether the places of all records are known."""
        if self._stops is None and all(self.get(shard) is not None for shard in range(self._count)):
            counts = [len(self._tables[shard].places) for shard in range(self._count)]
            self._stops = list(itertools.accumulate(counts))
        return self._stops is not None

    def __len__(self) -> int:
        """How many records there are; only if `complete`."""
        assert self._stops is not None
        return self._stops[-1] if self._count else 0

    def total_bytes(self) -> int:
        """Of all records that are known."""
        return sum(int(table.places[:, 1].sum()) for table in self._tables.values())

    def counts(self) -> list[int]:
        """Records of each shard; only if `complete`."""
        assert self._stops is not None
        return [len(self._tables[shard].places) for shard in range(self._count)]

    def record_id(self, index: int) -> int:
        """Number in 0 .. n-1 -> shard << 32 | ordinal; only if `complete`."""
        assert self._stops is not None
        shard = bisect.bisect_right(self._stops, index)
        first = self._stops[shard - 1] if shard else 0
        return shard << _SHARD_BITS | (index - first)

    def place(self, record: int) -> tuple[int, int]:
        """(offset, size) of the record with that id; its table must be known."""
        places, ordinal = self._tables[record >> _SHARD_BITS].places, record & 0xFFFF_FFFF
        return places.item(ordinal, 0), places.item(ordinal, 1)

    def fault(self, record: int) -> Fault | None:
        """What was wrong with a record when its shard was read."""
        fault = self._tables[record >> _SHARD_BITS].bad.get(record & 0xFFFF_FFFF)
        return fault._replace(lasting=True) if fault is not None and record in self._settled else fault

    def settle(self, record: int, *, shard: bool = False) -> None:
        """The fault of a record need not be looked for again by this process; nor others of its `shard`."""
        number = record >> _SHARD_BITS
        found = self._tables[number].bad if shard else [record & 0xFFFF_FFFF]
        self._settled.update(number << _SHARD_BITS | ordinal for ordinal in found)

    def compressed(self, shard: int | None = None) -> bool:
        """Whether a shard whose table is known is compressed; None: whether any of these is."""
        if shard is not None:
            return self._tables[shard].compressed
        return any(table.compressed for table in self._tables.values())

    def doubt(self, shard: int) -> None:
        """The shard has other records than its table says: it was damaged only on the way, when it was read.

        This dataset keeps its numbers, which are those of all its processes. One that is made from now on
        reads the shard again.
        """
        table = self._tables[shard]
        if not table.doubted:
            self._tables[shard] = table = table._replace(doubted=time.time())
            self._write(shard, table.dump(self._identity(shard)))

    def give(self, shard: int, table: Table) -> None:
        """From an index file."""
        self._tables[shard] = table

    def learn(self, shard: int, table: Table) -> None:
        """From reading the shard; kept for the other processes too, if there is a directory for it."""
        if self._directory is not None and shard not in self._tables:
            self._tables[shard] = table
            self._write(shard, table.dump(self._identity(shard)))

    def dump(self) -> dict[int, bytes]:
        """All known tables."""
        return {shard: table.dump(self._identity(shard)) for shard, table in self._tables.items()}

    def load(self, tables: Mapping[int, bytes]) -> None:
        """Take up tables that another rank has dumped. Those of other shards than ours are left out."""
        for shard, data in tables.items():
            if 0 <= shard < self._count and shard not in self._tables:
                table = Table.load(data, self._identity(shard))
                if table is not None:
                    self._tables[shard] = table
                    self._write(shard, data)

    def _path(self, shard: int) -> Path:
        assert self._directory is not None
        digest = hashlib.blake2b(self._identity(shard).encode("utf-8", "surrogatepass"), digest_size=16)
        return self._directory / f"{digest.hexdigest()}.places"

    def _read(self, shard: int) -> Table | None:
        path = self._path(shard)
        try:
            with os.fdopen(open_kept(path), "rb") as file:
                data = file.read()
        except CacheError as error:
            _log.warning("a kept table is not read, and its shard is read again: %s", error.message)
            return None
        except OSError:
            return None
        try:
            table = Table.load(data, self._identity(shard))
        except (ValueError, KeyError, TypeError, AttributeError, struct.error):
            table = None
        if table is not None and 0 < table.doubted < self._begun:
            return None  # until it is learned again
        if table is None:
            _log.warning("table %s is damaged: its shard will be read again", path)
            with contextlib.suppress(OSError):
                path.unlink()
        return table

    def _write(self, shard: int, data: bytes) -> None:
        """Whole or not at all. Where it cannot be kept, the shard is read again by whoever needs it."""
        if self._directory is None:
            return
        path = self._path(shard)
        try:
            save_kept(path, data)
        except OSError as error:
            _log.warning("the table of a shard cannot be kept in %s: %s", path.parent, error)
