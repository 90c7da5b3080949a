"""The prefetcher: nothing is lost, nothing waits for ever, and no byte is held longer than it must be."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import Subset

from fastload import Cache, DataLoader, ImageFolder, ObjectDataset, RandomResizedCrop
from fastload.cli.demo.photos import make_photo
from fastload.errors import StoreError
from fastload.fetch import threads
from fastload.fetch.prefetcher import Outstanding, Prefetcher
from fastload.fetch.queues import Read, ReaderQueues, Request
from fastload.fetch.reads import ObjectSource
from fastload.fetch.threads import ByteBudget, ReadPool, ReadSettings
from fastload.images.kernel import active
from fastload.metrics.counters import Counters
from fastload.store.base import Page, Reading
from fastload.store.listing import list_objects
from fastload.store.local import LocalStore
from tests.cachedata import segments
from tests.faultserver import Fault, FaultServer
from tests.patience import PATIENCE, interrupt_when, wait_until
from tests.photos import pillow_jpeg, scene
from tests.shortform import stress

NOTHING = Outstanding(samples=0, awaited=(), requests=0, bytes=0)
IN_RANGES = ReadSettings(large_object=3000, range_size=1000)


def with_bytes(most: int) -> ReadSettings:
    """Objects of 3,000 bytes are read in ranges; at most so many bytes are read ahead."""
    return replace(IN_RANGES, process_bytes=most, node_bytes=most)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[ReadSettings], None]:
    """Gives settings to the prefetchers that datasets open."""
    return lambda settings: monkeypatch.setattr("fastload.fetch.threads.SETTINGS", settings)


class RangedFiles(LocalStore):
    """Files that are read as objects are: large ones in ranges."""

    native = True


class Unversioned(RangedFiles):
    def _list(self) -> Iterator[Page]:
        for page in super()._list():
            yield [info._replace(version="") for info in page]


def files_of(folder: Path, kind: type[LocalStore] = LocalStore, **options: Any) -> ObjectSource:
    store = kind(folder.as_uri(), str(folder))
    manifest = list_objects(store)
    return ObjectSource(store, manifest, key=key, **options)


def prefetcher(source: ObjectSource, cache: Cache | None = None, **options: Any) -> Prefetcher:
    return Prefetcher(source, cache, prepare=None, **{"counters": Counters(), **options})


def key(index: int, version: str | None = None) -> bytes:
    return hashlib.blake2b(b"%d" % index, digest_size=16).digest()


def test_sample_that_a_batch_has_twice_is_read_once_and_handed_out_twice(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"zero")
    counters = Counters()
    opened = prefetcher(files_of(tmp_path), counters=counters)
    opened.request([0, 0])
    opened.request([0])
    wait_until(lambda: opened.is_here(0), "the sample is read")
    assert [bytes(opened.get(0)) for _ in range(3)] == [b"zero"] * 3
    assert counters["get.samples"] == 1 and counters["get.ahead"] == 3
    assert opened.outstanding() == NOTHING and not opened.is_here(0)
    opened.close()


def test_sample_that_two_threads_request_at_once_is_read_once(tmp_path: Path) -> None:
    """One thread requests it while another one, which has not found it, looks it up."""
    (tmp_path / "0").write_bytes(b"zero")
    counters, source = Counters(), files_of(tmp_path)
    opened, size = prefetcher(source, counters=counters), source.size
    late = [lambda: opened.request([0], "other")]

    def size_of(index: int) -> int:
        while late:
            late.pop()()
        return size(index)

    source.size = size_of  # type: ignore[method-assign]
    opened.request([0], "one")
    assert [bytes(opened.get(0)) for _ in range(2)] == [b"zero"] * 2
    assert counters["get.samples"] == 1 and counters["get.ahead"] == 2
    assert opened.outstanding() == NOTHING
    opened.close()


def test_byte_budget_grows_for_a_consumer_that_waits_a_little_for_each_sample(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i:03d}").touch()
    source = files_of(tmp_path)

    def slow(index: int, wait: Any) -> bytes:
        time.sleep(0.01)
        return b""

    source.size, source.read = lambda index: 300_000, slow  # type: ignore[method-assign]
    opened = prefetcher(source)
    opened.limiter.value = 128
    opened.request(range(200))
    first = opened._queues._budget.bytes(300_000)
    for i in range(200):
        opened.get(i)
    assert opened._queues._budget.bytes(300_000) >= 2 * first
    opened.close()


def test_the_kernel_reads_cached_samples_itself_and_a_damaged_record_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (tmp_path / "photos" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / "a" / f"{number:02d}.jpg").write_bytes(make_photo(number, 40, 30))
    dataset = ImageFolder(str(tmp_path / "photos"), RandomResizedCrop(16), cache=str(tmp_path / "cache"))
    first, _ = next(iter(DataLoader(dataset, batch_size=20, seed=3)))
    assert dataset.cache is not None and dataset.cache.flush(PATIENCE)
    calls: list[int] = []
    kernel = active()

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(kernel, name)

        def crop_resize(self, out: Any, items: Any, *arguments: Any) -> Any:
            calls.append(len(items))
            return kernel.crop_resize(out, items, *arguments)

    monkeypatch.setattr("fastload.images.crop.active", Counted)
    for damaged in (False, True):
        if damaged:
            entry = dataset.cache.lookup(dataset._cache_keys(7)[0])
            assert entry is not None
            (segment,) = segments(tmp_path / "cache")
            with segment.open("r+b") as file:
                file.seek(entry.offset + 64 + 100)
                file.write(b"damaged")
        calls.clear()
        loader = DataLoader(dataset, batch_size=20, seed=3)
        ((again, _),) = loader
        assert torch.equal(again, first) and calls == [1] * damaged
        assert loader.stats()["counters"].get("cache.corrupt", 0) == damaged
    dataset.close()


@pytest.mark.parametrize("seed", [0, 1, *stress(2, 3)])
def test_requests_and_cancellations_in_any_order_lose_and_keep_nothing(
    seed: int, tmp_path: Path, no_leaks: None
) -> None:
    """Within a bound on bytes of three objects."""
    draw = random.Random(seed)
    bodies = [draw.randbytes(draw.choice([0, 10, 2999, 3000, 7001])) for _ in range(40)]
    for number, body in enumerate(bodies):
        (tmp_path / f"{number:02d}").write_bytes(body)
    objects = files_of(tmp_path, RangedFiles, settings=IN_RANGES)
    opened = prefetcher(objects, settings=with_bytes(20_000))
    ahead: list[int] = []
    for _ in range(400):
        action = draw.random()
        if action < 0.5 and len(ahead) < 30:
            some = [draw.randrange(40) for _ in range(draw.randrange(6))]
            opened.request(some)
            ahead += some
        elif action < 0.9 and ahead:
            index = ahead.pop(0)
            assert bytes(opened.get(index)) == bodies[index]
        elif ahead:
            opened.cancel([ahead.pop(draw.randrange(len(ahead)))])
    while ahead:
        index = ahead.pop(0)
        assert bytes(opened.get(index)) == bodies[index]
    wait_until(lambda: opened.outstanding() == NOTHING, "all bytes were let go")
    opened.close()


def cancel_and_wait(opened: Prefetcher, indices: list[int]) -> None:
    """With the guard removed: as every other call of the prefetcher."""
    with opened._work:
        opened.cancel(indices)


@pytest.mark.parametrize(
    "cancel", [Prefetcher.cancel, pytest.param(cancel_and_wait, marks=pytest.mark.stress, id="guard_removed")]
)
def test_cancelling_waits_for_no_lock(
    cancel: Callable[[Prefetcher, list[int]], None], tmp_path: Path
) -> None:
    """An iterator is collected in any thread at any moment, also in one that holds the prefetcher's lock."""
    for i in range(8):
        (tmp_path / f"{i}").write_bytes(bytes([i]) * 1000)
    opened = prefetcher(files_of(tmp_path))
    opened.request(range(4))
    thread = threading.Thread(target=cancel, args=(opened, [0, 1, 2, 3]))
    with opened._work:
        thread.start()
        thread.join(0.2 if cancel is cancel_and_wait else PATIENCE)
        assert thread.is_alive() == (cancel is cancel_and_wait)
    thread.join(PATIENCE)
    opened.request(range(4, 8))
    assert [bytes(opened.get(index)) for index in range(4, 8)] == [bytes([i]) * 1000 for i in range(4, 8)]
    wait_until(lambda: opened.outstanding() == NOTHING, "all bytes were let go")
    opened.close()


