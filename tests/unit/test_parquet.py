"""ParquetDataset on local files: values, shapes, filters, streams, and files that cannot be read."""

from __future__ import annotations

import io
import itertools
import logging
import math
import sys
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image
from torch.utils.data import DataLoader as TorchLoader

import fastload
from fastload import Cache, ParquetDataset
from fastload.errors import ArgumentError, DecodeError
from fastload.formats.sample import dump, load
from tests.faultserver import FaultServer
from tests.sharddata import CROP, TOTAL, closing, jpeg, labels, parquet, read, shards, table, write
from tests.sharddata import close_all as close_all

pytestmark = pytest.mark.usefixtures("close_all")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return write(tmp_path / "files", shards("parquet"))


def one(tmp_path: Path, rows: Any, **arguments: Any) -> ParquetDataset:
    """A dataset of one file."""
    found: ParquetDataset = closing(ParquetDataset(write(tmp_path / "one", {"a.parquet": rows}), **arguments))
    return found


# --- Samples -----------------------------------------------------------------------------------------------


def test_sample_is_a_dict_of_all_columns(url: str) -> None:
    data = closing(ParquetDataset(url))
    assert len(data) == TOTAL
    sample = data[50]
    assert isinstance(sample["image"], Image.Image) and sample["image"].mode == "RGB"
    assert {name: sample[name] for name in ("label", "name", "even")} == {
        "label": 50,
        "name": "n50",
        "even": True,
    }
    assert sample["point"].dtype == np.float32 and sample["point"].tolist() == [50, 0.5]
    assert data.key(50) == "part-002.parquet @ 10"


def test_fields_give_the_sample_its_structure(url: str) -> None:
    fields = ("name", {"y": "label", "pair": ("even", "name")})
    assert closing(ParquetDataset(url, fields))[7] == ("n7", {"y": 7, "pair": (False, "n7")})


def test_fused_transform_writes_batches_as_torch_collates_them(url: str) -> None:
    fields = ("image", {"y": "label", "name": "name", "point": "point"})
    data = closing(ParquetDataset(url, fields, transform=CROP))
    found = next(iter(fastload.DataLoader(data, 16)))
    (wanted,) = list(TorchLoader([data[i] for i in range(16)], 16))  # type: ignore[arg-type,var-annotated]
    assert found[0].shape == wanted[0].shape and found[0].dtype == torch.uint8
    assert torch.equal(found[1]["y"], wanted[1]["y"])
    assert found[1]["name"] == wanted[1]["name"]
    assert torch.equal(found[1]["point"], wanted[1]["point"])


def test_decode_of_a_column_gets_its_value(url: str) -> None:
    decode = {"image": len, "name": str.upper}
    data = closing(ParquetDataset(url, ("image", "name"), decode=decode))
    assert data[3] == (len(jpeg(3)), "N3")


def test_decode_of_the_row_gets_encoded_fields(url: str) -> None:
    data = closing(ParquetDataset(url, ("image", "label"), decode=lambda row: (row["label"], row["image"])))
    assert data[3] == (3, jpeg(3))


def test_plain_binary_is_an_image_if_it_begins_like_one(tmp_path: Path) -> None:
    data = one(tmp_path, parquet({"picture": [jpeg(0), jpeg(1)], "blob": [b"\0\1", b""], "n": [0, 1]}))
    sample = data[0]
    assert isinstance(sample["picture"], Image.Image)
    assert sample["blob"] == b"\0\1" and data[1]["blob"] == b""
    fused = closing(ParquetDataset(data.url, transform=CROP))
    assert fused[0]["picture"].shape == (3, 24, 24)


def test_damaged_image_of_hugging_face_is_a_decode_error_of_its_row(tmp_path: Path) -> None:
    rows = table(range(3)).to_pylist()
    rows[1]["image"]["bytes"] = b"no image"
    file = parquet(pa.Table.from_pylist(rows, table(range(0)).schema))
    data = one(tmp_path, file, fields=("image", "label"), transform=CROP)
    with pytest.raises(DecodeError, match=r"a\.parquet @ 1.*not a JPEG"):
        data[1]
    found = [
        int(label)
        for _, column in fastload.DataLoader(data, 2, on_error="repeat", shuffle=True)
        for label in column
    ]
    assert set(found) == {0, 2}


