"""In-flight locks: runs that share a cache directory read each object once, and wait for no dead process."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastload import Cache, DataLoader, ObjectDataset
from fastload.cache import writer
from fastload.cache.writer import InflightLocks
from fastload.datasets.warm import Warmed
from fastload.errors import WorkerError
from tests.bucketdata import Bucket, digest, serve_photos
from tests.patience import PATIENCE, wait_until
from tests.sharddata import write

IMAGES = 120
ROUND_TRIP = 0.02  # seconds

pytestmark = pytest.mark.usefixtures("no_leaks")


def key(i: int) -> bytes:
    return hashlib.blake2b(b"%d" % i, digest_size=16).digest()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


# --- the locks


def test_one_at_a_time(root: int) -> None:
    ours, theirs = InflightLocks(root), InflightLocks(root)
    assert ours.lock(key(1))
    assert not theirs.lock(key(1))
    assert not ours.lock(key(1)), "another thread of this process may be reading it"
    assert theirs.lock(key(2))
    theirs.unlock(key(1))  # is not theirs
    assert not theirs.lock(key(1))
    ours.unlock(key(1))
    assert theirs.lock(key(1))
    theirs.close()
    assert ours.lock(key(1)) and ours.lock(key(2))
    ours.close()


@pytest.mark.parametrize("extreme", [b"\0" * 16, b"\xff" * 16])
def test_any_key(root: int, extreme: bytes) -> None:
    ours, theirs = InflightLocks(root), InflightLocks(root)
    assert ours.lock(extreme) and not theirs.lock(extreme)
    ours.close()
    theirs.close()


def _hold(path: Path, ready: Any) -> None:
    ready.send(InflightLocks(os.open(path, os.O_RDONLY)).lock(key(1)))
    time.sleep(60)


def test_locks_end_with_their_process(root: int, tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path, there))
    process.start()
    assert here.poll(PATIENCE) and here.recv()
    ours = InflightLocks(root)
    assert not ours.lock(key(1))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE)
    assert ours.lock(key(1))
    for thing in (ours, here, there, process):
        thing.close()


def test_a_child_that_closes_leaves_the_parents_locks(root: int) -> None:
    ours, theirs = InflightLocks(root), InflightLocks(root)
    assert ours.lock(key(1))
    process = multiprocessing.get_context("fork").Process(target=ours.close)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    process.close()
    assert not theirs.lock(key(1))
    ours.close()
    theirs.close()


def test_file_system_without_locks_grants_all(root: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(writer.fcntl, "fcntl", refuse)
    ours, theirs = InflightLocks(root), InflightLocks(root)
    assert ours.lock(key(1)) and theirs.lock(key(1))
    ours.close()
    theirs.close()


# --- the cache


@contextmanager
def others_locks(path: Path) -> Iterator[InflightLocks]:
    """The in-flight locks of another process that uses the cache in `path`."""
    cache = Cache(path)
    cache.write(cache.key("anything"), b"x")
    cache.close()
    fd = os.open(path / "v1", os.O_RDONLY)
    locks = InflightLocks(fd)
    yield locks
    locks.close()
    os.close(fd)


def test_a_lock_lasts_until_the_payload_can_be_found(tmp_path: Path) -> None:
    with others_locks(tmp_path) as other, closing(Cache(tmp_path)) as ours:
        one = ours.key("one")
        assert ours._lock_inflight(one)
        assert not other.lock(one)
        assert ours.write(one, b"payload")
        wait_until(lambda: other.lock(one), "the lock is free")
        assert ours.lookup(one) is not None, "found by the next one that gets the lock"
        other.unlock(one)
        assert not ours._lock_inflight(one), "nothing is left to be read"


@pytest.mark.parametrize("why", ["unlocked", "full"])
def test_a_lock_without_a_payload_ends(tmp_path: Path, why: str) -> None:
    with others_locks(tmp_path) as other, closing(Cache(tmp_path, size_limit=1000)) as ours:
        one = ours.key("one")
        assert ours._lock_inflight(one) and not other.lock(one)
        if why == "unlocked":
            ours._unlock_inflight(one)
        else:
            assert not ours.write(one, bytes(5000))
        assert other.lock(one)


# --- two runs at once, cold, on a real S3 server


def run(bucket: Bucket, cache: Cache, **options: Any) -> DataLoader[Any]:
    dataset = ObjectDataset("s3://photos", decode=digest, cache=cache, storage_options=bucket.options)
    return DataLoader(dataset, 8, num_workers=1, collate_fn=list, **options)


class Blind(Cache):
    """With the guard removed: takes no in-flight locks."""

    def _lock_inflight(self, key: bytes) -> bool:
        return True


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    root = tmp_path_factory.mktemp("s3")
    write(root / "photos", {f"{number:03}.jpg": random.randbytes(50_000) for number in range(IMAGES)})
    with serve_photos(root, 0, ROUND_TRIP) as served:
        yield served


def both(first: Any, second: Any) -> list[list[str]]:
    """An epoch of two loaders whose workers run at the same time."""
    seen: list[list[str]] = [[], []]
    for batches in zip(first, second, strict=True):
        for mine, batch in zip(seen, batches, strict=True):
            mine += batch
    return seen


@pytest.mark.parametrize("shuffle", [False, True])
def test_two_runs_read_each_object_once(bucket: Bucket, tmp_path: Path, shuffle: bool) -> None:
    before = bucket.gets()
    loaders = [run(bucket, Cache(tmp_path), shuffle=shuffle) for _ in range(2)]
    for seen in both(*loaders):
        assert sorted(seen) == sorted(bucket.digests.values())
    for loader in loaders:
        counters = loader.stats()["counters"]
        looked_up = counters.get("cache.hits", 0) + counters.get("cache.misses", 0)  # one may have read all
        assert looked_up == IMAGES, "to look again is no miss"
    gets = bucket.gets() - before
    assert IMAGES <= gets <= 1.25 * IMAGES


@pytest.mark.stress
def test_guard_removed_two_runs_read_objects_twice(bucket: Bucket, tmp_path: Path) -> None:
    before = bucket.gets()
    bucket.proxy.set_round_trip(0.2)  # far away, so that what one reads is not in the cache before the other
    try:
        for seen in both(run(bucket, Blind(tmp_path)), run(bucket, Blind(tmp_path))):
            assert sorted(seen) == sorted(bucket.digests.values())
    finally:
        bucket.proxy.set_round_trip(ROUND_TRIP)
    assert bucket.gets() - before > 1.3 * IMAGES


def test_the_other_run_is_killed(bucket: Bucket, tmp_path: Path) -> None:
    first, second = iter(run(bucket, Cache(tmp_path))), iter(run(bucket, Cache(tmp_path)))
    seen = list(next(second))
    next(first)
    os.kill(first._workers[0].pid, signal.SIGKILL)
    start = time.monotonic()
    for batch in second:
        seen += batch
    assert sorted(seen) == sorted(bucket.digests.values())
    assert time.monotonic() - start < PATIENCE
    with pytest.raises(WorkerError, match="killed"):
        list(first)


def test_the_other_run_is_stopped(bucket: Bucket, tmp_path: Path) -> None:
    """A process that holds locks and does nothing is waited for, but not for long."""
    dataset = ObjectDataset(
        "s3://photos", decode=digest, cache=Cache(tmp_path), storage_options=bucket.options
    )
    with others_locks(tmp_path) as held:
        assert all(held.lock(dataset._cache_keys(i)[0]) for i in range(50))
        assert dataset[IMAGES - 1]  # the connection is open
        start = time.monotonic()
        batches = iter(DataLoader(dataset, 8, collate_fn=list))
        seen = next(batches)
        assert time.monotonic() - start > 0.1, "of 8 at once: without a wait a round trip or two"
        seen += [one for batch in batches for one in batch]
        assert sorted(seen) == sorted(bucket.digests.values())
        assert time.monotonic() - start < PATIENCE


def test_a_failed_read_gives_its_lock_back(tmp_path: Path) -> None:
    url = write(tmp_path / "data", dict.fromkeys("ab", b"x" * 100))
    dataset = ObjectDataset(url, cache=tmp_path / "cache")
    (tmp_path / "data" / "a").unlink()
    dataset.prefetch([0, 1])
    with pytest.raises(OSError, match="a"):
        dataset[0]
    assert dataset[1] == b"x" * 100
    assert dataset.cache is not None
    assert dataset.cache._lock_inflight(dataset._cache_keys(0)[0])
    dataset.close()


def test_warming_leaves_to_others_what_they_read(tmp_path: Path) -> None:
    url = write(tmp_path / "data", {name: name.encode() * 100 for name in "abc"})
    dataset = ObjectDataset(url, cache=tmp_path / "cache")
    first, second = dataset._cache_keys(0)[0], dataset._cache_keys(1)[0]
    with others_locks(tmp_path / "cache") as other:
        assert other.lock(first) and other.lock(second)
        outcomes = dataset.warm(range(3))
        assert next(outcomes) == Warmed(2, "stored", 100)
        assert dataset.cache is not None
        dataset.cache.write(first, b"a" * 100)  # by the other run; its lock on the second ends with it
        dataset.cache.flush()
    assert sorted(outcomes) == [Warmed(0, "present"), Warmed(1, "stored", 100)]
    dataset.close()
