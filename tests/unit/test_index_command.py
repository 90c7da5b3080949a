"""`fastload index`: what it writes is read back through the datasets, against what was written."""

from __future__ import annotations

import gzip
import io
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.shards import filling
from fastload.shards.catalog import index_name
from tests.commands import answer, command
from tests.sharddata import COUNTS, CROP, TOTAL, at_random, closing, dataset, jpeg, read, shard, shards, write
from tests.sharddata import close_all as close_all
from tests.sharddata import kind as kind

pytestmark = pytest.mark.usefixtures("close_all")


run = partial(answer, "index")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def open_at_random(kind: str, folder: Any, **more: Any) -> list[int]:
    """The labels of all samples, read by index."""
    data = closing(dataset(kind, str(folder), transform=CROP, **more))
    batch = at_random(data)
    return [int(one) for one in batch["cls" if kind == "tar" else "label"]]


def test_index_files_are_those_that_the_writers_make(kind: str, tmp_path: Path) -> None:
    write(tmp_path, shards(kind))
    document = run(tmp_path)
    assert (document["shards"], document["indexed"], document["samples"]) == (len(COUNTS), len(COUNTS), TOTAL)
    assert document["settings"]["kind"] == kind and document["left"] == 0
    for number, count in enumerate(COUNTS):
        first = sum(COUNTS[:number])
        assert (tmp_path / f"part-{number:03d}.idx").read_bytes() == shard(kind, range(first, first + count))[
            1
        ]
    assert open_at_random(kind, tmp_path) == list(range(TOTAL))


def test_second_run_reads_no_shard_and_again_reads_all(kind: str, tmp_path: Path) -> None:
    write(tmp_path, shards(kind))
    run(tmp_path)
    (tmp_path / "part-002.idx").unlink()
    document = run(tmp_path)
    assert (document["indexed"], document["present"], document["samples"]) == (1, len(COUNTS) - 1, COUNTS[2])
    assert run(tmp_path)["read_bytes"] == 0
    assert run(tmp_path, "--refresh")["indexed"] == len(COUNTS)


def test_index_of_another_place_is_read_from_there(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "shards", shards(kind))
    run(tmp_path / "shards" / f"part-*.{kind}", "--to", tmp_path / "index")
    assert not any(name.endswith("idx") for name in names(tmp_path / "shards"))
    assert names(tmp_path / "index") == [f"part-{number:03d}.idx" for number in range(len(COUNTS))]
    assert open_at_random(kind, tmp_path / "shards", index=str(tmp_path / "index")) == list(range(TOTAL))


@pytest.mark.parametrize("end", ["", ".gz"])
def test_index_in_a_cache_serves_the_trainings_with_that_cache(kind: str, end: str, tmp_path: Path) -> None:
    write(tmp_path / "shards", shards(kind, end=end))
    document = run(tmp_path / "shards", "--from", kind, "--cache", tmp_path / "cache")
    assert (document["indexed"], document["compressed"], document["samples"]) == (len(COUNTS), 0, TOTAL)
    assert not any(name.endswith("idx") for name in names(tmp_path / "shards"))
    data = closing(dataset(kind, str(tmp_path / "shards"), transform=CROP, cache=tmp_path / "cache"))
    assert len(data) == TOTAL and data[TOTAL - 1]["cls" if kind == "tar" else "label"] == TOTAL - 1
    assert run(tmp_path / "shards", "--from", kind, "--cache", tmp_path / "cache")["present"] == len(COUNTS)


def test_compressed_shards_get_no_index_file_and_the_way_is_said(kind: str, tmp_path: Path) -> None:
    write(
        tmp_path, {"a.tar.gz": gzip.compress(shard("tar", range(3))[0]), "b.tar": shard("tar", range(3))[0]}
    )
    document = run(tmp_path)
    assert (document["compressed"], document["indexed"]) == (1, 1)
    assert names(tmp_path) == ["a.tar.gz", "b.idx", "b.tar"]
    assert "--cache DIR indexes them" in command("index", tmp_path).stdout.replace("\n", " ")


def test_tar_of_other_tools_with_directories_long_and_spaced_names_is_indexed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        folder = tarfile.TarInfo("./")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for number in range(9):
            stem = f"./{'d' * 120}/{number}" if number % 2 else f"./a b/{number}"
            for end, content in (("JPG", jpeg(number)), ("cls", b"%d" % number), (".hidden", b"x")):
                info = tarfile.TarInfo(f"{stem}.{end}" if end != ".hidden" else "./.hidden")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    data = closing(dataset("tar", str(tmp_path), transform=CROP))
    streamed = {one for ids, _ in read(data) for one in ids}
    assert run(tmp_path)["samples"] == 9
    indexed = closing(dataset("tar", str(tmp_path), transform=CROP))
    assert {indexed._record(number) for number in range(9)} == streamed, "the cache knows them by these"
    assert (tmp_path / "x.idx").read_bytes().startswith(b"v1.1 9\n")
    assert open_at_random("tar", tmp_path) == list(range(9))