@pytest.mark.parametrize("mode", [None, "raw"])
def test_bytes_within_a_struct_are_bytes_as_pyarrow_has_them(tmp_path: Path, mode: Any) -> None:
    rows = [{"inner": {"md5": bytes(16), "id": 1}}, {"inner": {"md5": bytes(range(16)), "id": 2}}]
    cache = None if mode is None else Cache(tmp_path / "cache", mode)
    for _ in range(2):
        data = one(tmp_path, parquet({"m": rows}), cache=cache)
        [batch] = fastload.DataLoader(data, 2)
        assert [data[0]["m"], data[1]["m"]] == rows
        assert batch["m"]["inner"]["md5"] == [row["inner"]["md5"] for row in rows]
        data.close()


def test_null_is_none_for_text_and_an_error_for_numbers(tmp_path: Path) -> None:
    data = one(tmp_path, parquet({"text": ["a", None], "n": [1, None], "v": [[1.0], [None]]}))
    assert data[0]["text"] == "a"
    with pytest.raises(DecodeError, match=r"column 'n' is null.*decode=.*filters="):
        data[1]
    assert closing(ParquetDataset(data.url, "text"))[1] is None
    with pytest.raises(DecodeError, match="column 'v' has a null in its list"):
        closing(ParquetDataset(data.url, "v"))[1]
    zero = closing(ParquetDataset(data.url, "n", decode={"n": lambda value: value or 0}))
    assert [zero[0], zero[1]] == [1, 0]


@pytest.mark.parametrize("options", [{"use_dictionary": True}, {"compression": "zstd"}, {"version": "1.0"}])
def test_other_encodings_give_the_same_rows(tmp_path: Path, options: dict[str, Any]) -> None:
    columns = {
        "name": pa.array([f"n{n % 3}" for n in range(30)]).dictionary_encode(),
        "nested": [{"a": [n, n], "b": None} for n in range(30)],
        "matrix": [[[n, 1], [2, 3]] for n in range(30)],
    }
    data = one(tmp_path, parquet(columns, 7, **options))
    sample = data[29]
    assert sample["name"] == "n2"
    assert sample["nested"]["a"].tolist() == [29, 29] and sample["nested"]["b"] is None
    assert sample["matrix"].tolist() == [[29, 1], [2, 3]]


def test_packed_row_holds_its_values() -> None:
    row = {"image": memoryview(b"pixels"), "n": 3, "none": None, "empty": memoryview(b""), "t": "text"}
    assert load(dump(row)) == row
    assert list(load(dump(row))) == list(row)
    for damaged in (b"", b"abc", bytes(dump(row))[:-1], bytes(dump(row)) + b"\0"):
        with pytest.raises(DecodeError):
            load(damaged)


# --- Epochs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "ranks", "shuffle"),
    [
        *((workers, ranks, True) for workers, ranks in [(1, 1), (3, 2), (40, 1)]),
        (3, 2, False),
        *(pytest.param(n, 1, False, marks=pytest.mark.stress) for n in (1, 40)),
    ],
)
def test_streams_give_every_row_once(url: str, workers: int, ranks: int, shuffle: bool) -> None:
    """Also with more readers than files and row groups."""
    data = closing(ParquetDataset(url, transform=CROP, cycle_length=3, shuffle_buffer=50))
    assert data._streams().must_stream()
    found = labels(read(data, workers=workers, ranks=ranks, shuffle=shuffle), "label")
    assert sorted(found) == list(range(TOTAL))
    assert found == labels(read(data, workers=workers, ranks=ranks, shuffle=shuffle), "label")
    if shuffle:
        assert found != labels(read(data, workers=workers, ranks=ranks, epoch=1), "label")
    else:  # each stream has its part of the files, in their order
        assert found == list(range(TOTAL))


def test_order_of_a_stream_is_the_same_out_of_the_cache(url: str, tmp_path: Path) -> None:
    """A run that goes on from a saved state finds in the cache what was read after that."""
    data = closing(ParquetDataset(url, transform=CROP, shuffle_buffer="8KB", cache=tmp_path / "cache"))
    found = labels(read(data), "label")
    data._flush_cache()
    requests = data.counters["get.requests"]
    assert labels(read(data), "label") == found
    assert data.counters["get.requests"] == requests


