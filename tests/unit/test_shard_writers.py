"""Writers of shards: other people's readers read them, their indexes are right, and they are reproducible."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.make_shards import COUNT, FILES, HERE, features
from hypothesis import given, settings
from hypothesis import strategies as st

import fastload
from fastload.errors import ArgumentError
from fastload.formats.pieces import Record
from fastload.formats.tar import TarSplitter, TarWriter, parse_wds_index, read_sample
from fastload.formats.tfrecord import (
    TFRecordSplitter,
    TFRecordWriter,
    encode_example,
    parse_example,
    parse_tfrecord_index,
    unframe,
)
from tests.patience import PATIENCE
from tests.sharddata import split

SPEC = {
    "image": bytes,
    "label": int,
    "key": bytes,
    "box": [float],
    "counts": [int],
    "words": [bytes],
    "no floats": [float],
}

keys = st.from_regex(r"([a-z0-9_ü-]{1,60}/){0,4}[a-z0-9_ü-]{1,120}", fullmatch=True)
samples = st.dictionaries(
    keys,
    st.dictionaries(
        st.from_regex(r"[a-z]{1,4}(\.[a-z]{1,3})?", fullmatch=True), st.binary(max_size=1100), min_size=1
    ),
    max_size=6,
)


def write_tar(content: Iterable[tuple[str, dict[str, bytes]]]) -> tuple[bytes, bytes]:
    """(shard, index)"""
    file = io.BytesIO()
    writer = TarWriter(file)
    for key, members in content:
        writer.write(key, members)
    writer.close()
    assert writer.size == len(file.getvalue())
    return file.getvalue(), writer.index()


def write_tfrecord(records: Iterable[bytes]) -> tuple[bytes, bytes]:
    file = io.BytesIO()
    writer = TFRecordWriter(file)
    for record in records:
        writer.write(record)
    writer.close()
    assert writer.size == len(file.getvalue())
    return file.getvalue(), writer.index()


# --- tar


@given(samples)
@settings(max_examples=30)
def test_tar_is_read_by_ours_and_by_pythons(content: dict[str, dict[str, bytes]]) -> None:
    shard, index = write_tar(content.items())
    assert len(shard) % tarfile.RECORDSIZE == 0
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        found = {}
        for member in tar:
            assert (member.mtime, member.uid, member.gid, member.mode, member.isfile()) == (
                0,
                0,
                0,
                0o644,
                True,
            )
            file = tar.extractfile(member)
            assert file is not None
            found[member.name] = file.read()
    assert found == {
        f"{key}.{ext}": body for key, members in content.items() for ext, body in members.items()
    }
    records = split(TarSplitter, shard)
    assert {k: {e: bytes(b) for e, b in m.items()} for k, m in map(_sample, records)} == content
    places = parse_wds_index(index, len(shard))
    assert [(record.offset, record.size) for record in records] == [tuple(place) for place in places.tolist()]


def _sample(record: Record) -> tuple[str, dict[str, memoryview]]:
    assert record.payload is not None
    return read_sample(record.payload)


def test_tar_index_is_wds2idx(tmp_path: Path) -> None:
    """Each member's content is at the offset in the index, in its size."""
    shard, index = write_tar([("a/1", {"jpg": b"x" * 700, "cls": b"5"}), ("b" * 150, {"seg.png": b"yy"})])
    head, *lines = index.decode().splitlines()
    assert head == "v1.2 2" and len(lines) == 2
    words = " ".join(lines).split()
    for extension, offset, size, name in zip(*[iter(words)] * 4, strict=True):
        assert name.endswith(f".{extension}")
        body = {"jpg": b"x" * 700, "cls": b"5", "seg.png": b"yy"}[extension]
        assert shard[int(offset) : int(offset) + int(size)] == body


@pytest.mark.parametrize(
    ("key", "members"),
    [
        ("a.b", {"jpg": b""}),
        ("a b", {"jpg": b""}),
        ("a", {"JPG": b""}),
        ("a", {}),
        ("", {"jpg": b""}),
        ("a/", {"jpg": b""}),
        ("a", {"x/y": b""}),
        ("there", {"jpg": b"other"}),
    ],
)
def test_samples_that_readers_would_not_see_are_refused(key: str, members: dict[str, bytes]) -> None:
    file = io.BytesIO()
    writer = TarWriter(file)
    writer.write("there", {"jpg": b"x"})
    with pytest.raises(ArgumentError):
        writer.write(key, members)


# It leaves the shards that it has read to the garbage collector, still open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_webdataset_reads_ours(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    content = {f"class_{i % 3}/img-{i}": _members(i) for i in range(20)}
    for number in range(2):
        shard, _ = write_tar(list(content.items())[number * 10 : number * 10 + 10])
        (tmp_path / f"data-{number:06d}.tar").write_bytes(shard)
    dataset = webdataset.WebDataset(str(tmp_path / "data-{000000..000001}.tar"), shardshuffle=False)
    found = {
        sample["__key__"]: {name: body for name, body in sample.items() if name[:2] != "__"}
        for sample in dataset
    }
    assert found == content
    decoded = next(
        iter(webdataset.WebDataset(str(tmp_path / "data-000000.tar"), shardshuffle=False).decode())
    )
    assert decoded["cls"] == 0 and decoded["json"] == {"number": 0}


