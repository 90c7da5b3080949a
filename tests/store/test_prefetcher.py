"""The fetch window: nothing is lost, nothing waits for ever, and no byte is held longer than it must be."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faultserver import Fault, FaultServer
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import Subset

from fastload import Cache, DataLoader, ObjectDataset
from fastload.errors import StoreError
from fastload.fetch import hedge as hedge_rules
from fastload.fetch import prefetcher as window_module
from fastload.fetch import share, source
from fastload.fetch.limit import ConcurrencyLimiter
from fastload.fetch.lines import Lines
from fastload.fetch.prefetcher import Prefetcher
from fastload.fetch.source import ObjectSource
from fastload.fetch.threads import ReadPool
from fastload.metrics.counters import Counters
from fastload.store.local import LocalStore
from fastload.store.manifest import Manifest
from tests.patience import PATIENCE, wait_until


class Pieces(LocalStore):
    """Files that are read as objects are: large ones in ranges."""

    native = True


@pytest.mark.parametrize("seed", range(4))
def test_the_window_loses_and_keeps_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    """Requests, takes and cancellations in random order, within a bound on bytes of three objects."""
    monkeypatch.setattr(source, "_LARGE", 3000)
    monkeypatch.setattr(source, "_PIECE", 1000)
    draw = random.Random(seed)
    bodies = [draw.randbytes(draw.choice([0, 10, 2999, 3000, 7001])) for _ in range(40)]
    for number, body in enumerate(bodies):
        (tmp_path / f"{number:02d}").write_bytes(body)
    store = Pieces(f"file://{tmp_path}", str(tmp_path))
    manifest = Manifest.open(store, directory=None, refresh=False, images_only=False, labels=False)
    objects = ObjectSource(store, manifest, key=lambda index, version: b"")
    opened = Prefetcher(objects, None, prepare=None, counters=Counters())
    opened._most_bytes = 20_000
    ahead: list[int] = []
    for _ in range(400):
        action = draw.random()
        if action < 0.5 and len(ahead) < 30:
            some = [draw.randrange(40) for _ in range(draw.randrange(6))]
            opened.request(some)
            ahead += some
        elif action < 0.9 and ahead:
            index = ahead.pop(0)
            assert bytes(opened.take(index)) == bodies[index]
        elif ahead:
            opened.cancel([ahead.pop(draw.randrange(len(ahead)))])
    while ahead:
        index = ahead.pop(0)
        assert bytes(opened.take(index)) == bodies[index]
    wait_until(lambda: not opened._busy and not opened._held, "all bytes were let go")
    assert opened._reads == {}
    opened.close()


def cancel_and_wait(opened: Prefetcher, indices: list[int]) -> None:
    """Without the guard: as every other call of the window."""
    with opened._work:
        opened._cancelled.extend(indices)
        opened._drop_cancelled()


@pytest.mark.parametrize("cancel", [Prefetcher.cancel, cancel_and_wait])
def test_what_is_collected_waits_for_no_lock(
    cancel: Callable[[Prefetcher, list[int]], None], tmp_path: Path
) -> None:
    """An iterator is collected in any thread at any moment, also in one that holds the window's lock."""
    for i in range(8):
        (tmp_path / f"{i}").write_bytes(bytes([i]) * 1000)
    store = LocalStore(tmp_path.as_uri(), str(tmp_path))
    manifest = Manifest.open(store, directory=None, refresh=False, images_only=False, labels=False)
    objects = ObjectSource(store, manifest, key=lambda index, version: b"")
    opened = Prefetcher(objects, None, prepare=None, counters=Counters())
    opened.request(range(4))
    thread = threading.Thread(target=cancel, args=(opened, [0, 1, 2, 3]))
    with opened._work:
        thread.start()
        thread.join(0.2 if cancel is cancel_and_wait else PATIENCE)
        assert thread.is_alive() == (cancel is cancel_and_wait)
    thread.join(PATIENCE)
    opened.request(range(4, 8))
    assert [bytes(opened.take(index)) for index in range(4, 8)] == [bytes([i]) * 1000 for i in range(4, 8)]
    wait_until(lambda: not opened._busy and not opened._held, "all bytes were let go")
    assert opened._reads == {}
    opened.close()


