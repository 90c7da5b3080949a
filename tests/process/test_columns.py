"""`batches="columns"` gives what rows give, collated: values, order, dtypes, errors, states."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

import fastload
from fastload import Jagged, ParquetDataset, ShardSampler, TableDataset
from fastload.errors import ArgumentError, DecodeError
from fastload.testing.promises import contents
from tests.loaderdata import through_json
from tests.shortform import short_form

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

COUNT = 100
BATCH = 7


def _numbers() -> dict[str, Any]:
    kinds = [
        pa.int8(),
        pa.int64(),
        pa.uint8(),
        pa.uint32(),
        pa.uint64(),
        pa.float16(),
        pa.float32(),
        pa.float64(),
    ]
    return {str(kind): pa.array(np.arange(COUNT, dtype=kind.to_pandas_dtype())) for kind in kinds}


def _tensors(permutation: Any) -> Any:
    flat = pa.array([[n, n + 1, n + 2, n + 3, n + 4, n + 5] for n in range(COUNT)], pa.list_(pa.int16(), 6))
    return pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int16(), (2, 3), permutation=permutation), flat
    )


STACKED: dict[str, Any] = {
    **_numbers(),
    "bool": pa.array([n % 3 == 0 for n in range(COUNT)]),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([n % 2 for n in range(COUNT)], pa.int8())),
    "text": pa.array([f"text {n} \u00e9" for n in range(COUNT)]),
    "large": pa.array([f"text {n}" for n in range(COUNT)], pa.large_string()),
    "bytes": pa.array([bytes([n, 0, 255]) for n in range(COUNT)]),
    "fixed bytes": pa.array([bytes([n, 0, 255]) for n in range(COUNT)], pa.binary(3)),
    "word": pa.array([f"word {n % 3}" for n in range(COUNT)]).dictionary_encode(),
    "code": pa.array([100 + n % 3 for n in range(COUNT)]).dictionary_encode(),
    "pair": pa.array([[n, n + 0.5] for n in range(COUNT)], pa.list_(pa.float32(), 2)),
    "flags": pa.array([[n % 2 == 0, True] for n in range(COUNT)], pa.list_(pa.bool_(), 2)),
    "square": pa.array([[[n, 1], [2, n]] for n in range(COUNT)], pa.list_(pa.list_(pa.uint16(), 2), 2)),
    "tensor": _tensors(None),
    "turned": _tensors([1, 0]),
}
LISTS: dict[str, Any] = {
    "items": pa.array([list(range(n % 4)) for n in range(COUNT)], pa.list_(pa.int32())),
    "large items": pa.array([[0.5] * (n % 3) for n in range(COUNT)], pa.large_list(pa.float64())),
    "boxes": pa.array([[[n, 1, 2, 3]] * (n % 3) for n in range(COUNT)], pa.list_(pa.list_(pa.int64(), 4))),
}
WITH_NULLS: dict[str, Any] = {
    "id": pa.array(range(COUNT)),
    "number": pa.array([None if n % 10 == 3 else n for n in range(COUNT)]),
    "pair": pa.array(
        [None if n == 11 else [n, None if n == 12 else 1] for n in range(COUNT)], pa.list_(pa.int8(), 2)
    ),
    "items": pa.array(
        [None if n == 21 else [1] * (n % 2) + [None] * (n == 22) for n in range(COUNT)], pa.list_(pa.int8())
    ),
    "big": pa.array([2**63 if n == 31 else n for n in range(COUNT)], pa.uint64()),
    "text": pa.array([None if n == 41 else f"{n}" for n in range(COUNT)]),
}
BAD = [*range(3, COUNT, 10), 11, 12, 21, 22, 31]  # row 41 has no text, which is None


def write(folder: Path, columns: dict[str, Any], rows: int = 9) -> str:
    """Two files, whose row groups have so many rows."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    pq.write_table(table[:33], folder / "a.parquet", row_group_size=rows)
    pq.write_table(table[33:], folder / "b.parquet", row_group_size=rows)
    return str(folder)


def loader(dataset: Any, **options: Any) -> Any:
    options = {"batch_size": BATCH, "seed": 3, **options}
    return fastload.DataLoader(dataset, **options)


def shuffled(dataset: Any, **options: Any) -> Any:
    return loader(dataset, sampler=fastload.DistributedSampler(dataset, 1, 0, seed=5), **options)


def assert_same(batch: Any, other: Any) -> None:
    assert contents(batch) == contents(other)


