"""`num_workers="auto"`: the policy with a scripted clock and counters, the mechanism with real workers."""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from fastload import Cache, DataLoader, ImageFolder, RandomResizedCrop
from fastload.errors import WorkerError
from fastload.metrics.counters import Counters
from fastload.workers.autoscale import Autoscaler, ceiling
from fastload.workers.processes import WorkerProcesses
from tests.loaderdata import Numbers, Stream
from tests.patience import wait_until
from tests.photos import pillow_jpeg, scene

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # than there are cores
]


# --- the policy


class Run:
    """A scripted epoch: `stretch` lets time pass, in which so much of everything happens."""

    def __init__(self, most: int, cores: float = 16) -> None:
        self.now = self.busy = 0.0
        self.counters = Counters()
        self.cores = cores
        self.scaler = Autoscaler(most, clock=lambda: self.now, cores=cores, busy=lambda: self.busy)
        self.scaler.start_epoch()

    def stretch(self, rate: float, *, idle: float = 8, seconds: float = 2.0, **added: float) -> int:
        """So many batches a second, while `idle` cores are; counters as wait=..., decode=... seconds."""
        self.counters.add("wait.batches", 1 if self.counters["wait.batches"] else 2)
        self.counters.add("wait.batches", max(0.0, self.scaler._due - self.counters["wait.batches"]))
        self.scaler.look(self.counters, 4)
        self.now += seconds
        self.busy += (self.cores - idle) * seconds
        self.counters.add("wait.batches", rate * seconds)
        for stage, value in added.items():
            self.counters.add(f"{stage}.seconds", value)
        return self.scaler.look(self.counters, 4)


def test_grows_while_the_consumer_waits_and_it_helps() -> None:
    run = Run(most=12)
    found = [run.scaler.workers]
    for rate in (100, 150, 200):
        found.append(run.stretch(rate, wait=1.9, consumer=0.1, decode=12))
    assert found == [6, 9, 12, 12]
    assert "ceiling" in run.scaler.sentence() and "12 of at most 12" in run.scaler.sentence()


def test_what_did_not_help_is_taken_back_for_good() -> None:
    run = Run(most=12)
    found = [run.stretch(100, wait=1.9, consumer=0.1, get=12) for _ in range(5)]
    assert found == [9, 6, 6, 6, 6]
    assert "did not help: the bottleneck is get" in run.scaler.why


def test_does_not_grow_without_an_idle_core() -> None:
    run = Run(most=12)
    assert [run.stretch(100, idle=0.1, wait=1.9, consumer=0.1, decode=12) for _ in range(3)] == [6, 6, 6]
    assert "no core is idle" in run.scaler.why


def test_parks_workers_that_wait_for_the_consumer() -> None:
    run = Run(most=12)
    assert run.stretch(10, wait=0.0, consumer=2.0, decode=2.0, slot=10.0) == 2  # a sixth of 6, and some more
    assert run.stretch(10, wait=0.0, consumer=2.0, decode=2.0, slot=2.0) == 2
    assert "waited for 0.0%" in run.scaler.why


def test_parked_too_many_comes_back_and_does_not_swing() -> None:
    run = Run(most=12)
    assert run.stretch(10, wait=0.0, consumer=2.0, decode=2.0, slot=10.0) == 2
    assert run.stretch(5, wait=1.0, consumer=1.0, decode=4.0) == 3
    found = [run.stretch(10, wait=0.0, consumer=2.0, decode=1.0, slot=5.0) for _ in range(3)]
    assert found == [3, 3, 3]


def test_more_batches_are_made_ahead_while_the_consumer_waits_and_workers_are_held_back() -> None:
    run = Run(most=12)
    found = [run.stretch(100, wait=0.2, consumer=1.8, decode=8, slot=4) for _ in range(5)]
    assert (found[0], run.scaler.ahead) == (6, 16)
    assert found[1] == 9  # now more workers are tried
    assert "16 batches ahead each" in run.scaler.sentence()


