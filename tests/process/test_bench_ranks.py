"""`python -m bench ranks`: the job waits for its slowest rank; and a tiny run."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing.context import ForkProcess
from typing import Any

import pytest

from bench.measure.ranks import Job, row, run, run_rank

JOB = Job("2 ahead", ranks=2, workers=1, batch=2, steps=6, epochs=2, slow=0.5, times=5, load=1)


def test_wait_of_a_step_is_that_of_the_slowest_rank() -> None:
    of_ranks = [[0.0, 0.004, 0.0], [0.002, 0.0, 0.001]]
    reports = [{"waits": waits, "held_back": 0.25, "choice": ""} for waits in of_ranks]
    found = row(JOB, [reports])
    assert (found["p50_ms"], found["p99_ms"], found["max_ms"]) == pytest.approx((2, 4, 4))
    assert JOB.step_seconds == pytest.approx(0.006)
    assert found["not_waiting"] == pytest.approx(18 / 25)
    assert found["held_back"] == 0.25


class ForkedRank(ForkProcess):
    """What `subprocess.Popen` starts for a rank, forked."""

    def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
        ours, theirs = multiprocessing.Pipe()
        super().__init__(target=_run_rank, args=(Job(*json.loads(command[-1])), env, theirs))
        self._out = ours
        self.start()
        theirs.close()

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        out = self._out.recv()
        self.join(timeout)
        return out, ""


def _run_rank(job: Job, environment: dict[str, str], pipe: Any) -> None:
    os.environ.update(environment)
    with redirect_stdout(StringIO()) as out:
        run_rank(job)
    pipe.send(out.getvalue())


def test_tiny_run_reports_each_rank_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    reports = run(JOB._replace(contender="auto"))
    assert [(len(report["waits"]), report["samples"]) for report in reports] == [(6, 12), (6, 12)]
    assert all(report["choice"].startswith("num_workers='auto'") for report in reports)
