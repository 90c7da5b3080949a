"""The short form of `python -m tests.hostile`: hostile bytes into every reader, within limits."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.hostile import faulty, oracle
from tests.hostile.__main__ import cases, fault_of
from tests.hostile.readers import readers

SEED = 0


@pytest.fixture(scope="module")
def server() -> Iterator[oracle.Server]:
    with closing(oracle.Server(faulty.__name__)) as server:
        yield server


@pytest.fixture(
    scope="module", params=[1, pytest.param(8, marks=pytest.mark.stress)], ids="{} of a kind".format
)
def faults(request: pytest.FixtureRequest, server: oracle.Server) -> dict[str, list[str]]:
    """Reader -> what its cases showed, with so many of each random kind; all run at once."""
    found: dict[str, list[str]] = defaultdict(list)
    for case in cases(SEED, request.param):
        if fault := fault_of(case, server.judge(case.reader, case.files)):
            found[case.reader].append(fault)
    return found


@pytest.mark.parametrize("reader", readers())
def test_reader_refuses_hostile_bytes_within_its_limits(reader: str, faults: dict[str, list[str]]) -> None:
    assert not faults[reader], "\n\n".join(faults[reader])


@pytest.mark.parametrize("reader", faulty.READERS)
def test_suite_finds_a_reader_that_breaks_a_promise(reader: str, server: oracle.Server) -> None:
    outcome = server.judge(reader, {}, patience=1.0 if reader == "waits" else 30.0)
    assert re.search(faulty.READERS[reader][1], outcome.fault), outcome


def test_case_that_seems_at_fault_behind_others_is_judged_again_alone(server: oracle.Server) -> None:
    assert [server.judge("keeps", {}).fault for _ in range(2)] == ["", ""], "the memory of the first"
    assert server.judge("remembers", {}).fault == ""
    assert "behind other cases of this reader: raised ValueError" in server.judge("remembers", {}).fault


def test_cases_of_a_seed_are_the_same_each_time() -> None:
    one, other = (list(cases(3, 2, only="npy: ")) for _ in range(2))
    assert one == other and len(one) > 10
    assert len({case.attack for case in one}) == len(one)
