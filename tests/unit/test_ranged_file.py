"""An object as a file: it reads what a local file would, by one request a read, of one version."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastload.errors import ArgumentError, NotFoundError, ObjectChangedError
from fastload.store import Store, open_store
from fastload.store.base import RangedFile

BODY = np.random.default_rng(7).bytes(10_000)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "x.bin").write_bytes(BODY)
    (tmp_path / "empty").write_bytes(b"")
    return open_store(str(tmp_path))


@pytest.fixture
def requests(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that were read since."""
    seen: list[tuple[int, int]] = []
    read_range = store.read_range

    def watched(key: str, start: int, stop: int, *rest: Any, **options: Any) -> Any:
        seen.append((start, stop))
        return read_range(key, start, stop, *rest, **options)

    monkeypatch.setattr(store, "read_range", watched)
    return seen


@pytest.mark.parametrize("buffer_size", [None, 1, 37, 1 << 20])
def test_any_order_of_calls_reads_what_a_local_file_reads(store: Store, buffer_size: int | None) -> None:
    info, rng = store.head("x.bin"), random.Random(3)
    file: Any
    if buffer_size is None:
        file = RangedFile(store, info.key, info.size, info.version)
    else:
        file = store.open("x.bin", buffer_size=buffer_size)
    with file, io.BytesIO(BODY) as local:
        for _ in range(400):
            size = rng.choice([0, 1, 17, 500, 20_000])
            buffers = bytearray(size), bytearray(size)
            offset, whence = rng.randrange(12_000), rng.choice([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END])
            offset -= 5_000 if whence == os.SEEK_CUR else 11_000 if whence == os.SEEK_END else 0
            outcomes = []
            for one, buffer in zip((file, local), buffers, strict=True):
                try:
                    place = one.seek(offset, whence)
                except (ValueError, OSError):
                    place = -1
                    one.seek(0)
                outcomes.append((place, one.read(size), one.readinto(buffer), one.tell()))
            if outcomes[0][0] >= 0 and outcomes[1][0] > 0:  # BytesIO goes to 0 in place of an error
                assert outcomes[0] == outcomes[1]
                assert buffers[0] == buffers[1]
        file.seek(9_000)
        assert file.read() == BODY[9_000:]
        assert file.read() == b""


def test_every_read_is_one_request(store: Store, requests: list[tuple[int, int]]) -> None:
    info = store.head("x.bin")
    file = RangedFile(store, info.key, info.size, info.version)
    file.seek(-100, os.SEEK_END)
    file.seek(100)
    assert requests == []  # to open and to seek reads nothing
    file.read(10)
    file.readinto(bytearray(50_000))
    file.read()  # at the end
    assert requests == [(100, 110), (110, 10_000)]


def test_reads_within_the_buffer_make_one_request(store: Store, requests: list[tuple[int, int]]) -> None:
    with store.open("x.bin", buffer_size=1000) as file:
        assert [file.read(100) for _ in range(9)] == [BODY[i : i + 100] for i in range(0, 900, 100)]
        file.seek(300)
        assert file.read(10) == BODY[300:310]
    assert requests == [(0, 1000)]


def test_a_read_of_all_makes_one_request(store: Store, requests: list[tuple[int, int]]) -> None:
    with store.open("x.bin", buffer_size=1000) as file:
        assert file.read() == BODY
    assert requests == [(0, 10_000)]


def test_an_empty_object_is_an_empty_file(store: Store, requests: list[tuple[int, int]]) -> None:
    assert store.open("empty").read() == b""
    assert requests == []


def test_an_object_that_changed_since_it_was_opened_is_an_error(store: Store, tmp_path: Path) -> None:
    file = store.open("x.bin", buffer_size=100)
    file.read(10)
    (tmp_path / "x.bin").write_bytes(BODY[:-1] + b"!")
    os.utime(tmp_path / "x.bin", (0, 0))
    with pytest.raises(ObjectChangedError, match=r"x\.bin"):
        file.read(5_000)


def test_an_absent_object_or_bad_buffer_size_fails_at_open(store: Store) -> None:
    with pytest.raises(NotFoundError):
        store.open("absent")
    for size in (0, 1e6, "64k"):
        with pytest.raises(ArgumentError, match=f"buffer_size must be a whole number >= 1, found {size!r}"):
            store.open("x.bin", buffer_size=size)  # type: ignore[arg-type]


def test_a_closed_file_refuses_reads(store: Store) -> None:
    file = RangedFile(store, "x.bin", len(BODY))
    file.close()
    for call in (file.read, file.tell, lambda: file.seek(0)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_name_tells_the_format_as_that_of_a_file_does(store: Store) -> None:
    assert store.open("x.bin").name == "x.bin"
