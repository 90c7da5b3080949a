"""The cache returns exactly the bytes that were written, or nothing; its arguments and its limits."""

from __future__ import annotations

import errno
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload.cache import Cache
from fastload.cache import access as access_module
from fastload.cache import segment as segment_module
from fastload.cache import writer as writer_module
from fastload.cache.segment import record_size
from fastload.cache.writer import Item
from fastload.errors import ArgumentError, CacheError
from fastload.metrics.counters import Counters
from tests.cachedata import fill, payload_of, segments
from tests.patience import PATIENCE


def test_written_is_read(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    content = fill(cache, 200)
    for key, payload in content.items():
        entry = cache.lookup(key)
        assert entry is not None and entry.length == len(payload)
        cache._will_need(entry)
        assert cache.read(key, entry) == payload
    assert cache.read(cache.key("absent")) is None
    counters = cache.counters.as_dict()
    assert counters["cache.hits"] == counters["cache.writes"] == 200
    assert counters["cache.bytes"] == counters["cache.write_bytes"] == 200 * 3000
    assert counters["cache.misses"] == 1


@pytest.mark.parametrize("error", [None, BlockingIOError(), OSError(errno.EOPNOTSUPP, "not supported")])
def test_record_is_read_ahead_unless_it_is_in_memory(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    cache = open_cache()
    entry = cache.lookup(next(iter(fill(cache, 1))))
    assert entry is not None
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: advised.append(length))
    if error is not None:

        def fail(*_: Any) -> int:
            raise error

        monkeypatch.setattr(os, "preadv", fail)
    cache._will_need(entry)
    assert advised == ([] if error is None else [64 + 3000])


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 5_000_000])
def test_sizes(open_cache: Callable[..., Cache], size: int) -> None:
    cache = open_cache()
    content = fill(cache, 2, size)
    for key, payload in content.items():
        assert cache.read(key) == payload
    assert cache.check().ok


