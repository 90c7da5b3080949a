"""Shards for tests, and a reader of streams that does what a loader does, in one process."""

from __future__ import annotations

import functools
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import default_collate

import fastload
from fastload import RandomResizedCrop
from fastload.datasets.wrappers import view_of
from fastload.formats.pieces import Record, Splitter
from fastload.formats.tar import TarWriter
from fastload.formats.tfrecord import TFRecordWriter, encode_example
from fastload.shards import reader, row_groups
from tests.faultserver import FaultServer
from tests.photos import pillow_jpeg, scene
from tests.storedata import write as write

KINDS = ["tar", "tfrecord"]
ALL_KINDS = [*KINDS, "parquet"]
CROP = RandomResizedCrop(24, flip=0.5)
COUNTS = [40, 0, 57, 31, 1, 44]  # records of each shard
TOTAL = sum(COUNTS)
FEATURES = {"image": bytes, "label": int, "name": str}
LABEL = {"tar": "cls", "tfrecord": "label", "parquet": "label"}
IMAGE = {"tar": "jpg", "tfrecord": "image", "parquet": "image"}
JPEGS = [pillow_jpeg(scene(40 + 8 * i, 32 + 4 * i, i), quality=60) for i in range(7)]


def jpeg(number: int) -> bytes:
    """The image of a record; behind its end mark stands which one it is."""
    return JPEGS[number % len(JPEGS)] + b"%08d" % number


def shard(kind: str, numbers: range) -> tuple[bytes, bytes]:
    """(shard, its index file, which a Parquet file has within it)."""
    if kind == "parquet":
        return parquet(table(numbers)), b""
    file = io.BytesIO()
    writer: Any = TarWriter(file) if kind == "tar" else TFRecordWriter(file)
    for number in numbers:
        if kind == "tar":
            parts = {"jpg": jpeg(number), "cls": b"%d" % number, "json": json.dumps({"n": number}).encode()}
            writer.write(f"d/{number:05d}", parts)
        else:
            writer.write(encode_example({"image": jpeg(number), "label": number, "name": f"n{number}"}))
    writer.close()
    return file.getvalue(), writer.index()


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


def split(
    make: Callable[[int, int | None], Splitter], data: bytes, *, piece: int = 1 << 20, known: bool = True
) -> list[Record]:
    """All records of a shard that arrives in pieces; `known`: its size is."""
    splitter = make(0, len(data) if known else None)
    found: list[Record] = []
    for start in range(0, len(data), piece):
        splitter.feed(memoryview(data)[start : start + piece])
        found += iter(splitter.next, None)
    splitter.close()
    found += iter(splitter.next, None)
    assert splitter.next() is None
    return found


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zlib": zlib.compress}


def shards(kind: str, *, index: bool = False, end: str = "") -> dict[str, bytes]:
    """Key -> object."""
    return dict(_shards(kind, index, end))


@functools.cache
def _shards(kind: str, index: bool, end: str) -> dict[str, bytes]:
    objects, first = {}, 0
    for number, count in enumerate(COUNTS):
        data, places = shard(kind, range(first, first + count))
        objects[f"part-{number:03d}.{kind}{end}"] = COMPRESS[end](data)
        if index:
            objects[f"part-{number:03d}.{kind}.idx"] = places
        first += count
    return objects


def place_of(number: int) -> tuple[int, int]:
    """(shard, ordinal) of a record by its number among all."""
    for index, count in enumerate(COUNTS):
        if number < count:
            return index, number
        number -= count
    raise AssertionError


def dataset(kind: str, url: Any, **arguments: Any) -> Any:
    if kind == "parquet":
        return fastload.ParquetDataset(url, **arguments)
    if kind == "tar":
        return fastload.TarDataset(url, **arguments)
    return fastload.TFRecordDataset(url, arguments.pop("fields", FEATURES), **arguments)


def ordinary(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def columns_of(batch: Any) -> dict[str, Any]:
    """The columns of a filled batch, by field."""
    return {
        name: default_collate([row[name] for row in batch.rest]) if column is None else column
        for name, column in batch.columns.items()
    }


def batches(data: Any, stream: Any, size: int = 16, epoch: int = 0) -> Iterator[tuple[list[int], Any]]:
    """(ids, batch) of a stream, as a loader makes them."""
    while ids := stream.take(size):
        batch = view_of(data).new_batch(len(ids), ordinary)
        if batch is None:
            yield ids, [data[one] for one in ids]
        else:
            failures = view_of(data).fill(batch, list(enumerate(ids)), 5, epoch)
            if failures:
                raise failures[0][1]
            yield ids, columns_of(batch)


def read(
    data: Any, *, workers: int = 2, ranks: int = 1, epoch: int = 0, shuffle: bool = True
) -> list[tuple[list[int], Any]]:
    """All batches of one epoch, over all ranks and their streams."""
    found, streams = [], data._streams()
    for rank in range(ranks):
        states = streams.plan_streams(workers, seed=3, epoch=epoch, shuffle=shuffle, rank=rank, ranks=ranks)
        assert len(states) == workers
        for state in states:
            stream = streams.open_stream(json.loads(json.dumps(state)))
            found += batches(data, stream, epoch=epoch)
            stream.close()
    return found


def labels(found: list[tuple[list[int], Any]], name: str) -> list[int]:
    return [int(one) for _, batch in found for one in batch[name].tolist()]


def at_random(data: Any, epoch: int = 0) -> Any:
    """One batch of everything, by number."""
    n = len(data)
    data.prefetch(range(n))
    batch = view_of(data).new_batch(n, ordinary)
    failures = view_of(data).fill(batch, [(row, row) for row in range(n)], 5, epoch)
    assert not failures, failures
    return columns_of(batch)


def loader_of(data: Any, workers: int, **arguments: Any) -> Any:
    return fastload.DataLoader(data, 8, shuffle=True, num_workers=workers, seed=11, **arguments)


def numbers_of(found: list[Any], kind: str) -> list[int]:
    """The labels of a loader's batches."""
    return [int(one) for batch in found for one in batch[LABEL[kind]].tolist()]


# --- Fixtures, for modules that import them ---------------------------------------------------------------

_OPEN: list[Any] = []


def closing(data: Any) -> Any:
    """A dataset that `close_all` closes at the end of the test."""
    _OPEN.append(data)
    return data


def opened(kind: str, place: Any, **arguments: Any) -> Any:
    """A dataset with a crop, of a URL or of the bucket of a FaultServer, closed at the end of the test."""
    if isinstance(place, FaultServer):
        place, arguments = "s3://bucket", {"storage_options": place.options, **arguments}
    return closing(dataset(kind, place, **{"transform": CROP, **arguments}))


@pytest.fixture
def close_all(no_leaks: None) -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a few kilobytes arrive in many ranges."""
    for module in (reader, row_groups):
        monkeypatch.setattr(module, "PIECES", reader.PieceSizes(first=700, least=1500, usual=3000))
