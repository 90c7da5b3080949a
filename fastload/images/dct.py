"""How caches keep JPEGs: as records of mode "dct", without Huffman codes; or with an index of their rows.

Three quarters of the time of a JPEG decode go into Huffman codes. That work is the same in every epoch, so
the cache can keep its result: the quantised coefficients, in a form that vector instructions read
(`fastload/images/dct.h`). A record is one more encoded image: all functions of `fastload.images` take it
where they take a JPEG's bytes, and its pixels are the same to the bit at each scale and in each crop.

An index of the rows costs less: a crop of a file that has one begins to decode at its own first row
(`fastload/images/rows.h`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastload.errors import DecodeError
from fastload.formats.jpeg import index_size, jpeg_orientation, used_index
from fastload.images.decode import MAX_PIXELS, find_format
from fastload.images.kernel import Source, record_writer, row_index


def available() -> bool:
    """Return whether this process reads and writes records: the kernel does, its fallback does not."""
    return record_writer() is not None


def to_dct(data: Source) -> bytes:
    """Return the record of an image file, or the file's own bytes where there is none.

    There is none for formats other than JPEG, for damaged files, for a few rare kinds of JPEG (several scans
    with more than 10 blocks an MCU; progressive files without their last scans), and without the kernel.
    """
    write = record_writer()
    try:
        file, name = find_format(data)
        if name == "JPEG" and write is not None:
            return write(file, jpeg_orientation(file), MAX_PIXELS)
    except (DecodeError, ValueError):
        pass  # the decode says what is wrong with it
    return bytes(data)


def with_rows(data: Source) -> Any:
    """Return an image file behind the index of its rows, or the file itself where there is none.

    There is none for formats other than JPEG, for damaged files, for those of several scans or with
    arithmetic codes, and without the kernel.
    """
    index = row_index(data, MAX_PIXELS)
    return data if index is None else b"".join((index, data))


class Unindexed(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a file that is on its way into a cache, which is to have the index of its rows too.

    The first crop makes the index on the way, at a quarter of the time that reading through the file takes.
    So the file is written after it: whoever is handed such an array calls `keep` once it has made its sample.
    """

    _index: bytearray | None = None
    _write: Callable[[Any], object] | None = None
    _give_up: Callable[[], object] | None = None

    @classmethod
    def of(cls, file: Source) -> Unindexed:
        """Return A view of these bytes."""
        return np.frombuffer(file, np.uint8).view(cls)

    def bind(self, write: Callable[[Any], object], give_up: Callable[[], object]) -> None:
        """Set what `keep` calls with this file, and what is called if nobody ever calls `keep`."""
        self._write, self._give_up = write, give_up

    def index_room(self, height: int) -> bytearray:
        """Return memory for the index of an image of that height, which a crop makes; see `kernel.Item`."""
        self._index = bytearray(index_size(-(-height // 8)))
        return self._index

    def index(self) -> bytes:
        """Return the index of its rows; empty where it has none."""
        made = None if self._index is None else used_index(memoryview(self._index))
        return row_index(self.data, MAX_PIXELS) or b"" if made is None else bytes(made)

    def keep(self) -> None:
        """Write it, unless that was done; then it leads no more to the cache, whose queue may hold it."""
        write, self._write, self._give_up = self._write, None, None
        if write is not None:
            write(self)

    def __del__(self) -> None:
        if self._give_up is not None:
            self._give_up()
