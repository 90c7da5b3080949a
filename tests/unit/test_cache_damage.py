"""A damaged cache: a read returns the bytes that were written or nothing, and the index is made again."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable
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

from fastload.cache import Cache
from fastload.cache import directory as directory_module
from fastload.cache import index as index_module
from fastload.cache import segment as segment_module
from fastload.cache.segment import HEADER_SIZE, record_size
from tests.cachedata import fill, flip, payload_of, segments

HEADER_FIELDS = range(HEADER_SIZE)


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


@pytest.mark.stress
def test_guard_removed_without_checksums_bad_bytes_are_served(
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
        cache._will_need(wrong)
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


def test_lookup_of_several_keys_misses_those_whose_entries_are_damaged(
    open_cache: Callable[..., Cache],
) -> None:
    cache = open_cache()
    damaged, *sound = fill(cache, 5)
    index = cache._open_or_raise().index
    with index._write() as txn:
        txn.put(damaged, b"short", db=index._entries)
    entries = cache._find_all([damaged, *sound, b"x" * 16])
    assert [entry is None for entry in entries] == [True, *[False] * 4, True]
    assert entries[1:5] == [cache.lookup(key) for key in sound]
    assert cache.counters["cache.corrupt"] == 1 and not cache.counters["cache.misses"]


def test_lookup_in_a_corrupt_index(open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache()
    content = fill(cache, 5)
    directory = cache._open_or_raise()
    assert directory is not None

    def corrupt(keys: list[bytes]) -> list[bytes | None]:
        raise lmdb.CorruptedError("page is not a page")

    monkeypatch.setattr(directory.index, "packed", corrupt)
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
