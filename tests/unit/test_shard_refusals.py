"""Arguments of datasets of shards that the constructor refuses, in words that name the next step."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastload
from fastload import CenterCrop
from fastload.errors import ArgumentError, DecodeError, FastloadError, NotFoundError
from tests.sharddata import jpeg, shard, shards, write

FORMATS = Path(__file__).parents[1] / "data" / "formats"
CROP = CenterCrop(6)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one dataset of each format."""
    root = tmp_path_factory.mktemp("refusals")
    write(root / "tar", shards("tar", index=True))
    write(root / "tfrecord", shards("tfrecord", index=True))
    write(root / "parquet", shards("parquet"))
    write(root / "others", {"notes.txt": b""})
    write(root / "photos", {"cat/0.jpg": jpeg(0)})
    write(root / "odd", {"file": shard("tar", range(3))[0]})
    (root / "beton").mkdir()
    (root / "beton" / "x.beton").write_bytes(gzip.decompress((FORMATS / "fields.beton.gz").read_bytes()))
    for name in ("mds", "mds-gz", "mds-pkl", "mds-br", "lit", "lit-arrow"):
        (root / name).symlink_to(FORMATS / name)
    (root / "run[1]").symlink_to(FORMATS / "mds")
    return root


TAR = [
    ({"fields": ()}, "fields must be a str"),
    ({"fields": (1,)}, "must be a str"),
    ({"fields": ("jpg;cls",)}, "some are images"),
    ({"fields": ("jpg?;png",)}, "write a name such as 'jpg'"),
    ({"fields": ("cls",), "transform": CROP}, "none of cls may be one"),
    ({"fields": ("jpg", "png"), "transform": CROP}, "jpg and png may be one: name it"),
    ({"fields": ("jpg?",), "transform": CROP}, "'jpg' as optional"),
    ({"fields": ("jpg", "png?"), "transform": {"jpg": CROP, "png": CROP}}, "'png' as optional"),
    ({"fields": ("png;jpg",), "transform": {"jpg": CROP}}, "transform names 'jpg', and a sample has png"),
    ({"fields": {"x": "jpg"}, "transform": {"jpg": CROP}}, "transform names 'jpg', and a sample has x"),
    ({"fields": ("jpg",), "decode": lambda members: 1}, "a function as decode="),
    *(
        ({"num_samples": hint}, "num_samples must be a whole number >= 1")
        for hint in (0, -1, True, 1.0, "100")
    ),
    ({"cycle_length": 0}, "cycle_length"),
    ({"shuffle_buffer": 0}, "shuffle_buffer"),
    ({"shuffle_buffer": "many"}, "shuffle_buffer"),
    ({"decode": 3}, "decode"),
    ({"transform": 3}, "transform"),
    ({"transform": {"jpg": 3}}, "transform"),
]
TFRECORD = [
    ({"fields": {"a": dict}}, r"fields\['a'\] must be bytes"),
    ({"fields": {}}, "fields must be a dict of name: type"),
    ({"fields": ()}, "not empty"),
    ({"fields": (3,)}, "a feature and its type such as 'label:int'"),
    ({"fields": ("image",)}, "write a feature and its type, .* as in 'image:bytes'"),
    ({"fields": ("image:jpeg", "label:int")}, "has the leaf 'image:jpeg'"),
    ({"fields": ("a?:int",)}, "has the leaf 'a\\?:int'"),
    ({"fields": ("a:int", "a:str?")}, "has 'a' as .*int.* and as .*str.*: give one type"),
    ({"fields": ("image:bytes",), "decode": len}, "leave one out"),
]
PARQUET = [
    ({"fields": ("image", "target")}, "fields names 'target'.*no column.*image, label, name"),
    ({"fields": ("image", "label"), "decode": {"name": len}}, "decode names 'name'.*read are image, label"),
    ({"fields": "image", "transform": {"x": CROP}}, "transform names 'x'.*sample has image"),
    ({"fields": ("label", "name"), "transform": CROP}, "none of label, name may be one"),
    ({"filters": "label > 3"}, "filters must be a list of tuples"),
    ({"filters": []}, "filters must be a list of tuples"),
    ({"filters": [("label", "~", 3)]}, "operator '~' for column 'label'.*use one of ="),
    ({"filters": [("label", "in", 3)]}, "give a list, tuple or set"),
    ({"filters": [("colour", "=", 3)]}, "filters names 'colour'.*it has image, label"),
    ({"filters": [("label", "=", "three")]}, "compares column 'label', which is int64, with 'three'"),
    ({"filters": [("label", "<", 2**70)]}, "column 'label', which is int64, with 1180591620717411303424"),
    ({"filters": [("label", "<", np.arange(2))]}, "compares column 'label', which is int64, with array"),
]
OTHERS = [
    ("MDSDataset", "mds-pkl", {}, ArgumentError, "column 'thing' is a pickle.*unsafe=True"),
    ("MDSDataset", "mds-br", {}, ArgumentError, "by 'br' are not read: write them with compression='zstd'"),
    (
        "MDSDataset",
        "mds-gz",
        {"fields": ("label",), "transform": CROP},
        ArgumentError,
        "none of label may be",
    ),
    (
        "MDSDataset",
        "mds-gz",
        {"transform": {"photo": CROP}},
        ArgumentError,
        "transform names 'photo', and a s",
    ),
    (
        "MDSDataset",
        "mds-gz",
        {"fields": ("photo",)},
        ArgumentError,
        "names 'photo', and the columns are image",
    ),
    ("LitDataset", "lit-arrow", {}, DecodeError, "rows of Arrow.*tuples"),
    ("BetonDataset", "beton", {"transform": CROP}, ArgumentError, "one image.*jpg and raw.*{'jpg': Random"),
]
# A dataset and a folder or file that is none of its own.
ELSEWHERE = [
    ("MDSDataset", "lit", ArgumentError, r"of LitData: read it with fastload\.LitDataset"),
    ("LitDataset", "mds", ArgumentError, r"of MosaicML Streaming: read it with fastload\.MDSDataset"),
    ("MDSDataset", "others", NotFoundError, r"no index\.json"),
    ("MDSDataset", "run[1]", ArgumentError, "give the folder a name without these"),
    ("TarDataset", "mds/shard.00000.mds", FastloadError, r"fastload\.MDSDataset"),
    ("TarDataset", "beton/x.beton", FastloadError, r"fastload\.BetonDataset"),
    ("TarDataset", "parquet/part-000.parquet", ArgumentError, r"fastload\.ParquetDataset"),
    ("ImageFolder", "parquet", NotFoundError, r"fastload\.ParquetDataset reads them"),
    ("ParquetDataset", "tar/part-000.tar", ArgumentError, r"fastload\.TarDataset"),
    ("ParquetDataset", "others", NotFoundError, "named as Parquet"),
]


CASES = [
    *(("TarDataset", "tar", arguments, ArgumentError, words) for arguments, words in TAR),
    *(("TFRecordDataset", "tfrecord", arguments, ArgumentError, words) for arguments, words in TFRECORD),
    *(("ParquetDataset", "parquet", arguments, ArgumentError, words) for arguments, words in PARQUET),
    *OTHERS,
    *((dataset, folder, {}, error, words) for dataset, folder, error, words in ELSEWHERE),
]


@pytest.mark.parametrize(
    ("dataset", "folder", "arguments", "error", "words"),
    CASES,
    ids=[f"{case[0]}-{case[4]}" for case in CASES],
)
def test_argument_is_refused_at_once(
    dataset: str, folder: str, arguments: dict[str, Any], error: type[Exception], words: str, root: Path
) -> None:
    with pytest.raises(error, match=words):
        getattr(fastload, dataset)(str(root / folder), **arguments)
