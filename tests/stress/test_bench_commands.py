"""The short form of every command of `python -m bench` runs to its end.

python -m pytest -m stress tests/stress/test_bench_commands.py

One died in its last step after an hour of measuring, and no test saw it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import commands
from bench.data import RESULTS
from bench.show import report, scaling_table
from fastload.cli.demo.s3_server import find_rclone

pytestmark = [
    pytest.mark.stress,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_rclone() is None, reason="needs rclone"),
]

ROOT = Path(__file__).parents[2]
SHORT = {
    "cold": ["--quick", "--images", "200"],
    "columns": ["--rows", "20000", "--rounds", "1"],
    "compare": ["--quick"],
    "decode": ["--images", "16", "--rounds", "1"],
    "dgc_link": ["--model", "resnet18", "--images", "32", "--epochs", "1", "--results", "RESULTS"],
    "filling": ["--images", "200", "--repeats", "1"],
    "fuse": ["--rounds", "1"],
    "gpu_check": ["--device", "cpu", "--quick", "--cores", "2", "--results", "RESULTS"],
    "growth": ["--quick"],
    "handover": ["--repeats", "1", "--batches", "10"],
    "moxing": ["--images", "64", "--repeats", "1"],
    "node": [str(report.newest())],
    "published": ["--photos", "200", "--repeats", "1"],
    "ranges": ["--quick", "--parts", "64"],
    "ranks": ["--ranks", "2", "--workers", "1", "--steps", "20", "--epochs", "1", "--repeats", "1"],
    "report": [],
    "scaling": ["--images", "96", "--epochs", "1", "--results", "RESULTS"],
    "shapes": ["--images", "100", "--turns", "1", "--seconds", "1"],
    "starts": ["--quick", "--images", "200"],
    "trainer": ["--images", "256", "--epochs", "2", "--workers", "1", "--dir", "RESULTS"],
    "wrappers": ["--quick", "--images", "64"],
}
NOT_HERE = {"dlio": "needs an environment with DLIO", "report": "rewrites README.md and the documentation"}


def test_every_command_has_a_short_form() -> None:
    assert set(commands()) == set(SHORT) | set(NOT_HERE)


@pytest.mark.parametrize("name", sorted(set(SHORT) - set(NOT_HERE)))
def test_command_runs_to_its_end(name: str, tmp_path: Path) -> None:
    before = set(RESULTS.iterdir())
    arguments = [word.replace("RESULTS", str(tmp_path)) for word in SHORT[name]]
    done = subprocess.run(
        [sys.executable, "-m", "bench", name, *arguments],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    for written in set(RESULTS.iterdir()) - before:
        written.unlink()
    assert done.returncode == 0, done.stdout[-3000:]
    assert "left out: fastload" not in done.stdout
    if name == "scaling":
        [result] = tmp_path.glob("scaling-*.json")
        assert scaling_table.markdown(json.loads(result.read_text())) in done.stdout
        charts = {path.stem for path in tmp_path.glob("*.png")}
        assert charts == {result.stem, f"{result.stem}-dark"}
    shutil.rmtree(tmp_path, ignore_errors=True)
