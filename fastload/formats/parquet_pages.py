"""How much memory the columns of a Parquet row group take, found before they are decoded.

The footer's word is not taken for it: a page of 100 bytes may inflate to gigabytes, a value of a dictionary
may stand in each of a million rows, and a run of one value may have any length. So the header of each page is
read (Apache Parquet's `PageHeader`, in Thrift's compact protocol), and the dictionary where needed.
The encoding DELTA_BYTE_ARRAY, in which a text shares its beginning with the one before, is taken for what it
inflates to: a bound by each text's length would refuse sound files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from fastload.errors import DecodeError

__all__ = ["decoded_bytes"]

_DICTIONARY = 2  # PageType
_HEADS = {5: 2, 7: None, 8: 4}  # fields of PageHeader: headers of these pages -> their field for the encoding
_BY_DICTIONARY = (2, 8)  # Encoding: PLAIN_DICTIONARY, RLE_DICTIONARY
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_LEVELS = 4  # bytes of definition and repetition levels of a value
_OFFSET = 8  # bytes of a text's offset
_FIRST, _MOST_HEADER = 512, 16 << 20  # bytes of a page's header that are read at first, and at most
_MOST_DEPTH = 16


class _Page(NamedTuple):
    """A page: its bytes inflated and in the file, its values, and how many of these the dictionary holds."""

    kind: int
    inflated: int
    stored: int
    values: int
    named: int
    start: int  # of its data, in the file


def decoded_bytes(metadata: Any, group: int, leaves: Iterable[int], source: Any, enough: int) -> int:
    """Return the most bytes that columns of a row group take once they are decoded.

    Args:
        leaves: numbers of the columns, see `leaf_columns`.
        source: the file, of which the columns' bytes are there; read by `seek` and `read`.
        enough: a bound below this many bytes is not made tighter, at the cost of reading dictionaries.

    Raises:
        DecodeError: the header of a page is damaged.
    """
    chunks = [metadata.row_group(group).column(leaf) for leaf in leaves]
    pages = [_pages(chunk, source) for chunk in chunks]
    bounds = [_loose_bound(chunk, found) for chunk, found in zip(chunks, pages, strict=True)]
    for at in range(len(chunks)):
        if sum(bounds) <= enough:
            break
        if (tight := _tight_bound(chunks[at], pages[at], source, enough)) is not None:
            bounds[at] = tight
    return sum(bounds)


def _pages(chunk: Any, source: Any) -> list[_Page]:
    starts = [chunk.data_page_offset]
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        starts.append(chunk.dictionary_page_offset)
    at = min(starts)
    stop, pages = at + chunk.total_compressed_size, []
    while at < stop:
        pages.append(_page(source, at, stop))
        at = pages[-1].start + pages[-1].stored
    return pages


def _page(source: Any, at: int, stop: int) -> _Page:
    size = _FIRST
    while True:
        source.seek(at)
        head = bytes(source.read(min(size, stop - at)))
        try:
            fields, end = _struct(head, 0, 0)
            break
        except IndexError:
            size *= 8
            if size > _MOST_HEADER or len(head) == stop - at:
                raise DecodeError(f"the header of the page at byte {at:,} is cut or damaged") from None
    kind, inflated, stored = (fields.get(field) for field in (1, 2, 3))
    values = named = 0
    for field, encoding in _HEADS.items():
        inner = fields.get(field)
        if isinstance(inner, dict) and kind != _DICTIONARY:
            values = inner.get(1, -1)
            named = values if inner.get(encoding) in _BY_DICTIONARY else 0
    page = _Page(kind, inflated, stored, values, named, at + end)  # type: ignore[arg-type]
    if not all(isinstance(number, int) and number >= 0 for number in page):
        raise DecodeError(f"the header of the page at byte {at:,} is damaged: it tells of {page[:-1]}")
    return page


def _loose_bound(chunk: Any, pages: list[_Page]) -> int:
    width = _WIDTHS.get(chunk.physical_type)
    if width is not None:
        return _bound(pages, width, 0)
    longest = max((page.inflated for page in pages if page.kind == _DICTIONARY), default=0)
    return _bound(pages, _OFFSET, longest)


def _bound(pages: list[_Page], width: int, longest: int) -> int:
    """Bytes of values of `width`, and of those in the dictionary at most `longest` more."""
    inflated, values = sum(page.inflated for page in pages), sum(page.values for page in pages)
    return inflated + values * (width + _LEVELS) + sum(page.named for page in pages) * longest


def _tight_bound(chunk: Any, pages: list[_Page], source: Any, enough: int) -> int | None:
    """The bound by the longest value of the dictionary; None where there is none, or it is too large."""
    import pyarrow as pa

    dictionary = next((page for page in pages if page.kind == _DICTIONARY), None)
    if dictionary is None or chunk.physical_type != "BYTE_ARRAY" or dictionary.inflated > enough:
        return None
    source.seek(dictionary.start)
    data = source.read(dictionary.stored)
    try:
        if chunk.compression != "UNCOMPRESSED":
            codec = "lz4_raw" if chunk.compression == "LZ4" else chunk.compression.lower()
            data = pa.decompress(data, dictionary.inflated, codec=codec)
    except (pa.ArrowException, OSError, ValueError):  # decoding will say what is wrong with it
        return None
    view, at, longest = memoryview(data), 0, 0
    while at + 4 <= len(view):
        length = int.from_bytes(view[at : at + 4], "little")
        longest, at = max(longest, length), at + 4 + length
    return _bound(pages, _OFFSET, longest)


# ---------------------------------------------------------------- Thrift's compact protocol


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """(fields by number, the position behind them). IndexError: the bytes end before it does."""
    if depth > _MOST_DEPTH:
        raise DecodeError("the header of a page is nested too deeply: it is damaged")
    fields: dict[int, Any] = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        kind = head & 15
        if not kind:
            return fields, at
        if head >> 4:
            number += head >> 4
        else:
            number, at = _varint(data, at)
        fields[number], at = _value(data, at, kind, depth)


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # a field that is true or false has no bytes
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _varint(data, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = _varint(data, at, signed=False)
        if at + size > len(data):
            raise IndexError
        return None, at + size
    if kind in (9, 10):
        head = data[at]
        count, at = (head >> 4, at + 1) if head >> 4 < 15 else _varint(data, at + 1, signed=False)
        for _ in range(count):
            _, at = _value(data, at, 3 if head & 15 in (1, 2) else head & 15, depth)
        return None, at
    if kind == 12:
        return _struct(data, at, depth + 1)
    raise DecodeError(f"the header of a page is damaged: it has a field of kind {kind}")


def _varint(data: bytes, at: int, *, signed: bool = True) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return (value >> 1 ^ -(value & 1) if signed else value), at
        if shift > 63:
            raise DecodeError("the header of a page is damaged: it has a number of more than 64 bits")
