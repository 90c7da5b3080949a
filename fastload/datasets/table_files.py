"""The table of a `TableDataset`, from a file, a data frame, rows or columns.

    .csv .tsv                  a line a row, the first one names the columns; quoted text may have line ends
    .jsonl .ndjson .json       a JSON object per line, or one JSON array of objects
    .parquet .pq               Apache Parquet

CSV and JSON may be compressed by gzip. The content of a file has to be what its name says.

A file is parsed in a process of its own, which takes Arrow's threads with it when it ends.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastload.datasets.arrow import mapped_table, write_table
from fastload.errors import ArgumentError, DecodeError, NotFoundError
from fastload.formats.parquet import decoded_bytes, leaf_columns
from fastload.formats.pieces import Inflater, kind_of, too_large
from fastload.store import open_store
from fastload.store.client_process import ClientProcess, clients_live_here
from fastload.store.failures import redacted
from fastload.store.node import SharedFile

_KINDS = {
    "csv": "CSV",
    "tsv": "CSV",
    "jsonl": "JSON",
    "ndjson": "JSON",
    "json": "JSON",
    "parquet": "Parquet",
    "pq": "Parquet",
}
_NAMES = "a table's name ends in .csv, .tsv, .jsonl, .ndjson, .json or .parquet (.gz behind it is accepted)"
_BOM = b"\xef\xbb\xbf"
_JSON = re.compile(rb'\s*(\{\s*["}]|\[\s*[{\]])')
_SOMETHING = re.compile(r"\S")
_MOST = 1 << 30  # bytes that are parsed as one block: types are then inferred from all rows
_SHOWN = 20  # columns in a message
_MOST_DEEP = 500  # openings of lists and objects in a line, from which on their depth is looked at
_BAD = (
    *(pa.ArrowException, TypeError, ValueError, OverflowError, OSError, LookupError, RecursionError),
    *(MemoryError, AttributeError),
)


def read_table(table: Any, columns: Sequence[str], text: Collection[str], options: Mapping[str, Any]) -> Any:
    """Return these columns of a table, as a `pyarrow.Table`.

    Args:
        table: a URL or path; anything that Arrow knows as a table; a pandas DataFrame; rows as mappings; or a
            mapping of columns.
        columns: their names, each once.
        text: those among them that are text whatever they look like in a CSV file, such as "0001".
        options: of the store of a path or URL.

    Raises:
        ArgumentError: a column is missing, the table is of another kind than its name, or it is damaged.
        NotFoundError, StoreError: it cannot be read.
    """
    if isinstance(table, str | os.PathLike):
        return _from_file(os.fspath(table), columns, text, options)
    if type(table).__module__.partition(".")[0] == "pandas":
        return _from_pandas(table, columns)
    if isinstance(table, pa.Table | pa.RecordBatch) or hasattr(table, "__arrow_c_stream__"):
        found = pa.table(table) if not isinstance(table, pa.RecordBatch) else pa.Table.from_batches([table])
        _check_columns(found.column_names, columns, "the table")
        return found.select(columns)
    if isinstance(table, Mapping):
        _check_columns(list(table), columns, "the table")
        return _joined({name: _array(name, table[name]) for name in columns})
    if isinstance(table, Sequence):
        return _from_rows(table, columns, "the table")
    raise ArgumentError(
        "table must be the path or URL of a file, a data frame, an Arrow table, a list of dicts or a dict of "
        f"columns, found a {type(table).__name__}"
    )


# --- files


def _from_file(url: str, columns: Sequence[str], text: Collection[str], options: Mapping[str, Any]) -> Any:
    directory, slash, name = url.rpartition("/")
    if directory.endswith(":/"):  # memory://labels.csv
        directory += slash
    ending = name.lower().removesuffix(".gz").rpartition(".")[2]
    if ending not in _KINDS:
        raise ArgumentError(
            f"table {redacted(url)!r}: {_NAMES}. Read other files yourself, and pass the data frame"
        )
    store = open_store(directory or slash or ".", **options)

    try:
        data = memoryview(store.read(name))
    except NotFoundError:
        raise NotFoundError(f"there is no table {redacted(url)!r}: check its path or URL") from None

    def parse(path: Path) -> None:
        with path.open("wb") as file:
            most = store.reading.max_inflated
            write_table(file.fileno(), _parsed(data, redacted(url), ending, columns, text, most))

    def write(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}")
        if clients_live_here():
            parse(path)
        else:
            ClientProcess().call(parse, "__call__", path)

    return mapped_table(SharedFile.written("fastload-table", write))


def _parsed(
    data: memoryview, url: str, ending: str, columns: Sequence[str], text: Collection[str], most: int
) -> Any:
    """Return the columns, of a table that may be `most` bytes inflated."""
    kind = _KINDS[ending]
    if kind_of(data) == "gzip":
        data = _inflated(data, url, most)
    if data[:3] == _BOM:
        data = data[3:]
    found = _kind_of(data)
    if found != kind and not (kind == "CSV" and not found):
        raise ArgumentError(
            f"table {url!r} is named as {kind}, and its content is {found or 'something else'}: {_NAMES}"
        )
    try:
        if kind == "CSV":
            return _from_csv(data, "\t" if ending == "tsv" else ",", url, columns, text)
        return _from_json(data, url, columns) if kind == "JSON" else _from_parquet(data, url, columns, most)
    except ArgumentError:
        raise
    except _BAD as error:
        raise ArgumentError(
            f"table {url!r} cannot be read as {kind}: {f'{error}'[:300] or type(error).__name__}. Mend it, "
            "or pass the data frame that another program reads"
        ) from None


def _inflated(data: memoryview, url: str, most: int) -> memoryview:
    pieces, size, parts = iter([data]), 0, []
    inflate = Inflater(lambda: next(pieces, None))
    try:
        while (part := inflate()) is not None:
            size += len(part)
            if size > most:
                raise ArgumentError(
                    too_large(f"table {url!r}", size, most).replace("would be", "has at least")
                )
            parts.append(part)
    except DecodeError as error:
        raise ArgumentError(f"table {url!r} is cut or damaged: {error.message}") from None
    return memoryview(b"".join(parts))


def _kind_of(data: memoryview) -> str:
    """ "Parquet", "JSON", "HTML or XML", what it is compressed by, or "" for anything else."""
    head = bytes(data[:512])
    if head.startswith(b"PAR1"):
        return "Parquet"
    if _JSON.match(head):
        return "JSON"
    if re.match(rb"\s*<[!?a-zA-Z]", head):
        return "HTML or XML"
    return kind_of(data)


def _from_csv(
    data: memoryview, delimiter: str, url: str, columns: Sequence[str], text: Collection[str]
) -> Any:
    from pyarrow import csv

    reading = csv.ReadOptions(block_size=min(max(len(data), 1), _MOST))
    parsing = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    header = csv.open_csv(pa.BufferReader(data[: _header_end(data)]), parse_options=parsing).schema.names
    _check_columns(header, columns, f"table {url!r}")

    def read(types: Mapping[str, Any]) -> Any:
        converting = csv.ConvertOptions(include_columns=list(columns), column_types=types)
        return csv.read_csv(pa.BufferReader(data), reading, parsing, converting)

    types = {name: pa.string() for name in text}
    found = read(types)
    dates = _dates_as_text(found.schema)
    if dates:
        found = read(types | dates)
    for field in found.schema:
        if pa.types.is_binary(field.type):
            raise ArgumentError(f"column {field.name!r} of table {url!r} is not in UTF-8: convert the file")
    large = [name for name in columns if _is_large(found[name])]
    whole = read(dict.fromkeys(large, pa.string())) if large else found
    for name in large:
        long = whole[name].filter(pc.match_substring_regex(whole[name], r"^[+-]?\d{19,}$"))
        _check_whole(name, url, map(int, long.to_pylist()), "with a letter before them")
    return found


def _is_large(column: Any) -> bool:
    """Return whether a column of floats has one that may stand for a whole number beyond int64."""
    most = pc.max(pc.abs(column)).as_py() if pa.types.is_floating(column.type) else None
    return most is not None and most >= 2**63


def _check_whole(name: str, url: str, values: Iterable[Any], advice: str) -> None:
    """Refuse whole numbers beyond int64: Arrow has made floats of all in their column, and rounded them."""
    if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values):
        raise ArgumentError(
            f"column {name!r} of table {url!r} has whole numbers that int64 cannot hold: write them "
            f"{advice}, as text"
        )


def _dates_as_text(schema: Any) -> dict[str, Any]:
    """Return column -> its type with text in place of dates, where Arrow took text for dates."""
    return {field.name: kind for field in schema if (kind := _undated(field.type)) != field.type}


def _undated(kind: Any) -> Any:
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_undated(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _undated(field.type)) for field in kind])
    return kind


def _header_end(data: memoryview) -> int:
    """Return where the first line ends that closes its quotes."""
    quotes, at = 0, 0
    for line in bytes(data[: 1 << 20]).splitlines(keepends=True):
        quotes, at = quotes + line.count(b'"'), at + len(line)
        if quotes % 2 == 0:
            return at
    return len(data)


def _from_json(data: memoryview, url: str, columns: Sequence[str]) -> Any:
    from pyarrow import json as lines

    what = f"table {url!r}"
    if bytes(data[:512]).lstrip().startswith(b"["):
        return _from_rows(json.loads(bytes(data)), columns, what)
    if _is_deep(data):  # Arrow's parser would end this process
        raise ArgumentError(f"{what} has a line that is nested too deeply")
    reading = lines.ReadOptions(block_size=min(max(len(data), 1), _MOST))
    found = lines.read_json(pa.BufferReader(data), reading)
    _check_columns(found.column_names, columns, what)
    dates = _dates_as_text(found.select(columns).schema)
    if dates:
        parsing = lines.ParseOptions(explicit_schema=pa.schema(dates.items()))
        found = lines.read_json(pa.BufferReader(data), reading, parsing)
    for name in columns:
        if _is_large(found[name]):
            _check_whole(name, url, (row.get(name) for row in _objects(data)), "in quotes")
    return found.select(columns)


def _objects(data: memoryview) -> Iterator[Any]:
    """Return the objects of JSON lines as Python has them; one may take several lines, as in Arrow."""
    text, at, decoder = bytes(data).decode(), 0, json.JSONDecoder()
    while start := _SOMETHING.search(text, at):
        found, at = decoder.raw_decode(text, start.start())
        yield found


def _is_deep(data: memoryview) -> bool:
    """Return whether a line of JSON is nested more deeply than Python's own parser goes."""
    for line in re.finditer(rb"[^\n]+", data):
        text = line[0]
        if text.count(b"[") + text.count(b"{") > _MOST_DEEP:
            try:
                json.loads(text)
            except RecursionError:
                return True
            except ValueError:  # Arrow will say what is wrong with it
                pass
    return False


