"""The short form of `python -m tests.hostile`: hostile bytes into every reader, within limits."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.hostile import faulty, oracle
from tests.hostile.__main__ import cases, fault_of, judged
from tests.hostile.readers import readers

SEED = 0


@pytest.fixture(
    scope="module", params=[2, pytest.param(8, marks=pytest.mark.stress)], ids="{} of a kind".format
)
def faults(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Reader -> what its cases showed, with so many of each random kind; all run at once, two at a time."""
    found: dict[str, list[str]] = defaultdict(list)
    count = 0
    for case, outcome in judged(cases(SEED, request.param), processes=2):
        count += 1
        if fault := fault_of(case, outcome):
            found[case.reader].append(fault)
    print(f"{count} hostile cases")  # noqa: T201 - pytest shows it beside a failure
    return found


@pytest.mark.parametrize("reader", readers())
def test_reader_refuses_hostile_bytes_within_its_limits(reader: str, faults: dict[str, list[str]]) -> None:
    assert not faults[reader], "\n\n".join(faults[reader])


@pytest.fixture(scope="module")
def server() -> Iterator[oracle.Server]:
    with closing(oracle.Server(faulty.__name__, patience=20.0)) as server:
        yield server


@pytest.mark.parametrize("reader", faulty.READERS)
def test_suite_finds_a_reader_that_breaks_a_promise(reader: str, server: oracle.Server) -> None:
    outcome = server.judge(reader, {})
    assert re.search(faulty.READERS[reader][1], outcome.fault), outcome


def test_cases_of_a_seed_are_the_same_each_time() -> None:
    one, other = (list(cases(3, 2, only="npy: ")) for _ in range(2))
    assert one == other and len(one) > 10
    assert len({case.attack for case in one}) == len(one)
