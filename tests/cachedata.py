"""Caches for tests: their contents, their files, and children that use them."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload.cache import Cache


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


def no_room(number: int) -> Callable[..., None]:
    """A function that fails with this error of the system."""

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fails


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