def test_counters_of_what_is_collected_within_them() -> None:
    counters = Counters()
    with counters._lock:
        counters.add("copy.wait_seconds", 1)
    assert counters["copy.wait_seconds"] == 1


def test_a_pool_closed_by_a_thread_of_its_own() -> None:
    pool = ReadPool(1, Counters())
    assert pool.submit(pool.close).result(PATIENCE) is None


def test_a_read_that_is_late_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedge_rules, "_ENOUGH", 2)
    monkeypatch.setattr(hedge_rules, "_SHARE", 1.0)
    bodies = {f"{i:02d}.bin": bytes([i]) * 1000 for i in range(20)}
    with FaultServer(bodies) as server:
        server.script("15.bin", Fault(delay=20))
        dataset = ObjectDataset("s3://bucket", storage_options={**server.options, "hedge": True})
        start = time.monotonic()
        dataset.prefetch(range(20))
        assert [bytes(dataset[index]) for index in range(20)] == list(bodies.values())
        assert time.monotonic() - start < 10
        assert server.count("15.bin") == 2 and dataset.counters["get.hedged"] >= 1
        dataset.close()


# --- Beside other runs and other threads


def key(index: int, version: str | None = None) -> bytes:
    return hashlib.blake2b(b"%d" % index, digest_size=16).digest()


@pytest.fixture
def claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefetcher]:
    """Six objects, room for two; another run says that it is reading the first one, and never does."""
    monkeypatch.setattr(window_module, "_PATIENCE", 0.3)
    (tmp_path / "data").mkdir()
    for i in range(6):
        (tmp_path / "data" / str(i)).write_bytes(bytes([i]) * 1000)
    store = LocalStore((tmp_path / "data").as_uri(), str(tmp_path / "data"))
    manifest = Manifest.open(store, directory=None, refresh=False, images_only=False, labels=False)
    cache = Cache(tmp_path / "cache")
    assert cache.lock_inflight(key(0))
    opened = Prefetcher(ObjectSource(store, manifest, key=key), cache, prepare=None, counters=Counters())
    opened._most_bytes = 2500
    yield opened
    opened.close()


def test_what_was_put_off_is_read_when_it_is_waited_for(claimed: Prefetcher) -> None:
    """It lies behind reads for which there is no room, until it is taken."""
    claimed.request(range(6))
    wait_until(lambda: not claimed._busy and claimed._held >= 2000, "the window is full")
    assert [bytes(claimed.take(i)) for i in range(6)] == [bytes([i]) * 1000 for i in range(6)]
    assert claimed._reads == {} and claimed._held == 0


def test_twin_without_moving_it_up_it_is_waited_for_for_ever(
    claimed: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prefetcher, "_advance", lambda self, read: None)
    claimed.request(range(6))
    wait_until(lambda: not claimed._busy and claimed._held >= 2000, "the window is full")
    errors: list[StoreError] = []

    def take() -> None:
        try:
            claimed.take(0)
        except StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(1.0)  # three times as long as the other run is given
    assert thread.is_alive()
    claimed.close()
    thread.join(PATIENCE)
    assert len(errors) == 1


