"""`python -m bench scaling`: MoXing's columns, and a tiny run with one and two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.measure import scaling
from bench.show import scaling_table
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def test_moxings_columns_from_its_own_figures() -> None:
    """MoXing published a speedup of .8338 on one node of 8, and a dist_speedup of .9400 on two."""
    rates = {1: 390.0, 8: 8 * 390 * 0.8338, 16: 16 * 390 * 0.8338 * 0.9400}
    rows = scaling_table.speedups([{"GPUs": count, "FPS": rate} for count, rate in rates.items()], 8)
    assert [row["node"] for row in rows] == [1, 1, 2]
    assert [row["speedup"] for row in rows] == pytest.approx([1, 0.8338, 0.8338 * 0.94], abs=5e-5)
    assert [row["dist_speedup"] for row in rows] == [None, 1.0, 0.94]


def test_one_gpu_a_node_has_both_columns_equal() -> None:
    rows = scaling_table.speedups([{"GPUs": 1, "FPS": 100.0}, {"GPUs": 3, "FPS": 240.0}], 1)
    assert [(row["node"], row["speedup"], row["dist_speedup"]) for row in rows] == [(1, 1, 1), (3, 0.8, 0.8)]


def test_the_runs_that_the_columns_need_are_added() -> None:
    assert scaling.counts([4, 2], None) == ([1, 2, 4], 4)
    assert scaling.counts([16], 8) == ([1, 8, 16], 8)
    with pytest.raises(SystemExit, match="from 1 on"):
        scaling.counts([0, 2], None)


@pytest.mark.stress
def test_a_tiny_run_puts_two_runs_together(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "scaling", "--ranks", "2", "--images", "48", "--epochs", "2"]
    command += ["--batch-size", "4", "--rate", "100", "--results", str(tmp_path), "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    one, two = document["rows"]
    assert (one["GPUs"], one["batch size"], two["GPUs"], two["batch size"]) == (1, 4, 2, 8)
    assert two["speedup"] == pytest.approx(two["FPS"] / (2 * one["FPS"]), abs=1e-4)
    assert two["FPS"] <= 201 and two["dist_speedup"] == 1
    stem = f"scaling-{document['date'][:10]}"
    assert {path.name for path in tmp_path.iterdir()} == {f"{stem}.json", f"{stem}.png", f"{stem}-dark.png"}
    assert scaling_table.markdown(document) in done.stdout
    again = "python -m bench scaling --ranks 1,2 --node 2 --rate 100 --images 48 --epochs 2 --batch-size 4"
    assert f"`{again} --workers 1 --seed 3`" in done.stdout