def test_damaged_shard_fails_and_the_others_are_indexed(kind: str, tmp_path: Path) -> None:
    write(tmp_path, shards(kind))
    damaged = tmp_path / f"part-002.{kind}"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2 + 77])
    document = run(tmp_path, code=1)
    assert (document["indexed"], document["failed"], document["left"]) == (len(COUNTS) - 1, 1, 0)
    (fault,) = document["faults"]
    assert fault["shard"] == damaged.name and "at byte " in fault["fault"]
    assert not (tmp_path / "part-002.idx").exists()
    document = run(tmp_path, "--cache", tmp_path.parent / "cache", code=1)
    assert (document["indexed"], document["present"], len(document["faults"])) == (1, len(COUNTS) - 1, 1)


@pytest.mark.parametrize(
    "body",
    [
        b"a file of another program",
        b"v1.2 1\njpg 512 99999999 x.jpg\n",
        pytest.param(shard("tar", range(2))[1], id="of the first two samples"),
    ],
)
def test_file_that_is_no_index_of_the_shard_is_not_overwritten_without_again(
    body: bytes, tmp_path: Path
) -> None:
    write(tmp_path, {"x.tar": shard("tar", range(3))[0], "x.idx": body})
    document = run(tmp_path, code=1)
    assert "only --refresh overwrites it" in document["faults"][0]["fault"]
    assert (tmp_path / "x.idx").read_bytes() == body
    assert run(tmp_path, "--refresh")["indexed"] == 1


def test_interrupted_run_keeps_what_is_indexed_and_resumes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, shards(kind))
    whole = filling.Indexing.run

    def stopped(self: Any, *arguments: Any) -> Any:
        for number, found in enumerate(whole(self, *arguments)):
            if number == 3:
                raise KeyboardInterrupt
            yield found

    with monkeypatch.context() as patched:
        patched.setattr(filling.Indexing, "run", stopped)
        document = run(tmp_path, code=130)
    assert document["interrupted"] and (document["indexed"], document["left"]) == (3, len(COUNTS) - 3)
    document = run(tmp_path)
    assert (document["present"], document["indexed"]) == (3, len(COUNTS) - 3)
    assert open_at_random(kind, tmp_path) == list(range(TOTAL))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{images}"], "no shards there"),
        (["{nested}"], "no shards there"),  # a JSON document that Python refuses to read
        (["{shards}", "--to", "{index}", "--cache", "{cache}"], "leave one out"),
        (["{shards}", "--refresh", "--cache", "{cache}"], "leave one out"),
        (["{twice}", "--to", "{index}"], "2 of the shards would have the index file 'x.idx'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], says: str, tmp_path: Path) -> None:
    write(tmp_path / "images", {"a/1.jpg": jpeg(1)})
    write(tmp_path / "shards", shards("tar"))
    write(tmp_path / "nested", {"index.json": b"[" * 100_000})
    write(tmp_path / "twice", {f"{one}/x.tar": shard("tar", range(2))[0] for one in "ab"})
    known = {name: tmp_path / name for name in ("images", "nested", "shards", "twice", "index", "cache")}
    document = run(*(argument.format(**known) for argument in arguments), code=2)
    assert says in document["error"]["message"]
    assert not (tmp_path / "index").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("shard_name", "found"),
    [
        ("a/x.tar", "a/x.idx"),
        ("x.1.tfrecord", "x.1.idx"),
        ("train-00000-of-00128", "train-00000-of-00128.idx"),
        ("train.tfrecord-00000-of-00128", "train.tfrecord-00000-of-00128.idx"),
    ],
)
def test_name_of_an_index_file_is_one_that_datasets_look_for(
    shard_name: str, found: str, tmp_path: Path
) -> None:
    assert index_name(shard_name) == found
    kind = "tar" if shard_name.endswith("tar") else "tfrecord"
    write(tmp_path, {shard_name: shard(kind, range(3))[0]})
    run(tmp_path, "--from", kind)
    assert open_at_random(kind, tmp_path) == [0, 1, 2]


def test_streams_and_index_files_find_the_same_records(kind: str, tmp_path: Path) -> None:
    write(tmp_path, shards(kind))
    data = closing(dataset(kind, str(tmp_path), transform=CROP))
    streamed = {one for ids, _ in read(data) for one in ids}
    run(tmp_path)
    indexed = closing(dataset(kind, str(tmp_path), transform=CROP))
    assert streamed == {indexed._record(number) for number in range(len(indexed))}
    assert isinstance(indexed, fastload.TarDataset | fastload.TFRecordDataset)