@pytest.mark.parametrize("guarded", [True, False])
def test_the_parts_of_an_object_are_claimed_once(
    guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    monkeypatch.setattr(source, "_LARGE", 3000)
    monkeypatch.setattr(source, "_PIECE", 1000)
    claims: list[bytes] = []
    claim = Cache.lock_inflight

    def slow(cache: Cache, wanted: bytes) -> bool:
        time.sleep(0.05)  # the other threads have taken their parts meanwhile
        claims.append(wanted)
        return claim(cache, wanted)

    monkeypatch.setattr(Cache, "lock_inflight", slow)
    body = random.Random(1).randbytes(8000)
    with FaultServer({"large": body}) as server:
        dataset = ObjectDataset("s3://bucket", storage_options=server.options, cache=tmp_path / "cache")
        opened = dataset._open_window()
        if not guarded:
            opened._claiming = contextlib.nullcontext()  # type: ignore[assignment]
        dataset.prefetch([0])
        assert bytes(dataset[0]) == body
        dataset.close()
    assert (len(claims) == 1) is guarded


def test_a_large_object_that_changed_is_read_anew_once(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    """All of its parts are under way when the store says so; one request is to follow, not one for each."""
    monkeypatch.setattr(source, "_LARGE", 3000)
    monkeypatch.setattr(source, "_PIECE", 1000)
    draw = random.Random(1)
    with FaultServer({"large": draw.randbytes(8000)}) as server:
        dataset = ObjectDataset("s3://bucket", storage_options=server.options, on_change="refresh")
        server.objects["large"] = new = draw.randbytes(3500)
        server.script("large", *[Fault(status=412, code="PreconditionFailed", delay=0.3)] * 8)
        dataset.prefetch([0])
        assert bytes(dataset[0]) == new
        assert dataset.counters["get.refreshed"] == 1
        dataset.close()


def test_the_limit_recovers_while_threads_of_better_days_are_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.fetch.threads.IDLE_SECONDS", 10.0)  # idle threads stay
    for i in range(300):
        (tmp_path / f"{i:03d}").write_bytes(b"x")

    class Slow(Pieces):
        def _read(self, *arguments: Any) -> Any:
            time.sleep(0.02)
            return super()._read(*arguments)

    store = Slow(tmp_path.as_uri(), str(tmp_path))
    manifest = Manifest.open(store, directory=None, refresh=False, images_only=False, labels=False)
    opened = Prefetcher(ObjectSource(store, manifest, key=key), None, prepare=None, counters=Counters())
    opened._limit = ConcurrencyLimiter(32, pinned=True)
    opened.request(range(300))
    assert bytes(opened.take(0)) == b"x"
    with opened._work:
        while opened._limit.value > 1:
            opened._limit._cut_at = None
            opened._limit.slow_down(time.monotonic())
    wait_until(lambda: opened._idle > 16, "most threads have nothing to do")
    start, taken = time.monotonic(), 1
    while opened._limit.value < 3 and taken < 300:
        opened.take(taken)
        taken += 1
    assert opened._limit.value >= 3 and time.monotonic() - start < 10.0
    opened.close()


# --- Beside other iterations, and after Ctrl-C


class Gated:
    """Objects of 1000 bytes in fsspec's memory, those from `closed` on read only once the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, closed: int) -> None:
        monkeypatch.setattr(share, "_PROCESS_BYTES", 8 * 10_000)  # an eighth of it at least
        self.closed = closed
        self.gate = threading.Event()
        self.begun: list[int] = []
        cat_file = MemoryFileSystem.cat_file

        def read(system: Any, path: str, *arguments: Any, **options: Any) -> Any:
            number = int(Path(path).name)
            self.begun.append(number)
            if number >= self.closed:
                self.gate.wait(PATIENCE)
            return cat_file(system, path, *arguments, **options)

        files = MemoryFileSystem()
        files.pipe({f"/gated/{number:03d}": b"x" * 1000 for number in range(200)})
        monkeypatch.setattr(MemoryFileSystem, "cat_file", read)
        self.dataset = ObjectDataset("memory://gated")

    @property
    def window(self) -> Prefetcher:
        return self.dataset._open_window()

    def is_empty(self) -> bool:
        return not (self.window._reads or self.window._held or self.window._busy)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    found = Gated(monkeypatch, 100)
    yield found
    found.gate.set()
    found.dataset.close()


def interrupt(condition: Callable[[], Any]) -> threading.Thread:
    """Ctrl-C, once the condition holds."""

    def run() -> None:
        wait_until(condition, "it is waited for")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_paused_iterator_leaves_another_one_room_to_read_ahead(gated: Gated) -> None:
    window, dataset = gated.window, gated.dataset
    window._most_bytes = 20_000
    paused = iter(DataLoader(Subset(dataset, range(100)), 4, collate_fn=len))
    next(paused)
    wait_until(lambda: window._held == 20_000 and not window._busy, "it holds all the bytes there are")
    found: list[int] = []
    others = DataLoader(Subset(dataset, range(100, 200)), 4, collate_fn=len)
    thread = threading.Thread(target=lambda: found.extend(others))
    thread.start()
    wait_until(lambda: len([one for one in gated.begun if one >= 100]) == 10, "half as many are under way")
    gated.gate.set()
    thread.join(PATIENCE)
    assert found == [4] * 25 and [*paused] == [4] * 24
    assert len(gated.begun) == 200, "each is read once"
    wait_until(gated.is_empty, "all bytes were let go")


def test_interrupted_iterator_leaves_nothing_behind(gated: Gated) -> None:
    window = gated.window
    iterator = iter(DataLoader(Subset(gated.dataset, range(96, 140)), 4, collate_fn=len))
    assert next(iterator) == 4
    thread = interrupt(lambda: 100 in window._reads and window._reads[100].awaited)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    thread.join()
    gated.gate.set()
    assert list(iterator) == [4] * 9, "as torch's, it goes on with the batch after it"
    wait_until(gated.is_empty, "all bytes were let go")


def test_iteration_given_up_after_an_interrupt_leaves_nothing_behind(gated: Gated) -> None:
    def epoch() -> None:
        for _ in DataLoader(gated.dataset, 4, num_workers=0, collate_fn=len):
            pass

    window = gated.window
    thread = interrupt(lambda: 100 in window._reads and window._reads[100].awaited)
    with pytest.raises(KeyboardInterrupt):
        epoch()
    thread.join()
    gated.gate.set()
    wait_until(gated.is_empty, "all bytes were let go")


def test_interrupt_while_a_batch_is_announced_loses_no_batch(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated.gate.set()
    add, calls = Lines.add, iter(range(10**6))

    def interrupted(lines: Lines, parts: Any, reader: object) -> None:
        if next(calls) == 5:
            raise KeyboardInterrupt
        add(lines, parts, reader)

    monkeypatch.setattr(Lines, "add", interrupted)
    iterator = iter(DataLoader(Subset(gated.dataset, range(40)), 4, collate_fn=len))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert list(iterator) == [4] * 10
    wait_until(gated.is_empty, "all bytes were let go")


def test_read_whose_announcement_was_interrupted_is_not_waited_for_for_ever(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Lines, "add", lambda *_: None)
        gated.window.request([1])
    assert bytes(gated.window.take(1)) == b"x" * 1000
    wait_until(gated.is_empty, "all bytes were let go")


@pytest.mark.parametrize("bad", [[0, 1, 999], [999, 0, 1]])
def test_batch_with_an_index_that_there_is_not_leaves_nothing_behind(gated: Gated, bad: list[int]) -> None:
    iterator = iter(DataLoader(gated.dataset, batch_sampler=[[5, 6], bad, [7]], collate_fn=len))
    with pytest.raises(IndexError, match="999"):
        list(iterator)
    del iterator
    wait_until(gated.is_empty, "all bytes were let go")


def test_error_of_collate_fn_leaves_nothing_behind(gated: Gated) -> None:
    def fail(samples: list[Any]) -> Any:
        raise ValueError("no batch")

    iterator = iter(DataLoader(gated.dataset, 4, collate_fn=fail))
    for _ in range(3):
        with pytest.raises(ValueError, match="no batch"):
            next(iterator)
    gated.gate.set()
    del iterator
    wait_until(gated.is_empty, "all bytes were let go")
