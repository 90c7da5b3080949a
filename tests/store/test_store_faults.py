"""The object-store engine: what stores do wrong, through the whole loader, and the rules that answer it."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fastload.errors import AccessDeniedError, ShortReadError, StoreError
from fastload.fetch.reads import plan_ranges
from fastload.fetch.threads import ConcurrencyLimiter, Hedging, ReadSettings, process_share
from fastload.store import failures, open_store
from tests.engine_cases import BAD, CASES, CLIENTS, OBJECTS, PASSING, SECRET, is_long, main
from tests.patience import PATIENCE

# case -> (the error, requests for the bad object); None: the epoch is complete and right, whatever it took.
EXPECTED: dict[str, tuple[str | None, range]] = {
    "clean": (None, range(1, 2)),
    "500 for ever": ("StoreError", range(2, 200)),
    "stall": (None, range(2, 10)),  # what a loaded machine delays counts as one too
    "stalls for ever": ("StoreError", range(2, 40)),
    "XML in a 200 for ever": ("ShortReadError", range(2, 200)),
    "403": ("AccessDeniedError", range(1, 2)),
    "404": ("NotFoundError", range(1, 2)),
    "404, skipped": (None, range(1, 2)),
    "changed": ("ObjectChangedError", range(1, 2)),
    "changed, server ignores If-Match": ("ObjectChangedError", range(1, 2)),
    "changed, refresh": (None, range(2, 3)),
    "deleted, refresh": ("NotFoundError", range(1, 2)),
    "expired, static": ("AccessDeniedError", range(2)),
    "expired, provider": (None, range(1, 5)),
    "cached": (None, range(1)),  # the second epoch
    "large objects": (None, range(4, 5)),
    "large object changed between its ranges": ("ObjectChangedError", range(2, 5)),
    "hedged": (None, range(1, 3)),
    "storm": (None, range(2, 3)),
    "faults that pass": (None, range(2, 3)),
}
APART = [name for name in CASES if "flipped" in name or "guard removed" in name]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """client -> case -> its outcome."""
    yield from outcomes(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    yield from outcomes(tmp_path_factory.mktemp("engine"), long=True)


def outcomes(folder: Path, *, long: bool = False) -> Iterator[dict[str, dict[str, Any]]]:
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=main, args=(folder, client, long)) for client in CLIENTS]
    for process in processes:
        process.start()
    try:
        results = {}
        for client, process in zip(CLIENTS, processes, strict=True):
            process.join(2 * PATIENCE)  # for twenty cases, of which some take long on purpose
            said = (folder / f"{client}.err").read_text()
            assert process.exitcode == 0, said[-3000:]
            lines = (folder / f"{client}.out").read_text().splitlines()
            results[client] = dict(map(json.loads, lines))
            results[client]["said"] = {"shows_secret": SECRET in said}
        yield results
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)


WHOLE = [
    pytest.param(name, client, marks=[pytest.mark.stress] * is_long(name, client))
    for name in CASES
    for client in CLIENTS
    # s3fs takes no provider of ours; botocore renews roles and profiles itself.
    if name not in APART and (name, client) != ("expired, provider", "s3fs")
]


@pytest.mark.parametrize(("name", "client"), WHOLE)
def test_through_the_whole_loader(name: str, client: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue("long_run" if is_long(name, client) else "run")
    found = run[client][name]
    assert "raised" not in found, found
    error, requests = EXPECTED[name]
    if name == "stalls for ever" and client == "s3fs":
        error = "StoreTimeoutError"
    assert found["error"] == error, found["message"]
    wanted = sorted(OBJECTS) * (2 if name == "cached" else 1)
    if error is None:
        if name == "404, skipped":
            assert set(found["keys"]) == set(OBJECTS) - {BAD} and len(found["keys"]) == len(OBJECTS)
        elif name != "expired, provider":
            assert found["keys"] == wanted, "each object once, in order, with its own bytes"
    else:
        key = "0000" if "expired" in name else BAD
        assert f"'{key}'" in found["message"]
        assert found["keys"] == wanted[: len(found["keys"])]
    if name != "expired, provider":
        assert found["requests"].get(BAD, 0) in requests
    if "for ever" in name:
        assert "attempts in" in found["message"] and found["seconds"] < PATIENCE
    assert found["left"] == {}
    assert found["shows_secret"] == []
    assert found["native"] is False, "the trainer's process must stay safe to fork"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", PASSING)
def test_fault_that_passes_is_retried_unseen(name: str, client: str, run: dict[str, dict[str, Any]]) -> None:
    key, faults = PASSING[name]
    assert run[client]["faults that pass"]["requests"][key] == len(faults) + 1


@pytest.mark.parametrize("client", CLIENTS)
def test_what_the_client_log_shows(client: str, run: dict[str, dict[str, Any]]) -> None:
    """The cases ran with logging at DEBUG, of s3fs those of `LOGGED`."""
    assert run[client]["said"]["shows_secret"] is False


@pytest.mark.parametrize("client", CLIENTS)
def test_expired_credentials_make_no_storm(client: str, run: dict[str, dict[str, Any]]) -> None:
    assert sum(run[client]["expired, static"]["requests"].values()) <= 4  # as many as were in flight


def test_a_provider_is_asked_again(run: dict[str, dict[str, Any]]) -> None:
    found = run["obstore"]["expired, provider"]
    assert found["keys"] == sorted(OBJECTS)
    assert max(found["requests"].values()) <= 2


@pytest.mark.parametrize("client", CLIENTS)
def test_a_storm_is_counted(client: str, run: dict[str, dict[str, Any]]) -> None:
    found = run[client]["storm"]
    assert found["counters"]["get.retries"] == len(OBJECTS)
    assert Counter(found["requests"]) == dict.fromkeys(OBJECTS, 2)


@pytest.mark.parametrize("client", CLIENTS)
def test_if_match_travels_with_every_read(client: str, run: dict[str, dict[str, Any]]) -> None:
    for name in ("clean", "large objects"):
        assert len(run[client][name]["if_match"]) == len(OBJECTS) and "" not in run[client][name]["if_match"]


def test_flipped_bytes(run: dict[str, dict[str, Any]]) -> None:
    """Found where the store sends a checksum and the client shows it: s3fs does, obstore does not."""
    assert "WRONG BYTES" in run["obstore"]["flipped byte"]["keys"]
    assert "WRONG BYTES" in run["s3fs"]["flipped byte"]["keys"]
    assert "WRONG BYTES" in run["obstore"]["flipped byte, with a checksum"]["keys"]
    found = run["s3fs"]["flipped byte, with a checksum"]
    assert found["keys"] == sorted(OBJECTS) and found["requests"][BAD] == 2


@pytest.mark.stress
@pytest.mark.parametrize("client", CLIENTS)
def test_guard_removed_the_cases_above_would_fail(client: str, long_run: dict[str, dict[str, Any]]) -> None:
    found = long_run[client]
    # The changed object passes for the listed one.
    assert found["guard removed: no version check"]["error"] is None
    assert "WRONG BYTES" in found["guard removed: no length check"]["keys"]
    assert found["guard removed: no retry"]["error"] == "StoreError"
    assert found["guard removed: everything is retried"]["requests"][BAD] > 2


# --- The rules ----------------------------------------------------------------------------------------------


def test_pauses_are_drawn_from_the_whole_interval() -> None:
    policy = failures.RetryPolicy(budget=60, first=0.2, longest=15)
    assert [failures.pause_before(n, policy, lambda: 1.0) for n in (2, 3, 4, 20, 10_000)] == [
        0.2,
        0.4,
        0.8,
        15,
        15,
    ]
    assert failures.pause_before(20, policy, lambda: 0.0) == 0
    drawn = {failures.pause_before(20, policy) for _ in range(50)}
    assert len(drawn) == 50 and max(drawn) > 7.5 > min(drawn) >= 0


def _failing(error: StoreError, clock: list[float], *, renew: bool = False, reached: bool = True) -> int:
    """Attempts until the error comes through, each of a second."""
    made = 0

    def attempt() -> None:
        nonlocal made
        made += 1
        clock[0] += 1
        raise error

    def wait(_: StoreError, seconds: float) -> None:
        clock[0] += seconds

    with pytest.raises(type(error)):
        failures.retried(
            attempt,
            lambda start: failures.Attempts(start, failures.READ_POLICY, lambda _: renew, reached),
            wait,
        )
    return made


def _with_retry(error: StoreError, how: str) -> StoreError:
    error.retry = how
    return error


def test_the_budget_is_minutes_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: clock[0])
    error = _with_retry(StoreError("x", key="k"), "later")
    made = _failing(error, clock)
    assert 10 < made < 60 and 150 < clock[0] < 200
    assert f"({made} attempts in" in error.message
    clock[0] = 0
    assert _failing(StoreError("refused"), clock) == 1
    clock[0] = 0
    _failing(_with_retry(StoreError("no such host"), "reachable"), clock, reached=False)
    assert clock[0] < 10
    assert _failing(_with_retry(AccessDeniedError("x"), "renewed"), clock) == 1
    assert _failing(_with_retry(AccessDeniedError("x"), "renewed"), clock, renew=True) == 3
    assert ShortReadError("x").retry == "later"


def test_ranges_cover_and_are_even() -> None:
    assert plan_ranges(0, 8) == [(0, 0)]
    for size in (*range(1, 60), 10**9 + 7):
        for piece in (1, 7, 8, 1000, 8 << 20):
            if size // piece > 10_000:
                continue
            ranges = plan_ranges(size, piece)
            assert ranges[0][0] == 0 and ranges[-1][1] == size
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
            lengths = [stop - start for start, stop in ranges]
            assert max(lengths) <= piece and max(lengths) - min(lengths) <= 1


def _simulated(
    limit: ConcurrencyLimiter, latency: float, capacity: float, seconds: float, start: float = 0.0
) -> float:
    """A store that answers after `latency`, `capacity` a second at most, and a consumer that always waits."""
    now = start
    while now < start + seconds:
        took = max(latency, limit.value / capacity)
        now += took
        for _ in range(limit.value):
            limit.finished(took)
        limit.grow(now)
    return now


def test_the_limit_grows_as_far_as_it_helps() -> None:
    near, far = ConcurrencyLimiter(512), ConcurrencyLimiter(512)
    _simulated(near, 0.001, 1000, 4)
    assert near.value == 32, "a full server gets no longer queue"
    _simulated(far, 0.1, 2000, 4)
    assert 200 <= far.value <= 256, "200 requests of 100 ms make 2,000 a second"


def test_the_limit_halves_when_asked_and_comes_back() -> None:
    limit = ConcurrencyLimiter(64, pinned=True)
    for _ in range(20):
        limit.slow_down(10.0)  # the refusals of one moment are one
    assert limit.value == 32
    limit.slow_down(11.5)
    assert limit.value == 16
    limit.grow(13.5)
    assert limit.value == 20
    limit.grow(100.0)
    assert limit.value == 64
    for now in range(200, 220):
        limit.slow_down(float(now))
    assert limit.value == 1


def test_a_node_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    plain, pinned = open_store(tmp_path), open_store(tmp_path, max_requests=80)
    assert process_share(pinned)[0].value == 80
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert process_share(pinned)[0].value == 10
    small = process_share(plain)
    assert small[0].most == 128 and small[1] == 256 << 20
    monkeypatch.setattr("fastload.fetch.threads.threads", lambda: 4)  # of the kernel
    assert process_share(plain)[0].most == 128, "the node has no more"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert process_share(plain)[0].most == 512
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert process_share(plain)[0].most == 16 and process_share(plain)[1] == 64 << 20


def test_hedging_is_late_and_capped() -> None:
    hedge = Hedging(ReadSettings())
    assert not hedge.due(100.0), "nothing is known yet"
    for number in range(1000):
        hedge.finished(1.0 if number % 50 == 0 else 0.02)
    assert not hedge.due(0.015)
    assert sum(hedge.due(5.0) for _ in range(100)) == 30