def test_row_groups_are_in_random_order_in_a_stream(url: str) -> None:
    data = closing(ParquetDataset(url, transform=CROP, cycle_length=1, shuffle_buffer=1))
    found = labels(read(data, workers=1), "label")
    starts = [b for a, b in itertools.pairwise(found) if b != a + 1]
    assert sorted(found) == list(range(TOTAL)) and starts != sorted(starts)
    assert len(starts) >= 10  # of 16 row groups


def test_other_columns_are_other_records_of_the_cache(url: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    first = closing(ParquetDataset(url, ("label",), cache=cache))
    read(first)
    first._flush_cache()
    assert first.contains(3)
    assert closing(ParquetDataset(url, "label", cache=cache)).contains(3)
    other = closing(ParquetDataset(url, ("label", "name"), cache=cache))
    assert not other.contains(3) and other[3] == (3, "n3")


@pytest.mark.parametrize("mode", ["auto", "raw", "dct"])
def test_lossless_cache_keeps_all_rows_of_a_row_group_for_one(url: str, tmp_path: Path, mode: Any) -> None:
    data = closing(ParquetDataset(url, ("image", "label"), transform=CROP, cache=Cache(tmp_path, mode)))
    assert not data.contains(0) and data[1][1] == 1
    data._flush_cache()
    assert data.contains(0) and data[0][1] == 0


def _rows(found: list[tuple[list[int], Any]]) -> list[tuple[Any, Any]]:
    return [pair for _, batch in found for pair in zip(batch["label"], batch["image"], strict=True)]


def test_only_the_wanted_columns_are_read(url: str) -> None:
    small = closing(ParquetDataset(url, "label"))
    read(small)
    whole = closing(ParquetDataset(url))
    read(whole)
    assert small.counters["get.bytes"] < whole.counters["get.bytes"] / 2


def test_row_group_is_read_once_for_neighbours() -> None:
    with FaultServer(shards("parquet")) as server:
        data = closing(ParquetDataset("s3://bucket", "label", storage_options=server.options))
        listed = server.count("part-000.parquet")
        assert [data[i] for i in range(12)] == list(range(12))
        assert server.count("part-000.parquet") == listed + 2  # the footer, and the row group


def test_damaged_row_group_is_read_once_for_its_rows() -> None:
    body = bytearray(parquet(table(range(12)), compression="none", write_page_checksum=True))
    mark = body.index(b"%08d" % 3)
    body[mark - 20 : mark] = bytes(20)
    with FaultServer({"a.parquet": bytes(body)}) as server:
        data = closing(ParquetDataset("s3://bucket", "image", storage_options=server.options))
        listed = server.count("a.parquet")
        for number in range(12):
            with pytest.raises(DecodeError, match=rf"a\.parquet @ {number}\b.*row group 0 cannot be read"):
                data[number]
        assert server.count("a.parquet") == listed + 2  # the footer, and the row group


def test_saved_state_of_other_filters_is_refused(url: str) -> None:
    data = closing(ParquetDataset(url, "label"))
    (state,) = data._streams().plan_streams(1, seed=1, epoch=0, shuffle=True, rank=0, ranks=1)
    other = closing(ParquetDataset(url, "label", filters=[("label", ">", 3)]))
    with pytest.raises(ArgumentError, match="filters="):
        other._streams().open_stream(state)


def test_prefix_leaves_out_logs_and_drafts(tmp_path: Path) -> None:
    hidden = ["_temporary/0/a.parquet", "_delta_log/1.parquet", "year=2024/._a.parquet"]
    url = write(tmp_path / "_files", dict.fromkeys(["a.parquet", *hidden], parquet(table(range(12)))))
    assert len(closing(ParquetDataset(url))) == 12
    assert [len(closing(ParquetDataset(f"{url}/{name}"))) for name in hidden] == [12] * 3
    assert len(closing(ParquetDataset(f"{url}/**/*.parquet"))) == 4 * 12


# --- Filters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ([("label", "<", 3)], [0, 1, 2]),
        ([("label", ">=", 170), ("even", "=", True)], [170, 172]),
        ([[("label", "==", 5)], [("name", "in", ["n7", "n9"])]], [5, 7, 9]),
        ([("label", "<=", 4), ("label", "not in", (1, 2)), ("name", "!=", "n3")], [0, 4]),
        ([("label", ">", 1000)], []),
        ([("label", "in", [2.0, 3.5, np.float32(4.5)])], [2]),
    ],
    ids=str,
)
def test_filters_choose_rows(url: str, filters: Any, wanted: list[int]) -> None:
    data = closing(ParquetDataset(url, "label", filters=filters))
    assert [data[i] for i in range(len(data))] == wanted
    found = [sample for _, samples in read(data) for sample in samples]
    assert sorted(found) == wanted


