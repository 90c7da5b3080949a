"""Parquet files for tests, in the ways in which others write them."""

from __future__ import annotations

import functools
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.sharddata import jpeg

COUNTS = [40, 0, 57, 31, 1, 44]  # rows of each file
TOTAL = sum(COUNTS)
HUGGING_FACE = {
    "info": {"features": {"image": {"_type": "Image"}, "label": {"names": ["a"], "_type": "ClassLabel"}}}
}


def table(numbers: range) -> pa.Table:
    """Rows as Hugging Face's `datasets` writes them, and columns of other kinds."""
    files = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {
        "image": pa.array([{"bytes": jpeg(n), "path": f"{n}.jpg"} for n in numbers], files),
        "label": pa.array(list(numbers), pa.int64()),
        "name": pa.array([f"n{n}" for n in numbers], pa.string()),
        "point": pa.array([[n, 0.5] for n in numbers], pa.list_(pa.float32())),
        "even": pa.array([n % 2 == 0 for n in numbers], pa.bool_()),
    }
    return pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(HUGGING_FACE)})


def parquet(rows: pa.Table | dict[str, Any], row_group_size: int = 12, **options: Any) -> bytes:
    """A file in bytes."""
    file = io.BytesIO()
    found = rows if isinstance(rows, pa.Table) else pa.table(rows)
    pq.write_table(found, file, row_group_size=row_group_size, **options)
    return file.getvalue()


@functools.cache
def _files() -> dict[str, bytes]:
    files, first = {}, 0
    for number, count in enumerate(COUNTS):
        files[f"part-{number:03d}.parquet"] = parquet(table(range(first, first + count)))
        first += count
    return files


def files() -> dict[str, bytes]:
    """Key -> file. One has no rows, and one has a single row."""
    return dict(_files())
