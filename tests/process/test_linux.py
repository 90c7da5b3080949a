"""Other systems than Linux, as far as one can be played: what works there works, the rest says one sentence.

Played in a process of its own, once torch and the like are loaded: they look at the system too. One process
per system tries all names and runs all commands, as the imports take most of its time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.metrics.platform import ANYWHERE
from tests.patience import PATIENCE

DOCTOR = "doctor --json"
COMMANDS = ["bench . --json", "convert . /tmp/x --to tar --json", "cache info . --json"]
ELSEWHERE = """
import contextlib, io, json, os, sys, sysconfig, zoneinfo, torch.utils.data, PIL.Image, rich.live, typer
sysconfig.get_config_vars()
sys.platform = SYSTEM
for name in MISSING:
    delattr(os, name)
for name in MODULES:
    sys.modules[name] = None
import fastload
names = {}
for name in fastload.__all__:
    try:
        names[name] = "works" if getattr(fastload, name) else ""
    except ImportError as error:
        names[name] = str(error)
from fastload.cli import main
commands = {}
for command in COMMANDS:
    sys.argv = ["fastload", *command.split()]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    commands[command] = [code, out.getvalue(), err.getvalue()]
print(json.dumps({"names": names, "commands": commands}), flush=True)
os._exit(0)  # torch's own cleaning up at the end meets a system that is none
"""
SYSTEMS = {
    "darwin": ("darwin", ["sched_getaffinity", "memfd_create", "pidfd_open"], []),
    "win32": (
        "win32",
        ["sched_getaffinity", "memfd_create", "pidfd_open", "register_at_fork", "sysconf", "statvfs", "fork"],
        ["fcntl", "resource"],
    ),
    "a Python without memfd_create": ("linux", ["memfd_create"], []),
}
SENTENCE = "fastload's loader, datasets and cache run on Linux"


@cache
def played(system: str) -> dict[str, Any]:
    """name -> "works" or its error; command -> exit status, standard output, standard error."""
    platform, missing, modules = SYSTEMS[system]
    given = f"SYSTEM, MISSING, MODULES = {platform!r}, {missing!r}, {modules!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{given}COMMANDS = {[DOCTOR, *COMMANDS]!r}\n{ELSEWHERE}"],
        cwd=Path(fastload.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("system", SYSTEMS)
def test_names_work_or_say_one_sentence(system: str) -> None:
    found = played(system)["names"]
    assert {name for name, text in found.items() if text == "works"} == {*ANYWHERE, "__version__"}
    for text in found.values():
        assert text == "works" or (text.startswith(SENTENCE) and "RandomResizedCrop" in text), text


@pytest.mark.parametrize("system", SYSTEMS)
def test_doctor_says_the_sentence(system: str) -> None:
    code, out, err = played(system)["commands"][DOCTOR]
    assert code == 1, err
    (check,) = json.loads(out)["checks"]
    assert check["state"] == "fail" and check["advice"].startswith(SENTENCE)
    assert "Traceback" not in err


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands_say_the_sentence(system: str, command: str) -> None:
    code, out, err = played(system)["commands"][command]
    assert code == 1, err
    error = json.loads(out)["error"]
    assert error["type"] == "PlatformError" and error["message"].startswith(SENTENCE)
    line, more = err.splitlines()
    assert line.startswith(f"fastload: {SENTENCE}") and more == f"see {error['help']}"
