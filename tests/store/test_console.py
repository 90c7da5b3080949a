"""Text of others has no effect on a terminal: every command that prints keys, names, states or errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich.console
from PIL import Image
from rich.progress import Progress, TextColumn
from rich.table import Table

import fastload
from fastload import DataLoader, ImageFolder, ObjectDataset, RandomResizedCrop
from fastload.errors import FastloadError, StoreError, printable
from fastload.metrics.watch import Console
from tests.commands import command

# The title of the window, colours by ESC and by CSI, another direction, ends of lines, and an emoji's code.
EVIL = "x\x1b]0;owned\x1b\\\x9b31m\u202e\u2066\u2028\x85\x7f\r\n[bold]:smile:x"
SHOWN = r"x\x1b]0;owned\x1b\\x9b31m\u202e\u2066\u2028\x85\x7f\r\n[bold]:smile:x"
assert printable(EVIL) == SHOWN


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 images in two classes, all with such a name, and so has one class."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(8):
        path = root / ("cat", EVIL)[number % 2] / f"{number}{EVIL}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (320, 240), (30 * number, 120, 90)).save(path, "JPEG")
    return root


def _replay(photos: Path, tmp: Path) -> list[object]:
    loader = DataLoader(ImageFolder(str(photos), RandomResizedCrop(16)), 2)
    next(iter(loader))
    state = loader.state_dict()
    state["recipe"]["notes"] = [EVIL]
    (tmp / "state").write_text(json.dumps(state))
    return ["replay", tmp / "state", "--step", 0, "--html", tmp / "page", "--png", tmp / "png"]


def _warm(photos: Path, tmp: Path) -> list[object]:
    shutil.copytree(photos, tmp / "bad")
    (tmp / "bad" / "cat" / f"{EVIL}.jpg").write_bytes(b"\xff\xd8\xff no photo")
    return ["warm", tmp / "bad", "--cache", tmp / "cache", "--mode", "shrunk"]


def _no_tar(tmp: Path) -> Path:
    (tmp / "in").mkdir()
    (tmp / "in" / f"{EVIL}.tar").write_bytes(b"no tar" * 400)
    return tmp / "in"


def _pull(photos: Path, tmp: Path) -> list[object]:
    (tmp / "packs").mkdir()
    (tmp / "packs" / f"{'0' * 32}-0000.pack").write_bytes(EVIL.encode())
    (tmp / "packs" / EVIL).write_bytes(b"")
    return ["cache", "pull", tmp / "packs", tmp / f"cache{EVIL}"]


def _cache(photos: Path, tmp: Path) -> Path:
    cache = fastload.Cache(tmp / f"cache{EVIL}")
    list(DataLoader(ImageFolder(str(photos), RandomResizedCrop(16), cache=cache), 2))
    cache.close()
    return tmp / f"cache{EVIL}"


def _prove(photos: Path, tmp: Path) -> list[object]:
    for number in (1, 2):
        dataset: Any = ObjectDataset(str(photos), decode=len)
        list(DataLoader(dataset, 2, shuffle=True, seed=number, sample_log=tmp / f"log{number}"))
    return ["prove", tmp / "log1", tmp / "log2"]


COMMANDS: dict[str, Callable[[Path, Path], list[object]]] = {
    "replay": _replay,
    "warm": _warm,
    "index": lambda photos, tmp: ["index", _no_tar(tmp), "--cache", tmp / "cache"],
    "convert": lambda photos, tmp: ["convert", _no_tar(tmp), tmp / "out", "--to", "tfrecord"],
    "bench": lambda photos, tmp: ["bench", photos, *("--epochs", 1, "--num-workers", 0, "--batch-size", 4)],
    "plan": lambda photos, tmp: ["plan", photos, "--size-limit", "1GB", "--gpus", 1, "--gpu-rate", 100],
    "pull": _pull,
    "info": lambda photos, tmp: ["cache", "info", _cache(photos, tmp)],
    "check": lambda photos, tmp: ["cache", "check", _cache(photos, tmp)],
    "clear": lambda photos, tmp: ["cache", "clear", _cache(photos, tmp)],
    "prove": _prove,
    "doctor": lambda photos, tmp: ["doctor"],
    "usage": lambda photos, tmp: ["bench", photos, f"--{EVIL}"],
    "argument": lambda photos, tmp: ["bench", photos / EVIL],
}
# Those whose text has the name; others print none of today's data, and must not begin to do so unescaped.
NAMED = {"replay", "warm", "index", "info", "check", "clear", "pull", "argument", "usage"}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_what_a_terminal_obeys(
    name: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    words = COMMANDS[name](photos, tmp_path)
    for flags in ((), ("--json",)):
        result = command(*words, *flags, stdin="n\n")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        lines = result.output.split("\n")
        assert [line for line in lines if not line.isprintable()] == []
        assert not any(line.startswith("[bold]") for line in lines), "a name has ended a line"
        if name in NAMED and not flags:
            assert r"\x1b" in "".join(lines)
    if (page := tmp_path / "page").exists():
        text = page.read_text()
        assert r"\u202e" in text and [line for line in text.split("\n") if not line.isprintable()] == []


def test_tables_progress_bars_and_titles_are_printable_too(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=False, width=200)
    table = Table(EVIL, title=EVIL, caption=EVIL)
    table.add_row(EVIL)
    console.print(table)
    with Progress(TextColumn("{task.description}"), TextColumn(EVIL), console=console) as progress:
        progress.add_task(EVIL.replace("\n", ""), total=None)
    text = capsys.readouterr().out
    assert r"\x1b]0;owned\x1b\\x9b31m\u202e\u2066\u2028\x85\x7f" in text and ":smile:" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_guard_removed_a_name_is_obeyed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.cli.report.Console", rich.console.Console)
    assert "\x1b]0;owned" in command(*_replay(photos, tmp_path)).output


def test_error_has_no_text_that_a_terminal_obeys() -> None:
    error: FastloadError = StoreError(f"the store said: {EVIL}", stage="get", key=EVIL)
    assert all(line.isprintable() for line in f"{error}{error.message}".split("\n"))
    assert error.key == EVIL


def test_each_control_is_shown_as_its_escape_and_other_text_stays_as_it_is() -> None:
    for number in (*range(0x20), *range(0x7F, 0xA1), 0xAD, 0x200B, 0x200E, 0x2029, 0x202A, 0xDC80):
        shown = printable(f"a{chr(number)}b")
        assert shown.isascii() and shown.isprintable() and shown.startswith("a\\")
        assert printable(shown) == shown
    for text in ("plain", "é ü 漢字 😀", "", "a b", "\\x1b", "[bold]"):
        assert printable(text) == text