def test_nulls_pass_no_comparison(tmp_path: Path) -> None:
    data = one(tmp_path, parquet({"n": [1, None, 3]}), filters=[("n", "!=", 1)])
    assert [data[i] for i in range(len(data))] == [{"n": 3}]


def test_null_is_not_in_values_as_pyarrow_has_it(tmp_path: Path) -> None:
    """Row 1 is a null."""
    body, filters = parquet({"s": ["a", None, "b"], "n": [0, 1, 2]}), [("s", "not in", ["a"])]
    data = one(tmp_path, body, fields="n", filters=filters)
    theirs = pq.read_table(io.BytesIO(body), filters=filters)["n"].to_pylist()
    assert [data[i] for i in range(len(data))] == theirs == [1, 2]


@pytest.mark.parametrize(
    "kind", [pa.float32(), pytest.param(pa.float64(), marks=pytest.mark.stress), pa.int8()]
)
@pytest.mark.parametrize("operator", ["in", "not in", "=", "!=", "<", "<=", ">", ">="])
def test_rows_that_pass_do_not_depend_on_the_row_groups(operator: str, kind: Any, tmp_path: Path) -> None:
    numbers = [1, 3, 2, 5, 1, 4] if pa.types.is_integer(kind) else [0.1, 0.05, 0.25, 0.5, 0.1, 0.9]
    table = pa.table({"x": pa.array(numbers, kind)})
    for value in {numbers[0], numbers[2]}:
        found, equal = [], []
        for size in (1, 2, 6):
            body = parquet(table, row_group_size=size)
            given = [value] if operator.endswith("in") else value
            found.append(len(one(tmp_path / f"{size}", body, filters=[("x", operator, given)])))
            equal.append(len(one(tmp_path / f"{size}", body, filters=[("x", "=", value)])))
        assert len(set(found)) == 1, found
        assert found == equal or operator != "in"


@pytest.mark.parametrize(
    ("operator", "value", "rows"), [("=", 2**64 - 1, 1), (">", 1, 2), ("<", 2**63, 1), ("in", [2**63], 1)]
)
def test_filters_take_the_whole_range_of_uint64(tmp_path: Path, operator: str, value: Any, rows: int) -> None:
    table = pa.table({"n": pa.array([1, 2**63, 2**64 - 1], pa.uint64())})
    assert len(one(tmp_path, parquet(table), filters=[("n", operator, value)])) == rows


def test_filter_finds_nan_whatever_the_statistics_of_its_row_group(tmp_path: Path) -> None:
    """Its row group has the statistics 1 to 1."""
    body = parquet({"x": [math.nan, 1.0]})
    assert len(one(tmp_path, body, filters=[("x", "in", [math.nan, 5.0])])) == 1


@pytest.mark.parametrize(
    "condition",
    [
        *(("price", "=", 0.1), ("price", "<=", 0.3), ("price", "=", Decimal("0.3"))),
        ("time", ">", datetime(1969, 1, 1)),
    ],
    ids=str,
)
def test_filters_compare_decimals_and_nanoseconds_as_pyarrow_does(tmp_path: Path, condition: Any) -> None:
    prices = pa.array([Decimal("0.10"), Decimal("0.30")], pa.decimal128(9, 2))
    rows = pa.table({"n": [0, 1], "price": prices, "time": pa.array([1001, 1002], pa.timestamp("ns"))})
    body = parquet(rows, row_group_size=1)
    theirs = pq.read_table(io.BytesIO(body), filters=[condition])["n"].to_pylist()
    data = one(tmp_path, body, fields="n", filters=[condition])
    assert theirs and [data[i] for i in range(len(data))] == theirs


