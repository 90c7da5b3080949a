"""The cache: what it returns is what was written, or nothing; and what happens to it stops nobody."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from fastload.cache import Cache, Entry, maintenance
from fastload.cache import directory as directory_module
from fastload.cache import index as index_module
from fastload.cache import registry as registry_module
from fastload.cache import segment as segment_module
from fastload.cache import write_queue as queue_module
from fastload.cache import writer as writer_module
from fastload.cache.segment import HEADER_SIZE, record_size
from fastload.cache.write_queue import Item
from fastload.errors import ArgumentError, CacheError
from tests.patience import PATIENCE

HEADER_FIELDS = range(HEADER_SIZE)


def payload_of(name: str, size: int = 3000) -> bytes:
    """Deterministic bytes: a hash chain of the name."""
    return hashlib.shake_256(name.encode()).digest(size)


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[Callable[..., Cache]]:
    """Makes caches in one directory, and closes them."""
    made: list[Cache] = []

    def make(path: Path | None = None, *args: Any, **options: Any) -> Cache:
        made.append(Cache(path or tmp_path / "cache", *args, **options))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def fill(cache: Cache, count: int, size: int = 3000) -> dict[bytes, bytes]:
    """Write `count` payloads, and wait until they are in."""
    content = {cache.key(f"k{i}"): payload_of(f"k{i}", size) for i in range(count)}
    for key, payload in content.items():
        assert cache.write(key, payload)
    assert cache.flush(30)
    return content


def segments(path: Path) -> list[Path]:
    return sorted((path / "v1" / "segments").glob("*.seg"))


def marker(cache: Cache) -> dict[str, Any]:
    """How the directory was left."""
    return dict(json.loads((Path(cache.path) / "v1" / "fastload-cache.json").read_bytes()))


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


# -- the way there and back


def test_written_is_read(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    content = fill(cache, 200)
    for key, payload in content.items():
        entry = cache.lookup(key)
        assert entry is not None and entry.length == len(payload)
        cache.will_need(entry)
        assert cache.read(key, entry) == payload
    assert cache.read(cache.key("absent")) is None
    counters = cache.counters.as_dict()
    assert counters["cache.hits"] == counters["cache.writes"] == 200
    assert counters["cache.bytes"] == counters["cache.write_bytes"] == 200 * 3000
    assert counters["cache.misses"] == 1


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
    directory = cache.open_or_raise()
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
    assert one.open_or_raise() is two.open_or_raise()
    one.close()
    assert two.read(two.key("k1")) == payload_of("k1")


def test_collected_cache_closes(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    fill(cache, 1)
    del cache
    assert not registry_module._opened


def test_pickles_as_its_address(open_cache: Callable[..., Cache], tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", "shrunk", size_limit="1GB", short_side=100, quality=70)
    fill(cache, 100)
    data = pickle.dumps(cache)
    assert len(data) < 400
    twin = pickle.loads(data)
    assert (twin.path, twin.mode, twin.size_limit) == (cache.path, "shrunk", 10**9)
    assert twin.key("k1") == cache.key("k1") and twin.read(cache.key("k1")) == payload_of("k1")
    assert twin.counters["cache.writes"] == 0
    twin.close()
    # The address of a path that has become unusable still unpickles: the worker passes through.
    cache.close()
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    twin = pickle.loads(data)
    with pytest.warns(RuntimeWarning, match="passes through"):
        assert twin.read(cache.key("k1")) is None and not twin.write(cache.key("k1"), b"x")


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


# -- arguments


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
        {"memory": "1GB"},
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(options))}="):
        Cache(tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("path", ["", "s3://bucket/cache", b"bytes", "a\0b"])
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


# -- damage to the bytes


def test_every_header_byte_and_many_payload_bytes(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    content = fill(cache, 1)
    (key, payload), *_ = content.items()
    (segment,) = segments(Path(cache.path))
    generator = random.Random(7)
    offsets = [*HEADER_FIELDS, HEADER_SIZE, HEADER_SIZE + len(payload) - 1]
    offsets += [generator.randrange(HEADER_SIZE, HEADER_SIZE + len(payload)) for _ in range(1000)]
    entry = cache.lookup(key)
    for count, offset in enumerate(offsets):
        mask = 1 << generator.randrange(8)
        flip(segment, offset, mask)
        assert cache.read(key, entry) is None, f"byte {offset}, mask {mask}"
        flip(segment, offset, mask)
        assert cache.counters["cache.corrupt"] == count + 1
    assert cache.read(key, entry) == payload


def test_padding_is_nobodys_business(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    ((key, payload),) = fill(cache, 1, 65).items()
    flip(segments(Path(cache.path))[0], HEADER_SIZE + 65)
    assert cache.read(key) == payload


def test_corrupt_entry_is_dropped_and_written_anew(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    content = fill(cache, 3)
    key = next(iter(content))
    flip(segments(Path(cache.path))[0], HEADER_SIZE + 5)
    assert cache.read(key) is None
    assert cache.flush(30)
    assert cache.lookup(key) is None
    assert cache.write(key, content[key]) and cache.flush(30)
    assert cache.read(key) == content[key]
    assert cache.counters["cache.corrupt"] == 1
    assert cache.check().ok


def test_twin_without_checksums_serves_bad_bytes(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that it is the payload's checksum which catches a flipped payload byte."""
    cache = open_cache()
    ((key, payload),) = fill(cache, 1).items()
    entry = cache.lookup(key)
    assert entry is not None
    flip(segments(Path(cache.path))[0], HEADER_SIZE + 5)
    monkeypatch.setattr(segment_module, "checksum", lambda data: entry.checksum)
    served = cache.read(key, entry)
    assert served is not None and served != payload


