"""Parquet files: the footer, and the rows of a row group out of the byte ranges of its columns.

    "PAR1" | column chunks of row group 0 | of row group 1 ... | footer (Thrift) | its size (uint32) | "PAR1"

Apache Parquet's format (https://parquet.apache.org/docs/file-format/), parsed and decoded by pyarrow.
pyarrow's own reader asks for one column chunk after the other. `column_ranges` says in advance which bytes it
will ask for, so that they are read side by side.

`decoded_bytes` says how much memory a row group takes, before it is decoded. The footer's word is not taken
for it: a page of 100 bytes may inflate to gigabytes, a value of a dictionary may stand in each of a million
rows, and a run of one value may have any length. So the header of each page is read (Apache Parquet's
`PageHeader`, in Thrift's compact protocol). If they do not prove that there is room, the dictionaries are
read, and at last which of their values each row names. The encoding DELTA_BYTE_ARRAY, in which a text shares
its beginning with the one before, is taken for what it inflates to: a bound by each text's length would
refuse sound files.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from fastload.errors import DecodeError
from fastload.formats.pieces import too_large, varint

TAIL = 64 << 10  # bytes at the end of a file among which most footers are
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_END = 8  # bytes behind the footer
_GAP = 256 << 10  # bytes between two ranges below which one request is cheaper than two
_PADDING = 100  # bytes that pyarrow reads beyond a column chunk of old writers (PARQUET-816)

Ranges = list[tuple[int, int]]


def footer_size(tail: Any, size: int) -> int:
    """Return the bytes of the footer, with what lies behind it, of a file of `size` bytes with that end.

    Raises:
        DecodeError: the file does not end as Parquet files do.
    """
    end = bytes(memoryview(tail)[-_END:])
    if end[4:] == _ENCRYPTED:
        raise DecodeError("the file is encrypted, which fastload does not read: write it without encryption")
    found = int.from_bytes(end[:4], "little") + _END
    if len(end) < _END or end[4:] != _MAGIC or found + len(_MAGIC) > size:
        raise DecodeError(
            f"the file does not end as a Parquet file does, with 'PAR1', but with {end[4:]!r}: it was cut, "
            "or is a file of another kind. Copy it again, or leave it out of url"
        )
    return found


def parse_footer(footer: Any) -> Any:
    """Return the `pyarrow.parquet.FileMetaData` of a footer with what lies behind it.

    Raises:
        DecodeError: it is damaged, or encrypted.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(pa.BufferReader(footer))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DecodeError(f"the footer cannot be read: {_first_line(error)}") from error


def leaf_columns(metadata: Any, columns: Iterable[str]) -> list[int]:
    """Return the numbers of the leaf columns below the named top-level ones, of all columns of the file."""
    wanted = set(columns)
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    names = metadata.schema.to_arrow_schema().names
    top = [name for name in names if name in wanted]
    return [at for at, path in enumerate(paths) if any(path == n or path.startswith(f"{n}.") for n in top)]


def column_ranges(
    metadata: Any, group: int, leaves: Iterable[int], size: int, footer: int
) -> tuple[Ranges, int]:
    """Return the bytes of some columns of a row group, as ranges [start, stop); and what they inflate to.

    Args:
        leaves: of `leaf_columns`.
        size, footer: of the file, and of the footer at its end.

    Raises:
        DecodeError: the row group is not all in the file.
    """
    row_group = metadata.row_group(group)
    found: Ranges = []
    inflated = 0
    if not row_group.num_rows:  # its columns lie nowhere
        return found, inflated
    for leaf in leaves:
        chunk = row_group.column(leaf)
        start = _start_of(chunk)
        stop = start + chunk.total_compressed_size
        if chunk.file_path or not 0 < start <= stop <= size - footer:
            raise DecodeError(
                f"row group {group} is not all in the file: column {chunk.path_in_schema!r} lies at bytes "
                f"{start:,} to {stop:,}, and the data end at {size - footer:,}. The file was cut or damaged: "
                "copy or write it again"
            )
        found.append((start, min(stop + _PADDING, size)))
        inflated += chunk.total_uncompressed_size
    return _joined(sorted(found)), inflated


def _start_of(chunk: Any) -> int:
    has_dictionary = chunk.has_dictionary_page and chunk.dictionary_page_offset
    return int(min(chunk.data_page_offset, chunk.dictionary_page_offset if has_dictionary else math.inf))


