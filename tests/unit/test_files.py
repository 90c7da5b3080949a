"""Files that are written whole or not at all, and the nearest directory that exists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastload.store.node import is_part, nearest_existing, whole_file


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "name"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
        (part,) = [one for one in tmp_path.iterdir() if one != path]
        assert is_part(part.name) and not is_part(path.name)
    assert [one.name for one in tmp_path.iterdir()] == ["name"] and path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "name"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert [one.name for one in tmp_path.iterdir()] == ["name"] and path.read_bytes() == b"old"


def test_a_path_may_be_relative_to_an_open_directory(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with whole_file("name", folder=folder, durable=True) as file:
            file.write(b"bytes")
    finally:
        os.close(folder)
    assert (tmp_path / "name").read_bytes() == b"bytes"


@pytest.mark.parametrize("name", ["n" * 255, "名" * 85, "\udcff" * 255])
def test_a_name_may_be_as_long_as_the_file_system_allows(name: str, tmp_path: Path) -> None:
    with whole_file(tmp_path / name) as file:
        file.write(b"bytes")
    assert (tmp_path / name).read_bytes() == b"bytes"


def test_nearest_existing(tmp_path: Path) -> None:
    assert nearest_existing(tmp_path) == nearest_existing(tmp_path / "a" / "b") == tmp_path
    assert nearest_existing("/") == Path("/")
