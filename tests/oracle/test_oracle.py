"""Random jobs, on fastload and on a slow loader that is right by definition: `python -m tests.oracle`."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.oracle.__main__ import differences, report, smallest
from tests.oracle.jobs import random_job
from tests.oracle.known import MEANT, name_of

PARTS, JOBS = 12, 100  # tests, and the jobs of each; `make test` runs the first
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "differences.md"


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.stress) for n in range(1, PARTS))])
def test_random_jobs(part: int) -> None:
    covered: Counter[str] = Counter()
    for number in range(part * JOBS, (part + 1) * JOBS):
        job = random_job(number)
        found = differences(job)
        covered.update({name_of(job, one) for one in found} - {""})
        new = [one for one in found if not name_of(job, one)]
        if new:
            small = smallest(job, new[0])
            text = report(small, differences(small))
            pytest.fail(f"job {number}:\n{report(job, new)}\nas small as it gets:\n{text}")
    print(f"{JOBS} jobs; known differences: {dict(covered)}")


def test_what_differs_on_purpose_is_documented() -> None:
    page = re.sub(r"\s+", " ", PAGE.read_text())
    assert [sentence for sentence, _ in MEANT.values() if sentence not in page] == []