# --- Files that cannot be read -----------------------------------------------------------------------------


def _cut(body: bytes) -> bytes:
    return body[: len(body) // 2]


def _middle_missing(body: bytes) -> bytes:
    """The footer at the end of too few bytes, as a file that was put together wrongly."""
    return body[:1000] + body[-int.from_bytes(body[-8:-4], "little") - 8 :]


def _footer_lost(body: bytes) -> bytes:
    size = int.from_bytes(body[-8:-4], "little")
    return body[: -size - 8] + bytes(size) + body[-8:]


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (_cut, r"part-002\.parquet.*does not end as a Parquet file.*cut"),
        (lambda body: b"", r"part-002\.parquet.*does not end as a Parquet file"),
        (lambda body: b"id,label\n1,2\n", r"part-002\.parquet.*a file of another kind"),
        (lambda body: body[:-4] + b"PARE", r"part-002\.parquet.*encrypted"),
        (_footer_lost, r"part-002\.parquet.*footer cannot be read"),
        (_middle_missing, r"part-002\.parquet.*row group \d+ is not all in the file"),
    ],
    ids=["cut", "empty", "csv", "encrypted", "footer", "middle"],
)
def test_file_that_is_none_is_named(tmp_path: Path, damage: Any, error: str) -> None:
    broken = shards("parquet")
    broken["part-002.parquet"] = damage(broken["part-002.parquet"])
    with pytest.raises(DecodeError, match=error):
        ParquetDataset(write(tmp_path, broken))


def test_damaged_row_group_is_an_error_of_each_of_its_rows(tmp_path: Path) -> None:
    body = bytearray(parquet(table(range(36)), 12, compression="none", write_page_checksum=True))
    mark = body.index(b"%08d" % 12)  # behind the image of row 12
    body[mark - 20 : mark] = bytes(20)
    data = one(tmp_path, bytes(body), fields=("image", "label"), transform=CROP)
    with pytest.raises(DecodeError, match=r"a\.parquet @ 1\d.*row group 1 cannot be read"):
        read(data)
    loader = fastload.DataLoader(data, 36, on_error="repeat", shuffle=True)
    found = {int(label) for _, column in loader for label in column}
    assert found == {*range(12), *range(24, 36)}
    with pytest.raises(DecodeError, match=r"a\.parquet @ 14.*row group 1 cannot be read"):
        data[14]


