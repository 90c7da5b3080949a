"""A soak of three minutes: the hour of `make soak` in short, without its verdict on growth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stress


def test_soak_in_short(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", "3", "--folder", str(tmp_path)]
    soak = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert soak.returncode == 0, soak.stdout + soak.stderr
    assert (tmp_path / "runs.jsonl").read_text().count('"failure": null') >= 1
