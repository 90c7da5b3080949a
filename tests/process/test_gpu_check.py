"""`make gpu-check` on a machine without a GPU: it says so; its steps run over the CPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from bench.measure import gpu_check

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
    """In this process; tests/stress/test_bench_commands.py starts the command, which imports torch."""
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--part", part, *SMALL])
    gpu_check.main()
    assert json.loads(capsys.readouterr().out)[rate] > 0