def _from_parquet(data: memoryview, url: str, columns: Sequence[str], most: int) -> Any:
    from pyarrow import parquet

    file = parquet.ParquetFile(pa.BufferReader(data))
    _check_columns(file.schema_arrow.names, columns, f"table {url!r}")
    leaves, groups = leaf_columns(file.metadata, columns), range(file.metadata.num_row_groups)
    try:
        size = decoded_bytes(file.metadata, groups, leaves, pa.BufferReader(data), most)
    except DecodeError as error:
        raise ArgumentError(f"table {url!r} is cut or damaged: {error.message}") from None
    if size > most:
        raise ArgumentError(too_large(f"table {url!r}", size, most))
    return file.read(columns=list(columns))


# --- what is in memory already


def _from_pandas(table: Any, columns: Sequence[str]) -> Any:
    names = [str(name) for name in table.columns]
    _check_columns(names, columns, "the data frame")
    series = {name: table.iloc[:, names.index(name)] for name in columns}
    # As an array of numpy, or Arrow would make nulls of NaN.
    plain = {name: isinstance(one.dtype, np.dtype) and one.dtype.kind == "f" for name, one in series.items()}
    return _joined(
        {name: _array(name, one.to_numpy() if plain[name] else one) for name, one in series.items()}
    )


def _from_rows(rows: Any, columns: Sequence[str], what: str) -> Any:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ArgumentError(f"row {number:,} of {what} must be a dict, found {row!r:.60}")
        missing = next((name for name in columns if name not in row), None)
        if missing is not None:
            raise ArgumentError(
                f"row {number:,} of {what} has no {missing!r}: it has {_listed(list(map(str, row)), missing)}"
            )
    return _joined({name: _array(name, [row[name] for row in rows]) for name in columns})


