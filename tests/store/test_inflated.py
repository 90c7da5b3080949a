"""Small files that would become large are refused in words, before the memory is taken."""

from __future__ import annotations

import gzip
import io
import multiprocessing
import tarfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastload import DataLoader, ParquetDataset, TableDataset, TarDataset, TFRecordDataset
from fastload.errors import ArgumentError, DecodeError
from fastload.formats.pieces import masked_crc, zstd
from tests.patience import PATIENCE

MB = 1 << 20
LIMIT = 16 * MB


def zeros_of_tar(path: Path, size: int) -> None:
    """A compressed tar of one member of `size` zeros, in members of gzip of 16 MB each."""
    info = tarfile.TarInfo("a.bin")
    info.size = size
    zeros = gzip.compress(bytes(16 * MB)) * (size // (16 * MB))
    path.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT)) + zeros + gzip.compress(bytes(1024)))


def equal_rows(path: Path, size: int = 4 * MB) -> None:
    """A dictionary of one value of `size` bytes, and 4,000 rows that name it."""
    values = pa.DictionaryArray.from_arrays(np.zeros(4000, np.int32), pa.array([b"x" * size]))
    pq.write_table(pa.table({"a": values}), path, compression="zstd")


def one_page_of_equal_rows(**options: Any) -> tuple[bytearray, Any]:
    """(file, footer) of 130,000 equal texts of 1,000 bytes: a dictionary of one, and a page of some bytes."""
    file = io.BytesIO()
    table, rows = pa.table({"a": ["x" * 1000] * 130_000}), 130_000
    pq.write_table(table, file, compression="none", max_rows_per_page=rows, data_page_size=1 << 30, **options)
    return bytearray(file.getvalue()), pq.read_metadata(file)


def second_header_of_a_page(path: Path) -> None:
    """In place of statistics, the page's header has one of the second version, which tells of no values."""
    data, _ = one_page_of_equal_rows()
    start = data.index(b"\x1c", data.index(b"\x2c\x15"))
    end = data.index(bytes(3), start) + 3
    second = b"\0\x3c" + b"\x15\0" * 6 + b"\0"
    filler = end - start - len(second) - 4
    data[start:end] = second + bytes([0x78, filler & 127 | 128, filler >> 7]) + b"." * filler + b"\0"
    path.write_bytes(data)


def page_in_the_padding(path: Path) -> None:
    """The column ends in front of its page. pyarrow reads it: old writers left out up to 100 bytes."""
    data, footer = one_page_of_equal_rows(write_statistics=False, store_schema=False)
    chunk, at = footer.row_group(0).column(0), len(data) - footer.serialized_size - 8
    size, dictionary = chunk.total_compressed_size, chunk.data_page_offset - chunk.dictionary_page_offset
    sizes = [b"\x16" + bytes([2 * n & 127 | 128, 2 * n >> 7]) for n in (size, dictionary)]
    writer = footer.created_by.encode()
    data[at:] = data[at:].replace(*sizes).replace(writer, b"parquet-mr version 1.2.8".ljust(len(writer)))
    path.write_bytes(data)


