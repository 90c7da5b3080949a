"""--ray before a cluster is asked: what the option takes, and what is refused. Needs no Ray."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fastload.cli import warm_nodes
from fastload.cli.app import app
from fastload.errors import ArgumentError


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
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

    monkeypatch.setattr(warm_nodes, "Cluster", Found)
    found: Any = refused("warm", tmp_path, "--cache", tmp_path / "ssd", *words)
    assert found == f"asked for {address}"


def test_missing_ray_is_named_with_its_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'torch-fastload[ray]'" in refused(
        "warm", tmp_path, "--cache", tmp_path / "c", "--ray"
    )


def test_shard_with_ray_is_refused_unless_it_is_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["warm", tmp_path, "--cache", tmp_path / "ssd", "--ray", "--shard"]
    assert "give 0/1 to warm all" in refused(*words, "1/4")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "needs Ray" in refused(*words, "0/1")
