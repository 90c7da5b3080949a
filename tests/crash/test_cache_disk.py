"""The cache on full, read-only and foreign disks. Needs root: the tests mount small file systems."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastload.cache import Cache, writer
from fastload.cache.segment import record_size
from fastload.errors import CacheError
from tests.cachedata import fill, in_child, marker, payload_of
from tests.patience import PATIENCE


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


@pytest.mark.root
@needs_root
def test_filling_goes_on_when_a_full_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program's checkpoint fills the disk for a moment."""
    with tmpfs(tmp_path / "small", "20m") as disk:
        cache = Cache(disk / "c")
        first = fill(cache, 3)
        fill_up(disk)
        key, payload = cache.key("lost"), payload_of("lost", 100_000)
        with pytest.warns(RuntimeWarning, match="filled again when there is room") as caught:
            assert cache.write(key, payload) and not cache.flush(30)
            assert not cache.write(key, payload), "the disk is left alone for some seconds"
        assert len(caught) == 1 and cache.counters["cache.dropped"] == 2
        used = cache._open_or_raise().index.used_bytes()
        (disk / "other").unlink()
        monkeypatch.setattr(writer, "FULL_SECONDS", 0.0)
        assert cache.write(key, payload) and cache.flush(30)
        assert cache.read(key) == payload
        assert cache._open_or_raise().index.used_bytes() == used + record_size(len(payload))
        assert all(cache.read(one) == content for one, content in first.items())
        cache.close()


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("free", [0, 4, 8, 16, 32, 64, 96])
def test_a_cache_made_on_a_full_disk_passes_through(tmp_path: Path, free: int) -> None:
    """LMDB writes its lock file through a mapping: without room for it that is SIGBUS."""
    with tmpfs(tmp_path / "small", "1m") as disk:
        fill_up(disk)
        with (disk / "other").open("r+b") as file:
            file.truncate((disk / "other").stat().st_size - (free << 10))

        def makes_none() -> bool:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                cache = Cache(disk / "cache")
                key = cache.key("x")
                did = cache.write(key, b"a" * 1000), cache.flush(PATIENCE), cache.read(key) is not None
                cache.close()
            told = [one for one in caught if "fastload passes through its cache" in str(one.message)]
            return did == (False, False, False) and len(told) == 1

        assert in_child(makes_none)
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
        with pytest.warns(RuntimeWarning, match="no room left on its disk: its records are read"):
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
