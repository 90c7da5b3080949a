"""`memory_limit=`: what is refused, how it is split, and the budget of bytes that are read ahead."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest

from fastload import DataLoader
from fastload.errors import ArgumentError
from fastload.fetch.threads import ByteBudget, budgeted_bytes
from fastload.metrics.machine import limit_payloads, payload_limit, usable_bytes
from fastload.workers.memory_limit import MemoryLimit, WorkerMemory, most_workers
from tests.loaderdata import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

MB = 1_000_000
METHODS = ["fork", "forkserver", "spawn"]


class Owner:
    """Of a limit."""


NO_SIZES = ["", "two", "-1GB", 0, -5, True, 1.5, ["1GB"], "0%", "101%", "%", "-5%", "5 % of it"]


@pytest.mark.parametrize("value", NO_SIZES)
def test_memory_limit_that_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"memory_limit={re.escape(repr(value))}; give bytes"):
        DataLoader(Numbers(4), memory_limit=value)


@pytest.mark.parametrize(("ranks", "size"), [(None, 4000 * MB), ("1", 4000 * MB), ("8", 500 * MB)])
def test_percentage_is_shared_by_the_ranks_of_the_node(
    ranks: str | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.workers.memory_limit.usable_bytes", lambda: 8000 * MB)
    if ranks is not None:
        for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": ranks}.items():
            monkeypatch.setenv(name, value)
    limit = MemoryLimit.of("50%", 2, "fork")
    assert limit is not None and limit.bytes == size
    loader = DataLoader(Numbers(4), num_workers=1, multiprocessing_context="fork", memory_limit="50 %")
    assert len(list(loader)) == 4
    assert loader.stats()["memory"]["limit"] == size


def test_percentage_without_the_number_of_local_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ArgumentError, match=r"memory_limit='50%' is shared .* set LOCAL_WORLD_SIZE"):
        DataLoader(Numbers(4), memory_limit="50%")
    DataLoader(Numbers(4), memory_limit="2GB")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    DataLoader(Numbers(4), memory_limit="50%")


def test_percentage_that_is_too_small_says_what_a_rank_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.workers.memory_limit.usable_bytes", lambda: 1000 * MB)
    with pytest.raises(
        ArgumentError, match="'1%' is too little for num_workers=0 with 10 MB of this node: give"
    ):
        DataLoader(Numbers(4), memory_limit="1%")


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({}, 8000 << 10),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "5000\n"}, 5000),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 8000 << 10),
        ({"proc/self/cgroup": "4:memory:/a\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "7"}, 7),
        (
            {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9" * 19},
            8000 << 10,
        ),
        ({"proc/self/cgroup": "4:cpu:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "7"}, 8000 << 10),
    ],
    ids=[
        "machine",
        "version 2, of a parent",
        "version 2, none",
        "version 1",
        "version 1, none",
        "another kind",
    ],
)
def test_usable_memory_is_within_the_control_groups(files: dict[str, str], size: int, tmp_path: Path) -> None:
    for name, text in ({"proc/meminfo": "MemTotal:  8000 kB\nMemFree: 1 kB\n"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_bytes(str(tmp_path)) == size


@pytest.mark.parametrize("workers", [0, 1, 6])
@pytest.mark.parametrize("method", METHODS)
def test_memory_limit_too_small_is_refused_and_the_smallest_one_named_is_taken(
    workers: int, method: str
) -> None:
    more: Any = {"num_workers": workers, "multiprocessing_context": method if workers else None}
    with pytest.raises(ArgumentError, match="memory_limit='1MB' is too little") as refused:
        DataLoader(Numbers(4), memory_limit="1MB", **more)
    least = re.search(r"give at least (\d+) MB", str(refused.value))
    assert least is not None
    assert (f"{workers} worker process" if workers else "num_workers=0") in str(refused.value)
    DataLoader(Numbers(4), memory_limit=f"{least[1]}MB", **more)
    with pytest.raises(ArgumentError, match=f"give at least {least[1]} MB"):
        DataLoader(Numbers(4), memory_limit=int(least[1]) * MB - MB, **more)


@pytest.mark.parametrize("method", METHODS)
def test_shares_of_the_workers_and_the_common_processes_are_the_limit(method: str) -> None:
    limit = MemoryLimit.of("2GB", 5, method)
    assert limit is not None
    assert limit.bytes - 5 < limit.common + 5 * limit.share <= limit.bytes == 2000 * MB


@pytest.mark.parametrize("method", METHODS)
def test_auto_starts_no_more_workers_than_the_limit_is_enough_for(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has room for four batches of 256 images of 224 pixels."""
    monkeypatch.setattr("fastload.workers.memory_limit.ceiling", lambda: 64)
    found: list[int] = []
    for size in ("300MB", "1GB", "4GB", "99GB"):
        limit = MemoryLimit.of(size, most_workers(size, method), method)
        assert limit is not None
        found.append(limit.workers)
        if limit.workers > 1:
            limit.check(limit.least(room=4 * 256 * 3 * 224 * 224))
    assert found[0] == 1 < found[1] < found[2] < found[3] == 64
    with pytest.raises(ArgumentError, match="too little for 1 worker process "):
        DataLoader(Numbers(4), num_workers="auto", memory_limit="2MB", multiprocessing_context="fork")


