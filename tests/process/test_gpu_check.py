"""`make gpu-check` on a machine without a GPU: it says so; its steps run over the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.measure import gpu_check
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
SMALL = ["--device", "cpu", "--quick", "--photos", "64", "--batch", "8", "--workers", "2"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    with pytest.raises(SystemExit, match=r"^3$"):
        gpu_check.main()
    assert "no CUDA GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "rate"), [("copy", "end_to_end_gb_s"), ("idle", "images_per_s"), ("images", "images_per_s")]
)
def test_a_part_over_the_cpu(
    part: str, rate: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process; the long form starts the command, which imports torch."""
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--part", part, *SMALL])
    gpu_check.main()
    assert json.loads(capsys.readouterr().out)[rate] > 0


@pytest.mark.stress
def test_every_step_over_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "gpu_check", "--device", "cpu", "--quick"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("cpu-*.json")
    result = json.loads(path.read_text())
    assert {"copy", "images", "idle", "tests", "trainer", "machine", "versions"} <= result.keys()
