"""`python -m bench scaling`: MoXing's columns, and the runs that they need."""

from __future__ import annotations

import pytest

from bench.measure import scaling
from bench.show import scaling_table


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
