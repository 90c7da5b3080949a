"""`python -m bench dgc_link`: the limited link, what it needs, and its end by signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.measure import dgc_link, link
from tests.patience import PATIENCE, runs, wait_until

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "bench", "dgc_link", "--model", "small", "--rate", "100"]
root_only = pytest.mark.skipif(bool(link.missing()), reason=f"a limited link needs {link.missing()}")


def test_a_missing_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    assert link.missing() == "tc: install iproute2"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert link.missing().startswith("root:")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in link.missing()


@root_only
def test_the_link_has_its_rate_and_counts_bytes() -> None:
    with link.Link(50e6) as limited:
        assert limited.measure(4) <= 55e6  # the bucket, of a quarter MB, is full at first
        assert 4e6 < limited.sent(0) < 4.4e6


def test_rows_have_the_link_s_time_and_bytes_without_the_ceiling_s() -> None:
    line = {"batch size": 16, "FPS after the first step": 32.0, "loss": 2.0}
    line |= {"communication MB": 200.0, "communication MB per step": 100.0}
    epochs = [
        # 0.2 s of each epoch's CPU time are those of the checkpoint before it.
        line | {"epoch": i + 1, "sent": (i + 1) * 202e6, "CPU": i + 1.0, "CPU after": i + 1.2}
        for i in range(6)
    ]
    epochs[3]["CPU after"] = None  # not seen
    dense = dgc_link.rows(epochs, "dense", 1e9)
    assert (dense[1]["link, s"], dense[1]["step, s"]) == (0.8, 0.5)
    assert [row["on the wire"] for row in dense] == [None] + [101.0] * 5
    assert [row["CPU, s"] for row in dense] == [None] + [0.4] * 3 + [None, 0.4]
    compressed = dgc_link.rows(epochs, "DGC", 1e9)
    assert [row["sparsity"] for row in compressed] == [0.75, 0.9375, 0.984375, 0.996, 0.999, 0.999]
    assert [row["on the wire"] for row in compressed] == [None] * 5 + [101.0]


@root_only
@pytest.mark.stress
def test_a_tiny_run_compares_both_exchanges(tmp_path: Path) -> None:
    tiny = ["--images", "32", "--epochs", "6", "--results", str(tmp_path)]
    done = subprocess.run([*COMMAND, *tiny], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    [written] = tmp_path.glob("dgc_link-*-100mbit.json")
    document = json.loads(written.read_text())
    dense, compressed = document["runs"]["dense"], document["runs"]["DGC"][-1]
    # These epochs take a part of a second, and a look that comes late counts bytes of the next one.
    on_the_wire = statistics.mean(row["on the wire"] for row in dense[1:])
    assert on_the_wire == pytest.approx(dense[0]["MB a step"], rel=0.3)
    assert compressed["on the wire"] < on_the_wire / 5
    assert document["bare rate"] <= 120e6


@root_only
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.stress)]
)
def test_nothing_is_left_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, env=environment) as bench:
        assert bench.stdout is not None and bench.stdout.readline() == b"dense ...\n"
        wait_until(lambda: len(_ranks(bench.pid)) == 2, "two ranks train")
        started = psutil.Process(bench.pid).children(recursive=True)
        bench.send_signal(number)
        bench.wait(PATIENCE)
    wait_until(lambda: not any(map(runs, started)), f"all of {started} have ended")
    assert number == signal.SIGKILL or not list(tmp_path.iterdir())


def _ranks(parent: int) -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process(parent).children(recursive=True)
        if any(word.endswith("train.py") for word in process.cmdline())
    ]