def test_counters_may_be_added_to_by_a_destructor_that_runs_inside_them() -> None:
    counters = Counters()
    with counters._lock:
        counters.add("copy.wait_seconds", 1)
    assert counters["copy.wait_seconds"] == 1


def test_pool_can_be_closed_by_one_of_its_threads() -> None:
    pool = ReadPool(1, Counters())
    assert pool.submit(pool.close).result(PATIENCE) is None


def test_late_read_is_requested_a_second_time(use: Callable[[ReadSettings], None]) -> None:
    use(ReadSettings(hedge_after=2, hedge_share=1.0))
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


def test_threads_are_started_for_the_share_of_an_iteration_beside_a_paused_one(tmp_path: Path) -> None:
    (tmp_path / "0").touch()
    limiter = prefetcher(files_of(tmp_path)).limiter
    queues = ReaderQueues(limiter, ByteBudget(20_000))
    for reader in ("paused", "other"):
        queues.add([Request(Read(index, 1000), 0, 1000) for index in range(40)], reader)
        while (queue := queues.startable()) is not None and reader == "paused":
            queues.begin(queue, 1.0)
    assert queues.held == 20_000 and queues.may_begin() == 1 + 10


# --- The first batch


@pytest.fixture
def opening(tmp_path: Path) -> Iterator[Prefetcher]:
    """Forty objects; the first twenty were requested as one batch, then the next ten."""
    for i in range(40):
        (tmp_path / f"{i:02d}").write_bytes(bytes([i]) * 1000)
    opened = prefetcher(files_of(tmp_path))
    opened.request(range(20), "training")
    opened.request(range(20, 30), "training")
    yield opened
    opened.close()


