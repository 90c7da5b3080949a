"""`DataLoader(threads=)`: samples are made at the same time, and are handed over as without threads."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

import fastload
from fastload import CenterCrop, DataLoader, ImageFolder
from fastload.errors import ArgumentError, WorkerError
from fastload.fetch.prefetcher import Prefetcher
from fastload.workers import sample_threads
from tests.faultserver import Fault, FaultServer
from tests.loaderdata import At, Bulk, Numbers, identity, seed_all, told
from tests.loaderdata import Stream as Iterable
from tests.patience import PATIENCE
from tests.photos import pillow_jpeg, scene
from tests.sharddata import write

pytestmark = pytest.mark.usefixtures("no_leaks")

IMAGES = 24


class Together(Dataset[int]):
    """Each sample waits until `count` samples are being made at the same time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return 24

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count}

    def __getitem__(self, index: int) -> int:
        with _making:
            barrier = self.__dict__.setdefault("barrier", threading.Barrier(self.count))
        barrier.wait(PATIENCE)
        return index


_making = threading.Lock()


class Bad(Numbers):
    """Sample 5 and 11 fail, each in its way."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("five")
        if index == 11:
            raise StopIteration
        return index


class Drawing(Dataset[Any]):
    """Draws before and after it reads a photo."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        before = drawn()
        image, _ = self.inner[index]
        return index, before, drawn(), int(image.sum())


class NeverEnding(Numbers):
    """Sample `make(0)` takes until `end`."""

    def __getitem__(self, index: int) -> int:
        if index == self.make(0):
            self.here.set()
            self.end.wait(PATIENCE)
        return index

    here, end = threading.Event(), threading.Event()


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()


def with_noise(samples: list[Any]) -> Any:
    return default_collate(samples), drawn()


@pytest.fixture(scope="module")
def photos() -> dict[str, bytes]:
    return {f"class{i % 2}/{i:03d}.jpg": pillow_jpeg(scene(32, 32, i)) for i in range(IMAGES)}


@pytest.fixture
def opened(photos: dict[str, bytes], tmp_path: Path, keep: Callable[[Any], Any]) -> Callable[[], ImageFolder]:
    """Open the folder."""
    url = write(tmp_path / "photos", photos)
    return lambda: keep(ImageFolder(url, CenterCrop(8, resize=10)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [2, 8, None])
def test_samples_are_made_at_the_same_time_and_come_in_order(workers: int, batch_size: int | None) -> None:
    loader = DataLoader(Together(8), batch_size, num_workers=workers, threads=8, collate_fn=identity)
    batches: Any = list(loader)
    assert [index for batch in batches for index in ([batch] if batch_size is None else batch)] == [
        *range(24)
    ]


@pytest.mark.filterwarnings("ignore:Drawing asks the ImageFolder")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [None, with_noise])
def test_with_a_seed_samples_and_collate_draw_as_without_threads(
    opened: Any, workers: int, collate_fn: Callable[..., Any] | None
) -> None:
    folder = opened()
    found = []
    for threads in (6, 0):
        torch.manual_seed(1)
        loader: Any = DataLoader(
            Drawing(folder),
            5,
            shuffle=True,
            num_workers=workers,
            collate_fn=collate_fn,
            seed=3,
            threads=threads,
            persistent_workers=workers > 0,
        )
        found.append([told(list(loader)) for _ in range(2)])
    assert found[0] == found[1]


def test_with_a_seed_the_trainers_generators_are_where_they_were(opened: Any) -> None:
    folder = opened()
    seed_all(1)
    loader = iter(DataLoader(Drawing(folder), 4, seed=3, threads=6))
    before = [drawn() for _ in range(7)]
    seed_all(1)
    del loader
    loader = iter(DataLoader(Drawing(folder), 4, seed=3, threads=6))
    after = [drawn(), *(drawn() for _ in loader)]
    assert after == before


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 3])
def test_reads_of_a_wrapped_dataset_are_in_flight_together(
    photos: dict[str, bytes], workers: int, seed: int | None
) -> None:
    with FaultServer(photos) as server:
        for key in photos:
            server.script(key, Fault(delay=0.1), repeat=True)
        options = {"endpoint_url": server.endpoint_url, "key": "k", "secret": "s"}
        inner = ImageFolder("s3://bucket", CenterCrop(8, resize=10), storage_options=options)
        loader: Any = DataLoader(Drawing(inner), 12, num_workers=workers, threads=12, seed=seed)
        assert torch.cat([batch[0] for batch in loader]).tolist() == list(range(IMAGES))
        inner.close()
        assert server.most_at_once >= 6
        assert "get.alone" not in loader.stats()["counters"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 3])