def test_buffers(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    mutable = bytearray(b"before")
    assert cache.write(cache.key("a"), mutable)
    mutable[:] = b"after!"
    strided = memoryview(bytes(range(100)))[::2]
    assert cache.write(cache.key("b"), strided)
    assert cache.flush(30)
    assert cache.read(cache.key("a")) == b"before"
    assert cache.read(cache.key("b")) == bytes(range(0, 100, 2))


def test_read_only_payload_is_not_copied(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    directory = cache._open_or_raise()
    assert directory is not None and directory.writer is not None
    taken: list[Item] = []
    directory.writer.put = lambda item, wait: bool(taken.append(item)) or True  # type: ignore[method-assign]
    payload = b"x" * 1000
    cache.write(cache.key("a"), payload)
    assert taken[0].payload.obj is payload


def test_survives_reopening(open_cache: Callable[..., Cache]) -> None:
    content = fill(cache := open_cache(), 50)
    cache.close()
    again = open_cache()
    assert all(again.read(key) == payload for key, payload in content.items())
    assert again.check().entries == 50
    # And the closed one opens itself again.
    assert all(cache.read(key) == payload for key, payload in content.items())


def test_key_tells_everything_apart(tmp_path: Path) -> None:
    caches = [
        Cache(tmp_path, "raw"),
        Cache(tmp_path, "shrunk"),
        Cache(tmp_path, "shrunk", quality=91),
        Cache(tmp_path, "shrunk", short_side=257),
        Cache(tmp_path, "decoded"),
        Cache(tmp_path, "decoded", short_side=257),
    ]
    parts: list[tuple[str | bytes, ...]] = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("ab", "c", ""),
        ("2:ab", "c"),
        (),
    ]
    keys = [cache.key(*some) for cache in caches for some in parts]
    assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {16}
    # Parameters that do not shape the payload do not part the keys.
    assert Cache(tmp_path, "raw", quality=1).key("a") == Cache(tmp_path, "raw").key(b"a")
    assert Cache(tmp_path, "decoded", quality=1).key("a") == Cache(tmp_path, "decoded").key("a")
    assert Cache(tmp_path).key("\udcff") != Cache(tmp_path).key("?")


def test_key_is_pinned(tmp_path: Path) -> None:
    """A change here makes every cache in the world cold: it must be a decision."""
    assert Cache(tmp_path).key("s3://bucket", "a.jpg", "etag").hex() == "a02083bb6fb2432963730ebe9c2e28f7"


def test_duplicates_are_stored_once(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    key = cache.key("same")
    for _ in range(5):
        assert cache.write(key, b"x" * 1000)
    assert cache.flush(30)
    assert cache.write(key, b"x" * 1000) and cache.flush(30)
    assert cache.info()["bytes"] == record_size(1000)


def test_two_caches_of_one_process_share_the_directory(
    tmp_path: Path, open_cache: Callable[..., Cache]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir(0o700)
    one, two = open_cache(tmp_path / "real"), open_cache(tmp_path / "link", "decoded")
    fill(one, 3)
    fill(two, 3)
    assert one.info()["entries"] == two.info()["entries"] == 6
    assert one._open_or_raise() is two._open_or_raise()
    one.close()
    assert two.read(two.key("k1")) == payload_of("k1")


def test_collected_cache_closes(tmp_path: Path) -> None:
    before = set(access_module._opened)  # of other tests
    cache = Cache(tmp_path / "c")
    fill(cache, 1)
    assert set(access_module._opened) > before
    del cache
    assert set(access_module._opened) == before


def test_cache_collected_at_the_end_of_python_says_nothing(tmp_path: Path) -> None:
    code = """
import os, sys
from fastload import Cache
fsync = os.fsync
os.fsync = lambda descriptor: fsync(descriptor)  # keeps the names here until modules have lost theirs
cache = Cache(sys.argv[1], "raw")
cache.write(cache.key("1"), b"x")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "cache"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_cache_collected_while_another_opens_closes(tmp_path: Path) -> None:
    """A collection may run in the thread that is just opening a directory."""
    before = set(access_module._opened)  # of other tests
    cache = Cache(tmp_path / "c")
    fill(cache, 1)
    with access_module._lock:
        del cache
    assert set(access_module._opened) > before
    Cache(tmp_path / "d")._open_or_raise()
    assert set(access_module._opened) == before


def test_pickles_as_its_address(open_cache: Callable[..., Cache], tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", "shrunk", size_limit="1GB", short_side=100, quality=70)
    fill(cache, 100)
    data = pickle.dumps(cache)
    assert len(data) < 400
    copy = pickle.loads(data)
    assert (copy.path, copy.mode, copy.size_limit) == (cache.path, "shrunk", 10**9)
    assert copy.key("k1") == cache.key("k1") and copy.read(cache.key("k1")) == payload_of("k1")
    assert copy.counters["cache.writes"] == 0
    copy.close()
    # The address of a path that has become unusable still unpickles: the worker passes through.
    cache.close()
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    copy = pickle.loads(data)
    with pytest.warns(RuntimeWarning, match="passes through"):
        assert copy.read(cache.key("k1")) is None and not copy.write(cache.key("k1"), b"x")


def test_threads(open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of 12 segments by 8 threads with 3 open files among them."""
    monkeypatch.setattr(segment_module, "MAX_OPEN_SEGMENTS", 3)
    monkeypatch.setattr(writer_module, "SEGMENT_BYTES", 4000)
    cache = open_cache()
    content: dict[bytes, bytes] = {}
    for part in range(12):
        some = {cache.key(f"{part}/{i}"): payload_of(f"{part}/{i}") for i in range(3)}
        assert all(cache.write(key, payload) for key, payload in some.items()) and cache.flush(30)
        content |= some
    assert len(segments(Path(cache.path))) == 12
    wrong: list[bytes] = []

    def read(seed: int) -> None:
        keys = list(content) * 10
        random.Random(seed).shuffle(keys)
        wrong.extend(key for key in keys if cache.read(key) != content[key])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong
    assert cache.counters["cache.hits"] == 8 * 360


def test_close_under_readers(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    content = fill(cache, 20)
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            for key, payload in content.items():
                if cache.read(key) not in (payload, None):
                    wrong.append(key)

    threads = [threading.Thread(target=read) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a lookup in a closing index is a failure, hence a miss
        for thread in threads:
            thread.start()
        for _ in range(20):
            cache.close()
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not wrong


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5),
        ("5", 5),
        ("500GB", 500 * 10**9),
        ("200MiB", 200 << 20),
        (" 1.5 kb ", 1500),
        ("2tib", 2 << 40),
        ("7B", 7),
    ],
)
def test_size_limit(tmp_path: Path, text: int | str, size: int) -> None:
    assert Cache(tmp_path, size_limit=text).size_limit == size


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "cooked"},
        {"size_limit": "lots"},
        {"size_limit": 0},
        {"size_limit": -1},
        {"size_limit": True},
        {"size_limit": "5 XB"},
        {"size_limit": 1.5},
        {"short_side": 0},
        {"short_side": "256"},
        {"quality": 101},
        {"quality": True},
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(options))}( must be|=)"):
        Cache(tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("path", ["", "s3://bucket/cache", b"bytes", "a\0b", "$TMPDIR/cache", "/ssd/${USER}"])
def test_bad_paths(path: Any) -> None:
    with pytest.raises(ArgumentError, match="path="):
        Cache(path)


def test_constructor_makes_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "a" / "b")
    cache.key("x")
    assert cache.info()["entries"] == 0 and not cache.info()["exists"]
    assert cache.check().ok and cache.clear() == 0
    assert cache.counters.as_dict() == {}
    cache.close()
    assert list(tmp_path.iterdir()) == []


