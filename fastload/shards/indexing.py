"""The index of shards that exist already: each is read once, from its beginning to its end.

    shards, some at a time ─▶ ShardReader ─▶ records ─▶ RecordOffsets ─▶ the lines of an index file

All bytes of a shard are read. To read only the headers of a tar was rejected: that is a request for each
member, one after the other. At 20 ms and 8 shards at a time it is slower than 100 MB/s where members are
smaller than 250 KB, and for TFRecord files it would leave the CRCs unchecked.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any, Literal, NamedTuple

from fastload.errors import DecodeError, NotFoundError, ObjectChangedError, ShortReadError
from fastload.fetch.threads import ReadPool
from fastload.metrics.counters import Counters
from fastload.shards.formats import ShardFormat
from fastload.shards.index import RecordOffsets
from fastload.shards.reader import ReadAhead, Shard, ShardReader
from fastload.store import Store

_SHARDS = 8  # at a time
_READS = 32  # at a time
_READ_AHEAD = 128 << 20  # bytes, of all shards
_LOOK_SECONDS = 0.1
_BAD = (NotFoundError, ObjectChangedError, ShortReadError)  # of one shard; others say that the store is down


class IndexedShard(NamedTuple):
    """What became of a shard.

    number: of the shard.
    outcome: "present": it had an index; "compressed": an index file cannot point into it; "failed": it is
        damaged or cannot be read, and has no index; "indexed".
    records: of a shard that was read to its end.
    file: the bytes of its index file, where one is wanted.
    fault: what is wrong with it, or "".
    """

    number: int
    outcome: Literal["present", "compressed", "failed", "indexed"]
    records: RecordOffsets | None = None
    file: bytes = b""
    fault: str = ""


class Indexing:
    """Indexes shards in threads.

    Args:
        store, form: of the shards.
        present: whether a shard has an index already. It may raise `DecodeError`: the shard has failed then.
        files: whether index files are wanted. A damaged record fails its shard then, for such a file cannot
            name it.

    Attributes:
        read: bytes of shards so far, of compressed ones what they inflate to.
    """

    def __init__(
        self, store: Store, form: ShardFormat, present: Callable[[int], bool], *, files: bool
    ) -> None:
        self._store = store
        self._form = form
        self._present = present
        self._files = files
        self._shards = ReadPool(_SHARDS, Counters())
        self._reads = ReadPool(_READS, Counters())
        self._ahead = ReadAhead.of(_READ_AHEAD, _SHARDS)
        self._lock = threading.Lock()
        self.read = 0

    def run(self, shards: Sequence[Shard], progress: Callable[[], None]) -> Iterator[IndexedShard]:
        """What became of each shard, in the order in which they end.

        Args:
            progress: called some times a second.

        Raises:
            StoreError: the store is down, or refuses us.
        """
        pending = {
            self._shards.submit(functools.partial(self._index, number, shard))
            for number, shard in enumerate(shards)
        }
        while pending:
            done, pending = wait(pending, _LOOK_SECONDS, FIRST_COMPLETED)
            progress()
            for future in done:
                yield future.result()

    def close(self) -> None:
        """Stop reading."""
        self._reads.close()
        self._shards.close()

    def _index(self, number: int, shard: Shard) -> IndexedShard:
        try:
            if self._present(number):
                return IndexedShard(number, "present")
            return self._read(number, shard)
        except (DecodeError, *_BAD) as error:
            return IndexedShard(number, "failed", fault=error.message)

    def _read(self, number: int, shard: Shard) -> IndexedShard:
        found: list[RecordOffsets] = []
        entries, fault = list[Any](), ""
        index_files = self._form.index_files if self._files else None
        reader = ShardReader(
            self._store,
            shard,
            self._form.splitter,
            ahead=self._ahead,
            pool=self._reads,
            counters=Counters(),
            on_end=found.append,
        )
        try:
            while (record := reader.next()) is not None:
                if reader.compressed and index_files is not None:
                    return IndexedShard(number, "compressed")
                with self._lock:
                    self.read += record.size
                if record.error is not None:
                    fault = fault or f"at byte {record.offset:,}: {record.error.message}"
                elif index_files is not None:
                    entries.append(index_files.entry(record))
        finally:
            reader.close()
        if fault and index_files is not None:
            return IndexedShard(number, "failed", fault=fault)
        file = b"" if index_files is None else index_files.write(entries)
        return IndexedShard(number, "indexed", found[0], file, fault)
