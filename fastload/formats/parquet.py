"""Parquet files: the footer, and the rows of a row group out of the byte ranges of its columns.

    "PAR1" | column chunks of row group 0 | of row group 1 ... | footer (Thrift) | its size (uint32) | "PAR1"

Apache Parquet's format (https://parquet.apache.org/docs/file-format/), parsed and decoded by pyarrow.
pyarrow's own reader asks for one column chunk after the other. `column_ranges` says in advance which bytes it
will ask for, so that they are read side by side.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastload.errors import DecodeError
from fastload.formats.parquet_pages import decoded_bytes
from fastload.formats.pieces import too_large

__all__ = [
    "TAIL",
    "Ranges",
    "column_ranges",
    "footer_size",
    "leaf_columns",
    "parse_footer",
    "read_row_group",
    "statistics",
]

TAIL = 64 << 10  # bytes at the end of a file among which most footers are
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_END = 8  # bytes behind the footer
_GAP = 256 << 10  # bytes between two ranges below which one request is cheaper than two
_PADDING = 100  # bytes that pyarrow reads beyond a column chunk of old writers (PARQUET-816)

Ranges = list[tuple[int, int]]


def footer_size(tail: Any, size: int) -> int:
    """Bytes of the footer of a file of `size` bytes, with what lies behind it; `tail` is the file's end.

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
    """The `pyarrow.parquet.FileMetaData` of a footer with what lies behind it.

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
    """The numbers of the leaf columns below the named top-level ones. Looks at all columns of the file."""
    wanted = set(columns)
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    names = metadata.schema.to_arrow_schema().names
    top = [name for name in names if name in wanted]
    return [at for at, path in enumerate(paths) if any(path == n or path.startswith(f"{n}.") for n in top)]


def column_ranges(
    metadata: Any, group: int, leaves: Iterable[int], size: int, footer: int
) -> tuple[Ranges, int]:
    """The bytes of some columns of a row group, as ranges [start, stop); and what they inflate to.

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
        starts = [chunk.data_page_offset]
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            starts.append(chunk.dictionary_page_offset)
        start = min(starts)
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


def _joined(ranges: Ranges) -> Ranges:
    """Ranges that touch, or nearly so, as one."""
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
    """The least and the greatest value of a column in a row group; None where the file does not say.

    `leaves`: of each column, see `leaf_columns`.
    """
    if len(leaves[column]) != 1:
        return None
    chunk = metadata.row_group(group).column(leaves[column][0])
    told = chunk.statistics if chunk.path_in_schema == column else None
    return (told.min, told.max) if told is not None and told.has_min_max else None


def read_row_group(
    metadata: Any, group: int, columns: Sequence[str], pieces: Sequence[tuple[int, Any]], size: int, most: int
) -> Any:
    """Some columns of a row group as a `pyarrow.Table`. Takes the GIL only to find the pieces.

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
        decoded = decoded_bytes(metadata, group, leaf_columns(metadata, columns), source, most)
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
        """The next bytes, without a copy where they lie in one piece."""
        stop = self._size if size is None or size < 0 else self._at + size
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
