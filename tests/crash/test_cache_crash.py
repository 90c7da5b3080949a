"""The cache under kill -9, and under several processes at once.

Payloads are a hash of their key, so that whoever reads can tell right from wrong without a second source.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import select
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload.cache import Cache
from fastload.cache import writer as writer_module
from fastload.cache.directory import Directory
from fastload.cache.segment import Entry, SegmentWriter, record_size
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("no_leaks")


def payload_of(name: str) -> bytes:
    size = 500 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:2], "big") % 60_000
    return hashlib.shake_256(name.encode()).digest(size)


class Child:
    """A forked process that runs `action(report)`; `report(line)` reaches `lines`. Ended with the block."""

    def __init__(self, action: Callable[[Callable[[str], None]], None]) -> None:
        self._read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads about
            self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._read)
                warnings.simplefilter("error")
                with os.fdopen(write, "w", buffering=1) as pipe:
                    action(lambda line: print(line, file=pipe, flush=True))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)
        self._text = b""
        self.status: int | None = None

    def wait_for(self, count: int, timeout: float = PATIENCE) -> None:
        """Until `count` lines have come or the child has ended."""
        while self._text.count(b"\n") < count:
            assert select.select([self._read], [], [], timeout)[0], "the child says nothing"
            data = os.read(self._read, 1 << 16)
            if not data:
                return
            self._text += data

    def end(self, kill: bool = False) -> list[str]:
        """All complete lines; `status` is the exit status as of waitpid."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        self.wait_for(1 << 62)
        os.close(self._read)
        self.status = os.waitpid(self.pid, 0)[1]
        return self._text.decode().split("\n")[:-1]


@contextlib.contextmanager
def opened(path: Path, **options: Any) -> Iterator[Cache]:
    cache = Cache(path, **options)
    try:
        yield cache
    finally:
        cache.close()


def fill_for_ever(path: Path, start: int) -> Callable[[Callable[[str], None]], None]:
    def action(report: Callable[[str], None]) -> None:
        cache = Cache(path)
        number = start
        while True:
            for _ in range(random.randrange(1, 40)):
                name = f"{start}-{number}"
                while not cache.write(cache.key(name), payload_of(name)):
                    assert cache.counters["cache.failures"] == 0
                number += 1
            assert cache.flush(60)
            report(f"{start}-{number}")  # all before this one are promised

    return action


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(20, id="short"),
        pytest.param(200, id="long", marks=[pytest.mark.stress, pytest.mark.timeout(1800)]),
    ],
)
def test_killed_while_filling(tmp_path: Path, rounds: int) -> None:
    """What was promised before a kill -9 is there and right after it, for every kill so far."""
    generator = random.Random(rounds)
    promised: dict[int, int] = {}
    verified = 0
    for turn in range(rounds):
        random.seed(turn)
        child = Child(fill_for_ever(tmp_path / "c", turn * 1_000_000))
        child.wait_for(generator.randrange(0, 6))
        select.select([], [], [], generator.uniform(0, 0.02))  # a random moment, not a state to wait for
        for line in child.end(kill=True):
            start, end = map(int, line.split("-"))
            promised[start] = end
        assert child.status == signal.SIGKILL
        with opened(tmp_path / "c") as cache:
            for start, end in promised.items():
                # Every record of the last round, a sample of the older ones.
                last = start == turn * 1_000_000
                numbers = range(start, end)
                for number in numbers if last else generator.sample(numbers, min(5, len(numbers))):
                    name = f"{start}-{number}"
                    assert cache.read(cache.key(name)) == payload_of(name), f"lost {name} in round {turn}"
                    verified += 1
            if turn % 10 == 9:
                report = cache.check()
                assert report.ok and not report.foreign_files
                cache.clear()
                promised.clear()
    assert verified > 20 * rounds  # the promises were not empty


# Moments inside the writer at which the process is killed: (function to wrap, when, fewest and most records
# whose bytes are whole then, without an index entry).
MOMENTS: dict[str, tuple[object, str, str, int, int]] = {
    "before the reservation": (writer_module.Index, "reserve", "before", 0, 0),
    "after the reservation": (writer_module.Index, "reserve", "after", 0, 0),
    "with half a record written": (os, "pwritev", "half", 1, 9),
    "before the index entries": (writer_module.Index, "publish", "before", 10, 10),
    "inside the index transaction": (Entry, "pack", "before", 10, 10),
    "after the index entries": (writer_module.Index, "publish", "after", 0, 0),
    "before a segment is registered": (writer_module.Index, "add_segment", "before", 0, 0),
    "after a segment is registered": (writer_module.Index, "add_segment", "after", 0, 0),
}


