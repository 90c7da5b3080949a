"""The table of shard formats: each has a dataset, a name, and keys that only it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import fastload
from fastload.formats.pieces import Record
from fastload.shards.catalog import index_name
from fastload.shards.formats import FORMATS, ShardFormat, format_of, format_of_index, title_of
from tests.sharddata import FEATURES, IMAGE, shard, write

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "formats"
KEYS = {
    "tar": ["a/b-000.tar", "x.tar.gz", "x.tgz"],
    "tfrecord": [
        "x.tfrecord", "a/x.tfrecords", "x.tfrec", "x.tfrecord.gz", "x.tfrecord-00001-of-00010",
        "x_train.tfrec_1", "a/train-00001-of-01024", "train-00001-of-01024.gz",
    ],
    "parquet": ["a/train-00000-of-00001.parquet", "x.pq"],
    "mds": ["shard.00000.mds", "train/shard.00000.mds.zstd"],
    "litdata": ["chunk-0-0.bin", "a/chunk-12-3.zstd.bin"],
    "beton": ["a/train.beton", "x.ffcv"],
}  # fmt: skip
NONE = [
    "x.tfrecord.idx",
    "train-00001-of-01024.json",
    "x.jpg",
    "x.npy",
    "x.bin",
    "tar",
    "x.tarx",
    "a.tfrec/x.txt",
]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_format_has_a_public_dataset_and_a_page(form: ShardFormat) -> None:
    assert form.dataset in fastload.__all__
    for page in ("docs/how-to/data/index.md", "docs/reference/datasets.md"):
        assert form.dataset in (ROOT / page).read_text(), page
    assert re.fullmatch(rf"{form.name}-\d+", form.code)
    assert form.split is None or form.index_files is not None


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in KEYS.items() for key in keys])
def test_key_is_of_one_format(name: str, key: str) -> None:
    takers = [form.name for form in FORMATS.values() if form.names_shard(key) and not form.required]
    assert takers == [name]
    assert format_of([*NONE, key]) is FORMATS[name]


def test_other_keys_are_of_none() -> None:
    assert format_of(NONE) is None
    assert format_of([]) is None


def test_name_that_only_one_format_has_is_known() -> None:
    for name, keys in KEYS.items():
        known = {title_of(key) for key in keys} - {None}
        assert known <= {(FORMATS[name].title, FORMATS[name].dataset)}
    assert title_of("train-00001-of-01024") is None, "a tar may be called so too"
    assert title_of("x.npy") is None


@pytest.mark.parametrize(("folder", "name"), [("mds-gz", "mds"), ("lit", "litdata")])
def test_index_json_says_its_format(folder: str, name: str) -> None:
    assert format_of_index(json.loads((DATA / folder / "index.json").read_text())) is FORMATS[name]
    assert format_of_index({"shardlist": []}) is FORMATS["tar"]
    assert format_of_index([]) is None


@pytest.mark.parametrize("name", ["tar", "tfrecord"])
def test_splitter_fields_and_index_file_belong_together(name: str) -> None:
    form = FORMATS[name]
    assert form.index_files is not None and form.read_fields is not None
    data, _ = shard(name, range(3))
    splitter = form.splitter(0, len(data))
    splitter.feed(memoryview(data))
    splitter.close()
    records: list[Record] = list(iter(splitter.next, None))
    for record in records:
        assert record.payload is not None
        assert b"JFIF" in bytes(form.read_fields(record.payload)[IMAGE[name]])
    file = form.index_files.write([form.index_files.entry(record) for record in records])
    offsets = form.index_files.parse(file, len(data))
    assert np.array_equal(offsets[:, 0], [record.offset for record in records])


@pytest.mark.parametrize("ending", ["tfrec", "tfrecord", "tfrecords"])
def test_tfrecord_files_have_one_set_of_names(ending: str, tmp_path: Path) -> None:
    data, index = shard("tfrecord", range(4))
    key = f"x.{ending}"
    assert index_name(key) == "x.idx"
    dataset = fastload.TFRecordDataset(write(tmp_path, {key: data, "x.idx": index, "y.txt": b""}), FEATURES)
    assert [dataset[number]["label"] for number in range(4)] == list(range(4))
    dataset.close()
