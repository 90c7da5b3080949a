"""--ray before a cluster is asked: what the option takes, and what is refused. Needs no Ray."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.cli import warming
from fastload.cli.cluster import Lost, Node, Task
from fastload.cli.command_options import CacheOptions
from fastload.cli.data_source import SourceOptions
from fastload.cli.warm_report import Target
from fastload.errors import ArgumentError
from tests.commands import command


def refused(*arguments: object) -> str:
    done = command(*arguments, "--json")
    assert done.exit_code == 2, done.output
    return str(json.loads(done.stdout.splitlines()[-1])["error"]["message"])


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--ray"], "auto"),
        (["--ray", "--mode", "raw"], "auto"),
        (["--ray", "a:1"], "a:1"),
        (["--ray=b:2"], "b:2"),
    ],
)
def test_ray_without_an_address_is_this_machines_cluster(
    words: list[str], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        def __init__(self, address: str) -> None:
            raise ArgumentError(f"asked for {address}")

    monkeypatch.setattr(warming, "Cluster", Found)
    found: Any = refused("warm", tmp_path, "--cache", tmp_path / "ssd", *words)
    assert found == f"asked for {address}"


def test_missing_ray_is_named_with_its_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'torch-fastload[ray]'" in refused(
        "warm", tmp_path, "--cache", tmp_path / "c", "--ray"
    )


def test_shard_with_ray_is_refused_unless_it_is_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["warm", tmp_path, "--cache", tmp_path / "ssd", "--ray", "--share"]
    assert "give 0/1 to warm all" in refused(*words, "1/4")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "needs Ray" in refused(*words, "0/1")


@pytest.mark.parametrize("limit", ["max_gets=5", "max_egress=1GB"])
def test_limit_of_requests_with_ray_is_refused(limit: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.bin").write_bytes(b"a")
    warm = ["warm", "s3://bucket", "--cache", tmp_path / "ssd", "--storage-option", limit]
    convert = ["convert", tmp_path / "in", tmp_path / "out", "--to", "tar", "--from", "objects"]
    for words in (warm, [*convert, "--dst-option", limit]):
        assert "would be a limit of each slice" in refused(*words, "--ray")


def test_relative_paths_are_those_of_this_directory_on_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's processes work in another directory."""
    monkeypatch.chdir(tmp_path)
    target = Target("photos", "ssd", CacheOptions("raw"), SourceOptions(), {}).anywhere()
    assert (target.url, target.cache) == (str(tmp_path / "photos"), str(tmp_path / "ssd"))
    assert replace(target, url="s3://bucket/a#b").anywhere().url == "s3://bucket/a#b"


class OneNode:
    """A cluster whose tasks run here, one after the other; `after_each` is called with their number."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.nodes = [Node("10.0.0.1", 2, "a")]

    def __enter__(self) -> OneNode:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, lanes: list[Iterator[Task]]) -> Iterator[tuple[Task, Any]]:
        for lane in lanes:
            for task in lane:
                yield task, task.run(*task.arguments)


def test_objects_that_change_between_slices_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice is a range of the listing, so in another listing it would leave objects out."""
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.bin").write_bytes(b"a")
    cache = tmp_path / "ssd"

    class Changing(OneNode):
        def run(self, lanes: list[Iterator[Task]]) -> Iterator[tuple[Task, Any]]:
            for outcome in super().run(lanes):
                yield outcome
                (tmp_path / "in" / "0.bin").unlink(missing_ok=True)
                fastload.ObjectDataset(tmp_path / "in", cache=cache).close()

    monkeypatch.setattr(warming, "Cluster", Changing)
    words = ["warm", tmp_path / "in", "--cache", cache, "--ray", "--from", "objects", "--num-workers", "0"]
    done = command(*words)
    assert done.exit_code == 1 and "was listed again while slices of it were warmed" in done.stderr


def test_cluster_whose_nodes_all_die_at_first_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(OneNode):
        def __init__(self, address: str) -> None:
            self.nodes = [Node("10.0.0.1", 4, "a"), Node("10.0.0.2", 4, "b")]

        def run(self, lanes: list[Iterator[Task]]) -> Iterator[tuple[Task, Lost]]:
            return ((next(lane), Lost("it was stopped")) for lane in lanes)

    monkeypatch.setattr(warming, "Cluster", Dying)
    done = command("warm", tmp_path, "--cache", tmp_path / "ssd", "--ray")
    assert done.exit_code == 1 and "all nodes are gone, as node 10.0.0.1 (it was stopped)" in done.stderr