def write_bombs(folder: Path) -> None:
    """Files of some kilobytes, that would become 128 MB each, or more."""
    zeros_of_tar(folder / "0.tar.gz", 128 * MB)
    head = (1 << 27).to_bytes(8, "little")
    head += masked_crc(head).to_bytes(4, "little")
    (folder / "0.tfrecord.gz").write_bytes(gzip.compress(head) + gzip.compress(bytes(16 * MB)) * 8)
    rows, text = gzip.compress(b"1,2\n" * MB), gzip.compress(b"x" * (4 * MB))
    (folder / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n") + rows * 32)
    (folder / "text.csv.gz").write_bytes(gzip.compress(b"a,b\n1,") + text * 32)
    (folder / "t.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * (MB // 2)) * 28)
    equal_rows(folder / "0.parquet")
    equal_rows(folder / "texts.parquet", 100 << 10)
    pq.write_table(pa.table({"a": pa.nulls(1000, pa.binary(MB // 8))}), folder / "nulls.parquet")
    pq.write_table(pa.table({"a": pa.nulls(200, pa.list_(pa.int8(), MB))}), folder / "null_lists.parquet")
    second_header_of_a_page(folder / "header.parquet")
    page_in_the_padding(folder / "padding.parquet")
    # One row of 2**25 equal numbers.
    lists = pa.ListArray.from_arrays([0, 1 << 25], pa.array(np.zeros(1 << 25, np.int8)))
    pq.write_table(pa.table({"a": lists}), folder / "lists.parquet", compression="zstd")


def rows_of(dataset: Any) -> list[Any]:
    return list(DataLoader(dataset, None, collate_fn=lambda row: row))


# What opens or reads the file of that name, and the error.
BOMBS: dict[str, tuple[Callable[[str, Any], Any], type[Exception]]] = {
    "0.tar.gz": (lambda path, limit: rows_of(TarDataset(path, **limit)), DecodeError),
    "0.tfrecord.gz": (lambda path, limit: rows_of(TFRecordDataset(path, {"a": bytes}, **limit)), DecodeError),
    "t.csv.gz": (lambda path, limit: TableDataset(path, "a", **limit), ArgumentError),
    "text.csv.gz": (lambda path, limit: TableDataset(path, "b", **limit), ArgumentError),
    "t.jsonl.gz": (lambda path, limit: TableDataset(path, "a", **limit), ArgumentError),
    **{
        f"{name}.parquet": (lambda path, limit: rows_of(ParquetDataset(path, **limit)), DecodeError)
        for name in ("0", "texts", "nulls", "null_lists", "lists", "header", "padding")
    },
    "0.parquet as a table": (lambda path, limit: TableDataset(path, "a", **limit), ArgumentError),
}


def memory(field: str) -> int:
    """Megabytes of this process: "VmRSS", or "VmHWM", the most since that was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(size) >> 10


def explode(folder: Path, say: Connection) -> None:
    """Read each bomb; tell what was said of it, and the megabytes that it took."""
    import pyarrow.csv
    import pyarrow.json  # noqa: F401 - part of what is there before

    found = {}
    for name, (read, error) in BOMBS.items():
        Path("/proc/self/clear_refs").write_text("5")  # it resets VmHWM
        before = memory("VmRSS")
        try:
            read(str(folder / name.split()[0]), {"storage_options": {"max_inflated": LIMIT}})
            said = ""
        except error as caught:
            said = str(caught)
        found[name] = said, memory("VmHWM") - before
    say.send(found)


@pytest.fixture(scope="module")
def exploded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    """name -> (what was said, megabytes), from a process of their own."""
    folder = tmp_path_factory.mktemp("bombs")
    write_bombs(folder)
    assert max(path.stat().st_size for path in folder.iterdir()) < 3 * MB
    context = multiprocessing.get_context("forkserver")
    said, say = context.Pipe(duplex=False)
    process = context.Process(target=explode, args=(folder, say))
    process.start()
    assert said.poll(PATIENCE)
    found: dict[str, tuple[str, int]] = said.recv()
    process.join()
    return found


@pytest.mark.parametrize("name", BOMBS)
def test_small_file_that_becomes_large_is_refused_in_words(
    name: str, exploded: dict[str, tuple[str, int]]
) -> None:
    said, took = exploded[name]
    assert f"max_inflated={LIMIT:,}" in said and "storage_options" in said, said
    assert took < 64, f"{took} MB"


def test_limit_is_512_mib(tmp_path: Path) -> None:
    equal_rows(tmp_path / "0.parquet")
    with pytest.raises(DecodeError, match="max_inflated=536,870,912"):
        rows_of(ParquetDataset(str(tmp_path)))


@pytest.mark.stress
def test_limit_of_a_tar_is_512_mib_too(tmp_path: Path) -> None:
    zeros_of_tar(tmp_path / "0.tar.gz", 528 * MB)
    with pytest.raises(DecodeError, match="more than max_inflated=536,870,912"):
        rows_of(TarDataset(str(tmp_path)))


def test_limit_is_set_by_a_storage_option(tmp_path: Path) -> None:
    zeros_of_tar(tmp_path / "0.tar.gz", 16 * MB)
    pq.write_table(pa.table({"a": np.zeros(2_500_000)}), tmp_path / "t.parquet", row_group_size=2_500_000)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a\n" + b"1234567\n" * 2_000_000))
    small, large = {"max_inflated": 15_000_000}, {"max_inflated": "100MB"}
    tar = str(tmp_path / "0.tar.gz")
    with pytest.raises(DecodeError, match="max_inflated="):
        rows_of(TarDataset(tar, storage_options=small))
    assert len(rows_of(TarDataset(tar, storage_options=large))) == 1
    rows = str(tmp_path / "t.parquet")
    with pytest.raises(DecodeError, match=r"row group 0 would be .* max_inflated="):
        ParquetDataset(rows, storage_options=small)[0]
    assert ParquetDataset(rows, storage_options=large)[0]["a"] == 0
    with pytest.raises(ArgumentError, match=r"table .* max_inflated="):
        TableDataset(str(tmp_path / "t.csv.gz"), "a", storage_options=small)
    assert len(TableDataset(str(tmp_path / "t.csv.gz"), "a", storage_options=large)) == 2_000_000


@pytest.mark.parametrize("limit", [0, -1, True, "much", 1.5, None])
def test_limit_that_is_no_size_is_refused(limit: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="storage option max_inflated"):
        TarDataset(str(tmp_path), storage_options={"max_inflated": limit})


def test_long_texts_that_repeat_are_read(tmp_path: Path) -> None:
    """The dictionary's size times the rows is 25 GB, and the rows are 60 MB."""
    texts = [f"{number:05} " + "x" * 30 for number in range(20_000)]
    table = pa.table({"a": pa.array([texts[at * 7 % 20_000] for at in range(1_000_000)])})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=1_000_000)
    assert next(iter(ParquetDataset(str(tmp_path))))["a"] == texts[0]


@pytest.mark.parametrize("kind", [pa.float16(), pa.binary(16), pa.decimal128(21, 2)], ids=str)
def test_values_of_one_width_that_repeat_are_read(kind: pa.DataType, tmp_path: Path) -> None:
    numbers = np.arange(20_000) % 2000
    values = [int(at).to_bytes(16, "big") for at in numbers] if kind == pa.binary(16) else numbers
    table = pa.table({"a": pa.array(values).cast(kind), "b": numbers})
    pq.write_table(table, tmp_path / "0.parquet")
    seventh, small = ("a", "in", [table["a"][7].as_py()]), {"max_inflated": 2 * MB}
    assert len(ParquetDataset(str(tmp_path), "b", filters=[seventh], storage_options=small)) == 10


TEXTS: list[tuple[pa.DataType, Callable[[str], Any]]] = [
    (pa.string(), str),
    (pa.large_string(), str),
    (pa.list_(pa.string()), lambda text: [text]),
    (pa.list_(pa.struct({"c": pa.string()})), lambda text: [{"c": text}]),
    (pa.struct({"c": pa.int8(), "d": pa.string()}), lambda text: {"c": 1, "d": text}),
]


@pytest.mark.parametrize(("kind", "form"), TEXTS, ids=[str(kind) for kind, _ in TEXTS])
def test_one_long_text_among_short_ones_is_read(
    kind: pa.DataType, form: Callable[[str], Any], tmp_path: Path
) -> None:
    """The longest text times the rows is 200 MB, and the rows are less than 1 MB."""
    texts = [f"{at % 1000}" for at in range(20_000)]
    texts[7] = "x" * 10_000
    pq.write_table(pa.table({"a": pa.array(map(form, texts), kind)}), tmp_path / "0.parquet")
    dataset = ParquetDataset(str(tmp_path), storage_options={"max_inflated": LIMIT})
    assert texts[7] in repr(dataset[7])


@pytest.mark.parametrize(("rows", "usual", "longest"), [(100, 100_000, 6 * MB), (1001, 20_000, 2 * MB)])
def test_one_long_file_among_many_in_a_row_group_is_read(
    rows: int, usual: int, longest: int, tmp_path: Path
) -> None:
    """pyarrow keeps them all in the dictionary. The longest times the rows is more than max_inflated."""
    noise = np.random.default_rng(0)
    files = [noise.bytes(longest), *(noise.bytes(usual) for _ in range(rows - 1))]
    pq.write_table(pa.table({"image": [{"bytes": one} for one in files]}), tmp_path / "0.parquet")
    dataset = ParquetDataset(str(tmp_path), decode=None)
    assert dataset[0]["image"]["bytes"] == files[0] and dataset[rows - 1]["image"]["bytes"] == files[-1]


@pytest.mark.parametrize(
    "rows",
    [
        [[[1.0, 2.0, 3.0, 4.0]] * 40] * 2000,
        [[[1.0, 2.0, 3.0, 4.0]], [], [None]] * 100,
    ],
    ids=["boxes", "nulls"],
)
def test_lists_of_lists_of_a_fixed_size_are_read(rows: list[Any], tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"a": pa.array(rows, pa.list_(pa.list_(pa.float32(), 4)))}), tmp_path / "0.parquet"
    )
    dataset = ParquetDataset(str(tmp_path), storage_options={"max_inflated": LIMIT})
    assert [[list(inner) for inner in dataset[at]["a"] if inner is not None] for at in (0, 1)] == [
        rows[0],
        rows[1],
    ]


def test_table_of_many_row_groups_is_read(tmp_path: Path) -> None:
    """The dictionary's size times the rows is 10 MB in each of ten row groups, and the rows are 1 MB."""
    texts = [f"{at % 500:020}" for at in range(10_000)]
    pq.write_table(pa.table({"a": texts}), tmp_path / "t.parquet", row_group_size=1000)
    table = str(tmp_path / "t.parquet")
    assert len(TableDataset(table, "a", storage_options={"max_inflated": LIMIT})) == 10_000


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
def test_pages_of_every_codec_and_version_are_measured(codec: str, version: str, tmp_path: Path) -> None:
    columns = {
        "text": [f"{at % 50}" * 20 for at in range(200)],
        "bytes": [bytes([at % 256]) * 100 for at in range(200)],
        "list": [list(range(at % 5)) for at in range(200)],
        "null": [None if at % 3 else str(at) for at in range(200)],
        "bool": [at % 2 == 0 for at in range(200)],
    }
    path = tmp_path / "0.parquet"
    pq.write_table(pa.table(columns), path, compression=codec, data_page_version=version, data_page_size=2000)
    rows = list(ParquetDataset(str(path)))
    assert [row["text"] for row in rows] == columns["text"] and len(rows) == 200


def test_zstd_sample_that_becomes_large_is_refused() -> None:
    from fastload.shards.litdata import _inflate

    bomb = zstd().compress(bytes(8 * MB))
    assert len(_inflate(memoryview(bomb), 8 * MB)) == 8 * MB
    with pytest.raises(DecodeError, match="max_inflated="):
        _inflate(memoryview(bomb), 8 * MB - 1)


def test_json_that_no_parser_takes_is_an_error_of_the_table(tmp_path: Path) -> None:
    deep = {"lines": b"[" * 200_000, "objects": b'{"a":' * 200_000, "array": b'[{"a":' + b"[" * 200_000}
    for name, body in deep.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(body if name == "array" else b'{"a": ' + body + b"\n")
        with pytest.raises(ArgumentError, match=f"{name}.jsonl"):
            TableDataset(str(path), "a")


def test_damaged_parquet_table_is_an_error_of_the_table(tmp_path: Path) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"a": list(range(1000)), "b": ["x" * 20] * 1000}), file)
    body, path = file.getvalue(), tmp_path / "t.parquet"
    for at in range(4, len(body), 331):
        path.write_bytes(body[:at] + bytes([body[at] ^ 0x55]) + body[at + 1 :])
        try:
            len(TableDataset(str(path), ("a", "b")))
        except ArgumentError as error:
            assert "t.parquet" in str(error) and "Traceback" not in str(error)