@pytest.mark.parametrize("keep", [0, 0.5, -1, -HEADER_SIZE])
def test_truncated_segment(open_cache: Callable[..., Cache], keep: float) -> None:
    cache = open_cache()
    content = fill(cache, 4, 1000)
    (segment,) = segments(Path(cache.path))
    size = 3 * record_size(1000) + HEADER_SIZE + 1000  # without the last record's padding
    end = int(size * keep) if 0 <= keep < 1 else size + int(keep)
    os.truncate(segment, end)
    expected = [key for i, key in enumerate(content) if i * record_size(1000) + HEADER_SIZE + 1000 <= end]
    found = [key for key in content if cache.read(key) is not None]
    assert found == expected and len(found) < 4
    assert all(cache.read(key) == content[key] for key in found)
    cache.flush(30)
    assert cache.check().ok  # the reads dropped the entries


def test_deleted_segment_and_huge_entries(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    content = fill(cache, 3)
    key = next(iter(content))
    entry = cache.lookup(key)
    assert entry is not None
    for wrong in (
        entry._replace(length=(1 << 64) - 1),
        entry._replace(offset=(1 << 64) - 1),
        entry._replace(length=1 << 40),
        entry._replace(offset=entry.offset + 64),
        entry._replace(segment=77),
        entry._replace(checksum=1),
    ):
        assert cache.read(key, wrong) is None
        cache.will_need(wrong)
    assert cache.flush(30) and cache.read(key) == content[key]  # a wrong entry in hand drops no right one
    cache.close()
    segments(Path(cache.path))[0].unlink()
    assert [cache.read(key) for key in content] == [None] * 3
    assert cache.counters["cache.failures"] == 0
    cache.flush(30)
    assert cache.info()["entries"] == 0


@pytest.mark.parametrize("plant", ["symlink", "fifo", "directory"])
def test_segment_that_is_no_file(open_cache: Callable[..., Cache], tmp_path: Path, plant: str) -> None:
    cache = open_cache()
    content = fill(cache, 2)
    cache.close()
    (segment,) = segments(Path(cache.path))
    segment.rename(tmp_path / "elsewhere")
    if plant == "symlink":
        segment.symlink_to(tmp_path / "elsewhere")
    elif plant == "fifo":
        os.mkfifo(segment)
    else:
        segment.mkdir()
    assert all(cache.read(key) is None for key in content)
    assert cache.counters["cache.corrupt"] == 2
    assert cache.check().foreign_files == [f"v1/segments/{segment.name}"]
    cache.clear()
    assert os.path.lexists(segment) and (tmp_path / "elsewhere").exists()


def test_eio_on_read_is_a_miss(open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache()
    ((key, _),) = fill(cache, 1).items()

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.warns(RuntimeWarning, match="Input/output error"):
        assert cache.read(key) is None
    assert cache.read(key) is None  # warned once
    assert cache.counters["cache.failures"] >= 1
    monkeypatch.undo()
    cache.flush(30)
    assert cache.lookup(key) is None


def test_out_of_descriptors_keeps_the_entry(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache()
    ((key, payload),) = fill(cache, 1).items()
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if str(path).endswith(".seg"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(RuntimeWarning, match="Too many open files"):
        assert cache.read(key) is None
    monkeypatch.undo()
    cache.flush(30)
    assert cache.read(key) == payload


# -- damage to the index


@pytest.mark.parametrize("damage", ["garbage", "empty", "missing", "truncated", "one page"])
def test_damaged_index_is_made_again(open_cache: Callable[..., Cache], damage: str) -> None:
    cache = open_cache()
    content = fill(cache, 300)
    cache.close()
    data = Path(cache.path) / "v1" / "index" / "data.mdb"
    if damage == "garbage":
        data.write_bytes(os.urandom(50_000))
    elif damage == "missing":
        data.unlink()
    else:
        os.truncate(data, {"empty": 0, "truncated": 20_000, "one page": 4096}[damage])
    cache.lookup(next(iter(content)))
    assert cache.flush(30)  # the writer's first job is the new index
    assert all(cache.read(key) == payload for key, payload in content.items())
    assert cache.counters["cache.failures"] == 0
    report = cache.check()
    assert report.ok and report.entries == 300 and not report.foreign_files


def test_unclean_stop_of_the_machine(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not closed, and the machine has booted since: the old index is not even opened."""
    cache = open_cache()
    content = fill(cache, 10)
    copy = Path(cache.path).parent / "copy"  # as a machine that lost power would find it
    shutil.copytree(cache.path, copy)
    (copy / "v1" / "index" / "data.mdb").write_bytes(b"half written")
    monkeypatch.setattr(directory_module, "_boot_id", lambda: "another boot")
    opened: list[bytes] = []
    real = lmdb.open

    def spy(path: str, **options: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            opened.append((Path(path) / "data.mdb").read_bytes()[:4])
        return real(path, **options)

    monkeypatch.setattr(lmdb, "open", spy)
    after = open_cache(copy)
    after.lookup(b"x" * 16)
    assert after.flush(30) and opened == []
    assert all(after.read(key) == payload for key, payload in content.items())
    after.close()
    assert open_cache(copy).read(next(iter(content))) is not None
    assert opened[0][:4] != b"half"  # closed cleanly: trusted, in any boot


def test_damage_that_another_process_has_noted_is_not_forgotten(open_cache: Callable[..., Cache]) -> None:
    """Whoever leaves last, the index is made anew."""
    cache = open_cache()
    content = fill(cache, 10)

    def child() -> bool:
        directory = cache.open_or_raise()
        assert directory is not None
        directory.mark_damaged()
        cache.close()
        return True

    assert in_child(child)
    lost, directory = next(iter(content)), cache.open_or_raise()
    entry = cache.lookup(lost)
    assert directory is not None and entry is not None
    directory.index.drop([(lost, entry.pack())])
    cache.close()
    assert not marker(cache)["clean"]
    cache.lookup(lost)
    assert cache.flush(30)
    assert all(cache.read(key) == payload for key, payload in content.items())


def test_lookup_in_a_corrupt_index(open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache()
    content = fill(cache, 5)
    directory = cache.open_or_raise()
    assert directory is not None

    def corrupt(key: bytes) -> Entry:
        raise lmdb.CorruptedError("page is not a page")

    monkeypatch.setattr(directory.index, "get", corrupt)
    with pytest.warns(RuntimeWarning, match="page is not a page"):
        assert cache.read(next(iter(content))) is None
    cache.close()
    # The next to open it alone makes it anew.
    assert cache.lookup(b"x" * 16) is None and cache.flush(30)
    assert all(cache.read(key) == payload for key, payload in content.items())


def test_map_full(open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAP_SIZE", 128 << 10)
    cache = open_cache()
    with pytest.warns(RuntimeWarning, match="MDB_MAP_FULL"):
        for i in range(5000):
            cache.write(cache.key(str(i)), b"x")
        cache.flush(30)
        assert not cache.write(cache.key("late"), b"x")
    assert cache.counters["cache.failures"] == 1
    for i in range(5000):
        assert cache.read(cache.key(str(i))) in (b"x", None)


def test_dead_readers_are_cleared(open_cache: Callable[..., Cache], tmp_path: Path) -> None:
    cache = open_cache()
    fill(cache, 1)
    cache.close()
    script = (
        "import lmdb, os, sys\n"
        "env = lmdb.open(sys.argv[1], max_dbs=3, max_readers=1024)\n"
        "held = [env.begin() for _ in range(100)]\n"
        "os.kill(os.getpid(), 9)\n"
    )
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", script, str(Path(cache.path) / "v1" / "index")],
            check=False,
            timeout=PATIENCE,
        )
    assert cache.read(cache.key("k0")) is not None
    directory = cache.open_or_raise()
    assert directory is not None and "no active readers" in directory.index._env.readers().lower()


# -- check and clear


def test_check_fix(open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SEGMENT_BYTES", 3 * record_size(1000))
    cache = open_cache()
    for part in range(4):  # segments of three records
        for i in range(3):
            cache.write(cache.key(f"{part}/{i}"), payload_of(f"{part}/{i}", 1000))
        assert cache.flush(30)
    assert cache.check().entries == 12
    cache.close()
    first, second, *_ = segments(Path(cache.path))
    entry_of = {
        cache.key(f"{p}/{i}"): cache.lookup(cache.key(f"{p}/{i}")) for p in range(4) for i in range(3)
    }
    directory = cache.open_or_raise()
    assert directory is not None
    names = {name: number for number, name in directory.index.segments().items()}
    for i in range(3):
        flip(first, i * record_size(1000) + HEADER_SIZE + 9)  # all bad
    lost = [(key, e) for key, e in entry_of.items() if e is not None and e.segment == names[second.name]]
    directory.index.drop([(key, e.pack()) for key, e in lost])  # sound, but not in the index

    seen: list[tuple[int, int]] = []
    report = cache.check(progress=lambda done, of: seen.append((done, of)))
    assert (report.entries, report.bad_entries, report.ok) == (6, 3, False)
    assert report.orphaned_bytes == 6 * record_size(1000)
    assert seen[-1] == (9, 9)
    fixed = cache.check(fix=True)
    assert (fixed.bad_entries, fixed.dropped_entries, fixed.recovered_entries, fixed.ok) == (3, 3, 3, True)
    assert fixed.freed_bytes == 3 * record_size(1000) and not first.exists()
    again = cache.check()
    assert (again.entries, again.bad_entries, again.orphaned_bytes) == (9, 0, 0)
    assert cache.info()["bytes"] == again.bytes == 9 * record_size(1000)
    assert again.as_dict()["ok"] is True


def test_fix_leaves_a_living_writers_segment(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    ((key, _),) = fill(cache, 1).items()
    flip(segments(Path(cache.path))[0], HEADER_SIZE)
    assert cache.check(fix=True).freed_bytes == 0
    content = fill(cache, 5)
    assert all(cache.read(k) == payload for k, payload in content.items())
    assert len(segments(Path(cache.path))) == 1 and key in content


def test_scan_steps_over_damage_and_forgeries(open_cache: Callable[..., Cache]) -> None:
    """A payload that imitates records, behind a broken header, is not taken for any."""
    cache = open_cache()
    victim = cache.key("victim")
    forged = segment_module.pack_header(
        bytes(16), victim, 4, segment_module.checksum(b"evil")
    ) + b"evil".ljust(64)
    cache.write(cache.key("carrier"), forged * 10)
    cache.flush(30)
    fill(cache, 3)
    cache.close()
    flip(segments(Path(cache.path))[0], 20)
    (Path(cache.path) / "v1" / "index" / "data.mdb").unlink()
    cache.lookup(victim)
    assert cache.flush(30)
    assert cache.info()["entries"] == 3 and cache.lookup(victim) is None


def test_clear_and_foreign_files(open_cache: Callable[..., Cache], tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    foreign = {
        path / "notes.txt": b"mine",
        path / "v0" / "old.seg": b"another format",
        path / "photos" / "a.jpg": b"photo",
    }
    cache = open_cache(path)
    fill(cache, 20)
    foreign |= {
        path / "v1" / "readme": b"mine",
        path / "v1" / "segments" / "holiday.seg": b"mine",
        path / "v1" / "segments" / "host-1-zz.seg": b"mine",
        path / "v1" / "index" / "backup.mdb": b"mine",
    }
    foreign |= {path / "manifests" / "list.txt": b"mine"}
    for file, data in foreign.items():
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
    (path / "manifests" / "0123.manifest").write_bytes(b"listing")
    expected = ["manifests/list.txt", "notes.txt", "photos", "v0", "v1/index/backup.mdb", "v1/readme"]
    expected += ["v1/segments/holiday.seg", "v1/segments/host-1-zz.seg"]
    assert cache.check().foreign_files == expected and cache.check().ok
    assert cache.clear() == 20 * record_size(3000) + len(b"listing")
    assert segments(path) == [path / "v1" / "segments" / n for n in ("holiday.seg", "host-1-zz.seg")]
    assert cache.info()["entries"] == 0
    content = fill(cache, 5)  # and it goes on
    assert all(cache.read(key) == payload for key, payload in content.items())
    assert cache.counters["cache.failures"] == 0
    cache.check(fix=True)
    assert {file: file.read_bytes() for file in foreign} == foreign


def test_clear_leaves_a_segment_that_is_just_being_made(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made before the clearing, registered after it: what is written to it comes after, and stays."""
    fill(open_cache(), 3)
    registry_module.close_all()
    cache = open_cache()
    directory = cache.open_or_raise()
    register = index_module.Index.add_segment
    freed = []

    def clear_first(index: index_module.Index, name: str) -> int:
        freed.append(maintenance.clear(directory))
        return register(index, name)

    monkeypatch.setattr(index_module.Index, "add_segment", clear_first)
    key = cache.key("after")
    assert cache.write(key, b"after") and cache.flush()
    assert freed == [3 * record_size(3000)]
    assert bytes(cache.read(key) or b"") == b"after"
    assert cache.counters["cache.failures"] == cache.counters["cache.corrupt"] == 0


def test_clear_leaves_a_segment_that_was_made_while_it_looked(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache()
    fill(cache, 3)
    names = cache.open_or_raise().segment_names
    key = cache.key("after")

    def write_first() -> list[str]:
        assert cache.write(key, b"after") and cache.flush()
        return names()

    monkeypatch.setattr(cache.open_or_raise(), "segment_names", write_first)
    assert maintenance.clear(cache.open_or_raise()) == 3 * record_size(3000)
    assert bytes(cache.read(key) or b"") == b"after"
    assert cache.counters["cache.failures"] == cache.counters["cache.corrupt"] == 0


def test_a_folder_of_somebody_elses(open_cache: Callable[..., Cache], tmp_path: Path) -> None:
    (tmp_path / "cache" / "v1").mkdir(parents=True)
    (tmp_path / "cache" / "v1" / "thesis.tex").write_text("x")
    cache = open_cache()
    with pytest.warns(RuntimeWarning, match="not a fastload cache"):
        assert not cache.write(b"k" * 16, b"x")
    with pytest.raises(CacheError, match="not a fastload cache"):
        cache.clear()
    assert [p.name for p in (tmp_path / "cache" / "v1").iterdir()] == ["thesis.tex"]


def test_another_format_is_left_alone(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "FOLDER", "v999")
    future = open_cache()
    fill(future, 3)
    future.close()
    monkeypatch.undo()
    cache = open_cache()
    assert cache.lookup(cache.key("k1")) is None
    fill(cache, 1)
    cache.clear()
    assert len(list((Path(cache.path) / "v999" / "segments").iterdir())) == 1


def test_record_of_another_format_is_a_miss(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache()
    with monkeypatch.context() as patch:
        patch.setattr(segment_module, "FORMAT", 2)
        ((key, _),) = fill(cache, 1).items()
    assert cache.read(key) is None


# -- limits


def test_size_limit_fills_then_stops(open_cache: Callable[..., Cache]) -> None:
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


def test_tiny_limit_passes_through(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache(size_limit=10)
    assert not cache.write(cache.key("a"), b"x" * 100)
    assert cache.read(cache.key("a")) is None and cache.counters["cache.failures"] == 0


def test_reservations_of_a_killed_process_are_given_back(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    fill(cache, 2)
    directory = cache.open_or_raise()
    assert directory is not None
    directory.index.set_used_bytes(10**12)
    cache.close()
    limited = open_cache(size_limit=10**6)
    assert limited.write(limited.key("x"), b"x" * 100)


def test_full_queue_drops_and_does_not_wait(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "QUEUE_BYTES", 10_000)
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


# -- failures of the disk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_write_error_passes_through(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    cache = open_cache()
    content = fill(cache, 10)
    size = segments(Path(cache.path))[0].stat().st_size
    real = os.pwritev

    def full(fd: int, buffers: Any, offset: int) -> int:
        real(fd, [b"half a rec"], offset)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.warns(RuntimeWarning, match=os.strerror(code)) as caught:  # by whichever call comes after it
        for i in range(20):
            cache.write(cache.key(f"more{i}"), b"x" * 1000)
        assert not cache.flush(30)
        assert not cache.write(cache.key("late"), b"x")
    assert len(caught) == 1 and cache.counters["cache.failures"] == 1
    assert cache.counters["cache.dropped"] == 21
    assert all(cache.read(key) == payload for key, payload in content.items())  # still serves
    assert segments(Path(cache.path))[0].stat().st_size == size  # no torn tail
    assert cache.check().ok


def test_partial_write_is_finished(open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: real(fd, [bytes(buffers[0])[:7]], offset))
    cache = open_cache()
    content = fill(cache, 10)
    assert all(cache.read(key) == payload for key, payload in content.items())


def test_nearly_full_disk_is_left_alone(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "RESERVE_BYTES", 1 << 60)
    real = os.fstatvfs

    def nearly_full(fd: int) -> os.statvfs_result:
        values = list(real(fd))
        values[4] = values[2] // 200  # f_bavail: half a per cent of f_blocks
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "fstatvfs", nearly_full)
    cache = open_cache()
    cache.write(cache.key("a"), b"x")
    with pytest.warns(RuntimeWarning, match=r"the disk is full: .* MB are free"):
        assert not cache.flush(30)


def _no_room(number: int) -> Callable[..., None]:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fails


def _no_room_in_the_index(*_: object) -> None:
    raise lmdb.DiskError("No space left on device")


@pytest.mark.parametrize("step", ["disk", "quota", "index"])
def test_without_room_for_the_mark_it_is_only_read(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    cache = open_cache()
    content = fill(cache, 10)
    cache.close()
    with monkeypatch.context() as patched:
        if step == "index":
            patched.setattr(index_module.Index, "set_used_bytes", _no_room_in_the_index)
        else:
            number = errno.ENOSPC if step == "disk" else errno.EDQUOT
            patched.setattr(directory_module.Directory, "_write_state", _no_room(number))
        assert all(cache.read(key) == payload for key, payload in content.items())
        assert cache.counters["cache.failures"] == 0
        with pytest.warns(RuntimeWarning, match="has no room left on its disk: it serves what it holds"):
            assert not cache.write(cache.key("new"), b"x")
    # It does not look like in use: another process is the first one, and marks it.
    lock = os.open(Path(cache.path) / "v1" / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
    assert in_child(lambda: cache.write(cache.key("new"), b"x") and cache.flush(30) and cache.close() is None)
    assert cache.read(cache.key("new")) == b"x"
    cache.close()
    assert marker(cache)["clean"]
    again = open_cache()
    assert again.write(again.key("more"), b"x") and again.flush(30)


def test_what_needs_repair_is_not_served_without_room(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache()
    content = fill(cache, 10)
    copy = Path(cache.path).parent / "copy"
    shutil.copytree(cache.path, copy)
    monkeypatch.setattr(directory_module, "_boot_id", lambda: "another boot")
    with monkeypatch.context() as patched:
        patched.setattr(directory_module.Directory, "_write_state", _no_room(errno.ENOSPC))
        with pytest.warns(RuntimeWarning, match="No space left"):
            assert open_cache(copy).read(next(iter(content))) is None
    after = open_cache(copy)
    after.lookup(b"x" * 16)
    assert after.flush(30) and all(after.read(key) == payload for key, payload in content.items())


def test_directory_removed_while_running(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    content = fill(cache, 10)
    shutil.rmtree(cache.path)
    assert all(cache.read(key) in (payload, None) for key, payload in content.items())
    cache.write(cache.key("more"), b"x")
    with pytest.warns(RuntimeWarning, match="removed"):
        assert not cache.flush(30)
    assert not cache.write(cache.key("more"), b"x")
    fresh = open_cache()  # a new one at the same place is a new directory, also while the old is open
    content = fill(fresh, 5)
    assert all(fresh.read(key) == payload for key, payload in content.items())


def test_directory_removed_before_the_first_segment(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    assert cache.lookup(cache.key("a")) is None
    shutil.rmtree(cache.path)
    cache.write(cache.key("a"), b"x")
    with pytest.warns(RuntimeWarning, match="passes through"):
        assert not cache.flush(30)


def test_errors_turned_on_do_not_escape(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under -W error, the one warning goes to the log instead of into the training loop."""
    cache = open_cache()
    ((key, _),) = fill(cache, 1).items()
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken disk")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.read(key) is None
    assert "broken disk" in caplog.text


def test_permissions(open_cache: Callable[..., Cache], tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        cache = open_cache()
        fill(cache, 3)
    finally:
        os.umask(old)
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_world_writable_is_refused(open_cache: Callable[..., Cache], tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(CacheError, match="writable for everybody"):
        Cache(path)
    path.chmod(0o1777)
    cache = open_cache(path)
    fill(cache, 1)
    cache.close()
    (path / "v1").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="other users"):
        assert cache.read(cache.key("k0")) is None


def test_index_symlink_is_refused(open_cache: Callable[..., Cache], tmp_path: Path) -> None:
    cache = open_cache()
    fill(cache, 1)
    cache.close()
    data = Path(cache.path) / "v1" / "index" / "data.mdb"
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        assert cache.read(cache.key("k0")) is None


# -- forks


def in_child(action: Callable[[], bool]) -> bool:
    """Run `action` in a forked child, as torch's workers start; True if it returned True there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads about
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if action() else 2
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def test_fork(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    content = fill(cache, 20)

    def child() -> bool:
        assert cache.counters.as_dict() == {}
        assert all(cache.read(key) == payload for key, payload in content.items())
        assert cache.write(cache.key("child"), b"from the child") and cache.flush(30)
        cache.close()
        return not any(cache.path in os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir())

    for _ in range(3):
        assert in_child(child)
        assert all(cache.read(key) == payload for key, payload in content.items())
    assert cache.read(cache.key("child")) == b"from the child"
    assert fill(cache, 30) and cache.check().entries == 31


def test_fork_in_the_middle_of_filling(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    stop = threading.Event()
    wrong: list[int] = []

    def read() -> None:
        while not stop.is_set():
            for i in range(50):
                if cache.read(cache.key(f"k{i}")) not in (None, payload_of(f"k{i}", 500)):
                    wrong.append(i)

    reader = threading.Thread(target=read)
    reader.start()

    def child() -> bool:
        cache.write(cache.key(f"child{os.getpid()}"), b"x")
        done = cache.flush(30)
        cache.close()
        return done

    try:
        for i in range(15):
            cache.write(cache.key(f"k{i}"), payload_of(f"k{i}", 500))
            assert in_child(child)
    finally:
        stop.set()
        reader.join(PATIENCE)
    assert not wrong and cache.flush(30)
    assert cache.check().entries == 30


def test_fork_while_the_index_is_stuck(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody holds LMDB's lock and does not move: the fork does not wait, the child passes through."""
    cache = open_cache()
    fill(cache, 3)
    directory = cache.open_or_raise()
    assert directory is not None
    monkeypatch.setattr(registry_module, "FORK_DEADLINE", 0.01)

    def child() -> bool:
        with pytest.warns(RuntimeWarning, match="already open in this process"):
            return cache.read(cache.key("k1")) is None and not cache.write(cache.key("x"), b"x")

    with directory.index._write_lock:
        assert in_child(child)
    assert in_child(lambda: cache.read(cache.key("k1")) == payload_of("k1"))
    assert cache.read(cache.key("k1")) == payload_of("k1")


def test_exit_without_close_is_clean(tmp_path: Path) -> None:
    """A multiprocessing child that just returns loses nothing, and leaves the index synced."""
    process = multiprocessing.get_context("spawn").Process(target=_fill_and_return, args=(tmp_path / "c",))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert b'"clean": true' in (tmp_path / "c" / "v1" / "fastload-cache.json").read_bytes()
    cache = Cache(tmp_path / "c")
    assert all(cache.read(cache.key(f"k{i}")) == payload_of(f"k{i}") for i in range(10))
    cache.close()


def _fill_and_return(path: Path) -> None:
    global _kept
    _kept = Cache(path)
    for i in range(10):
        _kept.write(_kept.key(f"k{i}"), payload_of(f"k{i}"))


# -- needs root


@contextlib.contextmanager
def tmpfs(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "fastload-test", str(path)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill_up(disk: Path) -> None:
    """As others may, down to the last byte: LMDB itself cannot write."""
    with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount and to change owners")


@pytest.mark.root
@needs_root
def test_full_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "20m") as disk:
        cache = Cache(disk / "c")
        payloads = {cache.key(str(i)): payload_of(str(i), 100_000) for i in range(400)}
        with pytest.warns(RuntimeWarning, match="passes through") as caught:
            for key, payload in payloads.items():
                cache.write(key, payload)
                cache.flush(30)
        assert len(caught) == 1 and cache.counters["cache.failures"] == 1
        served = [cache.read(key) for key in payloads]
        assert all(data in (None, payload) for data, payload in zip(served, payloads.values(), strict=True))
        assert sum(data is not None for data in served) > 150
        assert cache.check().ok
        cache.close()
        fill_up(disk)
        again = Cache(disk / "c")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for key, payload in payloads.items():
                assert again.read(key) in (payload, None)
                again.write(key, payload)
            again.close()


MAKES_A_CACHE = """
import sys, warnings, fastload
warnings.simplefilter("always")
cache = fastload.Cache(sys.argv[1])
key = cache.key("x")
print(cache.write(key, b"a" * 1000), cache.flush(), cache.read(key) is not None)
"""


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("free", [0, 4, 8, 16, 32, 64, 96])
def test_a_cache_made_on_a_full_disk_passes_through(tmp_path: Path, free: int) -> None:
    """LMDB writes its lock file through a mapping: without room for it that is SIGBUS."""
    with tmpfs(tmp_path / "small", "1m") as disk:
        fill_up(disk)
        with (disk / "other").open("r+b") as file:
            file.truncate((disk / "other").stat().st_size - (free << 10))
        done = subprocess.run(
            [sys.executable, "-c", MAKES_A_CACHE, str(disk / "cache")],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert (done.returncode, done.stdout) == (0, "False False False\n"), done.stderr
        assert done.stderr.count("fastload passes through its cache") == 1
        (disk / "other").unlink()
        cache = Cache(disk / "cache")
        assert fill(cache, 3) and cache.info()["entries"] == 3, "with room again it is made"
        cache.close()


@pytest.mark.root
@needs_root
def test_a_full_disk_and_a_lock_file_with_holes(tmp_path: Path) -> None:
    """As earlier versions made it: what the cache holds is served."""
    with tmpfs(tmp_path / "small", "4m") as disk:
        cache = Cache(disk / "c")
        content = fill(cache, 3)
        cache.close()
        lock = disk / "c" / "v1" / "index" / "lock.mdb"
        lock.unlink()
        with lock.open("wb") as file:
            file.truncate(65_664)
        fill_up(disk)
        assert all(cache.read(key) == payload for key, payload in content.items())
        cache.close()


@pytest.mark.root
@needs_root
def test_full_disk_serves_hits(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "20m") as disk:
        cache = Cache(disk / "c")
        content = fill(cache, 10)
        cache.close()
        fill_up(disk)
        assert all(cache.read(key) == payload for key, payload in content.items())
        assert cache.info()["entries"] == 10 and cache.check().ok
        with pytest.raises(CacheError, match="no room left on its disk and cannot be cleared"):
            cache.clear()
        with pytest.raises(CacheError, match="no room left on its disk: check without fix"):
            cache.check(fix=True)
        with pytest.warns(RuntimeWarning, match="no room left on its disk: it serves what it holds"):
            assert not cache.write(cache.key("new"), b"x")
        cache.close()
        assert marker(cache)["clean"]
        (disk / "other").unlink()
        again = Cache(disk / "c")
        assert again.write(again.key("new"), b"x") and again.flush(30)
        assert again.check().entries == 11
        again.close()


@pytest.mark.root
@needs_root
def test_read_only_mount_serves_hits(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "20m") as disk:
        cache = Cache(disk / "c")
        content = fill(cache, 10)
        cache.close()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert all(cache.read(key) == payload for key, payload in content.items())
        with pytest.warns(RuntimeWarning, match="read-only"):
            assert not cache.write(cache.key("new"), b"x")
        assert cache.read(cache.key("new")) is None
        assert cache.info()["entries"] == 10 and cache.check().ok
        with pytest.raises(CacheError, match="read-only"):
            cache.clear()
        with pytest.raises(CacheError, match="read-only"):
            cache.check(fix=True)
        cache.close()
        empty = Cache(disk / "new")
        with pytest.warns(RuntimeWarning, match="[Rr]ead-only"):
            assert not empty.write(cache.key("new"), b"x")
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@pytest.mark.root
@needs_root
def test_no_permission_to_write_serves_hits(tmp_path: Path) -> None:
    nobody = 65534
    for parent in tmp_path.parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    tmp_path.chmod(0o755)
    cache = Cache(tmp_path / "c")
    content = fill(cache, 10)
    cache.close()
    for path in [tmp_path / "c", *(tmp_path / "c").rglob("*")]:
        os.chown(path, nobody, nobody)
        path.chmod(0o500 if path.is_dir() else 0o400)

    def child() -> bool:
        os.setgid(nobody)
        os.setuid(nobody)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            right = all(cache.read(key) == payload for key, payload in content.items())
            return right and not cache.write(cache.key("new"), b"x") and "read-only" in str(caught[0].message)

    assert in_child(child)
    with pytest.warns(RuntimeWarning, match="other users"):
        os.chown(tmp_path / "c", 0, 0)
        assert Cache(tmp_path / "c").read(next(iter(content))) is None
    os.chown(tmp_path / "c", nobody, nobody)
    with pytest.raises(CacheError, match="belongs to user id 65534"):
        Cache(tmp_path / "c")


# -- everything at once


class CacheMachine(RuleBasedStateMachine):
    """Any order of calls and damage: a read returns exactly what was written under that key, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[bytes, bytes] = {}
        self.damaged = False

    @initialize(folder=st.uuids())
    def begin(self, folder: Any) -> None:
        self.path = Path(CacheMachine.root) / folder.hex
        shutil.rmtree(self.path, ignore_errors=True)
        self.cache = Cache(self.path)

    root = ""
    numbers = st.integers(0, 30)

    @rule(number=numbers, size=st.sampled_from([0, 1, 64, 700, 5000]))
    def write(self, number: int, size: int) -> None:
        key = self.cache.key(str(number))
        payload = self.model.get(key, payload_of(f"{number}/{size}", size))
        assert self.cache.write(key, payload)
        self.model[key] = payload

    @rule(number=numbers)
    def read(self, number: int) -> None:
        key = self.cache.key(str(number))
        found = self.cache.read(key)
        assert found is None or found == self.model[key]

    @rule()
    def flush(self) -> None:
        assert self.cache.flush(30)
        if not self.damaged:
            for key, payload in self.model.items():
                assert self.cache.read(key) == payload

    @rule()
    def reopen(self) -> None:
        self.cache.close()

    @rule(fix=st.booleans())
    def check(self, fix: bool) -> None:
        report = self.cache.check(fix)
        assert report.ok or (self.damaged and not fix)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model.clear()
        self.damaged = False

    def damage(self, draw: float) -> tuple[Path, int] | None:
        self.cache.flush(30)
        files = [file for file in segments(self.path) if file.stat().st_size]
        if not files:
            return None
        self.damaged = True
        size = files[0].stat().st_size
        return files[0], int(draw * size)

    fraction = st.floats(0, 1, exclude_max=True)

    @rule(where=fraction, mask=st.integers(1, 255))
    def corrupt(self, where: float, mask: int) -> None:
        if found := self.damage(where):
            flip(found[0], found[1], mask)

    @rule(where=fraction)
    def truncate(self, where: float) -> None:
        if found := self.damage(where):
            os.truncate(*found)

    @rule()
    def delete_segment(self) -> None:
        if found := self.damage(0):
            self.cache.close()
            found[0].unlink()

    @rule()
    def lose_index(self) -> None:
        self.cache.close()
        self.damaged = True
        with contextlib.suppress(FileNotFoundError):
            (self.path / "v1" / "index" / "data.mdb").unlink()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.counters["cache.failures"] == 0
            self.cache.close()
            shutil.rmtree(self.path, ignore_errors=True)


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(25, id="short"),
        pytest.param(1000, id="long", marks=[pytest.mark.stress, pytest.mark.timeout(900)]),
    ],
)
def test_any_order_of_calls_and_damage(tmp_path: Path, examples: int) -> None:
    CacheMachine.root = str(tmp_path)
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            suppress_health_check=list(HealthCheck),
        ),
    )