@pytest.mark.parametrize(
    "stretch",
    [{"wait": 1.9, "consumer": 0.1, "decode": 12}, {"wait": 0.02, "consumer": 1.98, "decode": 2, "slot": 10}],
    ids=["decode bound", "consumer bound"],
)
def test_batches_ahead_stay_where_more_would_not_help(stretch: dict[str, float]) -> None:
    run = Run(most=12)
    for _ in range(5):
        run.stretch(100, **stretch)
    assert run.scaler.ahead == 2 and "ahead" not in run.scaler.sentence()


def test_prefetch_factor_that_is_given_stays() -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(4), num_workers="auto", prefetch_factor=3)
    scaler = loader._context.autoscaler
    assert scaler is not None and scaler.ahead == 3
    scaler._decide({"wait.seconds": 1, "consumer.seconds": 1, "decode.seconds": 1, "slot.seconds": 1}, 1, 0)
    assert scaler.ahead == 3


def test_looks_neither_too_early_nor_too_often() -> None:
    run = Run(most=12)
    run.stretch(100, seconds=0.5, wait=0.5, decode=3)  # not a second yet
    assert run.scaler.workers == 6
    run = Run(most=12)
    run.stretch(1, wait=2, decode=12)  # a second, but two batches only
    assert run.scaler.workers == 6
    run = Run(most=12)
    assert run.stretch(100, wait=1.9, consumer=0.1, decode=12) == 9
    run.now += 10
    run.counters.add("wait.batches", 3)  # what was in flight is not through: it shows nothing of the change
    run.scaler.look(run.counters, 4)
    assert run.scaler._start is None


