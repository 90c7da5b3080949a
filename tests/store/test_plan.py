"""`fastload plan`: the model is monotone and names the limit; the probe of a real S3 server makes sense."""

from __future__ import annotations

import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from fastload.cli.app import app
from fastload.cli.plan.model import (
    RECORD_BYTES,
    Data,
    Demand,
    Mode,
    Node,
    connections_needed,
    cores_left,
    hit_rate,
    predict,
    predict_epoch,
)
from tests.bucketdata import serve_photos
from tests.commands import answer, store_words
from tests.photos import png
from tests.sharddata import write

IMAGES = 120
# Figures as measured on 138 KB JPEGs, 20 ms away.
DATA = Data(1_000_000, 138_000, 0.022, 0.0004)
MODE = Mode(138_000, 0.0, 0.00002, 0.001)
NODE = Node(8, 8, 1e12)
DEMAND = Demand(3000, 10)
DEMANDED = ["--size-limit", "1GB", "--gpus", 1, "--gpu-rate", 100]


def positive(least: float, most: float) -> Any:
    return st.floats(least, most)


datas = st.builds(
    Data,
    st.integers(1, 10**7),
    positive(100, 1e7),
    positive(1e-4, 2),
    positive(1e-6, 1e-2),
    st.none() | positive(1e6, 1e11),
)
modes = st.builds(Mode, positive(100, 1e7), positive(0, 1e-2), positive(0, 1e-2), positive(1e-6, 1e-2))
disks = st.none() | positive(1e6, 1e11)
nodes = st.builds(Node, st.integers(1, 256), st.integers(1, 256), positive(1, 1e14), disks, disks)
demands = st.builds(Demand, positive(1, 1e6), st.integers(1, 100))


# --- the model, by hand


def test_stage_rates_equal_hand_computed_ones() -> None:
    first = predict_epoch(DATA, MODE, NODE, DEMAND, hits=0)
    assert first.stages == {
        "cores": pytest.approx(8 / 0.0014),
        "workers": pytest.approx(8 / 0.001),
        "connections": pytest.approx(1024 / 0.022),
    }
    assert (first.limit, first.requests) == ("GPUs", 1_000_000)
    assert first.connections == 66, "3,000 a second, 22 ms each"
    later = predict_epoch(DATA, MODE, replace(NODE, disk_read=1e9), DEMAND, hits=0.5)
    assert later.stages["cores"] == pytest.approx(8 / (0.001 + 0.00001 + 0.0002))
    assert later.stages["disk read"] == pytest.approx(1e9 / 138_000 / 0.5)
    assert later.egress_bytes == pytest.approx(138_000 * 500_000)