def die_at(moment: str) -> None:
    owner, name, when, _, _ = MOMENTS[moment]
    real = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        if when == "half":
            fd, buffers, offset = args
            data = b"".join(buffers)
            os.pwrite(fd, data[: len(data) * 2 // 3], offset)
        elif when == "after":
            real(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, wrapped)  # in the child: no need to undo


def killed_at(path: Path, moment: str, index_before_bytes: bool = False) -> None:
    def action(report: Callable[[str], None]) -> None:
        cache = Cache(path)
        cache.lookup(b"x" * 16)
        if index_before_bytes:
            writer_module.Writer._append = index_first  # type: ignore[method-assign]
        die_at(moment)
        writer_module.LINGER = PATIENCE  # all ten are one batch, which `flush` ends
        for i in range(10):
            name = f"{moment}-{i}"
            cache.write(cache.key(name), payload_of(name))
        cache.flush(60)

    child = Child(action)
    child.end()
    assert child.status == signal.SIGKILL, f"did not come to {moment!r}"


def index_first(self: writer_module.Writer, items: list[writer_module.Item]) -> None:
    """The mutation: promise first, write then."""
    assert self._segment is not None
    end, entries = self._segment.size, []
    for item in items:
        entries.append((item.key, Entry(self._number, end, len(item.payload), item.checksum)))
        end += record_size(len(item.payload))
    self._index.publish(self._number, entries)
    SegmentWriter.append(
        self._segment, self._number, [(i.key, (i.head, i.payload), i.checksum) for i in items]
    )


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_the_worst_moment(tmp_path: Path, moment: str) -> None:
    with opened(tmp_path / "c") as cache:
        before = {cache.key(f"old{i}"): payload_of(f"old{i}") for i in range(10)}
        assert all(cache.write(key, payload) for key, payload in before.items()) and cache.flush(30)
        killed_at(tmp_path / "c", moment)  # with this process looking on: its lock and index stay sound
        assert all(cache.read(key) == payload for key, payload in before.items())
        assert cache.write(cache.key("next"), b"next") and cache.flush(30)  # the dead one's LMDB lock is free
    with opened(tmp_path / "c") as cache:
        report = cache.check()
        assert report.ok and not report.foreign_files
        assert report.entries == (21 if moment == "after the index entries" else 11)
        assert all(cache.read(key) == payload for key, payload in before.items())
        for i in range(10):
            name = f"{moment}-{i}"
            assert cache.read(cache.key(name)) in (None, payload_of(name))
        on_disk = sum(file.stat().st_size for file in (tmp_path / "c" / "v1" / "segments").iterdir())
        assert cache.info()["bytes"] == on_disk == report.bytes + report.orphaned_bytes
        fixed = cache.check(fix=True)
        fewest, most = MOMENTS[moment][3:]
        assert fixed.ok and fewest <= fixed.recovered_entries <= most


def test_cleared_between_lookup_and_read(tmp_path: Path) -> None:
    """A plain miss, not corruption."""
    with opened(tmp_path / "c") as cache:
        key = cache.key("a")
        assert cache.write(key, b"x") and cache.flush(30)
        entry = cache.lookup(key)
        child = Child(lambda report: report(str(Cache(tmp_path / "c").clear())))
        assert child.end() == [str(record_size(1))] and child.status == 0
        assert entry is not None and cache.read(key, entry) is None
        assert cache.counters["cache.corrupt"] == 0 and cache.counters["cache.misses"] == 1


@pytest.mark.stress
def test_guard_removed_an_index_before_its_bytes_is_caught(tmp_path: Path) -> None:
    """Shows that the check sees what an index committed before its bytes would leave."""
    killed_at(tmp_path / "c", "with half a record written", index_before_bytes=True)
    with opened(tmp_path / "c") as cache:
        report = cache.check()
        assert not report.ok and report.bad_entries > 0
        # Even then no wrong bytes are served.
        names = [f"with half a record written-{i}" for i in range(10)]
        assert all(cache.read(cache.key(name)) in (None, payload_of(name)) for name in names)
        assert cache.check(fix=True).ok


# -- several processes


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_new_index_is_finished_whoever_leaves_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """One process makes the index anew and leaves; the one that leaves after it knows nothing of that."""
    with opened(tmp_path / "c") as cache:
        content = {cache.key(f"n{i}"): payload_of(f"n{i}") for i in range(30)}
        assert all(cache.write(key, payload) for key, payload in content.items()) and cache.flush(30)
    (tmp_path / "c" / "v1" / "index" / "data.mdb").unlink()
    goes, go = os.pipe()

    def second(report: Callable[[str], None]) -> None:
        with opened(tmp_path / "c") as cache:
            cache.lookup(b"x" * 16)
            report("inside")
            os.read(goes, 1)

    def left() -> dict[str, Any]:
        return dict(json.loads((tmp_path / "c" / "v1" / "fastload-cache.json").read_bytes()))

    with monkeypatch.context() as patched:
        if interrupted:
            patched.setattr(Directory, "_reindex", lambda self, stopping: None)
        with opened(tmp_path / "c") as cache:
            cache.lookup(b"x" * 16)
            assert cache.flush(30)
            child = Child(second)
            child.wait_for(1)
        os.write(go, b"x")
        child.end()
    assert child.status == 0
    assert (left()["clean"], left()["reindex"]) == (True, interrupted)
    with opened(tmp_path / "c") as cache:
        cache.lookup(b"x" * 16)
        assert cache.flush(30)
        assert all(cache.read(key) == payload for key, payload in content.items())
    assert (left()["clean"], left()["reindex"]) == (True, False)
    os.close(goes)
    os.close(go)


def epochs(path: Path, seed: int, count: int, times: int) -> Callable[[Callable[[str], None]], None]:
    def action(report: Callable[[str], None]) -> None:
        cache = Cache(path)
        order = random.Random(seed)
        for turn in range(times):
            for number in order.sample(range(count), count):
                name = f"n{number}"
                found = cache.read(cache.key(name))
                if found is None:
                    cache.write(cache.key(name), payload_of(name))
                else:
                    assert found == payload_of(name)
            assert turn < 1 or cache.flush(60)
        cache.close()
        counters = cache.counters.as_dict()
        assert not counters.get("cache.failures") and not counters.get("cache.corrupt"), counters
        report(str(int(counters.get("cache.hits", 0))))

    return action


def test_four_processes(tmp_path: Path) -> None:
    """They make, fill and read the directory at once; all bytes are right, and each is there in the end."""
    children = [Child(epochs(tmp_path / "c", seed, 150, 3)) for seed in range(4)]
    hits = [int(child.end()[0]) for child in children]
    assert [child.status for child in children] == [0] * 4
    assert min(hits) >= 150  # at the latest the third epoch
    with opened(tmp_path / "c") as cache:
        report = cache.check()
        assert report.ok and report.entries == 150
        assert all(cache.read(cache.key(f"n{i}")) == payload_of(f"n{i}") for i in range(150))


def test_clear_while_others_work(tmp_path: Path) -> None:
    children = [Child(epochs(tmp_path / "c", seed, 100, 6)) for seed in range(2)]
    with opened(tmp_path / "c") as cache:
        cache.lookup(b"x" * 16)
        for _ in range(15):
            select.select([], [], [], 0.01)
            cache.clear()
        for child in children:
            child.end()
        assert [child.status for child in children] == [0, 0]
        assert cache.check().ok
        assert cache.info()["bytes"] <= 2 * 100 * record_size(60_500)


def test_size_limit_over_processes(tmp_path: Path) -> None:
    limit = 2_000_000

    def filler(seed: int) -> Callable[[Callable[[str], None]], None]:
        def action(report: Callable[[str], None]) -> None:
            cache = Cache(tmp_path / "c", size_limit=limit)
            for number in range(300):
                name = f"{seed}/{number}"
                cache.write(cache.key(name), payload_of(name))
            assert cache.flush(60)
            cache.close()
            assert cache.counters["cache.writes"] + cache.counters["cache.dropped"] == 300
            assert cache.counters["cache.failures"] == 0
            report(str(int(cache.counters["cache.writes"])))

        return action

    children = [Child(filler(seed)) for seed in range(2)]
    written = sum(int(child.end()[0]) for child in children)
    assert [child.status for child in children] == [0, 0]
    on_disk = sum(file.stat().st_size for file in (tmp_path / "c" / "v1" / "segments").iterdir())
    assert limit - record_size(60_500) <= on_disk <= limit
    with opened(tmp_path / "c") as cache:
        report = cache.check()
        assert report.ok and report.entries == written and report.orphaned_bytes == 0


def test_spawned_process_shares_the_directory(tmp_path: Path) -> None:
    with opened(tmp_path / "c") as cache:
        for i in range(20):
            cache.write(cache.key(f"n{i}"), payload_of(f"n{i}"))
        assert cache.flush(30)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=read_all, args=(cache, theirs))
        process.start()
        theirs.close()
        assert ours.poll(PATIENCE) and ours.recv() == 20
        process.join(PATIENCE)
        ours.close()
        process.close()
        assert cache.read(cache.key("from the child")) == b"hello"


def read_all(cache: Cache, pipe: Any) -> None:
    right = sum(cache.read(cache.key(f"n{i}")) == payload_of(f"n{i}") for i in range(20))
    cache.write(cache.key("from the child"), b"hello")
    cache.flush(60)
    cache.close()
    pipe.send(right)


def test_opened_and_closed_100_times(tmp_path: Path) -> None:
    """Nothing adds up: `no_leaks` looks at descriptors and threads."""
    for i in range(100):
        with opened(tmp_path / f"c{i % 3}") as cache:
            cache.write(cache.key(str(i)), b"x")
    with opened(tmp_path / "c0") as cache:
        assert cache.read(cache.key("3")) == b"x"
