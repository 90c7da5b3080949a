"""Other systems than Linux, as far as one can be played: what works there works, the rest says one sentence.

Played in a process of its own, once torch and the like are loaded: they look at the system too. One process
per system tries all names and runs all commands, as the imports take most of its time.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.metrics.machine import ANYWHERE, memory_file
from tests.scripts import serve_scripts

DOCTOR = "doctor --json"
COMMANDS = ["bench . --json", "convert . /tmp/x --to tar --json", "cache info . --json"]
ELSEWHERE = """
import contextlib, ctypes, io, json, os, sys, sysconfig, tempfile, zoneinfo
import torch.utils.data, PIL.Image, rich.live, typer
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
def tried(use):
    try:
        return use()
    except ImportError as error:
        return str(error)
uses = {}
with tempfile.TemporaryDirectory() as folder:
    for number in range(6):
        os.makedirs(f"{folder}/{number % 2}", exist_ok=True)
        PIL.Image.new("RGB", (40, 30), (number, 0, 0)).save(f"{folder}/{number % 2}/{number}.png")
    def load(url=folder, num_workers=0, **options):
        dataset = fastload.ImageFolder(url, fastload.CenterCrop(8, resize=8), **options)
        loader = fastload.DataLoader(dataset, 4, num_workers=num_workers)
        return [[batch[:, 0, 0, 0].tolist(), labels.tolist()] for batch, labels in loader]
    uses["local"] = tried(load)
    uses["workers"] = tried(lambda: load(num_workers=1))
    uses["cache"] = tried(lambda: load(cache=folder + "-cache"))
    uses["store"] = tried(lambda: load("s3://bucket/train"))
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
print(json.dumps({"names": names, "uses": uses, "commands": commands}), flush=True)
os._exit(0)  # torch's own cleaning up at the end meets a system that is none
"""
LINUX_ONLY = ["sched_getaffinity", "memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate"]
SYSTEMS = {
    "darwin": ("darwin", LINUX_ONLY, []),
    "win32": (
        "win32",
        [*LINUX_ONLY, "register_at_fork", "sysconf", "statvfs", "fork"],
        ["fcntl", "resource"],
    ),
}
SENTENCE = "fastload's loader, datasets and cache run on Linux"


@cache
def played() -> dict[str, dict[str, Any]]:
    """system -> name -> "works" or its error; command -> exit status, standard output, standard error."""
    with tempfile.TemporaryDirectory() as name:
        runs = []
        for platform, missing, modules in SYSTEMS.values():
            script = Path(name, f"{platform}.py")
            given = f"SYSTEM, MISSING, MODULES = {platform!r}, {missing!r}, {modules!r}\n"
            script.write_text(f"{given}COMMANDS = {[DOCTOR, *COMMANDS]!r}\n{ELSEWHERE}")
            runs.append(([script], {}))
        with serve_scripts("import torch.utils.data") as scripts:
            done = scripts.run_files(*runs)
    assert not any(one.returncode for one in done), done
    return {system: json.loads(one.stdout) for system, one in zip(SYSTEMS, done, strict=True)}


@pytest.mark.parametrize("system", SYSTEMS)
def test_names_work_or_say_one_sentence(system: str) -> None:
    found = played()[system]["names"]
    expected = set(fastload.__all__) if system == "darwin" else {*ANYWHERE, "__version__"}
    assert {name for name, text in found.items() if text == "works"} == expected
    for text in found.values():
        assert text == "works" or (text.startswith(SENTENCE) and "RandomResizedCrop" in text), text


def test_darwin_reads_local_files_in_the_trainer_and_says_one_sentence_for_the_rest() -> None:
    uses = played()["darwin"]["uses"]
    assert uses.pop("local") == [[[0, 2, 4, 1], [0, 0, 0, 1]], [[3, 5], [1, 1]]]
    for text in uses.values():
        assert text.startswith(SENTENCE) and "local files with num_workers=0" in text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_python_built_for_an_old_glibc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_workers: int
) -> None:
    """As conda's are: without `memfd_create` and `pidfd_open`."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "pidfd_open")
    for number in range(6):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]))
    dataset = fastload.ObjectDataset(str(tmp_path), decode=lambda data: torch.tensor(list(bytes(data))))
    loader = fastload.DataLoader(dataset, 4, num_workers=num_workers)
    assert [batch.flatten().tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]
    descriptor = memory_file("fastload-test")
    assert str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("/memfd:fastload-test")
    os.close(descriptor)


@pytest.mark.parametrize("system", SYSTEMS)
def test_doctor_says_the_sentence(system: str) -> None:
    code, out, err = played()[system]["commands"][DOCTOR]
    assert code == 1, err
    (check,) = json.loads(out)["checks"]
    assert check["state"] == "fail" and check["advice"].startswith(SENTENCE)
    assert "Traceback" not in err


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands_say_the_sentence(system: str, command: str) -> None:
    code, out, err = played()[system]["commands"][command]
    assert code == 1, err
    error = json.loads(out)["error"]
    assert error["type"] == "PlatformError" and error["message"].startswith(SENTENCE)
    line, more = err.splitlines()
    assert line.startswith(f"fastload: {SENTENCE}") and more == f"see {error['help']}"
