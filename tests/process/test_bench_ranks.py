"""`python -m bench ranks`: the job waits for its slowest rank."""

from __future__ import annotations

import pytest

from bench.measure.ranks import Job, row

JOB = Job("2 ahead", ranks=2, workers=1, batch=2, steps=6, epochs=2, slow=0.5, times=5, load=1)


def test_wait_of_a_step_is_that_of_the_slowest_rank() -> None:
    of_ranks = [[0.0, 0.004, 0.0], [0.002, 0.0, 0.001]]
    reports = [{"waits": waits, "held_back": 0.25, "choice": ""} for waits in of_ranks]
    found = row(JOB, [reports])
    assert (found["p50_ms"], found["p99_ms"], found["max_ms"]) == pytest.approx((2, 4, 4))
    assert JOB.step_seconds == pytest.approx(0.006)
    assert found["not_waiting"] == pytest.approx(18 / 25)
    assert found["held_back"] == 0.25