def test_errors_are_those_without_threads(workers: int, seed: int | None) -> None:
    def outcome(on_error: str, threads: int, first: int) -> Any:
        loader: Any = DataLoader(
            Bad(24),
            4,
            sampler=range(first, 24),
            num_workers=workers,
            threads=threads,
            seed=seed or 0 if on_error == "replace" else seed,
            on_error=on_error,
        )
        try:
            return told(list(loader)), loader.stats()["bad"]
        except Exception as error:
            return type(error), str(error).split("\n")[-2:], getattr(error, "__notes__", None)

    for on_error in ("raise", "repeat", "replace"):
        for first in (0, 6)[workers:]:
            assert outcome(on_error, 4, first) == outcome(on_error, 0, first)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 3])
def test_loader_that_is_closed_in_the_middle_ends_its_threads(
    opened: Any, workers: int, seed: int | None
) -> None:
    folder = opened()
    for _ in range(3):
        iterator = iter(DataLoader(Drawing(folder), 2, num_workers=workers, threads=4, seed=seed))
        next(iterator)
        del iterator
    assert folder._outstanding() == 0


def test_sample_that_is_being_made_when_the_loader_is_closed_delays_nobody_for_long() -> None:
    dataset = NeverEnding(24, lambda _: 9)
    iterator = iter(DataLoader(dataset, 4, threads=4))
    next(iterator)
    assert dataset.here.wait(PATIENCE)
    del iterator
    dataset.end.set()  # or the test would leave the thread behind


@pytest.mark.parametrize("seed", [None, 3])
def test_ctrl_c_interrupts_the_wait_for_a_sample_and_the_loader_goes_on_with_the_next_batch(
    seed: int | None,
) -> None:
    dataset = NeverEnding(24, lambda _: 1)
    dataset.here, dataset.end = threading.Event(), threading.Event()
    iterator = iter(DataLoader(dataset, 4, threads=4, seed=seed))

    def interrupt() -> None:
        dataset.here.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    thread.join()
    dataset.end.set()
    # Where it came before the wait began, the batch is made again.
    assert torch.cat(list(iterator)).tolist() in (list(range(24)), list(range(4, 24)))


@pytest.mark.parametrize("deed", ["kill", "exit"])
def test_worker_that_ends_in_a_thread_is_an_error(deed: str) -> None:
    loader: Any = DataLoader(Numbers(24, At(9, deed, 3)), 4, num_workers=1, threads=4)
    with pytest.raises(WorkerError):
        list(loader)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 3])
def test_epochs_resume_and_persistent_workers_are_as_without_threads(workers: int, seed: int | None) -> None:
    def made(workers: int) -> Any:
        persistent = workers > 0
        return DataLoader(
            Numbers(25),
            4,
            shuffle=True,
            num_workers=workers,
            threads=3,
            seed=seed,
            persistent_workers=persistent,
        )

    loader = made(workers)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(25))
    iterator = iter(loader)
    before = [next(iterator) for _ in range(2)]
    state = loader.state_dict()
    again = made(1 - workers)
    again.load_state_dict(state)
    assert sorted(torch.cat([*before, *again]).tolist()) == list(range(25))
    del iterator
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(25))


class Announcing(Drawing):
    def prefetch(self, indices: list[int]) -> None:
        self.inner.prefetch(indices)


