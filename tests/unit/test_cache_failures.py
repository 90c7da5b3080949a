"""A failing disk or directory: the cache passes through, warns once, and stops nothing."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload.cache import Cache, access
from fastload.cache import directory as directory_module
from fastload.cache import writer as writer_module
from fastload.cache.directory import Directory
from fastload.cache.segment import SegmentReader
from fastload.errors import CacheError
from tests.cachedata import fill, no_room, segments


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


def test_what_needs_repair_is_not_served_without_room(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache()
    content = fill(cache, 10)
    copy = Path(cache.path).parent / "copy"
    shutil.copytree(cache.path, copy)
    monkeypatch.setattr(directory_module, "_boot_id", lambda: "another boot")
    with monkeypatch.context() as patched:
        patched.setattr(directory_module.Directory, "_write_state", no_room(errno.ENOSPC))
        with pytest.warns(RuntimeWarning, match="No space left"):
            assert open_cache(copy).read(next(iter(content))) is None
    after = open_cache(copy)
    after.lookup(b"x" * 16)
    assert after.flush(30) and all(after.read(key) == payload for key, payload in content.items())


def test_a_directory_that_was_locked_is_tried_again(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is while the fsync of the first process to open it takes long."""
    cache = open_cache()
    fill(cache, 1)
    cache.close()
    monkeypatch.setattr(access, "LOCK_DEADLINE", 0.01)
    with (Path(cache.path) / "v1" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.warns(RuntimeWarning, match="another process held its lock"):
            assert not cache.write(cache.key("early"), b"x")
    assert not cache.write(cache.key("soon"), b"x"), "it is left alone for a while"
    later = time.monotonic() + access._AGAIN_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert cache.write(cache.key("later"), b"x")


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


def test_a_cache_is_closed_while_its_records_are_indexed_again(
    open_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of that is done by the next process, and records are written until then."""
    cache = open_cache()
    content = fill(cache, 5)
    cache.close()
    for file in (Path(cache.path) / "v1" / "index").iterdir():
        file.unlink()
    scan = SegmentReader.scan
    with monkeypatch.context() as patched:
        patched.setattr(directory_module, "CLOSE_DEADLINE", 0.5)
        patched.setattr(SegmentReader, "scan", lambda *args: itertools.cycle(list(scan(*args))))
        cache.lookup(b"x" * 16)
        cache.close()
    cache.lookup(b"x" * 16)
    assert cache.flush(30) and all(cache.read(key) == payload for key, payload in content.items())
    assert cache.write(cache.key("more"), b"x") and cache.flush(30)


@pytest.mark.parametrize("again", ["reindex", "check"])
def test_a_cache_cleared_while_its_records_are_indexed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """Another process clears it meanwhile."""
    cache = Cache(tmp_path / "c")
    fill(cache, 5)
    cache.close()
    for file in (tmp_path / "c" / "v1" / "index").iterdir():
        file.unlink()
    found = Directory.unindexed

    def cleared(self: Directory, *stopping: Any) -> Any:
        records = list(found(self, *stopping))
        self.index.clear()
        return records

    if again == "check":
        monkeypatch.setattr(Directory, "_reindex", lambda self, stopping: None)
    monkeypatch.setattr(Directory, "unindexed", cleared)
    cache = Cache(tmp_path / "c")
    if again == "check":
        assert cache.check(fix=True).recovered_entries == 0
    content = fill(cache, 5)
    assert all(cache.read(key) == payload for key, payload in content.items())
    assert cache.info()["entries"] == 5
    cache.close()