def _members(i: int) -> dict[str, bytes]:
    return {
        "jpg": os.urandom(1000 + i),
        "cls": str(i % 3).encode(),
        "json": json.dumps({"number": i}).encode(),
        "seg.png": bytes(i),
    }


def test_ours_reads_webdatasets(tmp_path: Path) -> None:
    """ShardWriter and TarWriter, with their own encoders and headers."""
    webdataset = pytest.importorskip("webdataset")
    with webdataset.ShardWriter(str(tmp_path / "data-%06d.tar"), maxcount=8, verbose=0) as writer:
        for i in range(20):
            writer.write(
                {
                    "__key__": f"dir/{i:04d}",
                    "jpg": b"%d" % i * 300,
                    "cls": i,
                    "json": {"i": i},
                    "npy": np.arange(i),
                }
            )
    shards = sorted(tmp_path.glob("*.tar"))
    assert len(shards) == 3
    found = []
    for shard in shards:
        content = shard.read_bytes()
        found += [_sample(record) for record in split(TarSplitter, content)]
    assert [key for key, _ in found] == [f"dir/{i:04d}" for i in range(20)]
    for i, (_, members) in enumerate(found):
        assert bytes(members["jpg"]) == b"%d" % i * 300
        assert (int(bytes(members["cls"])), json.loads(bytes(members["json"]))) == (i, {"i": i})
        assert np.array_equal(np.load(io.BytesIO(members["npy"])), np.arange(i))


# --- TFRecord


@given(st.lists(st.binary(max_size=300)))
def test_tfrecord_and_its_index(records: list[bytes]) -> None:
    shard, index = write_tfrecord(records)
    found = split(TFRecordSplitter, shard)
    assert [bytes(record.payload or b"") for record in found] == records
    places = parse_tfrecord_index(index, len(shard)).tolist()
    assert [(record.offset, record.size) for record in found] == [tuple(place) for place in places]
    assert [bytes(unframe(memoryview(shard)[at : at + size])) for at, size in places] == records


def test_tensorflows_files_are_read() -> None:
    """Byte for byte what TFRecordWriter wrote, and ours writes the same file from the same records."""
    shard = (HERE / FILES[""]).read_bytes()
    records = split(TFRecordSplitter, shard)
    assert len(records) == COUNT
    for number, record in enumerate(records):
        assert record.payload is not None
        found = parse_example(record.payload, SPEC)
        wanted = features(number)
        assert [found["image"]] == wanted["image"] and [found["key"]] == wanted["key"]
        assert [found["label"]] == wanted["label"] and found["words"] == wanted["words"]
        assert found["counts"].tolist() == wanted["counts"]
        assert found["box"].tolist() == wanted["box"] and found["no floats"].tolist() == wanted["no floats"]
    again, _ = write_tfrecord(bytes(record.payload or b"") for record in records)
    assert again == shard


@pytest.mark.parametrize("compression", list(FILES))
def test_tensorflows_files_through_the_dataset(compression: str) -> None:
    """Without an index, and compressed: as a stream of its records."""
    dataset = fastload.TFRecordDataset(HERE / FILES[compression], SPEC)
    (state,) = dataset._streams().plan_streams(1, seed=0, epoch=0, shuffle=False, rank=0, ranks=1)
    stream = dataset._streams().open_stream(state)
    found: list[Any] = []
    while ids := stream.take(5):
        found += [dataset[i] for i in ids]
    stream.close()
    dataset.close()
    assert len(found) == COUNT
    for number, sample in enumerate(found):
        assert [bytes(sample["image"])] == features(number)["image"]
        assert sample["counts"].tolist() == features(number)["counts"]


def test_our_examples_are_tensorflows() -> None:
    """Golden: equal to TensorFlow's bytes. An empty list has no kind in ours."""
    shard = (HERE / FILES[""]).read_bytes()
    for number, record in enumerate(split(TFRecordSplitter, shard)):
        if number % 2 == 0:
            assert encode_example(features(number)) == bytes(record.payload or b"")


def test_tensorflow_reads_ours(tmp_path: Path) -> None:
    """By TensorFlow itself, in the environment that FASTLOAD_TENSORFLOW_PYTHON names."""
    python = os.environ.get("FASTLOAD_TENSORFLOW_PYTHON")
    if python is None:
        pytest.skip(
            "no TensorFlow: set FASTLOAD_TENSORFLOW_PYTHON to the python of an environment that has it"
        )
    shard, _ = write_tfrecord(encode_example(features(number)) for number in range(COUNT))
    (tmp_path / "ours.tfrecord").write_bytes(shard)
    said = subprocess.check_output(
        [python, str(HERE / "make_shards.py"), str(tmp_path / "ours.tfrecord")], text=True, timeout=PATIENCE
    )
    found: list[Any] = [json.loads(line) for line in said.splitlines()]
    assert len(found) == COUNT
    for number, example in enumerate(found):
        wanted = features(number)
        assert example["label"] == wanted["label"] and example["counts"] == wanted["counts"]
        assert [len(one["base64"]) for one in example["words"]] == [
            4 * (-(-len(w) // 3)) for w in wanted["words"]
        ]
        assert example["box"] == wanted["box"]