def _joined(ranges: Ranges) -> Ranges:
    """Join ranges that touch, or nearly so."""
    joined: Ranges = []
    for start, stop in ranges:
        if joined and start <= joined[-1][1] + _GAP:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def statistics(
    metadata: Any, group: int, leaves: Mapping[str, list[int]], column: str
) -> tuple[Any, Any] | None:
    """Return the least and greatest value of a column in a row group; None where the file does not say.

    `leaves`: of each column, see `leaf_columns`.
    """
    if len(leaves[column]) != 1:
        return None
    chunk = metadata.row_group(group).column(leaves[column][0])
    told = chunk.statistics if chunk.path_in_schema == column else None
    try:
        return (told.min, told.max) if told is not None and told.has_min_max else None
    except (ValueError, OverflowError):  # no value of Python, such as a time in nanoseconds
        return None


def read_row_group(
    metadata: Any, group: int, columns: Sequence[str], pieces: Sequence[tuple[int, Any]], size: int, most: int
) -> Any:
    """Read some columns of a row group as a `pyarrow.Table`. Take the GIL only to find the pieces.

    Args:
        pieces: (position in the file, bytes) of what `column_ranges` named, in order.
        size: of the file.
        most: bytes that the columns may take once they are decoded.

    Raises:
        DecodeError: its bytes are damaged, packed by a codec that pyarrow does not have, or would take more.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = _Pieces(pieces, size)
        decoded = decoded_bytes(metadata, [group], leaf_columns(metadata, columns), source, most)
        if decoded > most:
            raise DecodeError(too_large(f"row group {group}", decoded, most))
        with pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True) as file:
            return file.read_row_group(group, columns=list(columns), use_threads=False)
    except DecodeError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise DecodeError(f"row group {group} cannot be read: {_first_line(error)}") from error


class _Pieces(io.RawIOBase):
    """A file of which only some pieces are here."""

    def __init__(self, pieces: Sequence[tuple[int, Any]], size: int) -> None:
        self._pieces = [(start, memoryview(body).cast("B")) for start, body in pieces]
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> Any:
        """Return the next bytes, without a copy where they lie in one piece."""
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        parts = []
        for start, body in self._pieces:
            if start <= self._at < start + len(body):
                parts.append(body[self._at - start : stop - start])
                self._at += len(parts[-1])
            if self._at >= stop:
                break
        else:
            raise OSError(f"bytes up to {stop:,} are wanted, beyond the columns that the footer names")
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


_DICTIONARY = 2  # PageType
_HEADS = {0: (5, 2), 3: (8, 4)}  # PageType of values: the field of its own header, and there of the encoding
_BY_DICTIONARY = (2, 8)  # Encoding: PLAIN_DICTIONARY, RLE_DICTIONARY
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_LEVELS = 4  # bytes of definition and repetition levels of a value
_OFFSET = 8  # bytes of a text's offset
_HASHED = 200  # bytes that pyarrow takes, at most, for a value while it makes a dictionary
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


class _Fixed(NamedTuple):
    """The lists of a fixed size around a leaf column: how many, and the values of one row of them."""

    lists: int
    values: int


_NO_LISTS = _Fixed(0, 1)


class _Chunk(NamedTuple):
    """A column of a row group: its numbers, what the footer says of it, its pages, and values in memory."""

    group: int
    leaf: int
    told: Any
    pages: list[_Page]
    values: int  # with those for which a null of fixed-size lists has room


def decoded_bytes(
    metadata: Any, groups: Iterable[int], leaves: Iterable[int], source: Any, enough: int
) -> int:
    """Return the most bytes that columns of row groups take once they are decoded.

    Args:
        leaves: numbers of the columns, see `leaf_columns`.
        source: the file, of which the columns' bytes are there; read by `seek` and `read`.
        enough: a bound up to this many bytes is not made tighter, which costs reading dictionaries.

    Raises:
        DecodeError: the header of a page is damaged.
    """
    leaves, chunks = list(leaves), []
    fixed = _fixed_lists(metadata)
    for group in groups:
        for leaf in leaves:
            told, around = metadata.row_group(group).column(leaf), fixed[leaf]
            pages = _pages(told, source)
            values = sum(page.values for page in pages)
            # Among lists of any length, each value may be the null of a list of a fixed size.
            any_length = metadata.schema.column(leaf).max_repetition_level > around.lists
            nulls = values if any_length else metadata.row_group(group).num_rows
            chunks.append(_Chunk(group, leaf, told, pages, max(values, nulls * around.values)))
    bounds = [_loose_bound(metadata, chunk) for chunk in chunks]
    total, texts = sum(bounds), _Texts(metadata, source, enough)
    for tighter in (texts.bound_by_longest, texts.bound_by_rows):
        for at, chunk in enumerate(chunks):
            if total <= enough:
                return total
            is_text = chunk.told.physical_type == "BYTE_ARRAY" and _named(chunk)
            if is_text and (bound := tighter(chunk)) is not None:
                total += bound - bounds[at]
                bounds[at] = bound
        if sum(_bound(chunk, 0) for chunk in chunks) > enough:  # it is too large whatever the rows name
            return total
    return total


def _pages(chunk: Any, source: Any) -> list[_Page]:
    """Return the pages of a column chunk. As pyarrow does, read to its last value, even into the padding."""
    at = _start_of(chunk)
    stop, pages, values = at + chunk.total_compressed_size, [], 0
    while at < stop or values < chunk.num_values:
        if at >= stop + _PADDING:
            raise DecodeError(
                f"column {chunk.path_in_schema!r} has {values:,} values, and the footer tells of "
                f"{chunk.num_values:,}: the file was damaged, copy or write it again"
            )
        pages.append(_page(source, at, stop + _PADDING))
        at = pages[-1].start + pages[-1].stored
        values += pages[-1].values
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
        except ValueError as error:
            raise DecodeError(f"the header of the page at byte {at:,} is damaged: {error}") from None
    kind, inflated, stored = (fields.get(field) for field in (1, 2, 3))
    values = named = 0
    if kind in _HEADS:
        field, encoding = _HEADS[kind]
        inner = fields.get(field)
        inner = inner if isinstance(inner, dict) else {}
        values = inner.get(1, -1)
        named = values if inner.get(encoding) in _BY_DICTIONARY else 0
    page = _Page(kind, inflated, stored, values, named, at + end)  # type: ignore[arg-type]
    if not all(isinstance(number, int) and number >= 0 for number in page):
        raise DecodeError(f"the header of the page at byte {at:,} is damaged: it tells of {page[:-1]}")
    return page


def _bound(chunk: _Chunk, width: int, decoded: int = 0) -> int:
    """Return the bytes of the pages, or of what they decode to if that is more, and `width` a value."""
    return max(sum(page.inflated for page in chunk.pages), decoded) + chunk.values * (width + _LEVELS)


def _named(chunk: _Chunk) -> int:
    return sum(page.named for page in chunk.pages)


def _fixed_lists(metadata: Any) -> list[_Fixed]:
    """Return those of all leaf columns. The writer of the file names them in the footer."""
    found = [fixed for field in metadata.schema.to_arrow_schema() for _, fixed in _leaves(field.type)]
    if len(found) != metadata.num_columns:
        return [max(found, key=lambda fixed: fixed.values, default=_NO_LISTS)] * metadata.num_columns
    return found


def _loose_bound(metadata: Any, chunk: _Chunk) -> int:
    kind = chunk.told.physical_type
    if kind in _WIDTHS:
        return _bound(chunk, _WIDTHS[kind])
    if kind == "FIXED_LEN_BYTE_ARRAY":  # a null takes as much as a value
        return _bound(chunk, _OFFSET, chunk.values * metadata.schema.column(chunk.leaf).length)
    longest = max((page.inflated for page in chunk.pages if page.kind == _DICTIONARY), default=0)
    return _bound(chunk, _OFFSET) + _named(chunk) * longest


class _Texts:
    """Bounds of columns of texts that dictionaries hold. Each costs more than the one before."""

    def __init__(self, metadata: Any, source: Any, enough: int) -> None:
        self._metadata = metadata
        self._source = source
        self._enough = enough
        self._entries: dict[tuple[int, int], int] = {}  # (row group, leaf) -> texts of its dictionary

    def bound_by_longest(self, chunk: _Chunk) -> int | None:
        """Return the bound by the dictionary's longest value; None if it is too large, or missing."""
        import pyarrow as pa

        dictionary = next((page for page in chunk.pages if page.kind == _DICTIONARY), None)
        if dictionary is None or dictionary.inflated > self._enough:
            return None
        self._source.seek(dictionary.start)
        data, compression = self._source.read(dictionary.stored), chunk.told.compression
        try:
            if compression != "UNCOMPRESSED":
                codec = "lz4_raw" if compression == "LZ4" else compression.lower()
                data = pa.decompress(data, dictionary.inflated, codec=codec)
        except (pa.ArrowException, OSError, ValueError):  # decoding will say what is wrong with it
            return None
        view, at, longest, entries = memoryview(data), 0, 0, 0
        while at + 4 <= len(view):
            length = int.from_bytes(view[at : at + 4], "little")
            longest, at, entries = max(longest, length), at + 4 + length, entries + 1
        self._entries[chunk.group, chunk.leaf] = entries
        return _bound(chunk, _OFFSET) + _named(chunk) * longest

    def bound_by_rows(self, chunk: _Chunk) -> int | None:
        """Return the bound by the text that each row names; None where there is no room to find out.

        pyarrow reads a column as a dictionary and numbers of its values, which do not grow with the texts.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        entries = self._entries.get((chunk.group, chunk.leaf))
        if entries is None:
            return None
        others = sum(page.values - page.named for page in chunk.pages)
        if _bound(chunk, _OFFSET) + (entries + others) * _HASHED > self._enough:
            return None
        try:
            if chunk.leaf not in self._readable:
                return None
            paths, decoded = [chunk.told.path_in_schema], 0
            table = self._file.read_row_group(chunk.group, paths, use_threads=False)
            for texts in table.column(0).chunks:
                while pa.types.is_nested(texts.type):
                    texts = texts.field(0) if pa.types.is_struct(texts.type) else texts.values
                lengths = pc.take(pc.binary_length(texts.dictionary), texts.indices)
                decoded += pc.sum(lengths).as_py() or 0
            return _bound(chunk, _OFFSET, decoded)
        except (pa.ArrowException, OSError, ValueError, MemoryError, RecursionError):  # as above
            return None

    @cached_property
    def _paths(self) -> list[str]:
        return [self._metadata.schema.column(leaf).path for leaf in range(self._metadata.num_columns)]

    @cached_property
    def _file(self) -> Any:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self._source, metadata=self._metadata, read_dictionary=self._paths)

    @cached_property
    def _readable(self) -> set[int]:
        """The columns that pyarrow reads as dictionaries, and that no other one is read with."""
        import pyarrow as pa

        kinds = [kind for field in self._file.schema_arrow for kind, _ in _leaves(field.type)]
        shared = Counter(part for path in self._paths for part in accumulate(path.split("."), "{}.{}".format))
        leaves = zip(self._paths, kinds, strict=True) if len(kinds) == len(self._paths) else ()
        return {
            n for n, (path, kind) in enumerate(leaves) if pa.types.is_dictionary(kind) and shared[path] == 1
        }


def _leaves(kind: Any, fixed: _Fixed = _NO_LISTS) -> Iterator[tuple[Any, _Fixed]]:
    """Yield the type of each leaf column below a type of Arrow, and the lists of a fixed size around it."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_fixed_size_list(kind):
        fixed = _Fixed(fixed.lists + 1, fixed.values * kind.list_size)
    if not pa.types.is_nested(kind):
        yield kind, fixed
    else:
        for number in range(kind.num_fields):
            yield from _leaves(kind.field(number).type, fixed)


# ---------------------------------------------------------------- Thrift's compact protocol


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Return (fields by number, the position behind them). IndexError: the bytes end before it does."""
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deeply")
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
            number, at = _signed(data, at)
        fields[number], at = _value(data, at, kind, depth)


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # a field that is true or false has no bytes
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _signed(data, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = varint(data, at)
        if at + size > len(data):
            raise IndexError
        return None, at + size
    if kind in (9, 10):
        head = data[at]
        count, at = (head >> 4, at + 1) if head >> 4 < 15 else varint(data, at + 1)
        for _ in range(count):
            _, at = _value(data, at, 3 if head & 15 in (1, 2) else head & 15, depth)
        return None, at
    if kind == 12:
        return _struct(data, at, depth + 1)
    raise ValueError(f"it has a field of kind {kind}")


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, at = varint(data, at)
    return value >> 1 ^ -(value & 1), at
