"""`fastload warm`, `bench` and `plan` of shards: what was warmed, training reads without a GET."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload import Cache
from fastload.cli import warming
from fastload.cli.plan.model import Data, Demand, Mode, Node, Streaming, predict
from fastload.formats.tar import TarWriter
from tests.commands import answer
from tests.sharddata import (
    COUNTS,
    CROP,
    FEATURES,
    IMAGE,
    TOTAL,
    closing,
    dataset,
    jpeg,
    loader_of,
    numbers_of,
    shard,
    shards,
    write,
)
from tests.sharddata import close_all as close_all
from tests.sharddata import kind as kind

pytestmark = pytest.mark.usefixtures("close_all")

SPEC = '{"image": "image:bytes", "label": "label:int", "name": "name:str"}'


def run(command: str, *arguments: object, code: int = 0, workers: int = 0) -> dict[str, Any]:
    return answer(command, *arguments, "--num-workers", workers, code=code)


def counts(document: dict[str, Any]) -> list[Any]:
    return [document[name] for name in ("objects", "stored", "skipped", "failed", "left")]


def epoch(kind: str, url: Path, cache: Any, **more: Any) -> tuple[list[int], dict[str, float]]:
    """(the labels of an epoch, its counters)"""
    data = closing(dataset(kind, str(url), transform=CROP, cache=cache, **more))
    loader = loader_of(data, 0)
    found = numbers_of(list(loader), kind)
    return found, loader.stats()["counters"]


@pytest.mark.parametrize(
    ("mode", "end"), [("auto", ""), ("raw", ".gz"), ("dct", ""), ("shrunk", ".gz"), ("decoded", "")]
)
def test_training_after_warm_reads_nothing_from_the_store(
    kind: str, mode: Any, end: str, tmp_path: Path
) -> None:
    write(tmp_path / "shards", shards(kind, end=end))
    settings: list[object] = ["--mode", mode, "--short-side", 32]
    if kind == "tfrecord" and mode != "raw":
        settings += ["--fields", SPEC]
    url = tmp_path / "shards" / f"*{kind}{end}"
    document = run("warm", url, "--cache", tmp_path / "cache", *settings)
    assert counts(document) == [TOTAL, TOTAL, 0, 0, 0] and document["settings"]["kind"] == kind
    assert document["cache"]["entries"] == TOTAL
    found, counters = epoch(kind, url, Cache(tmp_path / "cache", mode, short_side=32))
    assert sorted(found) == list(range(TOTAL)) and found != list(range(TOTAL))
    assert counters["cache.hits"] == TOTAL and not counters.get("get.requests")


def test_second_warming_reads_nothing(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "shards", shards(kind))
    run("warm", tmp_path / "shards", "--cache", tmp_path / "cache")
    document = run("warm", tmp_path / "shards", "--cache", tmp_path / "cache")
    assert counts(document) == [TOTAL, 0, TOTAL, 0, 0] and document["read_bytes"] == 0


def test_only_missing_records_of_an_indexed_shard_are_read(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "shards", shards(kind, index=True))
    cache = Cache(tmp_path / "cache", "raw")
    data = closing(dataset(kind, str(tmp_path / "shards"), transform=CROP, cache=cache))
    some = [0, 5, 6, 50, 100, TOTAL - 1]
    data.prefetch(some)
    [data[number] for number in some]
    data._flush_cache()
    document = run("warm", tmp_path / "shards", "--cache", tmp_path / "cache")
    assert counts(document) == [TOTAL, TOTAL - len(some), len(some), 0, 0]
    sizes = sum(data._index.locate(data._record(number))[1] for number in range(TOTAL) if number not in some)
    assert sizes <= document["read_bytes"] == document["quote"]["read_bytes"] < 1.05 * sizes


def test_fields_of_the_training_are_those_of_the_warming(tmp_path: Path) -> None:
    write(tmp_path / "shards", shards("tar"))
    run(
        "warm",
        tmp_path / "shards",
        "--cache",
        tmp_path / "cache",
        "--mode",
        "decoded",
        "--fields",
        "jpg;png,cls",
    )
    _, counters = pairs(tmp_path, ("jpg;png", "cls"))
    assert counters["cache.hits"] == TOTAL and not counters.get("get.requests")
    write_dict = ["--fields", '{"x": "jpg", "y": "cls"}']
    run("warm", tmp_path / "shards", "--cache", tmp_path / "cache", "--mode", "decoded", *write_dict)
    data = closing(
        fastload.TarDataset(
            str(tmp_path / "shards"),
            fields={"x": "jpg", "y": "cls"},
            cache=Cache(tmp_path / "cache", "decoded"),
        )
    )
    assert all(data.contains(number) for number in range(TOTAL))


def test_fields_and_their_types_of_the_training_are_those_of_the_warming(tmp_path: Path) -> None:
    write(tmp_path / "shards", shards("tfrecord"))
    options = ["--mode", "shrunk", "--fields", "image:bytes,label:int"]
    run("warm", tmp_path / "shards", "--cache", tmp_path / "cache", *options)
    cache = Cache(tmp_path / "cache", "shrunk")
    fields = ("image:bytes", "label:int")
    data = dataset("tfrecord", str(tmp_path / "shards"), fields=fields, cache=cache)
    closing(data).transform = {"image": CROP}
    loader = loader_of(data, 0)
    assert sorted(torch.cat([labels for _, labels in loader]).tolist()) == list(range(TOTAL))
    assert not loader.stats()["counters"].get("get.requests")


def pairs(tmp_path: Path, fields: Any) -> tuple[torch.Tensor, dict[str, float]]:
    cache = Cache(tmp_path / "cache", "decoded")
    data = closing(fastload.TarDataset(str(tmp_path / "shards"), fields=fields, transform=CROP, cache=cache))
    loader = loader_of(data, 0)
    labels = torch.cat([labels for _, labels in loader])
    return labels, loader.stats()["counters"]


def test_damaged_sample_is_listed_with_its_place_and_the_others_are_kept(tmp_path: Path) -> None:
    file = io.BytesIO()
    writer = TarWriter(file)
    for number in range(20):
        writer.write(f"{number:03d}", {"jpg": b"<html>" if number == 7 else jpeg(number), "cls": b"1"})
    writer.close()
    write(tmp_path / "shards", {"x.tar": file.getvalue()})
    document = run("warm", tmp_path / "shards", "--cache", tmp_path / "cache", "--mode", "shrunk", code=1)
    assert counts(document) == [20, 19, 0, 1, 0]
    (failure,) = document["failures"]
    assert failure["key"].startswith("x.tar @ ") and "DecodeError" in failure["error"]


def test_full_cache_counts_what_it_holds_and_is_no_failure(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "shards", shards(kind))
    url = tmp_path / "shards"
    document = run("warm", url, "--cache", tmp_path / "cache", "--size-limit", "100kB")
    assert document["full"] and 0 < document["stored"] == document["cache"]["entries"] < TOTAL
    found, _ = epoch(kind, url, Cache(tmp_path / "cache", size_limit="100kB"))
    assert sorted(found) == list(range(TOTAL))


def test_interrupted_warming_resumes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "shards", shards(kind))
    taken = warming.Tally.add

    def stopping(self: Any, warmed: Any) -> None:
        if self.done == 60:
            raise KeyboardInterrupt
        taken(self, warmed)

    with monkeypatch.context() as patched:
        patched.setattr(warming.Tally, "add", stopping)
        document = run("warm", tmp_path / "shards", "--cache", tmp_path / "cache", code=130)
    assert document["interrupted"] and document["left"] in (None, TOTAL - 60)
    document = run("warm", tmp_path / "shards", "--cache", tmp_path / "cache")
    assert document["stored"] + document["skipped"] == TOTAL and document["skipped"] >= 60
    found, counters = epoch(kind, tmp_path / "shards", Cache(tmp_path / "cache"))
    assert sorted(found) == list(range(TOTAL)) and not counters.get("get.requests")


def test_share_of_indexed_shards_is_that_of_the_sampler(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "shards", shards(kind, index=True))
    url = tmp_path / "shards"
    document = run("warm", url, "--cache", tmp_path / "cache", "--share", "1/3")
    data = closing(dataset(kind, str(url), transform=CROP, cache=tmp_path / "cache"))
    sampler = fastload.DistributedSampler(data, 3, 1, partition="node", num_nodes=3, mode="eval")
    assert {number for number in range(TOTAL) if data.contains(number)} == set(sampler)
    assert document["objects"] == document["stored"] == len(sampler)


def test_share_of_shards_without_an_index_is_refused_with_the_way(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "shards", shards(kind))
    document = run("warm", tmp_path / "shards", "--cache", tmp_path / "cache", "--share", "0/2", code=2)
    assert "run fastload index first" in document["error"]["message"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--fields", "image:jpeg"], "write a feature and its type"),
        (["--fields", "a:bytes,b:bytes"], "several"),
        (["--mode", "shrunk"], "as in --fields image:bytes"),
    ],
)
def test_malformed_fields_of_examples_are_named(options: list[str], says: str, tmp_path: Path) -> None:
    write(tmp_path / "shards", {"x.tfrecord": shard("tfrecord", range(2))[0]})
    arguments = ["--cache", tmp_path / "cache", *options]
    assert says in run("warm", tmp_path / "shards", *arguments, code=2)["error"]["message"]


# --- bench


@pytest.mark.parametrize("index", [True, False])
def test_bench_measures_the_images_of_shards(kind: str, index: bool, tmp_path: Path) -> None:
    write(tmp_path / "shards", shards(kind, index=index))
    more = ["--cache", tmp_path / "cache", "--batch-size", 16, "--size", 32]
    document = run("bench", tmp_path / "shards", *more)
    assert document["settings"]["kind"] == kind and document["settings"]["images"] == TOTAL
    assert [one["images"] for one in document["epochs"]] == [TOTAL, TOTAL]
    assert document["epochs"][1]["counters"]["cache.hits"] == TOTAL
    assert FEATURES[IMAGE["tfrecord"]] is bytes and len(COUNTS) == 6


def test_bench_of_shards_without_images_says_what_they_have(tmp_path: Path) -> None:
    file = io.BytesIO()
    writer = TarWriter(file)
    writer.write("a", {"txt": b"text", "json": b"{}"})
    writer.close()
    write(tmp_path / "shards", {"x.tar": file.getvalue()})
    message = run("bench", tmp_path / "shards", code=2)["error"]["message"]
    assert "has no image among txt, json" in message


def test_images_in_folders_are_measured_although_a_tar_lies_beside_them(tmp_path: Path) -> None:
    folder = {f"{name}/{number}.jpg": jpeg(number) for name in "ab" for number in range(4)}
    write(tmp_path / "data", folder | {"devkit.tar": b"x"})
    document = run("bench", tmp_path / "data", "--epochs", 1, "--size", 32)
    assert (document["settings"]["kind"], document["settings"]["images"]) == ("folder", 8)


# --- plan

DEMAND = ["--size-limit", "1GB", "--gpus", 1, "--gpu-rate", 1000]


def test_plan_counts_samples_and_requests_of_streams(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "shards", shards(kind))
    document = run("plan", tmp_path / "shards", *DEMAND, "--objects", 64, workers=2)
    measured, raw = document["measured"], document["modes"]["raw"]
    assert document["settings"]["kind"] == kind and 64 <= measured["probed"] < 64 + len(COUNTS)
    assert 0.8 * TOTAL < measured["objects"] < 1.2 * TOTAL
    assert raw["first"]["requests"] < TOTAL / 4 and raw["later"]["requests"] == 0 and raw["hit_rate"] == 1
    assert raw["first"]["egress_bytes"] == pytest.approx(sum_of(tmp_path / "shards"), rel=0.1)
    assert any("streams the shards" in line for line in document["assumptions"])


def sum_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_plan_of_compressed_shards_says_why_not(tmp_path: Path) -> None:
    write(tmp_path / "shards", shards("tar", end=".gz"))
    document = run("plan", tmp_path / "shards", *DEMAND, code=2, workers=2)
    assert "the shards are compressed" in document["error"]["message"]


STREAMED = Data(1_000_000, 100_000, 0.02, 0.001, streaming=Streaming(80, 0.1, 0.0005, 64, at_random=True))
MODE = Mode(100_000, 0.0, 0.00002, 0.001)
NODE = Node(8, 8, 1e12)


def test_streams_in_the_model_equal_hand_computed_ones() -> None:
    demand = Demand(3000, 10)
    found = predict(STREAMED, MODE, NODE, demand)
    assert found.first.stages == {
        "cores": pytest.approx(8 / 0.0015),
        "workers": pytest.approx(8 / 0.001),
        "connections": pytest.approx(64 / 0.1 * 80),
    }
    assert (found.first.requests, found.first.connections) == (1_000_000 / 80, 4)  # 37.5 a second, 0.1 s each
    half = predict(STREAMED, MODE, replace(NODE, cache_bytes=0.5e11), demand)
    assert half.later.requests == pytest.approx(1_000_000 * (1 - half.hit_rate)), "at random: a request each"
    small = replace(STREAMED, streaming=replace(STREAMED.streaming, at_random=False))
    again = predict(small, MODE, replace(NODE, cache_bytes=0.5e11), demand)
    assert again.later.egress_bytes == 1e11, "small samples are streamed again, all of them"
    assert predict(small, MODE, replace(NODE, cache_bytes=0.95e11), demand).later.requests < 1_000_000 / 10
