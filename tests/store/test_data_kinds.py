"""Every kind of data in `fastload warm`, `bench` and `plan`, found by its names or named by --from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastload
from fastload.cli.data_source import KINDS, find_kind
from tests.commands import answer
from tests.kinds import COUNT, copy_format, photo, write_beton, write_parquet, write_table, write_tar
from tests.sharddata import write

TOKENS = ["--from", "tokens", "--dtype", "uint16", "--block", "100"]
TABLE = ["--fields", "@image,label"]
# kind, where it lies, its options; "parquet of paths" is a table although Parquet files have a kind too
CASES = [
    ("folder", "folder", []),
    ("objects", "photos", []),
    ("table", "table.csv", [*TABLE, "--files", "{root}"]),
    ("tar", "tar", []),
    ("parquet", "parquet", []),
    ("mds", "mds-numbered", []),
    ("litdata", "lit-numbered", []),
    ("beton", "beton", []),
    ("tokens", "tokens", TOKENS),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    write_table(root, photo)
    write_tar(root / "tar", photo)
    write_parquet(root / "parquet", photo)
    write_beton(root / "beton", photo)
    for name in ("mds-numbered", "lit-numbered"):
        copy_format(name)(root / name, photo)
    write(root / "folder", {f"{'ab'[number % 2]}/{number}.jpg": photo(number) for number in range(COUNT)})
    (root / "tokens").mkdir()
    np.arange(100 * COUNT, dtype=np.uint16).tofile(root / "tokens" / "corpus.bin")
    return root


def options_of(root: Path, options: list[str]) -> list[str]:
    return [option.format(root=root) for option in options]


@pytest.mark.parametrize(("kind", "place", "options"), CASES, ids=[case[0] for case in CASES])
def test_kind_is_found_warmed_and_measured(
    kind: str, place: str, options: list[str], root: Path, tmp_path: Path
) -> None:
    if kind != "tokens":
        assert find_kind(str(root / place), {}) == kind
    arguments = [root / place, "--cache", tmp_path / "cache", "--mode", "raw", *options_of(root, options)]
    for stored, skipped in ((COUNT, 0), (0, COUNT)):
        document = answer("warm", *arguments, "--num-workers", 0)
        assert (document["settings"]["kind"], document["objects"]) == (kind, COUNT)
        assert (document["stored"], document["skipped"], document["left"]) == (stored, skipped, 0)
    measured = answer("bench", *arguments, "--num-workers", 0, "--batch-size", 8, "--size", 16, "--epochs", 1)
    assert (measured["settings"]["kind"], measured["settings"]["images"]) == (kind, COUNT)
    assert measured["epochs"][0]["counters"]["cache.hits"] >= COUNT


@pytest.mark.parametrize(("kind", "place", "options"), CASES[:-1], ids=[case[0] for case in CASES[:-1]])
def test_plan_predicts_every_kind_of_images(kind: str, place: str, options: list[str], root: Path) -> None:
    demand = ["--size-limit", "1GB", "--gpus", 1, "--gpu-rate", 1000, "--objects", 16]
    document = answer("plan", root / place, *demand, *options_of(root, options))
    assert document["settings"]["kind"] == kind
    assert COUNT / 2 <= document["measured"]["objects"] <= COUNT * 2
    assert {"auto", "raw", "shrunk", "decoded"} <= document["modes"].keys()


def test_every_kind_has_a_case() -> None:
    assert {case[0] for case in CASES} | {"tfrecord"} == set(KINDS), "tfrecord: tests of shard commands"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["warm", "{root}/table.csv"], "table needs --fields"),
        (["warm", "{root}/tokens", "--from", "tokens", "--block", "8"], "tokens needs --dtype"),
        (["warm", "{root}/folder", "--fields", "jpg"], "--fields is not for folder"),
        (["warm", "{root}/tar", "--dtype", "uint16"], "--dtype is not for tar"),
        (["warm", "{root}/tar", "--fields", "{{"], "is no JSON"),
        (["warm", "{root}/tar", "--fields", "jpg?x"], "fields= has the leaf"),
        (["bench", "{root}/tar", "--from", "zip"], "'zip' is not one of"),
        (
            ["plan", "{root}/tokens", *TOKENS, "--gpus", "1", "--gpu-rate", "1", "--size-limit", "1GB"],
            "no image",
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else value,
)
def test_options_that_do_not_fit_are_refused(
    arguments: list[str], says: str, root: Path, tmp_path: Path
) -> None:
    cache = ["--cache", str(tmp_path / "cache")] if arguments[0] == "warm" else []
    assert says in answer(*options_of(root, arguments), *cache, code=2)["error"]["message"]


@pytest.mark.parametrize(
    ("options", "arguments"),
    [(["--overlap", 1], {"overlap": 1}), (["--documents", ".ends"], {"documents": ".ends"})],
    ids=["overlap", "documents"],
)
def test_warmed_tokens_are_those_that_the_script_reads(
    options: list[object], arguments: dict[str, Any], tmp_path: Path
) -> None:
    corpus, cache = tmp_path / "corpus", tmp_path / "cache"
    corpus.mkdir()
    np.arange(1000, dtype=np.uint16).tofile(corpus / "part.bin")
    with (corpus / "part.ends").open("wb") as ends:
        np.save(ends, [30, 1000])
    answer("warm", corpus, *TOKENS, *options, "--cache", cache, "--num-workers", 0)
    dataset = fastload.TokenDataset(corpus, "uint16", 100, cache=cache, **arguments)
    assert all(dataset.contains(number) for number in range(len(dataset)))


def test_table_of_rows_reads_the_files_that_it_names(root: Path, tmp_path: Path) -> None:
    files = ["--files", root]
    answer("warm", root / "table.csv", *TABLE, *files, "--cache", tmp_path / "cache", "--num-workers", 0)
    dataset = fastload.TableDataset(
        root / "table.csv",
        (fastload.File("image"), "label"),
        url=root,
        transform=fastload.CenterCrop(16),
        cache=tmp_path / "cache",
    )
    assert all(dataset.contains(number) for number in range(COUNT))