def _joined(columns: Mapping[str, Any]) -> Any:
    try:
        return pa.table(dict(columns))
    except _BAD as error:
        raise ArgumentError(f"the columns of the table do not go together: {error}") from error


def _array(name: str, values: Any) -> Any:
    """Return the values of one column in Arrow's memory; arrays of more than one dimension as lists of
    numbers.
    """
    try:
        if isinstance(values, pa.Array | pa.ChunkedArray):
            return values
        if hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        if isinstance(values, np.ndarray) and values.ndim > 1:
            flat = pa.array(values.reshape(-1))
            for size in reversed(values.shape[1:]):
                flat = pa.FixedSizeListArray.from_arrays(flat, size)
            return flat
        if isinstance(values, list | tuple):  # of arrays and tensors, perhaps
            column = _from_arrays(name, values)
            if column is not None:
                return column
            values = [one.tolist() if hasattr(one, "tolist") else one for one in values]
        return pa.array(values)
    except _BAD as error:
        raise ArgumentError(f"column {name!r} of the table has values of no one type: {error}") from error


def _from_arrays(name: str, values: Sequence[Any]) -> Any:
    """Return arrays or tensors of numbers as a column of their dtype; None for any other values.

    They differ in their length alone. An empty one may be of any dtype: numpy's is float64 unless told.
    """
    try:
        arrays = [one.detach().cpu().numpy() if hasattr(one, "detach") else one for one in values]
    except TypeError:  # numpy has no bfloat16
        return None
    if not all(type(one) is np.ndarray and one.ndim and one.dtype.kind in "biuf" for one in arrays):
        return None
    filled = [one for one in arrays if one.size]
    if len({(one.dtype, one.shape[1:]) for one in filled}) != 1 or any(len(one) > one.size for one in arrays):
        return None
    offsets = np.cumsum([0, *map(len, arrays)])
    return pa.LargeListArray.from_arrays(pa.array(offsets), _array(name, np.concatenate(filled)))


# --- columns


def _check_columns(names: Sequence[str], wanted: Sequence[str], what: str) -> None:
    for name in wanted:
        count = names.count(name)
        if count == 0:
            raise ArgumentError(f"fields names the column {name!r}, and {what} has {_listed(names, name)}")
        if count > 1:
            raise ArgumentError(f"{what} has {count} columns {name!r}: rename all but one")


def _listed(names: Sequence[str], wanted: str) -> str:
    if len(names) == 1 and (separator := next((one for one in ";\t|" if one in names[0]), "")):
        return f"one column, {names[0]!r}: write the file with ',' in place of {separator!r}"
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    spaced = next((name for name in names if name.strip() == wanted), None)
    if spaced is not None:
        return f"{shown}: remove the spaces around {spaced!r} in its first line"
    if near := difflib.get_close_matches(wanted, names, 1):
        return f"{shown}: did you mean {near[0]!r}?"
    if any("/" in name or name.lstrip("-").replace(".", "", 1).isdecimal() for name in names):
        return f"{shown}: the first line has to be the names of the columns, and these look like values"
    return shown or "none"
