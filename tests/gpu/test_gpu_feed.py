"""The feed over CUDA: what test_feed.py asks of the fake, and what only a GPU can show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastload import DataLoader
from tests.feed_cases import *  # noqa: F403
from tests.feed_cases import Target, ids
from tests.loaderdata import Numbers, numbered

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]


@pytest.fixture
def target() -> Target:
    return Target("cuda", lambda transform: transform, "cuda")


def big(index: int) -> torch.Tensor:
    """4 MB: a copy takes long enough to be overtaken."""
    return torch.full((1_000_000,), index, dtype=torch.float32)


def test_slots_are_registered_and_copied_without_a_detour() -> None:
    loader = DataLoader(Numbers(64, big), batch_size=8, num_workers=2, device="cuda")
    iterator = iter(loader)
    assert ids(next(iterator)) == list(range(8))
    workers = iterator._engine._workers
    slots = [torch.from_numpy(slot) for worker in workers for slot in worker.slots._memory.values()]
    assert slots and all(slot.is_pinned() for slot in slots)
    assert "copy.unregistered" not in loader.stats()["counters"]


def test_a_busy_device_never_gets_a_slot_that_was_used_again() -> None:
    """The consumer's stream, and so the hand-over, is far behind; the workers are far ahead."""
    loader = DataLoader(Numbers(400, big), batch_size=4, num_workers=4, shuffle=True, device="cuda")
    matrix = torch.randn(4096, 4096, device="cuda")
    firsts, spreads = [], []
    for batch in loader:
        for _ in range(5):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        firsts.append(batch[:, 0].clone())
        spreads.append((batch.amax(1) - batch.amin(1)).amax())
    assert float(torch.stack(spreads).max()) == 0, "a batch with content of several samples in one row"
    assert sorted(int(i) for i in torch.cat(firsts).tolist()) == list(range(400))


def test_memory_handed_over_is_not_reused_while_the_consumer_reads_it() -> None:
    """record_stream: batches are dropped at once, with their readers still queued behind long work."""
    loader = DataLoader(Numbers(200, big), batch_size=4, num_workers=2, device="cuda")
    matrix = torch.randn(4096, 4096, device="cuda")
    sums = []
    for batch in loader:
        for _ in range(10):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        sums.append(batch.double().sum(1))
        del batch
    assert torch.cat(sums).tolist() == [i * 1e6 for i in range(200)]


def test_a_consumer_with_a_stream_of_its_own() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        loader = DataLoader(Numbers(100, big), batch_size=4, num_workers=2, device="cuda")
        got = [i for batch in loader for i in ids(batch)]
    assert got == list(range(100))


def test_a_fork_after_cuda_was_used() -> None:
    torch.zeros(1, device="cuda")
    for _ in range(2):
        loader = DataLoader(Numbers(40, numbered), batch_size=4, num_workers=2, device="cuda")
        assert [i for batch in loader for i in ids(batch)] == list(range(40))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_stays_when_the_current_one_changes() -> None:
    loader = DataLoader(Numbers(40, numbered), batch_size=4, num_workers=2, device="cuda:1")
    for number, batch in enumerate(loader):
        torch.cuda.set_device(number % 2)
        assert batch.device == torch.device("cuda:1")
        assert ids(batch)[0] == 4 * number
    torch.cuda.set_device(0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [10, 25_000])
def test_pin_memory_alone(workers: int, size: int) -> None:
    def make(index: int) -> Any:
        return {"data": torch.full((size,), float(index)), "label": index}

    loader = DataLoader(Numbers(40, make), batch_size=4, num_workers=workers, pin_memory=True)
    for number, batch in enumerate(loader):
        assert batch["data"].is_pinned() and batch["label"].is_pinned()
        assert ids(batch["data"]) == list(range(4 * number, 4 * number + 4))


def test_the_idle_share_is_measured() -> None:
    loader = DataLoader(Numbers(100, big), batch_size=4, num_workers=2, device="cuda")
    for batch in loader:
        batch.sum()
    counters = loader.stats()["counters"]
    assert 0 < counters["device.idle.seconds"] <= counters["device.seconds"]
    assert counters["copy.seconds"] > 0
