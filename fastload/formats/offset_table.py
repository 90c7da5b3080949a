"""The table at the head of an MDS shard and of a LitData chunk, and records that are cut by known offsets.

    uint32 n | uint32 offsets[n + 1] | ... | records

Little-endian. The offsets count from the start of the file; the last one is its end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fastload.errors import DecodeError
from fastload.formats.pieces import Record, Splitter
from fastload.formats.shard_index import Offsets

__all__ = ["OffsetSplitter", "parse_table", "table_size"]


def table_size(count: int) -> int:
    """The bytes of a table of so many records."""
    return 4 * (count + 2)


def parse_table(table: memoryview, count: int, size: int | None) -> Offsets:
    """The offset and size of each record.

    Args:
        table: the first `table_size(count)` bytes of the file.
        count: of records, as the dataset's index.json says.
        size: of the file; None where it is not known.

    Raises:
        DecodeError: it is no such table, or the file was cut.
    """
    found = int.from_bytes(table[:4], "little")
    if found != count:
        raise DecodeError(
            f"the file begins with {found:,} for its number of samples, and index.json says {count:,}: it is "
            "of another kind or of another dataset; copy it again"
        )
    edges = np.frombuffer(table, "<u4", count + 1, 4).astype(np.uint64)
    if edges[0] < table_size(count) or not (edges[1:] > edges[:-1]).all():
        raise DecodeError("the offsets of its samples do not grow: the file is damaged; copy it again")
    if size is not None and edges[-1] != size:
        raise DecodeError(
            f"its samples end at byte {int(edges[-1]):,} of {size:,}: the file was cut; copy it again"
        )
    return np.stack([edges[:-1], edges[1:] - edges[:-1]], axis=1)


class OffsetSplitter(Splitter):
    """See `Splitter`: records whose offsets are known. Damage costs one record.

    Args:
        offset, end: see `Splitter`.
        offsets: of all records of the shard; each begins at the end of the one before or later.
        unwrap: the bytes of a record -> its payload. Raises DecodeError.
    """

    def __init__(
        self, offset: int, end: int | None, offsets: Offsets, unwrap: Callable[[memoryview], memoryview]
    ) -> None:
        super().__init__(offset, end)
        self._offsets = offsets
        self._unwrap = unwrap
        self._at = int(np.searchsorted(offsets[:, 0], offset))

    def next(self) -> Record | None:
        self.over = self.over or self._at == len(self._offsets)
        if self.over:
            return None
        pieces = self._pieces
        offset, size = self._offsets[self._at].tolist()
        pieces.skip(min(offset - pieces.offset, pieces.available))
        record = pieces.peek(size) if pieces.offset == offset else None
        if record is None:
            return (
                self._last(DecodeError("the shard was cut: it ends before this sample"))
                if pieces.closed
                else None
            )
        self._at += 1
        pieces.skip(size)
        try:
            return Record(offset, size, self._unwrap(record))
        except DecodeError as error:
            return Record(offset, size, None, error)