@pytest.fixture(scope="module")
def collated(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any], list[Any], int]]:
    """(URL, options, the batches of the rows that these select, the digest) of an epoch each."""
    url, found = write(tmp_path_factory.mktemp("stacked"), STACKED), []
    for options in ({}, {"filters": [("int64", ">", 20), ("bool", "=", False)]}):
        rows = shuffled(ParquetDataset(url, **options))
        found.append((url, options, list(rows), rows.digest()))
    return found


@pytest.mark.parametrize(
    ("cached", "workers"),
    short_form(itertools.product((False, True), (0, 2)), lambda cached, workers: cached == bool(workers)),
)
def test_parquet_columns_are_the_collated_rows(
    collated: Any, cached: bool, workers: int, tmp_path: Path
) -> None:
    for url, options, wanted, digest in collated:
        cache = tmp_path / "cache" if cached else None
        columns = ParquetDataset(url, batches="columns", cache=cache, **options)
        for _ in range(2):
            made = shuffled(columns, num_workers=workers)
            for batch, other in zip(made, wanted, strict=True):
                assert_same(batch, other)
                tensors = [part for part in batch.values() if isinstance(part, torch.Tensor)]
                assert all(tensor.is_contiguous() for tensor in tensors)
            assert made.digest() == digest


@pytest.mark.parametrize("workers", [0, 1])
def test_table_columns_are_the_collated_rows(workers: int) -> None:
    table = pa.table(STACKED)
    fields = {name: name for name in STACKED}
    columns, rows = TableDataset(table, fields, batches="columns"), TableDataset(table, fields)
    for batch, other in zip(shuffled(columns, num_workers=workers), shuffled(rows), strict=True):
        assert_same(batch, other)


@pytest.mark.parametrize(
    "fields", ["text", ("int64", "text"), ({"x": "pair", "y": "bool"}, ("word", "float"))]
)
def test_fields_give_columns_their_structure(fields: Any, tmp_path: Path) -> None:
    url = write(tmp_path, STACKED)
    datasets: list[Any] = [make(batches="columns") for make in _makers(url, fields)]
    for dataset, rows in zip(datasets, [make() for make in _makers(url, fields)], strict=True):
        for batch, other in zip(shuffled(dataset), shuffled(rows), strict=True):
            assert_same(batch, other)


def _makers(url: str, fields: Any) -> list[Any]:
    return [
        lambda **options: ParquetDataset(url, fields, **options),
        lambda **options: TableDataset(pa.table(STACKED), fields, **options),
    ]


def test_lists_are_values_and_offsets(tmp_path: Path) -> None:
    url = write(tmp_path, LISTS)
    fields = {name: name for name in LISTS}
    for dataset in (
        ParquetDataset(url, batches="columns"),
        TableDataset(pa.table(LISTS), fields, batches="columns"),
    ):
        rows = [dataset[index] for index in range(COUNT)]
        for workers in (0, 1):
            seen = 0
            sampler = list(torch.randperm(COUNT, generator=torch.Generator().manual_seed(1)))
            for batch in loader(dataset, sampler=sampler, num_workers=workers):
                for name, column in batch.items():
                    assert type(column) is Jagged and column.offsets.dtype == torch.int64
                    for row, (start, stop) in enumerate(itertools.pairwise(column.offsets.tolist())):
                        wanted = torch.as_tensor(rows[int(sampler[seen + row])][name])
                        assert column.values.dtype == wanted.dtype
                        assert torch.equal(
                            column.values[start:stop], wanted.reshape(-1, *column.values.shape[1:])
                        )
                nested = torch.nested.nested_tensor_from_jagged(*batch["items"])
                assert nested.shape[0] == len(batch["items"].offsets) - 1
                seen += nested.shape[0]
            assert seen == COUNT


def test_nulls_are_errors_of_their_rows(tmp_path: Path) -> None:
    dataset = ParquetDataset(write(tmp_path, WITH_NULLS), batches="columns")
    for workers in (0, 1):
        with pytest.raises(DecodeError, match=r"column 'number' is null.*filters=") as caught:
            list(loader(dataset, num_workers=workers))
        assert caught.value.key == dataset.key(3)
        for on_error in ("repeat", "replace"):
            made = loader(dataset, num_workers=workers, on_error=on_error)
            seen = [n for batch in made for n in batch["id"].tolist()]
            assert len(seen) == COUNT and set(seen) == set(range(COUNT)) - set(BAD)
            assert made.stats()["counters"]["bad.samples"] >= len(BAD)
    batches = loader(dataset, on_error="repeat", sampler=range(40, 50))
    assert next(iter(batches))["text"][1] is None