def test_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheError, match="path="):
            Cache(path)
    assert (tmp_path / "file").read_text() == "hello"


def test_size_limit_fills_then_stops(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LINGER", PATIENCE)  # until `flush`, none of them is on its way
    cache = open_cache(size_limit=10 * record_size(1000) + 50)
    kept = [cache.write(cache.key(str(i)), payload_of(str(i), 1000)) for i in range(50)]
    assert cache.flush(30)
    assert kept == [True] * 10 + [False] * 40
    assert cache.counters["cache.dropped"] == 40 and cache.counters["cache.writes"] == 10
    assert sum(file.stat().st_size for file in segments(Path(cache.path))) <= 10 * record_size(1000)
    assert cache.read(cache.key("3")) == payload_of("3", 1000)
    assert cache.counters["cache.failures"] == 0
    cache.clear()
    assert cache.write(cache.key("new"), b"x" * 1000)  # there is room again


def test_records_on_their_way_count_once(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They counted as queued, too, while room was reserved for them: a pull ended before the limit."""
    cache = open_cache(size_limit=10 * record_size(1000))
    reserved, gate, real = threading.Event(), threading.Event(), os.pwritev

    def slow(*args: Any) -> int:
        reserved.set()
        assert gate.wait(PATIENCE)
        return real(*args)

    monkeypatch.setattr(os, "pwritev", slow)
    kept = [cache.write(cache.key(str(i)), payload_of(str(i), 1000)) for i in range(6)]
    assert reserved.wait(PATIENCE)
    kept += [cache.write(cache.key(str(i)), payload_of(str(i), 1000)) for i in range(6, 12)]
    gate.set()
    assert cache.flush(30)
    assert kept == [True] * 10 + [False] * 2 and cache.info()["entries"] == 10


def test_tiny_limit_passes_through(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache(size_limit=10)
    assert not cache.write(cache.key("a"), b"x" * 100)
    assert cache.read(cache.key("a")) is None and cache.counters["cache.failures"] == 0


def test_reservations_of_a_killed_process_are_given_back(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    fill(cache, 2)
    directory = cache._open_or_raise()
    assert directory is not None
    directory.index.set_used_bytes(10**12)
    cache.close()
    limited = open_cache(size_limit=10**6)
    assert limited.write(limited.key("x"), b"x" * 100)


@pytest.mark.parametrize(
    ("records", "size", "limit"),
    [(6, 100_000, 1_000_000), (writer_module.BATCH_RECORDS, 5, None)],
    ids=["a memory limit makes the queue small", "small records fill a batch"],
)
def test_records_are_written_before_the_queue_lingers(
    records: int, size: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LINGER", PATIENCE)
    if limit is not None:
        monkeypatch.setattr(writer_module, "payload_limit", lambda: limit)
    queue, began = writer_module.WriteQueue(), time.monotonic()
    for i in range(records):
        assert queue.put(Item(b"%d" % i, memoryview(bytes(size)), 0, None, Counters()))
    batch = queue.take()
    assert batch is not None and len(batch.items) == records
    assert time.monotonic() - began < PATIENCE / 2


def test_full_queue_drops_and_does_not_wait(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "QUEUE_BYTES", 10_000)
    gate, real = threading.Event(), os.pwritev

    def slow(*args: Any) -> int:
        assert gate.wait(PATIENCE)
        return real(*args)

    monkeypatch.setattr(os, "pwritev", slow)
    cache = open_cache()
    kept = [
        cache.write(cache.key(str(i)), payload_of(str(i), 1000)) for i in range(100)
    ]  # returns: did not wait
    assert sum(kept) == 10_000 // record_size(1000)
    assert not cache.flush(0.05)
    gate.set()
    assert cache.flush(30)
    assert all((cache.read(cache.key(str(i))) is not None) == k for i, k in enumerate(kept))
    assert cache.counters["cache.dropped"] == 100 - sum(kept)
    # One that is larger than the queue still goes, alone.
    assert cache.write(cache.key("big"), b"x" * 50_000) and cache.flush(30)
    assert cache.read(cache.key("big")) == b"x" * 50_000
