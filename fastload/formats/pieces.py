"""Bytes that arrive in pieces, read as one sequence and split into records; and where records lie in a shard.

Bytes are copied only where a request spans two pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fastload.errors import DecodeError

# Bytes that compressed or encoded data may become: a record of a compressed shard, a row group, a table. The
# storage option "max_inflated" sets it.
MAX_INFLATED = 512 << 20
# (offset, size) of each record of one shard, in order: uint64, shape (n, 2).
Offsets = NDArray[np.uint64]
_LARGE = 32 << 20  # bytes of a request whose pieces are moved together, not copied


def too_large(what: str, size: int, most: int) -> str:
    """Return the words for data that would become larger than the storage option allows."""
    return (
        f"{what} would be {size:,} bytes inflated, more than max_inflated={most:,}: if the data is sound, "
        f"give storage_options={{'max_inflated': {size}}}"
    )


class Record(NamedTuple):
    """One record of a shard: the bytes [offset, offset + size), framing included.

    Attributes:
        offset, size: in the shard; of the inflated bytes, where it is compressed.
        payload: the content, a view of the piece it came in; None where `error` says why.
        lasting: the error follows from headers with sound checksums, so reading again finds the same. Any
            other damage may have happened in transfer.
    """

    offset: int
    size: int
    payload: memoryview | None
    error: DecodeError | None = None
    lasting: bool = False


class Pieces:
    """A queue of bytes.

    Attributes:
        offset: of the next byte, in the shard.
        available: bytes that have arrived.
        closed: whether no more will arrive.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.available = 0
        self.closed = False
        self._first = memoryview(b"")
        self._at = 0  # of the next byte, in the first piece
        self._others: deque[memoryview] = deque()
        self._joined = memoryview(b"")  # a copy of the next bytes, where a request spanned two pieces

    def feed(self, piece: memoryview) -> None:
        """Append a piece, which must not change any more."""
        self.available += len(piece)
        if self._at == len(self._first):
            self._first, self._at = piece, 0
        else:
            self._others.append(piece)

    def peek(self, n: int) -> memoryview | None:
        """Return the next `n` bytes, which stay in the queue; None where fewer have arrived."""
        stop = self._at + n
        if stop <= len(self._first):
            return self._first[self._at : stop]
        if n > self.available:
            return None
        if n > _LARGE:
            self._move_together(n)
            return self._first[:n]
        if n > len(self._joined):
            # Twice as many as before: a request that grows by a header at a time would copy all at each.
            self._joined = self._join(min(self.available, max(n, 2 * len(self._joined))))
        return self._joined[:n]

    def skip(self, n: int) -> None:
        """Drop the next `n` bytes, which must have arrived."""
        self.offset += n
        self.available -= n
        self._joined = memoryview(b"")
        left = len(self._first) - self._at
        while n >= left and self._others:
            n -= left
            self._first, self._at = self._others.popleft(), 0
            left = len(self._first)
        self._at += n

    def _move_together(self, n: int) -> None:
        """Make one piece of those with the next `n` bytes. Each is let go once it is copied."""
        whole, size = [self._first[self._at :]], len(self._first) - self._at
        while size < n:
            whole.append(self._others.popleft())
            size += len(whole[-1])
        self._first, self._at, self._joined = memoryview(bytearray(size)), 0, memoryview(b"")
        at = 0
        for number, piece in enumerate(whole):
            self._first[at : at + len(piece)] = piece
            at += len(piece)
            whole[number] = memoryview(b"")

    def _join(self, n: int) -> memoryview:
        """Return a copy of the next `n` bytes. The pieces stay, so that later bytes are not copied too."""
        parts = [self._first[self._at :]]
        n -= len(parts[0])
        for piece in self._others:
            if n <= 0:
                break
            parts.append(piece[:n])
            n -= len(piece)
        return memoryview(b"".join(parts))


class Splitter(ABC):
    """Cuts the bytes of one shard into records, in order. One shard, one splitter.

    Args:
        offset: of the first record, in the shard.
        end: of the shard; None where it is unknown (a compressed shard).

    Attributes:
        over: no record follows, whatever bytes may.
        max_inflated: bytes of a record where the end of the shard is unknown.
    """

    def __init__(self, offset: int, end: int | None) -> None:
        self._pieces = Pieces(offset)
        self._end = end
        self.max_inflated = MAX_INFLATED
        self.over = False

    def feed(self, piece: memoryview) -> None:
        """Take the next bytes of the shard."""
        self._pieces.feed(piece)

    def close(self) -> None:
        """End the bytes: this is the end of the shard, or of the wanted part of it."""
        self._pieces.closed = True

    @abstractmethod
    def next(self) -> Record | None:
        """Return the next record; None where more bytes are needed, or, after `close`, where none is left.

        A damaged record whose end is known has an `error`, and the next one follows. Where the start of the
        next record is not known, the record with the error reaches to the end of the shard and is the last:
        the splitter does not search for another.
        """

    def _last(self, error: DecodeError) -> Record:
        """Return a record with an error, after which no other can be found."""
        self.over = True
        offset = self._pieces.offset
        end = self._end if self._end is not None else offset + self._pieces.available
        return Record(offset, end - offset, None, error)


def check_offsets(offsets: Offsets, shard_size: int, *, whole: bool) -> Offsets:
    """Raise unless the records follow one another within the shard and, with `whole`, fill it."""
    starts, sizes = offsets[:, 0], offsets[:, 1]
    if len(offsets):
        most = np.uint64(shard_size)
        inside = bool((sizes <= most).all() and (starts <= most).all() and (starts + sizes <= most).all())
        if not inside or not (sizes > 0).all() or not (starts[1:] >= starts[:-1] + sizes[:-1]).all():
            raise DecodeError(
                f"the index does not fit a shard of {shard_size:,} bytes: it belongs to another shard "
                "or is out of date"
            )
    end = int(starts[-1] + sizes[-1]) if len(offsets) else 0
    if whole and end != shard_size:
        raise DecodeError(f"the index ends at byte {end:,} of a shard of {shard_size:,}: write it again")
    return offsets


class Sink(Protocol):
    """The destination of a shard's bytes, such as a file."""

    def write(self, data: Any, /) -> Any: ...