def wait_for_requests(opened: Prefetcher, count: int) -> None:
    """Until so many requests were made, and no thread finds another one to make."""

    def found() -> bool:
        with opened._work:
            idle = opened._threads.idle == len(opened._threads) and opened._queues.startable() is None
        return idle and opened._counters["get.requests"] == count

    wait_until(found, f"{count} requests were made, found {opened._counters['get.requests']}")


def test_first_batch_comes_alone_until_nearly_all_of_it_was_handed_out(opening: Prefetcher) -> None:
    wait_for_requests(opening, 20)
    found = [bytes(opening.get(i)) for i in range(11)]
    wait_for_requests(opening, 20)
    found.append(bytes(opening.get(11)))
    wait_for_requests(opening, 30)
    found += [bytes(opening.get(i)) for i in range(12, 30)]
    assert found == [bytes([i]) * 1000 for i in range(30)]
    opening.request(range(30, 40), "training")
    wait_for_requests(opening, 40)


def test_cancelled_first_batch_lets_the_next_one_start(opening: Prefetcher) -> None:
    wait_for_requests(opening, 20)
    opening.cancel(range(20))
    assert opening.outstanding().samples == 10
    wait_for_requests(opening, 30)


def test_consumer_that_leaves_the_first_batch_aside_ends_its_precedence(opening: Prefetcher) -> None:
    assert bytes(opening.get(20)) == bytes([20]) * 1000
    wait_for_requests(opening, 30)


def test_first_batch_of_one_iteration_does_not_hold_up_another_one(opening: Prefetcher) -> None:
    wait_for_requests(opening, 20)
    opening.request(range(30, 40), "validation")
    wait_for_requests(opening, 30)
    assert [bytes(opening.get(i)) for i in range(30, 40)] == [bytes([i]) * 1000 for i in range(30, 40)]


def test_first_batch_that_another_run_reads_does_not_hold_up_the_next_one(tmp_path: Path) -> None:
    """Another run has the in-flight locks of fifteen of its twenty samples."""
    (tmp_path / "data").mkdir()
    for i in range(30):
        (tmp_path / "data" / f"{i:02d}").write_bytes(bytes([i]) * 1000)
    cache, settings = Cache(tmp_path / "cache"), replace(ReadSettings(), inflight_patience=PATIENCE)
    assert all(cache._lock_inflight(key(i)) for i in range(15))
    source = files_of(tmp_path / "data")
    opened = prefetcher(source, cache, settings=settings)
    opened.request(range(20))
    opened.request(range(20, 30))
    wait_until(lambda: opened._counters["get.requests"] == 15, "all others were read")
    assert [bytes(opened.get(i)) for i in range(15, 30)] == [bytes([i]) * 1000 for i in range(15, 30)]
    seen = set()
    for _ in range(20):
        seen.add(opened.outstanding().requests)
        time.sleep(0.005)
    assert seen == {0}, "who looks for a sample has no request in flight"
    start = time.monotonic()
    assert [bytes(opened.get(i)) for i in range(15)] == [bytes([i]) * 1000 for i in range(15)]
    assert time.monotonic() - start < PATIENCE / 2, "a consumer waits for a few round trips"
    opened.close()
    counters = opened._counters
    assert counters["cache.misses"] == 30 and not counters["cache.hits"], "each sample counts once"