def test_text_that_is_no_utf8_is_an_error_of_its_row_group(tmp_path: Path) -> None:
    wrong = pa.array([b"fine", b"\xff"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, wrong.buffers())
    data = one(tmp_path, parquet({"text": text, "n": [0, 1]}, row_group_size=1))
    assert data[0]["text"] == "fine"
    with pytest.raises(DecodeError, match="column 'text' has a text that is not UTF-8"):
        data[1]
    assert one(tmp_path, parquet({"text": text, "n": [0, 1]}), fields="n")[1] == 1


@pytest.mark.parametrize("rows", [-5, 10**15])
def test_impossible_number_of_rows_is_refused_before_memory_is_taken(tmp_path: Path, rows: int) -> None:
    def varint(number: int) -> bytes:
        zigzag, out = (number << 1 ^ number >> 63) & (1 << 64) - 1, bytearray()
        while zigzag > 127:
            out.append(zigzag & 127 | 128)
            zigzag >>= 7
        return bytes([*out, zigzag])

    data = parquet({"n": pa.array(range(12345), pa.int32())}, 99999, store_schema=False)
    size = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - size : -8].replace(varint(12345), varint(rows))
    with pytest.raises(DecodeError, match=f"the footer tells of {rows:,} rows"):
        one(tmp_path, data[: -8 - size] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def test_files_that_differ_are_named(tmp_path: Path) -> None:
    both = {"a.parquet": parquet({"n": [1], "t": ["x"]}), "b.parquet": parquet({"n": [1.5], "u": ["x"]})}
    url = write(tmp_path, both)
    with pytest.raises(ArgumentError, match=r"'a.parquet' and 'b.parquet'.*'n' is int64 in one and double"):
        ParquetDataset(url, "n")
    with pytest.raises(ArgumentError, match=r"fields names 't', and 'b.parquet' has no column"):
        ParquetDataset(url, "t")


def test_timestamps_are_refused_unless_left_out(tmp_path: Path) -> None:
    when = pa.array([1, 2], pa.timestamp("us"))
    file = parquet({"n": [1, 2], "when": when}, use_deprecated_int96_timestamps=True)
    with pytest.raises(ArgumentError, match=r"column 'when' is timestamp.*leave it out with fields="):
        one(tmp_path, file)
    assert one(tmp_path, file, fields="n")[1] == 2


def test_image_without_bytes_is_an_error_that_says_so(tmp_path: Path) -> None:
    data = one(
        tmp_path, parquet({"image": [{"bytes": None, "path": "x/1.jpg"}, {"bytes": jpeg(1), "path": ""}]})
    )
    with pytest.raises(DecodeError, match=r"column 'image' has only the path 'x/1.jpg'.*embed"):
        data[0]
    assert isinstance(data[1]["image"], Image.Image)


@pytest.mark.parametrize("mode", ["auto", "raw"])
def test_bad_row_harms_no_other_row_of_its_row_group(tmp_path: Path, mode: Any) -> None:
    images = [{"bytes": jpeg(0), "path": ""}, {"bytes": None, "path": "x/1.jpg"}]
    cache = Cache(tmp_path / "cache", mode)
    data = one(tmp_path, parquet({"image": images}), fields="image", transform=CROP, cache=cache)
    assert data[0].shape == (3, 24, 24)
    with pytest.raises(DecodeError, match=r"a.parquet @ 1.*has only the path 'x/1.jpg'"):
        data[1]


@pytest.mark.parametrize("make", [ParquetDataset, lambda url: fastload.TableDataset([{"n": 1}], "n")])
def test_missing_pyarrow_is_an_error_with_the_command(
    url: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "fastload.datasets.arrow", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ArgumentError, match=r"pip install 'torch-fastload\[parquet\]'"):
        make(url)


def test_huge_row_group_brings_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.shards.parquet_files._HUGE", 1000)
    with caplog.at_level(logging.WARNING, "fastload"):
        one(tmp_path, parquet({"n": list(range(5000))}, 4000))
    assert "row_group_size=1000" in caplog.text and "4,000 rows" in caplog.text


# --- hf:// -------------------------------------------------------------------------------------------------


class _Hub(MemoryFileSystem):
    """A file system that names files and their versions as huggingface_hub's does."""

    protocol = "hf"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the class above
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("hf://").strip("/")

    def info(self, path: str, **arguments: Any) -> dict[str, Any]:
        return _as_hub(super().info(path, **arguments))

    def ls(self, path: str, detail: bool = True, **arguments: Any) -> Any:
        listed = [_as_hub(one) for one in super().ls(path, True, **arguments)]
        return listed if detail else [one["name"] for one in listed]


def _as_hub(info: dict[str, Any]) -> dict[str, Any]:
    found = info | {"name": info["name"].strip("/")}
    if found["type"] == "file":
        found["blob_id"] = f"blob-{found['size']}"
        del found["created"]
    return found


@pytest.mark.parametrize("branch", ["", "@refs/convert/parquet"])
def test_datasets_of_the_hub_are_read_by_fsspec(tmp_path: Path, branch: str) -> None:
    fsspec.register_implementation("hf", _Hub, clobber=True)
    try:
        hub = _Hub()
        for key, body in shards("parquet").items():
            hub.pipe_file(f"/datasets/org/name{branch}/data/{key}", body)
        data = closing(
            ParquetDataset(
                f"hf://datasets/org/name{branch}/data/part-*.parquet",
                ("image", "label"),
                transform=CROP,
                cache=tmp_path / "cache",
            )
        )
        assert sorted(int(n) for n, _ in _rows(read(data))) == list(range(TOTAL))
        data._flush_cache()
        assert data.contains(3) and not data._streams().must_stream()
    finally:
        sys.modules["fsspec.registry"]._registry.pop("hf")