@pytest.mark.parametrize(
    ("data", "node", "limit"),
    [
        (DATA, NODE, "cores"),
        (DATA, replace(NODE, workers=1), "workers"),
        (replace(DATA, request_seconds=2), NODE, "connections"),
        (replace(DATA, network=1e8), NODE, "network"),
        (DATA, replace(NODE, disk_write=1e8), "disk write"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_slowest_stage_is_the_limit(data: Data, node: Node, limit: str) -> None:
    assert predict(data, MODE, node, Demand(1e9)).first.limit == limit


def test_busy_cores_of_other_processes_lower_the_rate() -> None:
    assert [cores_left(8, others) for others in (0, 1.5, 6)] == [8, 6.5, 4]


def test_cache_of_half_the_data_hits_half() -> None:
    assert hit_rate(500 * (1000 + RECORD_BYTES), 1000, 1000) == 0.5
    assert hit_rate(1e15, 1000, 1000) == 1
    # An LRU cache of that size would hit 15 %: items come once an epoch, in random order.


# --- the model, in general


@given(data=datas, mode=modes, node=nodes, demand=demands)
def test_predictions_are_possible(data: Data, mode: Mode, node: Node, demand: Demand) -> None:
    found = predict(data, mode, node, demand)
    assert 0 < found.hit_rate <= 1
    for epoch in (found.first, found.later):
        assert 0 < epoch.rate == min(epoch.stages.values())
        assert epoch.limit == "GPUs" or epoch.stages[epoch.limit] == epoch.rate < demand.rate
        assert 0 <= epoch.requests <= data.objects
        assert epoch.seconds >= data.objects / demand.rate * (1 - 1e-9)
    assert found.first.requests == data.objects
    assert found.later.requests == pytest.approx(data.objects * (1 - found.hit_rate))
    assert found.total_seconds >= found.first.seconds


@given(data=datas, mode=modes, node=nodes, demand=demands, factor=positive(1, 100))
def test_more_resources_are_never_slower(
    data: Data, mode: Mode, node: Node, demand: Demand, factor: float
) -> None:
    before = predict(data, mode, node, demand)
    more = [
        replace(node, cores=node.cores * 2),
        replace(node, workers=node.workers * 2),
        replace(node, disk_read=node.disk_read and node.disk_read * factor),
        replace(node, disk_write=node.disk_write and node.disk_write * factor),
    ]
    for bigger in more:
        after = predict(data, mode, bigger, demand)
        assert after.first.rate >= before.first.rate * (1 - 1e-9)
        assert after.later.rate >= before.later.rate * (1 - 1e-9)
        assert after.total_seconds <= before.total_seconds * (1 + 1e-9)


@given(data=datas, mode=modes, node=nodes, demand=demands, factor=positive(1, 100))
def test_larger_cache_reads_less(data: Data, mode: Mode, node: Node, demand: Demand, factor: float) -> None:
    before = predict(data, mode, node, demand)
    after = predict(data, mode, replace(node, cache_bytes=node.cache_bytes * factor), demand)
    assert after.hit_rate >= before.hit_rate
    assert after.later.requests <= before.later.requests
    assert after.later.connections <= before.later.connections
    # And is not slower, where the disk is not what limits it and a read of it costs less than a GET.
    mode, node = replace(mode, read_cpu=0), replace(node, disk_read=None)
    before = predict(data, mode, node, demand)
    after = predict(data, mode, replace(node, cache_bytes=node.cache_bytes * factor), demand)
    assert after.later.rate >= before.later.rate * (1 - 1e-9)


@given(data=datas, mode=modes, node=nodes, demand=demands, factor=positive(1, 100))
def test_longer_round_trip_is_never_faster(
    data: Data, mode: Mode, node: Node, demand: Demand, factor: float
) -> None:
    before = predict(data, mode, node, demand)
    farther = replace(data, request_seconds=data.request_seconds * factor, get_cpu=data.get_cpu * factor)
    after = predict(farther, mode, node, demand)
    assert after.first.rate <= before.first.rate * (1 + 1e-9)
    assert after.first.connections >= before.first.connections


@given(rate=positive(1, 1e6), misses=positive(0, 1), seconds=positive(1e-4, 10))
def test_connections_by_littles_law(rate: float, misses: float, seconds: float) -> None:
    needed = connections_needed(rate, misses, seconds)
    assert needed / seconds >= rate * misses * (1 - 1e-9) > (needed - 1) / seconds * (1 - 1e-6) or needed == 0


# --- the command


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    root = tmp_path_factory.mktemp("s3")
    (root / "photos" / "class_00").mkdir(parents=True)
    (root / "photos" / "class_00" / "bad.jpg").write_bytes(b"no photo")
    with serve_photos(root, IMAGES, 0.02) as bucket:
        words = [*store_words(bucket.options), "--gpus", "8", "--gpu-rate", "2500", "--num-workers", "2"]
        yield ["plan", "s3://photos", *words]


@pytest.mark.usefixtures("no_leaks")
def test_plan(arguments: list[str], tmp_path: Path) -> None:
    more = ["--size-limit", "2MB", "--cache", tmp_path / "disk", "--objects", 64]
    document = answer(*arguments, *more)
    measured, predicted = document["measured"], document["modes"]
    assert measured["objects"] == IMAGES + 1
    assert document["demand"] == 20_000
    # Bounds that no noise reaches: 20 ms of delay, some decoding.
    assert 0.02 <= measured["request_seconds"] < 1
    assert 1e-5 < measured["get_cpu"] < 0.1
    for mode in measured["modes"].values():
        assert 1e-5 < mode["transform_cpu"] < 0.1
    sizes = [measured["modes"][name]["stored_bytes"] for name in ("shrunk", "raw", "decoded")]
    assert sizes == sorted(sizes)
    assert measured["modes"]["decoded"]["stored_bytes"] == pytest.approx(256 * 341 * 3, rel=0.2)
    assert measured["disk_write"] > 1e6 and measured["disk_read"] > 1e6
    for mode in predicted.values():
        assert 10 < mode["first"]["rate"] < 20_000
        assert mode["first"]["limit"] != "GPUs"
        assert 0 < mode["hit_rate"] < 1
        assert mode["first"]["requests"] == IMAGES + 1
        assert 400 <= mode["first"]["connections"] < 20_000
        assert mode["later"]["connections"] < mode["first"]["connections"]
    assert document["best"] in predicted
    assert any("all of them need" in line for line in document["advice"])
    assert not list((tmp_path / "disk").iterdir()), "nothing is left on the disk"


def test_plan_prints_a_table_and_advice(arguments: list[str]) -> None:
    result = CliRunner().invoke(
        app, [*arguments, "--size-limit", "1TB", "--objects", "32"], terminal_width=160
    )
    assert result.exit_code == 0, result.output
    for word in ("shrunk", "decoded", "epoch 1", "in flight", "assumed: ", "the limit"):
        assert word in result.stdout
    for secret in (word.partition("=")[2] for word in arguments if word.startswith("secret=")):
        assert secret not in result.output


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("--size-limit", "much", "much"), ("--gpus", "0", "gpus"), ("--gpu-rate", "-1", "gpu-rate")],
)
def test_bad_arguments(option: str, value: str, says: str) -> None:
    words = {"--size-limit": "1GB", "--gpus": "1", "--gpu-rate": "1"} | {option: value}
    assert says in answer("plan", "s3://x", *sum(words.items(), ()), code=2)["error"]["message"]


def test_objects_that_are_no_images_are_an_error(tmp_path: Path) -> None:
    url = write(tmp_path / "data", {f"a/{i}.jpg": b"<html>" * 100 for i in range(12)})
    assert "not an image" in answer("plan", url, *DEMANDED, code=1)["error"]["message"]
    used = tmp_path / "file"
    used.write_text("x")
    assert "--cache" in answer("plan", url, *DEMANDED, "--cache", used, code=2)["error"]["message"]


@pytest.mark.parametrize("shards", [False, True], ids=["files", "tar"])
def test_images_that_take_no_time_by_a_coarse_clock(
    shards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", dict.fromkeys((f"{i}.png" for i in range(20)), png(Image.new("L", (1, 1)))))
    if shards:
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            tar.add(tmp_path / "a", arcname="")
    monkeypatch.setattr(time, "thread_time", lambda: 1.0)
    document = answer("plan", tmp_path / "a.tar" if shards else tmp_path, *DEMANDED[:-1], 10)
    assert document["modes"]["raw"]["first"]["limit"] == "GPUs"
