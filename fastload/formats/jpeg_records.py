"""How caches keep JPEGs: what a record begins with, by which it is recognised.

    a record of mode "dct"       no Huffman codes: `fastload/images/dct.h`
    a file with its row index    the index of its rows, then the file: `fastload/images/rows.h`

Apart from `fastload.images`, so that a command that looks into a cache starts without torch.
"""

from __future__ import annotations

from typing import Any

# The last byte is the version. At 5 follows the EXIF orientation, at 7 the number of components.
DCT_MAGIC = b"\x89DCT\x01"
# The last byte is the version. At 6 follows the number of entries.
ROWS_MAGIC = b"\x89ROW\x01"
_HEAD, _ENTRY = 8, 10


def is_dct(data: Any) -> bool:
    """Return whether bytes, in anything with the buffer protocol, are a record of mode "dct"."""
    view = memoryview(data).cast("B")
    return len(view) > 7 and view[:5] == DCT_MAGIC


def is_record(data: Any) -> bool:
    """Return whether bytes, in anything with the buffer protocol, begin like a record of either kind."""
    return bytes(memoryview(data).cast("B")[:5]) in (DCT_MAGIC, ROWS_MAGIC)


def without_rows(data: memoryview) -> memoryview:
    """Return a file without the index of its rows; itself where it has none."""
    index = used_index(data)
    return data if index is None else data[len(index) :]


def index_size(rows: int) -> int:
    """Return the bytes of an index."""
    return _HEAD + _ENTRY * rows


def used_index(data: memoryview) -> memoryview | None:
    """Return the index with which bytes begin, if they do."""
    if len(data) < _HEAD or data[:5] != ROWS_MAGIC:
        return None
    return data[: index_size(data[6] | data[7] << 8)]
