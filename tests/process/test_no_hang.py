"""What would be waited for ever: threads that end or cannot start, requests that nobody answers, forks."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fastload import DataLoader, ImageFolder, ObjectDataset, RandomResizedCrop, TarDataset
from fastload.cache import Cache
from fastload.cache.directory import Directory
from fastload.cache.index import Index
from fastload.cache.writer import Writer
from fastload.cli.command_options import check_usable
from fastload.errors import StoreError, WorkerError
from fastload.fetch.prefetcher import Outstanding, Prefetcher
from fastload.fetch.reads import Source
from fastload.fetch.threads import ReadPool, ReadSettings
from fastload.metrics.counters import Counters
from fastload.order.position import Position
from fastload.store.local import LocalStore
from fastload.workers.worker import _leave_with
from tests.loaderdata import Numbers
from tests.patience import PATIENCE, wait_until
from tests.photos import pillow_jpeg, scene
from tests.sharddata import shards, write
from tests.streamdata import RowShards

pytestmark = pytest.mark.usefixtures("no_leaks")

NOTHING = Outstanding(samples=0, awaited=(), requests=0, bytes=0)


class Bodies(Source):
    """A source in memory. `gate` holds up reads of sample 0."""

    def __init__(self, store: LocalStore, size: int = 8) -> None:
        self.store = store
        self._size = size
        self.gate = threading.Event()

    def name(self, index: int) -> str:
        return str(index)

    def size(self, index: int) -> int:
        return self._size

    def ranges(self, index: int) -> list[tuple[int, int]]:
        return [] if self._size < 1000 else [(0, 8), (8, self._size)]

    def read(self, index: int, wait: Any) -> bytes:
        if index == 0:
            assert self.gate.wait(PATIENCE)
        return bytes([index]) * 8

    def read_part(self, index: int, start: int, stop: int, wait: Any) -> bytes:
        return bytes(8)


@pytest.fixture
def bodies(tmp_path: Path) -> Bodies:
    return Bodies(LocalStore(tmp_path.as_uri(), str(tmp_path)))


Open = Callable[..., Prefetcher]


@pytest.fixture
def open_prefetcher(bodies: Bodies) -> Iterator[Open]:
    """Opens prefetchers over `bodies`; each reads one sample at a time unless told otherwise."""
    opened: list[Prefetcher] = []

    def open_one(requests: int = 1, prepare: Callable[[Any, int], Any] | None = None) -> Prefetcher:
        settings = ReadSettings(process_requests=requests)
        opened.append(Prefetcher(bodies, None, prepare=prepare, counters=Counters(), settings=settings))
        return opened[-1]

    yield open_one
    bodies.gate.set()
    for one in opened:
        one.close()


@pytest.fixture
def prefetcher(open_prefetcher: Open) -> Prefetcher:
    """Reads one sample at a time."""
    return open_prefetcher()


def result_of(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that does it, and what will be its result or error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """This process may have no more threads of that name."""
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == name:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)


# --- the prefetcher and the pool -----------------------------------------------------------------------


class Panic(BaseException):
    """As of a client that is written in Rust."""


def test_panic_of_the_client_is_raised_at_the_consumer(open_prefetcher: Open) -> None:
    def panic(body: Any, index: int) -> Any:
        raise Panic("index out of bounds")

    prefetcher = open_prefetcher(prepare=panic)
    prefetcher.request([1, 2])
    for index in (1, 2):
        with pytest.raises(Panic):
            prefetcher.get(index)
    assert prefetcher.outstanding().requests == 0


def test_object_larger_than_memory_is_an_error(prefetcher: Prefetcher, bodies: Bodies) -> None:
    bodies._size = 1 << 60
    prefetcher.request([1])
    with pytest.raises(MemoryError):
        prefetcher.get(1)
    bodies._size = 8
    prefetcher.request([2])
    assert prefetcher.get(2) == bytes([2]) * 8


def is_reading(prefetcher: Prefetcher) -> bool:
    return prefetcher.outstanding().requests > 0


def is_awaited(prefetcher: Prefetcher) -> bool:
    return bool(prefetcher.outstanding().awaited)


def test_sample_that_one_reader_cancels_another_still_gets(prefetcher: Prefetcher, bodies: Bodies) -> None:
    prefetcher.request([0, 1])
    wait_until(lambda: is_reading(prefetcher), "sample 0 is being read")
    thread, found = result_of(lambda: prefetcher.get(1))
    wait_until(lambda: is_awaited(prefetcher), "sample 1 is waited for")
    prefetcher.cancel([1])
    thread.join(PATIENCE)
    assert found == [bytes([1]) * 8]
    bodies.gate.set()
    assert prefetcher.get(0) == bytes(8)
    wait_until(lambda: prefetcher.outstanding() == NOTHING, "all bytes were let go")


def test_sample_requested_once_and_got_twice_frees_its_bytes_once(
    prefetcher: Prefetcher, bodies: Bodies
) -> None:
    prefetcher.request([0])
    takers = [result_of(lambda: prefetcher.get(0)) for _ in range(2)]
    wait_until(lambda: is_awaited(prefetcher), "sample 0 is waited for")
    bodies.gate.set()
    for thread, found in takers:
        thread.join(PATIENCE)
        assert found == [bytes(8)]
    wait_until(lambda: not is_reading(prefetcher), "all is read")
    assert prefetcher.outstanding() == NOTHING


def test_closed_prefetcher_ends_the_wait_of_a_consumer(prefetcher: Prefetcher) -> None:
    prefetcher.request([0, 1])
    wait_until(lambda: is_reading(prefetcher), "sample 0 is being read")
    thread, found = result_of(lambda: prefetcher.get(1))
    wait_until(lambda: is_awaited(prefetcher), "sample 1 is waited for")
    prefetcher.close()
    thread.join(PATIENCE)
    assert isinstance(found[0], StoreError) and "closed" in str(found[0])


def test_a_prefetcher_that_gets_no_thread_tries_again(
    prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "fastload-read")
    with pytest.raises(RuntimeError, match="new thread"):
        prefetcher.request([1])
    monkeypatch.undo()
    assert prefetcher.get(1) == bytes([1]) * 8


def test_prefetcher_works_with_fewer_threads_than_it_wants(
    open_prefetcher: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetcher = open_prefetcher(requests=8)
    prefetcher.request([1])
    assert prefetcher.get(1) == bytes([1]) * 8
    refuse(monkeypatch, "fastload-read")
    prefetcher.request([2, 3, 4])
    assert [prefetcher.get(index) for index in (2, 3, 4)] == [bytes([i]) * 8 for i in (2, 3, 4)]


def test_threads_of_an_unclosed_dataset_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.fetch.threads.IDLE_SECONDS", 0.05)
    (tmp_path / "data").mkdir()
    for i in range(20):
        (tmp_path / "data" / str(i)).write_bytes(bytes([i]) * 100)
    before = set(threading.enumerate())
    dataset = ObjectDataset(str(tmp_path / "data"))
    dataset.prefetch(range(20))
    assert [dataset[i][0] for i in range(20)] == [int(dataset.key(i)) for i in range(20)]
    ended = weakref.ref(dataset)
    del dataset
    wait_until(lambda: set(threading.enumerate()) <= before, "its threads have ended")
    gc.collect()
    assert ended() is None


def test_a_thread_that_ended_is_replaced(prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.fetch.threads.IDLE_SECONDS", 0.001)
    before = set(threading.enumerate())
    for _ in range(50):
        prefetcher.request([1, 2])
        assert (prefetcher.get(1), prefetcher.get(2)) == (bytes([1]) * 8, bytes([2]) * 8)
    wait_until(lambda: set(threading.enumerate()) <= before, "all threads have ended")
    assert prefetcher.outstanding() == NOTHING


def test_a_pool_that_gets_no_thread_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ReadPool(1, Counters())
    refuse(monkeypatch, "fastload-shard")
    with pytest.raises(RuntimeError, match="new thread"):
        pool.submit(lambda: 1)
    monkeypatch.undo()
    assert pool.wait(pool.submit(lambda: 2)) == 2
    pool.close()


def test_a_pool_closed_by_a_thread_that_begins_to_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lanes are collected there, with the locks held that the pause takes."""
    pool = ReadPool(1, Counters())
    wait = threading.Condition.wait
    closed = []

    def collects(self: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "fastload-shard" and not closed:
            closed.append(True)
            pool.close()
        return wait(self, timeout)

    def work() -> None:
        monkeypatch.setattr(threading.Condition, "wait", collects)
        pool.pause(StoreError("busy"), 0.01)

    with pytest.raises(StoreError, match="busy"):
        pool.submit(work).result(PATIENCE)


def interrupt_in_conditions(owner: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come at the first instruction of the Python code that leaves a condition of `owner`."""
    leave, thread = threading.Condition.__exit__, threading.get_ident()

    def interrupted(self: threading.Condition, *error: Any) -> None:
        if threading.get_ident() == thread and any(self is value for value in vars(owner).values()):
            raise KeyboardInterrupt
        leave(self, *error)

    monkeypatch.setattr(threading.Condition, "__exit__", interrupted)


def test_ctrl_c_leaves_the_prefetcher_unlocked(
    prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_in_conditions(prefetcher, monkeypatch)
    with suppress(KeyboardInterrupt):
        prefetcher.request([1])
    monkeypatch.undo()

    def read() -> Any:
        prefetcher.request([2])
        return prefetcher.get(2)

    thread, found = result_of(read)
    thread.join(PATIENCE)
    assert found == [bytes([2]) * 8]


def test_ctrl_c_leaves_a_pool_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ReadPool(2, Counters())
    interrupt_in_conditions(pool, monkeypatch)
    with suppress(KeyboardInterrupt):
        pool.submit(lambda: 1)
    monkeypatch.undo()
    thread, found = result_of(lambda: pool.wait(pool.submit(lambda: 2)))
    thread.join(PATIENCE)
    assert found == [2]
    pool.close()


# --- the cache -------------------------------------------------------------------------------------------


def test_a_cache_that_gets_no_thread_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache")
    key = cache.key("a")
    refuse(monkeypatch, "fastload-cache-writer")
    assert cache._lock_inflight(key)
    cache.write(key, b"payload")
    with pytest.warns(RuntimeWarning, match="new thread"):
        assert not cache.write(key, b"payload")
    assert cache._lock_inflight(key)  # it was given back
    assert not cache.flush()
    cache.close()


def test_a_directory_that_was_left_with_an_error_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache")
    cache.write(cache.key("a"), b"payload")

    def fails(self: Index) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched, pytest.warns(RuntimeWarning, match="the disk is gone"):
        patched.setattr(Index, "sync", fails)
        cache.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write(cache.key("b"), b"payload")
        assert cache.flush() and cache.read(cache.key("b")) == b"payload"
        cache.close()


def test_ctrl_c_leaves_the_writer_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache")
    writer = cache._open_or_raise().writer
    assert writer is not None
    interrupt_in_conditions(writer._queue, monkeypatch)
    with suppress(KeyboardInterrupt):
        cache.write(cache.key("a"), b"payload")
    monkeypatch.undo()
    thread, found = result_of(lambda: cache.write(cache.key("b"), b"payload") and cache.flush())
    thread.join(PATIENCE)
    assert found == [True]
    cache.close()


@pytest.fixture
def filled(tmp_path: Path) -> tuple[str, Path]:
    """A folder of 8 objects, and a cache that has them."""
    folder = write(tmp_path / "data", {str(i): bytes([i]) * 100 for i in range(8)})
    dataset = ObjectDataset(folder, cache=Cache(tmp_path / "cache", "raw"))
    assert len([dataset[i] for i in range(8)]) == 8
    dataset.close()
    return folder, tmp_path / "cache"


@pytest.mark.parametrize("limit", [None, "1GB"])
def test_no_batch_and_no_dataset_waits_for_an_index_that_is_rebuilt(
    filled: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    """As after a power cut: the first process that opens the cache goes through all of its segments."""
    folder, cache = filled
    shutil.rmtree(cache / "v1" / "index")
    monkeypatch.setattr(Directory, "_reindex", lambda self, stopping: stopping.wait(PATIENCE))
    start = time.monotonic()
    datasets = [ObjectDataset(folder, cache=Cache(cache, size_limit=limit)) for _ in range(4)]
    loader = DataLoader(datasets[0], 4, num_workers=1, collate_fn=len, multiprocessing_context="fork")
    assert list(loader) == [4, 4]
    assert time.monotonic() - start < 30, "each of them would wait for 8 s, and the last batch for 60 s"


def test_command_does_not_wait_for_a_rebuild_that_has_failed(
    filled: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Directory, stopping: threading.Event) -> None:
        raise OSError(errno.EIO, "the disk is bad")

    shutil.rmtree(filled[1] / "v1" / "index")
    monkeypatch.setattr(Directory, "_reindex", fail)
    cache = Cache(filled[1])
    monkeypatch.setattr(cache, "flush", lambda: pytest.fail("there is nothing to wait for"))
    with pytest.warns(RuntimeWarning, match="the disk is bad"):
        check_usable(cache)


def test_consumer_with_a_timeout_gets_the_last_batch_before_a_slow_disk_has_it(
    filled: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.workers.processes._SHUTDOWN_GRACE", 0.1)
    monkeypatch.setattr(Writer, "_store", lambda self, items, drops: time.sleep(PATIENCE))
    dataset = ObjectDataset(filled[0], cache=Cache(tmp_path / "slow", "raw"))
    loader = DataLoader(dataset, 4, num_workers=1, collate_fn=len, timeout=8, multiprocessing_context="fork")
    assert list(loader) == [4, 4]


def test_cache_that_was_closed_while_its_disk_was_slow_takes_records_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.cache.directory.CLOSE_DEADLINE", 0.1)
    store, gate = Writer._store, threading.Event()

    def slow(writer: Writer, items: Any, drops: Any) -> None:
        assert gate.wait(PATIENCE)
        store(writer, items, drops)

    monkeypatch.setattr(Writer, "_store", slow)
    cache = Cache(tmp_path / "cache")
    before, after = cache.key("before"), cache.key("after")
    assert cache.write(before, b"1")
    cache.close()
    assert cache.write(after, b"2")
    gate.set()
    assert cache.flush() and (cache.read(before), cache.read(after)) == (b"1", b"2")
    monkeypatch.undo()
    cache.close()


# --- forks -----------------------------------------------------------------------------------------------


def forked(work: Callable[[], object]) -> bool:
    """Whether a forked child comes to the end of it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if (ended := os.waitpid(pid, os.WNOHANG))[0]:
            return ended[1] == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def test_a_worker_that_reads_nothing_waits_for_no_thread_of_its_parent(tmp_path: Path) -> None:
    gate = threading.Event()

    def decode(fields: Any) -> Any:
        assert gate.wait(PATIENCE)
        return 1

    decode.__fingerprint__ = "1"  # type: ignore[attr-defined]
    folder = write(tmp_path / "shards", shards("tar"))
    data = TarDataset(folder, decode=decode, cache=Cache(tmp_path / "cache", "decoded"))
    (state,) = data._streams().plan_streams(1, seed=0, epoch=0, shuffle=False, rank=0, ranks=1)
    stream = data._streams().open_stream(state)
    assert stream.take(4)  # the threads are at it
    assert forked(data._flush_cache)
    gate.set()
    data.close()


def test_an_iterator_is_let_go_in_a_fork(tmp_path: Path) -> None:
    iterator = iter(DataLoader(RowShards([8, 8]), batch_size=4))
    next(iterator)
    pool = ReadPool(1, Counters())
    source = iterator._engine._source
    close, source.end_iteration = source.end_iteration, pool.close
    locked, over = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._work:
            locked.set()
            over.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(PATIENCE)
    assert forked(iterator.__del__)
    over.set()
    thread.join()
    source.end_iteration = close


# --- workers ---------------------------------------------------------------------------------------------


def _leave_with_many_files_open(trainer: int, ready: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    assert files[-1] > 1023, "select() takes no descriptor from here on"
    _leave_with(trainer)
    os.close(ready)
    time.sleep(100_000)


def test_a_worker_with_many_files_open_sees_its_trainer_die() -> None:
    with subprocess.Popen(["sleep", "100000"]) as trainer:
        told, ready = os.pipe()
        worker = multiprocessing.get_context("fork").Process(
            target=_leave_with_many_files_open, args=(trainer.pid, ready)
        )
        worker.start()
        try:
            os.close(ready)
            assert os.read(told, 1) == b"" and worker.is_alive()
            trainer.kill()
            worker.join(PATIENCE)
            assert worker.exitcode == 1
        finally:
            worker.kill()
            trainer.kill()
            worker.join()
            worker.close()
            os.close(told)


def test_interrupted_while_results_are_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = iter(DataLoader(Numbers(8), num_workers=1))
    assert int(next(iterator)) == 0

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Position, "began", interrupt)
        for _ in range(8):
            next(iterator)
    with pytest.raises(WorkerError, match="start a new one"):
        next(iterator)


def test_persistent_workers_that_could_not_begin_say_so_in_every_epoch(tmp_path: Path) -> None:
    """More was asked of them in the first one than they may answer before the trainer takes an answer."""
    (tmp_path / "class").mkdir()
    for number in range(20):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(pillow_jpeg(scene(20, 20, 0)))

    def fails(worker_id: int) -> None:
        raise ValueError("no worker can begin")

    dataset = ImageFolder(str(tmp_path), RandomResizedCrop(8))
    loader = DataLoader(
        dataset, num_workers=1, persistent_workers=True, worker_init_fn=fails, timeout=PATIENCE / 4
    )
    for _ in range(3):
        with pytest.raises(ValueError, match="no worker can begin"):
            next(iter(loader))


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_batch_that_cannot_be_asked_for_is_not_waited_for(prefetch: int) -> None:
    indices: list[Any] = [[0], [1], [2], [lambda: 3], [4], [5]]
    loader = DataLoader(Numbers(8), batch_sampler=indices, num_workers=1, prefetch_factor=prefetch)
    iterator = iter(loader)
    got, errors = [], 0
    while True:
        try:
            got.append(int(next(iterator)))
        except StopIteration:
            break
        except Exception:
            errors += 1
    assert errors == 1 and got[-2:] == [4, 5]
