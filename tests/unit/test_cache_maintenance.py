"""`Cache.check` and `Cache.clear`, and files in the directory that fastload did not write."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fastload.cache import Cache, maintenance
from fastload.cache import access as access_module
from fastload.cache import directory as directory_module
from fastload.cache import index as index_module
from fastload.cache import segment as segment_module
from fastload.cache import writer as writer_module
from fastload.cache.segment import HEADER_SIZE, record_size
from fastload.errors import CacheError
from tests.cachedata import fill, flip, payload_of, segments


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
    directory = cache._open_or_raise()
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


def test_fix_keeps_a_segment_that_a_process_fills_meanwhile(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache()
    fill(cache, 1)
    writer, key = cache._open_or_raise().writer, cache.key("late")
    assert writer is not None
    items, looks = index_module.Index.items, []

    def items_before_it_fills(index: index_module.Index) -> list[tuple[bytes, bytes]]:
        found = items(index)
        looks.append(len(found))
        if len(looks) == 2:  # for the segments in use; the first look was for the records to verify
            writer._leave_segment()
            assert cache.write(key, b"late") and cache.flush(30)
            writer._leave_segment()
        return found

    monkeypatch.setattr(index_module.Index, "items", items_before_it_fills)
    assert cache.check(fix=True).freed_bytes == 0
    assert cache.read(key) == b"late"


def test_entry_of_a_segment_that_has_gone_is_a_miss_once(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    ((key, payload),) = fill(cache, 1).items()
    entry = cache.lookup(key)
    assert entry is not None
    cache._open_or_raise().index.remove_segments([entry.segment], 0)
    cache.close()
    assert cache.read(key) is None
    assert cache.write(key, payload) and cache.flush(30)
    assert cache.read(key) == payload


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


def test_room_of_cleared_records_is_free_once_a_running_process_writes_again(
    open_cache: Callable[..., Cache],
) -> None:
    def deleted() -> list[str]:
        files = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                files.append(str(descriptor.readlink()))
        return [file for file in files if file.startswith(cache.path) and file.endswith(".seg (deleted)")]

    cache = open_cache()
    assert all(cache.read(key) == payload for key, payload in fill(cache, 3).items())
    for name in cache._open_or_raise().index.clear():  # as another process does it
        (Path(cache.path) / "v1" / "segments" / name).unlink()
    assert deleted()
    fill(cache, 1)
    assert not deleted()


def test_clear_leaves_a_segment_that_is_just_being_made(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made before the clearing, registered after it: what is written to it comes after, and stays."""
    fill(open_cache(), 3)
    access_module.close_all()
    cache = open_cache()
    directory = cache._open_or_raise()
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
    names = cache._open_or_raise().segment_names
    key = cache.key("after")

    def write_first() -> list[str]:
        assert cache.write(key, b"after") and cache.flush()
        return names()

    monkeypatch.setattr(cache._open_or_raise(), "segment_names", write_first)
    assert maintenance.clear(cache._open_or_raise()) == 3 * record_size(3000)
    assert bytes(cache.read(key) or b"") == b"after"
    assert cache.counters["cache.failures"] == cache.counters["cache.corrupt"] == 0


def test_check_keeps_a_segment_that_two_processes_came_upon(open_cache: Callable[..., Cache]) -> None:
    """As beside another one that makes a lost index anew."""
    content = fill(open_cache(), 3)
    open_cache().close()
    directory = open_cache()._open_or_raise()
    [name] = directory.segment_names()
    [number] = directory.index.segments()
    assert directory.index.add_segment(name) == number
    report = open_cache().check(fix=True)
    assert (report.ok, report.freed_bytes) == (True, 0)
    assert all(open_cache().read(key) == payload for key, payload in content.items())


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
