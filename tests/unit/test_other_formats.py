"""MDS, LitData's chunks and FFCV's .beton, as their own libraries wrote and read them: tests/data/formats."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastload import BetonDataset, CenterCrop, DataLoader, LitDataset, MDSDataset
from fastload.errors import ArgumentError, DecodeError, FastloadError
from fastload.formats import beton as beton_format
from fastload.formats import litdata as lit_format
from fastload.formats.pieces import zstd
from tests.data.make_formats import COUNT, describe, encoded, pixels

DATA = Path(__file__).parent.parent / "data" / "formats"


def _has_zstd() -> bool:
    try:
        return zstd() is not None
    except DecodeError:
        return False


needs_zstd = pytest.mark.skipif(not _has_zstd(), reason="an older .venv: run .ci/setup again")


def made(name: str) -> Any:
    return (MDSDataset if name.startswith("mds") else LitDataset)(DATA / name)


def oracle(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(describe(value)))


@pytest.fixture
def beton(tmp_path: Path) -> Path:
    path = tmp_path / "fields.beton"
    path.write_bytes(gzip.decompress((DATA / "fields.beton.gz").read_bytes()))
    return path


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a dataset, to be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(DATA / name, tmp_path / name))

    return copy


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    told = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(change(told) or told))


# --- sample for sample equal to the real readers


NAMES = ["mds", "mds-gz", "mds-bz2", "lit", "lit-tuple", "lit-list", "lit-photos"]
WITH_ZSTD = ["mds-zstd", "lit-chunk", "lit-batch", "lit-single"]


@pytest.mark.parametrize("name", NAMES + [pytest.param(name, marks=needs_zstd) for name in WITH_ZSTD])
def test_samples_equal_those_of_the_real_reader(name: str) -> None:
    dataset, wanted = made(name), oracle(name)
    assert len(dataset) == COUNT
    assert [as_json(dataset[number]) for number in range(COUNT)] == wanted


def test_beton_samples_equal_those_of_the_real_reader(beton: Path) -> None:
    dataset, wanted = BetonDataset(beton), oracle("fields")
    assert len(dataset) == COUNT
    for number, told in enumerate(wanted):
        image, *others = dataset[number]
        jpg = told.pop("jpg")
        assert image.dtype == np.uint8
        assert np.abs(image.astype(int) - np.array(jpg)).max() <= 8  # FFCV decodes by the fast DCT
        assert dict(zip(told, map(as_json, others), strict=True)) == told


def write_beton(path: Path, samples: list[tuple[bytes, int]], allocated: list[tuple[int, int, int]]) -> None:
    """Write a text and a number for each sample. `allocated`: (sample, offset from the first page, size)."""
    rows = np.zeros(len(samples), beton_format.row_type(TEXT_AND_LABEL))
    header = beton_format.BetonHeader(2, 1 << 12, len(samples), 0)
    first = header.rows + rows.nbytes
    body = b"".join(text for text, _ in samples)
    head = np.array((2, 2, header.page, len(samples), first + len(body)), beton_format._HEADER)
    fields = np.zeros(2, beton_format._DESCRIPTOR)
    for field, (name, kind, *_) in zip(fields, TEXT_AND_LABEL, strict=True):
        field["kind"] = beton_format._KINDS.index(kind)
        field["name"][: len(name)] = list(name.encode())
    table = np.array([(n, first + at, size) for n, at, size in allocated], beton_format._ALLOCATED)
    places = {n: (first + at, size) for n, at, size in allocated}
    for n, (_, label) in enumerate(samples):
        rows[n] = places[n], label
    path.write_bytes(b"".join(part.tobytes() for part in (head, fields, rows)) + body + table.tobytes())


TEXT_AND_LABEL = [
    beton_format.BetonField("text", "bytes", None, ()),
    beton_format.BetonField("label", "int", None, ()),
]


@pytest.mark.parametrize("empty_at", [0, -50], ids=["where the next one begins", "before the pages"])
def test_a_beton_sample_without_bytes_is_not_taken_for_the_next_one(empty_at: int, tmp_path: Path) -> None:
    samples = [(b"", 1), (b"abc", 2)]
    write_beton(tmp_path / "x.beton", samples, [(0, empty_at, 0), (1, 0, 3)])
    dataset = BetonDataset(tmp_path / "x.beton", cache=tmp_path / "cache")
    for _ in range(2):
        assert [dataset[number] for number in range(2)] == samples
        dataset._flush_cache()
    dataset.close()


def test_a_beton_with_two_samples_at_one_offset_is_refused(tmp_path: Path) -> None:
    write_beton(tmp_path / "x.beton", [(b"abc", 1), (b"", 2)], [(0, 0, 3), (1, 0, 2)])
    with pytest.raises(DecodeError, match=r"two samples of the \.beton begin at one offset"):
        BetonDataset(tmp_path / "x.beton")


def test_lit_samples_in_the_order_of_index_json_not_of_names(copied: Callable[[str], Path]) -> None:
    folder = copied("lit-tuple")
    for old, new in ((2, 10), (1, 2), (10, 1)):  # the order of names is now 0, 2, 1
        (folder / f"chunk-0-{old}.bin").rename(folder / f"chunk-0-{new}.bin")

    def swap(told: Any) -> None:
        for chunk in told["chunks"]:
            number = chunk["filename"][8]
            chunk["filename"] = f"chunk-0-{ {'0': 0, '1': 2, '2': 1}[number] }.bin"

    edit(folder, swap)
    dataset = LitDataset(folder)
    assert [dataset[number][1] for number in range(COUNT)] == list(range(COUNT))


# --- fields, decode, transform


def _text(label: Any) -> str:
    return str(label.item() if isinstance(label, torch.Tensor) else label)


def test_fields_pick_and_rename_columns() -> None:
    assert MDSDataset(DATA / "mds-gz", fields=("label", {"t": "text"}))[3] == (3, {"t": "xxx"})
    assert LitDataset(DATA / "lit", fields={"x": "tuple.1.0"})[4] == {"x": 4.0}
    assert LitDataset(DATA / "lit", fields="int")[4] == 1


def test_fused_transform_fills_batches(beton: Path) -> None:
    crop = CenterCrop(12)
    sets: list[Any] = [
        MDSDataset(DATA / "mds-gz", ("image", "label"), transform=crop),
        LitDataset(DATA / "lit-tuple", transform=crop),
        LitDataset(DATA / "lit-list", transform={"0": crop}),
        BetonDataset(beton, ("raw", "int"), transform=CenterCrop(6)),
        BetonDataset(beton, ("jpg", "int"), transform=crop),
    ]
    for dataset in sets:
        ((images, labels),) = DataLoader(
            dataset, batch_size=COUNT
        )  # small samples are streamed, in any order
        assert images.shape[0] == COUNT and images.dtype == torch.uint8
        alone = {str(label): image for image, label in (dataset[number] for number in range(COUNT))}
        assert all(
            torch.equal(image, alone[_text(label)]) for image, label in zip(images, labels, strict=True)
        )
    raw = BetonDataset(beton, "raw", transform=CenterCrop(6))[2]
    assert np.array_equal(raw.numpy().transpose(1, 2, 0), pixels(2, 6, 8)[:, 1:7])


def test_decode_replaces_what_belongs_to_an_encoding(copied: Callable[[str], Path]) -> None:
    folder = copied("mds-gz")

    def rename(told: Any) -> None:
        for shard in told["shards"]:
            shard["column_encodings"][1] = "own"

    edit(folder, rename)
    with pytest.raises(
        ArgumentError, match=r"column 'label' has the encoding 'own'.*decode=.'label'.*Known are"
    ):
        MDSDataset(folder)
    assert MDSDataset(folder, decode={"label": len})[2]["label"] == 8
    assert list(MDSDataset(folder, fields=("text",))[2]) == ["xx"]
    whole = MDSDataset(folder, decode=lambda columns: columns["label"][0])
    assert [whole[number] for number in range(COUNT)] == list(range(COUNT))


@pytest.mark.parametrize("transform", [None, CenterCrop(12)])
def test_quality_that_an_encoding_of_mds_names_is_for_writers(
    transform: Any, copied: Callable[[str], Path]
) -> None:
    folder = copied("mds-gz")

    def name_it(told: Any) -> None:
        for shard in told["shards"]:
            shard["column_encodings"][0] += ":90"

    edit(folder, name_it)
    images = [MDSDataset(place, "image", transform=transform)[3] for place in (folder, DATA / "mds-gz")]
    assert np.array_equal(*map(np.asarray, images))
    assert type(images[0]) is type(images[1])


@pytest.mark.parametrize("order", ["<", ">"], ids=["older", "newer"])
def test_tensors_of_older_and_newer_litdata_are_opened(order: str) -> None:
    wanted = torch.arange(6).reshape(2, 3)
    opener: Any = lit_format.opener("tensor", bytes, unsafe=False)
    found = opener(memoryview(struct.pack(f"{order}4I", 18, 2, 2, 3) + wanted.numpy().tobytes()))
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_pickles_are_opened_only_if_asked_for() -> None:
    with pytest.raises(ArgumentError, match=r"column 'thing' is a pickle.*unsafe=True"):
        MDSDataset(DATA / "mds-pkl")
    assert MDSDataset(DATA / "mds-pkl", fields="label")[1] == 1
    assert MDSDataset(DATA / "mds-pkl", unsafe=True)[1]["thing"] == {1}
    assert pickle.loads(MDSDataset(DATA / "mds-pkl", decode={"thing": bytes})[0]["thing"]) == {0, 1}


# --- bad input: an error that names the place and the next step


@pytest.mark.parametrize(
    "name", ["../escape.mds", "/etc/passwd", "a/../../b", "a\\b", "s3://x/y", "", 7, "*.mds", "a.idx"]
)
def test_names_that_leave_the_folder_are_refused(name: Any, copied: Callable[[str], Path]) -> None:
    mds, lit = copied("mds"), copied("lit-list")
    edit(mds, lambda told: told["shards"][1]["raw_data"].update(basename=name))
    edit(lit, lambda told: told["chunks"][1].update(filename=name))
    for dataset, folder in ((MDSDataset, mds), (LitDataset, lit)):
        with pytest.raises(ArgumentError, match="not a plain name below this folder"):
            dataset(folder)


def test_index_json_is_found_without_a_folder_before_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DATA / "mds")
    assert len(MDSDataset("index.json")) == len(MDSDataset(".")) == COUNT


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mds", lambda told: told["shards"][0].update(samples=float("inf"))),
        ("lit", lambda told: told["chunks"][0].update(chunk_size=float("inf"))),
        ("lit", lambda told: told["config"]["data_format"].__setitem__(0, "no_header_numpy:\u00b2")),
        ("mds-gz", lambda told: told["shards"][0].update(samples=10**9)),
    ],
)
def test_numbers_that_are_none_are_refused_in_words(
    name: str, change: Callable[[Any], Any], copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    edit(folder, change)
    with pytest.raises(FastloadError, match=r"not an|not known|smaller shards"):
        (MDSDataset if name.startswith("mds") else LitDataset)(folder)


def test_merged_index_names_files_in_folders_below(tmp_path: Path) -> None:
    shutil.copytree(DATA / "mds", tmp_path / "part")
    told = json.loads((tmp_path / "part" / "index.json").read_text())
    for shard in told["shards"]:
        shard["raw_data"]["basename"] = f"part/{shard['raw_data']['basename']}"
    (tmp_path / "index.json").write_text(json.dumps(told))
    assert MDSDataset(tmp_path, fields="c_int")[5] == made("mds")[5]["c_int"]


@pytest.mark.parametrize(("name", "file"), [("mds", "shard.00001.mds"), ("lit", "chunk-0-1.bin")])
def test_cut_or_foreign_shard_is_named_by_the_constructor(
    name: str, file: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    whole = (folder / file).read_bytes()
    for damaged in (whole[:-5], whole[:9], b"", encoded(0) * 9, b"\xff" * len(whole)):
        (folder / file).write_bytes(damaged)
        with pytest.raises(DecodeError, match=r"copy it again|cut") as error:
            (MDSDataset if name == "mds" else LitDataset)(folder)
        assert file in str(error.value)


def test_cut_compressed_shard_costs_its_last_samples(copied: Callable[[str], Path]) -> None:
    folder = copied("mds-gz")
    path = folder / "shard.00001.mds.gz"
    path.write_bytes(path.read_bytes()[:-300])
    size = path.stat().st_size
    edit(folder, lambda told: told["shards"][1]["zip_data"].update(bytes=size))
    dataset = MDSDataset(folder, "label")
    assert [dataset[number] for number in range(4)] == list(range(4))
    with pytest.raises(DecodeError, match="cut") as error:
        dataset[COUNT - 1]
    assert "shard.00001.mds.gz" in str(error.value)


def test_damaged_sample_is_one_error_with_its_place(copied: Callable[[str], Path]) -> None:
    folder = copied("mds")
    path = folder / "shard.00000.mds"
    start = int.from_bytes(path.read_bytes()[4:8], "little")
    data = bytearray(path.read_bytes())
    data[start : start + 4] = b"\xff" * 4  # the size of the first column
    path.write_bytes(data)
    dataset = MDSDataset(folder)
    with pytest.raises(DecodeError, match="values add up") as error:
        dataset[0]
    assert error.value.key == f"shard.00000.mds @ {start}"
    assert as_json(dataset[1]) == oracle("mds")[1]


COLUMNS = ["h_any", "i_pil", "l_array", "l_pils", "m_json", "f_float16"]
LEAVES = ["numpy", "tensor", "flat_numpy", "int", "jpegs", "pil", "json"]


@pytest.mark.parametrize(
    ("name", "field"), [*(("mds", column) for column in COLUMNS), *(("lit", leaf) for leaf in LEAVES)]
)
def test_damaged_value_is_an_error_that_names_its_field(name: str, field: str) -> None:
    dataset = made(name)
    value = bytes(dataset._fields.split(memoryview(dataset._payload(1)))[field])
    for damaged in (b"\xff" * 41, value[:-1], *([b""] if name == "mds" else [])):
        with pytest.raises(DecodeError, match=f"column '{field}'" if name == "mds" else field):
            dataset._fields.open(field, memoryview(damaged))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda told: told["config"].update(item_loader="TokensLoader"), r"fastload\.TokenDataset"),
        (lambda told: told["config"].update(encryption={"algorithm": "fernet"}), "encrypted"),
        (lambda told: told["config"].update(compression="lz4"), "compressed by 'lz4'"),
        (
            lambda told: told["config"].update(data_format=["video:mp4", "int"]),
            "'video:mp4', which is not known",
        ),
        (lambda told: told["config"].update(data_spec="[1, {}]"), "not an index.json of LitData"),
        (lambda told: told["chunks"].clear(), "lists no shards"),
    ],
)
def test_chunks_that_are_not_read_are_refused_in_words(
    change: Callable[[Any], Any], message: str, copied: Callable[[str], Path]
) -> None:
    folder = copied("lit-tuple")
    edit(folder, change)
    with pytest.raises(ArgumentError, match=message):
        LitDataset(folder)


def test_damaged_beton_is_an_error_before_memory_is_taken(beton: Path) -> None:
    data = beton.read_bytes()

    def with_number(at: int, value: int, size: int = 8) -> bytes:
        return data[:at] + value.to_bytes(size, "little") + data[at + size :]

    table = int.from_bytes(data[16:24], "little")
    for damaged, message in (
        (with_number(8, 2**60), "cut|fit"),
        (with_number(16, 2**60), "the file was cut"),
        (with_number(0, 1, 2), "version is 1"),
        (data[:10], "at least"),
        (data[:-4000], "cut"),
        (with_number(table, 999), "damaged"),
        (with_number(table + 8, 2**63), "damaged"),
        (data[:24] + b"\xff" + data[25:], "one of the author's own classes"),
        (data.replace(b'"<f4"', b'"(2, "'), "dtype that is not read"),
    ):
        beton.write_bytes(damaged)
        with pytest.raises(DecodeError, match=message) as error:
            BetonDataset(beton)
        assert "fields.beton" in str(error.value)


def test_images_keep_the_mode_that_the_real_reader_gives() -> None:
    image = made("mds")[3]["j_jpeg"]
    assert isinstance(image, Image.Image) and image.mode == "L"
