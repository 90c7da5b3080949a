"""Other systems than Linux, as far as one can be played: what works there works, the rest says one sentence.

Played in a process of its own, once torch and the like are loaded: they look at the system too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fastload
from fastload.metrics.platform import ANYWHERE
from tests.patience import PATIENCE

ELSEWHERE = """
import os, sys, sysconfig, zoneinfo, torch.utils.data, PIL.Image, rich.live, typer
sysconfig.get_config_vars()
sys.platform = SYSTEM
for name in MISSING:
    delattr(os, name)
for name in MODULES:
    sys.modules[name] = None
import fastload
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


def run(system: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    platform, missing, modules = SYSTEMS[system]
    given = f"SYSTEM, MISSING, MODULES = {platform!r}, {missing!r}, {modules!r}\n"
    # torch's own cleaning up at the end meets a system that is none
    whole = f"{given}{ELSEWHERE}{code}\nsys.stdout.flush(); os._exit(0)"
    return subprocess.run(
        [sys.executable, "-c", whole, *arguments],
        cwd=Path(fastload.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_public_names_work_or_raise_the_sentence(system: str) -> None:
    code = """
found = {}
for name in fastload.__all__:
    try:
        found[name] = "works" if getattr(fastload, name) else ""
    except ImportError as error:
        found[name] = str(error)
import json; print(json.dumps(found))
"""
    done = run(system, code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name for name, text in found.items() if text == "works"} == {*ANYWHERE, "__version__"}
    for text in found.values():
        assert text == "works" or (text.startswith(SENTENCE) and "RandomResizedCrop" in text), text


@pytest.mark.parametrize("system", SYSTEMS)
def test_doctor_prints_the_sentence(system: str) -> None:
    done = run(system, "from fastload.cli import main; main()", "doctor", "--json")
    assert done.returncode == 1, done.stderr
    (check,) = json.loads(done.stdout)["checks"]
    assert check["state"] == "fail" and check["advice"].startswith(SENTENCE)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("command", ["bench .", "convert . /tmp/x --to tar", "cache info ."])
def test_other_commands_print_the_sentence(system: str, command: str) -> None:
    done = run(system, "from fastload.cli import main; main()", *command.split(), "--json")
    assert done.returncode == 1, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "PlatformError" and error["message"].startswith(SENTENCE)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fastload: {SENTENCE}")