def test_lowest_limit_of_payloads_counts_as_long_as_its_owner_lives() -> None:
    before = payload_limit()
    first, second = Owner(), Owner()
    limit_payloads(first, 5 * MB)
    limit_payloads(second, 3 * MB)
    assert payload_limit() == 3 * MB
    limit_payloads(second, 9 * MB)
    assert payload_limit() == 5 * MB
    del first
    gc.collect()
    assert payload_limit() == 9 * MB
    del second
    gc.collect()
    assert payload_limit() == before


class Consumer:
    """Takes samples of 1 MB from a prefetcher whose budget is full; some of its time it waits."""

    def __init__(self, most: int) -> None:
        self.now = 0.0
        self.budget = ByteBudget(most, clock=lambda: self.now)

    def take(self, samples: int, waited: float) -> bool:
        """Each takes 0.1 s, of which it waits for this part. Whether the budget grew."""
        grew = False
        for _ in range(samples):
            self.now += 0.1
            self.budget.delivered(MB)
            grew |= waited > 0 and self.budget.grow(MB, 0.1 * waited)
        return grew


def test_budget_grows_for_a_consumer_that_waits_and_not_for_one_that_does_not() -> None:
    idle, waiting = Consumer(256 * MB), Consumer(256 * MB)
    first = idle.budget.bytes(MB)
    assert not idle.take(2000, waited=0.05)
    assert idle.budget.bytes(MB) == first
    assert waiting.take(2000, waited=0.5)
    assert waiting.budget.bytes(MB) == 256 * MB  # and never more


def test_budget_does_not_grow_before_it_was_used_once() -> None:
    consumer = Consumer(256 * MB)
    for _ in range(1000):
        consumer.now += 0.1
        assert not consumer.budget.grow(MB, 0.1)


def test_budget_of_large_samples_begins_with_several_of_them() -> None:
    assert ByteBudget(256 * MB).bytes(8 * MB) == 256 * MB
    assert ByteBudget(256 * MB).bytes(2 * MB) == 64 * MB


def test_prefetchers_of_a_process_share_its_limit_equally() -> None:
    owner, budgets = Owner(), [ByteBudget(256 * MB) for _ in range(4)]
    limit_payloads(owner, 8 * MB)
    others = 8 * MB // budgets[0].bytes(MB)  # those that earlier tests left
    assert others >= 4 and sum(budget.bytes(MB) for budget in budgets) <= 8 * MB
    limit_payloads(owner, 4 * MB)
    assert sum(budget.bytes(MB) for budget in budgets) <= 4 * MB


def test_budgets_of_which_nobody_has_asked_count_no_more_than_the_limit() -> None:
    owner, budgets = Owner(), [ByteBudget(256 * MB) for _ in range(4)]
    limit_payloads(owner, MB)
    assert budgeted_bytes() <= MB < sum(budget.value for budget in budgets)


def test_budget_that_a_limit_made_small_returns_with_it() -> None:
    owner, consumer = Owner(), Consumer(256 * MB)
    before = consumer.budget.bytes(1000)
    limit_payloads(owner, MB)
    consumer.take(2000, waited=0.5)
    del owner
    gc.collect()
    assert consumer.budget.bytes(1000) >= before


class Process:
    """The memory of a forked worker, as it measures it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heap, self.free, self.private = 100 * MB, 0, 10 * MB  # of the heap, most is shared
        monkeypatch.setattr("fastload.workers.memory_limit.anonymous_bytes", lambda: self.heap)
        monkeypatch.setattr("fastload.workers.memory_limit.private_bytes", lambda: self.private)
        monkeypatch.setattr("fastload.workers.memory_limit.trim", self.trim)

    def allocate(self, nbytes: int) -> None:
        self.heap += nbytes
        self.private += nbytes

    def trim(self) -> None:
        self.allocate(-self.free)
        self.free = 0


def test_memory_of_a_worker_is_its_own_memory_however_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(monkeypatch)
    memory = WorkerMemory(MemoryLimit.of("150MB", 1, "fork"), 2)
    memory.begin()
    process.private += 30 * MB  # pages that it has inherited, and has written to
    memory.look(0)
    assert memory.used == process.private == 40 * MB
    process.allocate(100 * MB)
    process.free = 70 * MB
    memory.look(0)
    assert process.free == 0, "what copied pages take counts too"
    assert memory.used == process.private == 70 * MB
    process.allocate(10 * MB)
    memory.look(0)
    assert memory.used == process.private == 80 * MB
    process.heap -= 80 * MB  # inherited pages go, which other processes still have
    memory.look(0)
    assert memory.used == process.private == 80 * MB


def test_small_batches_are_made_further_ahead_when_allowed_and_large_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Process(monkeypatch)
    for limit, large in ((None, 2), (MemoryLimit.of("150MB", 1, "fork"), 1)):
        memory = WorkerMemory(limit, 2)
        memory.begin()
        memory.check_batch(MB)
        memory.allow_ahead(16)
        memory.look(0)
        assert memory.ahead == 16
        memory.check_batch(40 * MB if limit is None else 30 * MB)
        memory.look(0)
        assert memory.ahead == large