def test_later_epochs_keep_the_number(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(most=12)
    run.stretch(100, wait=1.9, consumer=0.1, decode=12)
    with caplog.at_level(logging.INFO, "fastload"):
        run.scaler.end_epoch()
        run.scaler.start_epoch(run.counters["wait.batches"])
        assert run.stretch(100, wait=1.9, consumer=0.1, decode=12) == 9
        run.scaler.end_epoch()
    assert len(caplog.messages) == 1 and "9 of at most 12 workers" in caplog.messages[0]


@pytest.mark.parametrize(
    ("cores", "ranks", "most"),
    [(1, 1, 1), (2, 1, 2), (4, 1, 3), (16, 1, 14), (192, 8, 22), (8, 8, 1), (0.5, 1, 1), (64, 1, 59)],
)
def test_ceiling(cores: float, ranks: int, most: int) -> None:
    assert ceiling(cores, ranks) == most


# --- the mechanism


class Scripted:
    """Says the next number after every batch."""

    def __init__(self, numbers: list[int]) -> None:
        self.workers = numbers[0]
        self.ahead = 2
        self.numbers: Iterator[int] = itertools.cycle(numbers)

    def start_epoch(self, handed_over: float) -> None:
        pass

    def end_epoch(self) -> None:
        pass

    def sentence(self) -> str:
        return "scripted"

    def look(self, counters: Counters, in_flight: int) -> int:
        self.workers = next(self.numbers)
        return self.workers


def auto(dataset: Any, batch_size: int, numbers: list[int], monkeypatch: Any, **options: Any) -> Any:
    """A loader with num_workers="auto" that has as many workers as the script says."""
    monkeypatch.setattr("fastload.workers.memory_limit.ceiling", lambda: max(numbers))
    loader: DataLoader[Any] = DataLoader(dataset, batch_size, num_workers="auto", **options)
    loader._context.autoscaler = Scripted(numbers)  # type: ignore[assignment]
    return loader


@pytest.mark.parametrize(
    ("numbers", "persistent", "in_order"),
    [
        ([1, 4, 1, 4], True, False),
        ([1, 2, 3, 4], False, True),
        ([2, 1, 1, 3, 3, 1], True, True),
    ],
    ids=str,
)
def test_exactly_once_while_growing_and_parking(
    numbers: list[int], persistent: bool, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = auto(
        Numbers(101), 3, numbers, monkeypatch, persistent_workers=persistent, in_order=in_order, seed=1
    )
    for _ in range(3):
        found = [batch.tolist() for batch in loader]
        assert Counter(itertools.chain(*found)) == Counter(range(101))
        assert not in_order or found == [list(range(101))[i : i + 3] for i in range(0, 101, 3)]


@pytest.mark.parametrize("break_at", [0, 5])
def test_an_epoch_that_is_broken_off(break_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = auto(Numbers(60), 2, [1, 3, 2], monkeypatch, persistent_workers=True)
    for _ in range(3):
        for n, _ in enumerate(loader):
            if n == break_at:
                break
    assert torch.cat(list(loader)).tolist() == list(range(60))


def test_images_are_those_of_any_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for i in range(30):
        (tmp_path / "photos" / "a" / f"{i}.jpg").write_bytes(pillow_jpeg(scene(60, 60, i)))

    def images(make: Any) -> torch.Tensor:
        cache = Cache(tmp_path / "cache")
        dataset = ImageFolder(str(tmp_path / "photos"), RandomResizedCrop(16), cache=cache)
        found = torch.cat([batch for batch, _ in make(dataset)])
        dataset.close()
        return found

    expected = images(lambda dataset: DataLoader(dataset, 2, seed=3))
    for numbers in ([1, 2, 3], [3, 1]):
        assert torch.equal(
            images(lambda dataset, n=numbers: auto(dataset, 2, n, monkeypatch, seed=3)), expected
        )


@pytest.mark.parametrize("then", ["auto", 0, 2])
def test_resume(then: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved while workers came and went; another loader, with any number, goes on exactly there."""
    loader = auto(Numbers(60), 2, [1, 3, 2], monkeypatch, shuffle=True, seed=5)
    torch.manual_seed(0)
    whole, state = [], None
    for n, batch in enumerate(loader):
        whole.append(batch.tolist())
        if n == 11:
            state = loader.state_dict()
    torch.manual_seed(1)
    other: DataLoader[Any] = (
        auto(Numbers(60), 2, [3, 1], monkeypatch, shuffle=True, seed=5)
        if then == "auto"
        else DataLoader(Numbers(60), 2, shuffle=True, seed=5, num_workers=then)
    )
    assert state is not None
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == whole[12:]


@pytest.mark.parametrize(
    ("size", "most", "persistent"),
    [(8, 6, False), (8, 6, True), (33_000_000, 2, True)],
    ids=["small", "small, persistent", "large"],
)
def test_workers_make_as_many_batches_ahead_as_they_may(
    size: int, most: int, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large batches stay at `prefetch_factor`, so that the memory does."""
    made = mmap.mmap(-1, 1)  # the worker counts in it

    def sample(index: int) -> torch.Tensor:
        made[0] += 1
        row = torch.empty(size, dtype=torch.uint8)  # to fill it would take most of the time
        row[0] = index
        return row

    options = {"persistent_workers": persistent, "multiprocessing_context": "fork"}
    loader = auto(Numbers(18, sample), 1, [1], monkeypatch, **options)
    loader._context.autoscaler.ahead = 6
    for _ in range(2):
        made[0] = 0
        for handed_out, batch in enumerate(loader, 1):
            assert batch[0, 0] == handed_out - 1
            if handed_out == 10:
                wait_until(lambda: made[0] >= 10 + most, "the batches ahead")
                time.sleep(0.1)
                assert made[0] == 10 + most


def test_processes_start_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = auto(Numbers(40), 2, [1, 1, 1, 2, 2, 3, 1], monkeypatch)
    before = {child.pid for child in psutil.Process().children()}
    iterator = iter(loader)
    counts = []
    for _ in range(7):
        next(iterator)
        counts.append(len({child.pid for child in psutil.Process().children()} - before))
    assert counts == [1, 1, 1, 2, 2, 3, 3]  # parked ones stay
    assert loader.stats()["rates"]["workers"] == 1
    del iterator


def test_workers_that_were_wanted_too_late_for_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last index batch was given out meanwhile: they were not started, and the next epoch does it."""
    loader = auto(Numbers(6), 2, [1, 4], monkeypatch, persistent_workers=True)
    loader._context.autoscaler.numbers = itertools.repeat(4)
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == list(range(6))


def test_interrupted_while_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch that was about to be handed over is the first one of the run that resumes."""

    def interrupt(workers: WorkerProcesses, number: int, ahead: int) -> None:
        if number < 2:
            return
        raise KeyboardInterrupt

    loader = auto(Numbers(40), 2, [1, 2], monkeypatch)
    seen = []
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(WorkerProcesses, "scale", interrupt)
        for batch in loader:
            seen += batch.tolist()
    other: DataLoader[Any] = DataLoader(Numbers(40), 2)
    other.load_state_dict(loader.state_dict())
    assert seen and seen + torch.cat(list(other)).tolist() == list(range(40))


def test_worker_that_cannot_be_started_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = WorkerProcesses._start, []

    def start_two(workers: WorkerProcesses, number: int) -> Any:
        if number < 2:
            return start(workers, number)
        refused.append(number)
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("fastload.workers.memory_limit.ceiling", lambda: 4)
    monkeypatch.setattr(WorkerProcesses, "_start", start_two)
    loader: DataLoader[Any] = DataLoader(Numbers(40), 2, num_workers="auto")
    autoscaler = loader._context.autoscaler
    assert autoscaler is not None
    monkeypatch.setattr(autoscaler, "look", lambda *_: autoscaler.most)
    with pytest.warns(RuntimeWarning, match="stays at 2: .*temporarily unavailable"):
        assert torch.cat(list(loader)).tolist() == list(range(40))
    assert refused == [2] and "no more processes" in autoscaler.sentence()
    assert loader.stats()["rates"]["workers"] == 2


def test_the_death_of_a_grown_worker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = auto(Numbers(400), 2, [1, 2], monkeypatch)
    loader._context.autoscaler.numbers = itertools.repeat(2)  # type: ignore[union-attr]
    iterator: Any = iter(loader)
    next(iterator)
    iterator._workers[1].kill()
    with pytest.raises(WorkerError, match="SIGKILL"):
        for _ in iterator:
            pass


@pytest.mark.parametrize("slow", ["samples", "steps"])
def test_policy_and_mechanism_together(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.workers.autoscale._INTERVAL", 0.1)
    loader = auto(Numbers(300, Slow(0.01 if slow == "samples" else 0.0)), 2, [6], monkeypatch)
    numbers = {3}
    for step in (0.02, 0.05, 0.1, 0.2):  # seconds; beside other work, short steps may not show it
        loader._context.autoscaler = Autoscaler(6, cores=8, busy=lambda: 0.0)  # one epoch settles its choice
        found = []
        for batch in loader:
            time.sleep(step if slow == "steps" else 0)
            found += batch.tolist()
            numbers.add(loader._context.autoscaler.workers)
        assert found == list(range(300))
        if max(numbers) > 3 if slow == "samples" else min(numbers) < 3:
            break
    else:
        pytest.fail(f"the number of workers stayed: {numbers}, {loader.stats()}")


class Slow:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class Stateful(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("dataset", [Stream([4, 5]), Stateful()], ids=["iterable", "stateful"])
def test_datasets_that_are_split_by_worker_keep_the_number(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.workers.memory_limit.ceiling", lambda: 2)
    loader: DataLoader[Any] = DataLoader(dataset, 2, num_workers="auto")
    assert (
        loader.num_workers == 2 and loader._context.autoscaler is None and loader.stats()["autoscale"] == ""
    )
    assert len(list(loader)) == (5 if isinstance(dataset, Stream) else 4)


def test_as_users_write_it(caplog: pytest.LogCaptureFixture) -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(64), 2, num_workers="auto")
    assert isinstance(loader.num_workers, int) and loader.num_workers == ceiling()
    with caplog.at_level(logging.INFO, "fastload"):
        assert len(list(loader)) == 32
    assert loader.stats()["autoscale"] == caplog.messages[-1]
    assert loader.stats()["autoscale"].startswith("num_workers='auto': ")
    with pytest.raises((TypeError, ValueError)):
        DataLoader(Numbers(4), num_workers="all")  # type: ignore[arg-type]