# --- Beside other runs and other threads


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Prefetcher]:
    """Six objects, room for two; another run has the in-flight lock of the first one, and never reads it."""
    (tmp_path / "data").mkdir()
    for i in range(6):
        (tmp_path / "data" / str(i)).write_bytes(bytes([i]) * 1000)
    cache = Cache(tmp_path / "cache")
    assert cache._lock_inflight(key(0))
    settings = replace(with_bytes(2500), inflight_patience=0.3)
    source = files_of(tmp_path / "data")
    opened = prefetcher(source, cache, settings=settings)
    yield opened
    opened.close()


def is_full(opened: Prefetcher) -> bool:
    outstanding = opened.outstanding()
    return not outstanding.requests and outstanding.bytes >= 2000


def test_deferred_sample_is_read_once_a_consumer_waits_for_it(locked: Prefetcher) -> None:
    """It lies behind reads for which there is no room, until it is taken."""
    locked.request(range(6))
    wait_until(lambda: is_full(locked), "no more bytes may be read ahead")
    assert [bytes(locked.get(i)) for i in range(6)] == [bytes([i]) * 1000 for i in range(6)]
    assert locked.outstanding() == NOTHING


@pytest.mark.stress
def test_guard_removed_consumer_waits_for_a_deferred_sample_for_ever(
    locked: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not moved up."""
    monkeypatch.setattr(ReaderQueues, "advance", lambda self, read: True)
    locked.request(range(6))
    wait_until(lambda: is_full(locked), "no more bytes may be read ahead")
    errors: list[StoreError] = []

    def get() -> None:
        try:
            locked.get(0)
        except StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=get)
    thread.start()
    thread.join(1.0)  # three times as long as the other run is given
    assert thread.is_alive()
    locked.close()
    thread.join(PATIENCE)
    assert len(errors) == 1


@pytest.mark.parametrize("grouped", [True, False])
def test_sample_that_another_run_reads_is_read_where_no_thread_can_look_for_it(
    grouped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for i in range(2):
        (tmp_path / "data" / str(i)).write_bytes(bytes([i]) * 1000)
    source, cache = files_of(tmp_path / "data"), Cache(tmp_path / "cache")
    if grouped:
        source.groups = lambda indices: [indices]  # type: ignore[method-assign]
        source.read_group = lambda indices, wait: [  # type: ignore[method-assign]
            source.read(index, wait) for index in indices
        ]
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "fastload-deferred":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert cache._lock_inflight(key(0))
    opened = prefetcher(source, cache)
    opened.request([0, 1])
    assert [bytes(opened.get(i)) for i in range(2)] == [bytes([i]) * 1000 for i in range(2)]
    wait_until(lambda: opened.outstanding() == NOTHING, "all bytes were let go")
    opened.close()


def test_deferred_sample_that_is_cancelled_as_it_gets_its_lock_gives_the_lock_back(
    locked: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, reserve = locked._samples._cache, locked._deferred._reserve
    assert cache is not None

    def reserve_and_cancel(read: Read) -> bool:
        if not reserve(read):
            return False
        locked.cancel([read.index])
        return True

    monkeypatch.setattr(locked._deferred, "_reserve", reserve_and_cancel)
    monkeypatch.setattr(locked._deferred, "_overtake", lambda reads: None)
    locked.request([0])
    wait_until(lambda: locked._deferred._requests, "the sample is deferred")
    cache._unlock_inflight(key(0))
    wait_until(lambda: locked.outstanding() == NOTHING, "the sample is cancelled")
    assert cache._lock_inflight(key(0))


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.stress, id="guard_removed")])
def test_ranges_of_one_object_take_its_inflight_lock_once(
    guarded: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[ReadSettings], None],
    no_leaks: None,
) -> None:
    use(IN_RANGES)
    locked: list[bytes] = []
    lock = Cache._lock_inflight

    def slow(cache: Cache, wanted: bytes) -> bool:
        time.sleep(0.05)  # the other threads have begun their ranges meanwhile
        locked.append(wanted)
        return lock(cache, wanted)

    monkeypatch.setattr(Cache, "_lock_inflight", slow)
    body = random.Random(1).randbytes(8000)
    with FaultServer({"large": body}) as server:
        dataset = ObjectDataset("s3://bucket", storage_options=server.options, cache=tmp_path / "cache")
        opened = dataset._prefetchers.get()
        if not guarded:
            opened._samples._reserving = contextlib.nullcontext()  # type: ignore[assignment]
        dataset.prefetch([0])
        assert bytes(dataset[0]) == body
        dataset.close()
    assert (len(locked) == 1) is guarded


def test_large_object_without_a_version_comes_by_one_request(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(8000))
    assert len(files_of(tmp_path, RangedFiles, settings=IN_RANGES).ranges(0)) == 8
    assert files_of(tmp_path, Unversioned, settings=IN_RANGES).ranges(0) == []


def test_changed_large_object_is_read_again_once(use: Callable[[ReadSettings], None], no_leaks: None) -> None:
    """All of its ranges are under way when the store says so; one request is to follow, not one for each."""
    use(IN_RANGES)
    draw = random.Random(1)
    with FaultServer({"first": draw.randbytes(4000), "large": draw.randbytes(8000)}) as server:
        dataset = ObjectDataset("s3://bucket", storage_options=server.options, on_change="refresh")
        dataset.prefetch([0])
        assert len(dataset[0]) == 4000, "the server keeps ranges: from now on they are read side by side"
        server.objects["large"] = new = draw.randbytes(3500)
        server.script("large", *[Fault(status=412, code="PreconditionFailed", delay=0.3)] * 8)
        dataset.prefetch([1])
        assert bytes(dataset[1]) == new
        assert dataset.counters["get.refreshed"] == 1
        dataset.close()


def test_read_that_was_planned_before_another_found_the_change_is_kept_as_the_new_version(
    tmp_path: Path, no_leaks: None
) -> None:
    """An epoch is left and the next one begins while the object is being read: that is two reads of it."""
    data, goes_on = tmp_path / "data", threading.Event()
    data.mkdir()
    (data / "0").write_bytes(b"old")

    class Held(LocalStore):
        def _read(self, *arguments: Any) -> Any:
            assert goes_on.wait(PATIENCE)
            return super()._read(*arguments)

    store = Held(data.as_uri(), str(data))
    manifest = list_objects(store)

    def name(index: int, version: str | None = None) -> bytes:
        text = manifest.version(index) if version is None else version
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    cache = Cache(tmp_path / "cache", "raw")
    opened = prefetcher(ObjectSource(store, manifest, key=name, on_change="refresh"), cache)
    (data / "0").write_bytes(b"newer")
    opened.request([0])
    wait_until(lambda: opened.outstanding().requests == 1, "the first read has begun")
    opened.cancel([0])
    opened.request([0])
    goes_on.set()
    assert bytes(opened.get(0)) == b"newer"
    opened.close()
    kept = [cache.read(name(0)), cache.read(name(0, store.head("0").version))]
    cache.close()
    assert kept == [None, b"newer"]


def test_concurrency_recovers_while_most_threads_are_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store asks for fewer requests, once in a while; then the consumer waits."""
    monkeypatch.setattr(threads, "IDLE_SECONDS", 10.0)  # idle threads stay
    for i in range(300):
        (tmp_path / f"{i:03d}").write_bytes(b"x")

    class Slow(RangedFiles):
        def _read(self, *arguments: Any) -> Any:
            time.sleep(0.02)
            return super()._read(*arguments)

    source = files_of(tmp_path, Slow)
    source.store.reading = Reading(max_requests=32)
    opened = prefetcher(source)
    limiter = opened.limiter
    opened.request(range(300))
    assert bytes(opened.get(0)) == b"x"
    with opened._work:
        for seconds_ago in range(20, 0, -2):
            limiter.slow_down(time.monotonic() - seconds_ago)
    assert limiter.value == 1
    start, taken = time.monotonic(), 1
    while limiter.value < 3 and taken < 300:
        opened.get(taken)
        taken += 1
    assert limiter.value >= 3 and time.monotonic() - start < threads.IDLE_SECONDS
    opened.close()


# --- Beside other iterations, and after Ctrl-C


class Gated:
    """Objects in fsspec's memory, those from `closed` on read only once the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, closed: int, body: bytes = b"x" * 1000) -> None:
        monkeypatch.setattr("fastload.fetch.threads.SETTINGS", with_bytes(20_000))
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
        files.pipe({f"/gated/{number:03d}": body for number in range(200)})
        monkeypatch.setattr(MemoryFileSystem, "cat_file", read)
        self.dataset = ObjectDataset("memory://gated")

    def outstanding(self) -> Outstanding:
        return self.dataset._prefetchers.get().outstanding()

    def is_empty(self) -> bool:
        return self.outstanding() == NOTHING

    def is_awaited(self) -> bool:
        """Whether the first object behind the gate is waited for."""
        return self.closed in self.outstanding().awaited


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    """Whatever a test does, all bytes are let go behind it."""
    found = Gated(monkeypatch, 100)
    yield found
    found.gate.set()
    wait_until(found.is_empty, "all bytes were let go")
    found.dataset.close()


@pytest.mark.parametrize("mode", ["raw", "auto", "dct"])
def test_read_that_ends_after_close_leaves_the_cache_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Any
) -> None:
    gated = Gated(monkeypatch, 0, pillow_jpeg(scene(16, 16)))
    closed, other = (
        ObjectDataset("memory://gated", transform=RandomResizedCrop(8), cache=Cache(tmp_path / "cache", mode))
        for _ in range(2)
    )
    assert other.cache is not None and other.cache.info()["entries"] == 0
    closed.prefetch([0])
    wait_until(lambda: bool(gated.begun), "it is being read")
    closed.close()
    before = set(threading.enumerate())
    gated.gate.set()
    wait_until(
        lambda: not any(one.name.startswith("fastload-read") and one.is_alive() for one in before), "it ended"
    )
    assert not closed.cache._is_open
    assert other.cache._lock_inflight(other._cache_keys(0)[0]), "another one may read the sample now"
    other.close()


def test_paused_iterator_leaves_another_one_room_to_read_ahead(gated: Gated) -> None:
    dataset = gated.dataset
    paused = iter(DataLoader(Subset(dataset, range(100)), 4, collate_fn=len))
    next(paused)
    wait_until(lambda: gated.outstanding()[2:] == (0, 20_000), "it holds all the bytes there are")
    found: list[int] = []
    others = DataLoader(Subset(dataset, range(100, 200)), 4, collate_fn=len)
    thread = threading.Thread(target=lambda: found.extend(others))
    thread.start()
    wait_until(lambda: len([one for one in gated.begun if one >= 100]) == 10, "half as many are under way")
    gated.gate.set()
    thread.join(PATIENCE)
    assert found == [4] * 25 and [*paused] == [4] * 24
    assert len(gated.begun) == 200, "each is read once"


def test_interrupted_iterator_leaves_nothing_behind(gated: Gated) -> None:
    iterator = iter(DataLoader(Subset(gated.dataset, range(96, 140)), 4, collate_fn=len))
    assert next(iterator) == 4
    thread = interrupt_when(gated.is_awaited)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    thread.join()
    gated.gate.set()
    assert list(iterator) == [4] * 9, "as torch's, it goes on with the batch after it"


def test_iteration_given_up_after_an_interrupt_leaves_nothing_behind(gated: Gated) -> None:
    def epoch() -> None:
        for _ in DataLoader(gated.dataset, 4, num_workers=0, collate_fn=len):
            pass

    thread = interrupt_when(gated.is_awaited)
    with pytest.raises(KeyboardInterrupt):
        epoch()
    thread.join()


def test_interrupt_while_a_batch_is_requested_loses_no_batch(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated.gate.set()
    add, calls = ReaderQueues.add, iter(range(10**6))

    def interrupted(queues: ReaderQueues, parts: Any, reader: object) -> None:
        if next(calls) == 5:
            raise KeyboardInterrupt
        add(queues, parts, reader)

    monkeypatch.setattr(ReaderQueues, "add", interrupted)
    iterator = iter(DataLoader(Subset(gated.dataset, range(40)), 4, collate_fn=len))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert list(iterator) == [4] * 10


def test_read_is_made_although_its_request_was_interrupted(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ReaderQueues, "add", lambda *_: None)
        gated.dataset.prefetch([1])
    assert bytes(gated.dataset[1]) == b"x" * 1000


@pytest.mark.parametrize("bad", [[0, 1, 999], [999, 0, 1]])
def test_batch_with_an_index_out_of_range_leaves_nothing_behind(gated: Gated, bad: list[int]) -> None:
    iterator = iter(DataLoader(gated.dataset, batch_sampler=[[5, 6], bad, [7]], collate_fn=len))
    with pytest.raises(IndexError, match="999"):
        list(iterator)
    del iterator


def test_error_of_collate_fn_leaves_nothing_behind(gated: Gated) -> None:
    def fail(samples: list[Any]) -> Any:
        raise ValueError("no batch")

    iterator = iter(DataLoader(gated.dataset, 4, collate_fn=fail))
    for _ in range(3):
        with pytest.raises(ValueError, match="no batch"):
            next(iterator)
    del iterator
