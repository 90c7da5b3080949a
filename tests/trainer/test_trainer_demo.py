"""`make train-demo`, shorter: pictures, an S3 server, torchrun, two ranks that learn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.patience import PATIENCE
from tests.resnet50 import RESNET50


@pytest.mark.parametrize(
    ("images", "epochs", "target", "resolution"),
    [
        (320, 3, 0.2, "0:32,1:40"),
        pytest.param(640, 5, 0.5, "0:48,2:64", marks=pytest.mark.stress),
    ],
)
def test_two_ranks_learn_shapes_from_a_bucket(
    tmp_path: Path, images: int, epochs: int, target: float, resolution: str
) -> None:
    """Guessing is right in an eighth of all cases: there are eight classes. The full demo reaches 99 %."""
    command = [sys.executable, str(RESNET50 / "demo.py"), "--dir", str(tmp_path)]
    command += ["--images", str(images), "--epochs", str(epochs), "--target", str(target)]
    command += ["--batch-size", "16", "--resolution", resolution, "--ceiling-steps", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE)
    lines = [json.loads(line) for line in (tmp_path / "run" / "epochs.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, epochs + 1))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [line["bad samples"] for line in lines] == [0] * epochs
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy"] >= target
    with Image.open(tmp_path / "run" / "chart.png") as image:
        assert image.size[0] > 1000


@pytest.mark.stress
def test_demo_fails_below_its_target(tmp_path: Path) -> None:
    command = [sys.executable, str(RESNET50 / "demo.py"), "--dir", str(tmp_path), "--ranks", "1"]
    command += ["--images", "64", "--epochs", "1", "--target", "1.01"]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1 and "below the target" in done.stderr
