"""The cache in forked and spawned processes."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from fastload.cache import Cache
from fastload.cache import access as access_module
from fastload.cache import directory as directory_module
from fastload.cache import index as index_module
from tests.cachedata import fill, in_child, marker, no_room, payload_of
from tests.patience import PATIENCE


def test_damage_that_another_process_has_noted_is_not_forgotten(open_cache: Callable[..., Cache]) -> None:
    """Whoever leaves last, the index is made anew."""
    cache = open_cache()
    content = fill(cache, 10)

    def child() -> bool:
        directory = cache._open_or_raise()
        assert directory is not None
        directory.mark_damaged()
        cache.close()
        return True

    assert in_child(child)
    lost, directory = next(iter(content)), cache._open_or_raise()
    entry = cache.lookup(lost)
    assert directory is not None and entry is not None
    directory.index.drop([(lost, entry.pack())])
    cache.close()
    assert not marker(cache)["clean"]
    cache.lookup(lost)
    assert cache.flush(30)
    assert all(cache.read(key) == payload for key, payload in content.items())


def test_a_process_whose_id_another_container_has_too_says_so(open_cache: Callable[..., Cache]) -> None:
    cache = open_cache()
    ((key, payload),) = fill(cache, 1).items()
    cache.close()

    def child() -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            missed = cache.read(key) is None
        return missed and ["hostPID: true" in str(warning.message) for warning in caught] == [True]

    with (Path(cache.path) / "v1" / "index" / "lock.mdb").open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 0, 1)  # as all processes at once
        assert in_child(child)
    assert cache.read(key) == payload


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
    directory = cache._open_or_raise()
    assert directory is not None and "no active readers" in directory.index._env.readers().lower()


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
            patched.setattr(directory_module.Directory, "_write_state", no_room(number))
        assert all(cache.read(key) == payload for key, payload in content.items())
        assert cache.counters["cache.failures"] == 0
        with pytest.warns(RuntimeWarning, match="has no room left on its disk: its records are read"):
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
    directory = cache._open_or_raise()
    assert directory is not None
    monkeypatch.setattr(access_module, "FORK_DEADLINE", 0.01)

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
