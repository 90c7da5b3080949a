"""`make gpu-check` on a machine without a GPU: it says so; its steps run over the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "gpu_check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 3 and "no CUDA GPU" in done.stdout


@pytest.mark.parametrize("part", ["copy", "images", "idle"])
def test_a_part_over_the_cpu(part: str) -> None:
    arguments = ["--device", "cpu", "--quick", "--photos", "64", "--batch", "8", "--workers", "2"]
    done = run("--part", part, *arguments)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    rate = {"copy": "end_to_end_gb_s", "images": "images_per_s", "idle": "images_per_s"}[part]
    assert figures[rate] > 0


@pytest.mark.stress
def test_every_step_over_the_cpu(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--quick", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("cpu-*.json")
    result = json.loads(path.read_text())
    assert {"copy", "images", "idle", "tests", "trainer", "machine", "versions"} <= result.keys()