def test_a_null_is_the_same_error_as_in_rows(tmp_path: Path) -> None:
    url = write(tmp_path, {"id": WITH_NULLS["id"], "number": WITH_NULLS["number"]})
    runs = []
    for batches in ("rows", "columns"):
        made = shuffled(ParquetDataset(url, batches=batches), on_error="replace")
        runs.append(
            (
                [contents(batch) for batch in made],
                made.digest(),
                sorted(key for key, _ in made.stats()["bad"]),
            )
        )
    assert runs[0] == runs[1]


@pytest.mark.parametrize("batches", ["rows", "columns"])
@pytest.mark.parametrize(
    ("index", "kind", "says"),
    [
        (1.5, TypeError, "an index must be a whole number, found 1.5"),
        (np.float64(1), TypeError, "an index must be a whole number"),
        ("1", TypeError, "an index must be a whole number, found '1'"),
        (1 << 70, IndexError, "is out of range for 100 rows of the table"),
        (100, IndexError, "index 100 is out of range for 100 rows of the table"),
    ],
)
def test_index_without_a_sample_is_the_same_error(batches: str, index: Any, kind: Any, says: str) -> None:
    dataset = TableDataset({"id": list(range(COUNT))}, {"id": "id"}, batches=batches)
    with pytest.raises(kind, match=says):
        next(iter(fastload.DataLoader(dataset, batch_sampler=[[index, 2]])))
    several = [[-1, np.int64(1), torch.tensor(2), True]]
    assert next(iter(fastload.DataLoader(dataset, batch_sampler=several)))["id"].tolist() == [99, 1, 2, 1]


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """A dataset whose rows from 9 up to 18 are in a row group that cannot be read."""
    url = write(tmp_path, {"id": pa.array(range(COUNT)), "x": pa.array(np.arange(COUNT) / 3)})
    path = Path(url) / "a.parquet"
    column = pq.read_metadata(path).row_group(1).column(1)
    data = bytearray(path.read_bytes())
    at = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 20
    data[at : at + 8] = bytes(8)
    path.write_bytes(data)
    return url


def test_damaged_row_group_is_the_error_of_each_of_its_rows(damaged: str) -> None:
    url = damaged
    for batches in ("rows", "columns"):
        made = loader(
            ParquetDataset(url, batches=batches), on_error="repeat", sampler=range(4, 25), batch_size=21
        )
        (batch,) = made
        assert made.stats()["counters"]["bad.samples"] == 9
        assert not set(batch["id"].tolist()) & set(range(9, 18))
        with pytest.raises(DecodeError, match="row group 1") as caught:
            list(loader(ParquetDataset(url, batches=batches), sampler=range(COUNT)))
        assert caught.value.key == ParquetDataset(url).key(9)


def test_damaged_row_group_keeps_no_batch_that_asked_for_it(damaged: str) -> None:
    dataset = ParquetDataset(damaged, batches="columns")
    source = dataset._column_source()
    (number,) = source.locate(np.array([9]))[0].tolist()

    def ask() -> Any:
        batch = Batch()
        with pytest.raises(DecodeError, match="cannot be read"):
            source.chunk(number)
        return weakref.ref(batch)

    asked = [ask() for _ in range(3)]
    gc.collect()
    assert [batch() for batch in asked] == [None] * 3
    dataset.close()


class Batch:
    """Something that a weak reference can be of."""