@pytest.mark.parametrize("seed", [None, 3])
def test_samples_that_are_read_ahead_too_are_used(opened: Any, seed: int | None) -> None:
    folder = opened()
    loader: Any = DataLoader(Announcing(folder), 4, threads=4, seed=seed)
    assert torch.cat([batch[0] for batch in loader]).tolist() == list(range(IMAGES))
    assert loader.stats()["counters"]["get.ahead"] == IMAGES
    iterator = iter(loader)
    next(iterator)
    del iterator
    assert folder._outstanding() == 0


class Batches:
    """40 batches of 64 samples, which it does not say; counts what is drawn from it."""

    drawn = 0

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, 40 * 64, 64):
            self.drawn += 1
            yield list(range(first, first + 64))


class Announced(Numbers):
    def prefetch(self, indices: list[int]) -> None:
        pass


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("kind", "threads", "most"), [(Numbers, 4, 3), (Announced, 0, 5)])
def test_batches_of_a_size_that_the_sampler_does_not_say_are_made_no_further_ahead(
    kind: type[Numbers], threads: int, most: int, workers: int
) -> None:
    batches = Batches()
    loader: Any = DataLoader(kind(40 * 64), batch_sampler=batches, num_workers=workers, threads=threads)
    iterator = iter(loader)
    next(iterator)
    assert 1 < batches.drawn <= most


@pytest.mark.parametrize("workers", [0, 1])
def test_getitems_gets_whole_batches(workers: int) -> None:
    loader: Any = DataLoader(Bulk(8), 4, num_workers=workers, threads=2, collate_fn=identity)
    assert list(loader) == [
        [(i, 4, "list") for i in range(4)],
        [(i, 4, "list") for i in range(4, 8)],
    ]


def test_threads_have_no_effect_on_rows_and_make_the_samples_of_other_transforms(opened: Any) -> None:
    folder = opened()

    def names(image: Any) -> str:
        return threading.current_thread().name

    assert len(list(DataLoader(fastload.map(folder, tuple), 8, threads=4))) == 3
    folder.transform = names
    made_by = {name for batch, _ in DataLoader(folder, 8, threads=4) for name in batch}
    assert made_by == {"fastload-sample"} or all("fastload-sample" in name for name in made_by)


@pytest.mark.parametrize("threads", [-1, 1.5, "4", True, None])
def test_number_of_threads_that_is_none_is_refused(threads: Any) -> None:
    with pytest.raises(ArgumentError, match="threads must be an int >= 0, found "):
        DataLoader(Numbers(3), threads=threads)


def test_threads_for_an_iterable_dataset_are_refused() -> None:
    with pytest.raises(ArgumentError, match="Stream is iterable: leave out threads"):
        DataLoader(Iterable([3]), threads=2)


class Locked(Drawing):
    """Holds a lock while it reads."""

    lock, other = threading.Lock(), threading.Event()

    def __getitem__(self, index: int) -> Any:
        if self.lock.locked():
            self.other.set()
        with self.lock:
            return super().__getitem__(index)


def test_lock_that_is_held_during_a_read_is_an_error_and_no_deadlock(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_threads, "_STUCK_SECONDS", 0.1)
    monkeypatch.setattr(sample_threads, "_LOOK_SECONDS", 0.02)
    read = Prefetcher._get

    def slow(self: Prefetcher, index: int) -> Any:
        Locked.other.wait(PATIENCE)  # a read lasts until another thread waits for the lock
        return read(self, index)

    monkeypatch.setattr(Prefetcher, "_get", slow)
    loader = DataLoader(Locked(opened()), 4, threads=4, seed=1, on_error="repeat")
    with pytest.raises(WorkerError, match="hold no lock while __getitem__ reads"):
        list(loader)


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("on_error", ["repeat", "replace"])
def test_iterator_that_met_a_bad_sample_is_freed_at_once(threads: int, on_error: str) -> None:
    gc.disable()
    try:
        iterator = iter(DataLoader(Bad(24), 8, threads=threads, on_error=on_error, seed=1))
        next(iterator)
        told = weakref.ref(iterator)
        del iterator
        assert told() is None
    finally:
        gc.enable()