def _stream(table: Any, *, batches: int = 1, compression: str | None = None) -> bytearray:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table, max_chunksize=-(-len(table) // batches))
    return bytearray(sink.getvalue())


def _offset_to_nowhere(table: Any) -> bytearray:
    stream = _stream(table)
    offsets = table["text"].combine_chunks().buffers()[1].to_pybytes()[: 4 * (len(table) + 1)]
    at = stream.index(offsets) + len(offsets) // 2 // 4 * 4
    stream[at : at + 4] = (2**30).to_bytes(4, "little")
    return stream


HOSTILE: dict[str, Any] = {
    "an offset to nowhere": (_offset_to_nowhere, "column 'text' is damaged"),
    "several batches": (lambda table: _stream(table, batches=2), "not one plain batch"),
    "buffers to inflate": (lambda table: _stream(table, compression="zstd"), "not one plain batch"),
    "a dictionary": (
        lambda table: _stream(table.set_column(0, "text", table["text"].dictionary_encode())),
        "not one plain batch",
    ),
    "too few rows": (lambda table: _stream(table[:5]), "has 5 rows, not 9"),
    "too many rows": (
        lambda table: _stream(pa.concat_tables([table] * 2).combine_chunks()),
        "has 18 rows, not 9",
    ),
    "another column": (lambda table: _stream(table.rename_columns(["other"])), "has the columns"),
    "no stream": (lambda table: bytearray(b"nothing"), "cannot be read|not one plain batch"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_row_group_of_a_published_cache_is_checked_before_it_is_used(name: str, tmp_path: Path) -> None:
    url = write(tmp_path, {"text": pa.array([f"text {n}" for n in range(COUNT)])})
    hostile, says = HOSTILE[name]
    group = pq.ParquetFile(Path(url) / "a.parquet").read_row_group(0)
    dataset: Any = ParquetDataset(url, batches="columns", cache=tmp_path / "cache")
    dataset.cache.write(dataset._cache_key(0), bytes(hostile(group)))
    dataset._flush_cache()
    with pytest.raises(DecodeError, match=says):
        dataset[0]
    with pytest.raises(DecodeError, match=says):
        next(iter(loader(dataset, sampler=range(COUNT))))
    dataset.close()


# --- order


def run(
    url: str, workers: int = 0, ranks: int = 1, state: Any = None, steps: int | None = None, **options: Any
) -> Any:
    """(ids of each rank, states of each rank) of an epoch, or of some steps of it."""
    ids, states = [], []
    for rank in range(ranks):
        dataset = ParquetDataset(url, batches="columns", **options)
        made = loader(dataset, sampler=ShardSampler(dataset, ranks, rank, seed=2), num_workers=workers)
        if state is not None:
            made.load_state_dict(through_json(state))
        ids.append([n for batch in itertools.islice(made, steps) for n in batch["id"].tolist()])
        states.append(made.state_dict())
    return ids, states


@pytest.mark.parametrize("cached", [pytest.param(False, marks=pytest.mark.stress), True])
def test_epoch_goes_on_with_other_workers_and_ranks(cached: bool, tmp_path: Path) -> None:
    url = write(tmp_path / "data", {"id": pa.array(range(COUNT))})
    options: Any = {"cache": tmp_path / "cache"} if cached else {}
    ((whole,), _) = run(url, **options)
    assert sorted(whole) == list(range(COUNT)) and whole != list(range(COUNT))
    assert run(url, workers=2, **options)[0] == [whole]
    for before, after, workers in ((1, 2, 1), (2, 1, 0), (2, 4, 0)):
        first, states = run(url, 0, before, steps=3, **options)
        second, _ = run(url, workers, after, states[0], **options)
        seen = [n for ids in (*first, *second) for n in ids]
        padding = len(seen) - COUNT  # each rank has equally many: some of the epoch's first rows come again
        assert set(seen) == set(range(COUNT)) and 0 <= padding < after


def test_ranks_read_row_groups_of_their_own(tmp_path: Path) -> None:
    url = write(tmp_path, {"id": pa.array(range(COUNT))}, rows=10)
    ids, _ = run(url, ranks=2)
    groups = [{(n // 10, n < 33) if n < 33 else ((n - 33) // 10, False) for n in each} for each in ids]
    assert len(groups[0] & groups[1]) <= 1


def test_window_is_part_of_the_order(tmp_path: Path) -> None:
    url = write(tmp_path, {"id": pa.array(range(COUNT))})
    _, states = run(url, steps=2)
    with pytest.raises(ArgumentError, match="window 32, this sampler has 2"):
        run(url, state=states[0], cycle_length=2)
    ids, _ = run(url, cycle_length=2)
    assert sorted(ids[0]) == list(range(COUNT))


def test_without_a_shuffle_the_order_is_that_of_the_files(tmp_path: Path) -> None:
    url = write(tmp_path, {"id": pa.array(range(COUNT))})
    for workers in (0, 2):
        made = loader(ParquetDataset(url, batches="columns"), num_workers=workers)
        assert [n for batch in made for n in batch["id"].tolist()] == list(range(COUNT))


def test_each_row_group_is_read_once_an_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = write(tmp_path / "data", {"id": pa.array(range(COUNT))})
    groups = -(-33 // 9) + -(-67 // 9)
    dataset = ParquetDataset(url, batches="columns", cycle_length=3, cache=tmp_path / "cache")
    for workers in (0, 4):
        made = loader(dataset, shuffle=True, num_workers=workers)
        list(made)
        counters = made.stats()["counters"]
        reads = counters.get("get.samples", 0) + counters.get("cache.hits", 0)
        assert reads == groups if workers == 0 else 0 < reads <= groups
        dataset.close()
    assert not caplog.records
    list(shuffled(ParquetDataset(url, batches="columns", cycle_length=2)))
    assert "asks for rows of more row groups" in caplog.text


def test_row_group_is_warmed_as_its_first_row(tmp_path: Path) -> None:
    url = write(tmp_path / "data", {"id": pa.array(range(COUNT))})
    dataset = ParquetDataset(url, batches="columns", cache=tmp_path / "cache")
    firsts = [dataset.key(row) for row in (*range(0, 33, 9), *range(33, COUNT, 9))]
    assert dataset._left_to_warm(range(COUNT)).objects == len(firsts)
    assert [dataset.key(warmed.sample) for warmed in dataset.warm(range(COUNT))] == firsts


@pytest.mark.parametrize("seed", [None, 3])
def test_threads_that_make_samples_share_row_groups(seed: int | None, tmp_path: Path) -> None:
    dataset = ParquetDataset(write(tmp_path, {"id": pa.array(range(COUNT))}), batches="columns")
    made = loader(fastload.map(dataset, dict), threads=4, seed=seed)
    assert [n for batch in made for n in batch["id"].tolist()] == list(range(COUNT))


# --- what else may be done with them


def test_wrappers_and_collate_fn_get_rows_or_columns(tmp_path: Path) -> None:
    url = write(tmp_path, {name: STACKED[name] for name in ("int64", "text", "pair")})
    columns, rows = ParquetDataset(url, batches="columns"), ParquetDataset(url)
    for wrap in (
        lambda one: Subset(one, [5, 90, 3, 3]),
        lambda one: ConcatDataset([one, one]),
        lambda one: fastload.map(one, dict),
    ):
        for batch, other in zip(
            loader(wrap(columns)), loader(wrap(rows), sampler=range(len(wrap(rows)))), strict=True
        ):
            assert_same(batch, other)
    assert_same(
        next(iter(loader(columns, batch_size=None))),
        next(iter(loader(rows, batch_size=None, sampler=range(3)))),
    )
    batch = next(iter(loader(columns, collate_fn=list)))
    assert [sample["int64"] for sample in batch] == list(range(BATCH))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (pa.struct([("a", pa.int8())]), "column 'x' is struct<a: int8>.*flatten"),
        (pa.list_(pa.list_(pa.int8())), "column 'x' is list<.*lists of numbers"),
        (pa.list_(pa.string()), "column 'x' is list<.*lists of numbers"),
        (pa.null(), "column 'x' is null"),
        (pa.timestamp("s"), "column 'x' is timestamp.*cast"),
        (pa.decimal128(5), "column 'x' is decimal"),
        (pa.struct([("bytes", pa.binary()), ("path", pa.string())]), "column 'x' has files, such as images"),
    ],
    ids=str,
)
def test_types_without_a_tensor_are_refused_early(kind: Any, says: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2], "x": pa.nulls(2, kind)}), tmp_path / "a.parquet")
    with pytest.raises(ArgumentError, match=says):
        ParquetDataset(str(tmp_path), batches="columns")
    assert list(next(iter(loader(ParquetDataset(str(tmp_path), ("id",), batches="columns"))))[0]) == [1, 2]


def test_arguments_that_take_rows_are_refused(tmp_path: Path) -> None:
    url = write(tmp_path, {"id": pa.array(range(COUNT))})
    for options in ({"transform": dict}, {"decode": {"id": float}}, {"decode": dict}):
        with pytest.raises(ArgumentError, match=r"is called for each row.*batch_transform="):
            ParquetDataset(url, batches="columns", **options)
    with pytest.raises(ArgumentError, match="batches must be one of"):
        ParquetDataset(url, batches="column")
    with pytest.raises(ArgumentError, match="names files of samples"):
        TableDataset({"a": ["x"]}, fastload.File("a"), url=str(tmp_path), batches="columns")
    dataset = ParquetDataset(url, batches="columns")
    with pytest.raises(ArgumentError, match="batch_transform="):
        dataset.transform = dict
    with pytest.raises(ArgumentError, match="batches of ParquetDataset cannot be set"):
        dataset.batches = "rows"
