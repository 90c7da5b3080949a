"""The command line, in this process or in one of its own; and scripts, which need one."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer.main
import typer.testing
from typer.testing import CliRunner

from fastload.cli.app import app
from tests.patience import PATIENCE

__all__ = ["answer", "command", "document", "run", "run_scripts", "script", "start", "store_words"]

ROOT = Path(__file__).parents[1]
# The tree of all commands is made once, as in a process of its own. To make it for each was half of its time.
typer.testing._get_command = typer.main.get_command = functools.cache(typer.main.get_command)


def command(*words: object, stdin: str = "") -> Any:
    """What `fastload WORDS` printed, and its exit code."""
    return CliRunner().invoke(app, [*map(str, words)], input=stdin)


def document(printed: str) -> dict[str, Any]:
    """The JSON document that a command printed last."""
    found = json.loads(printed.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def run(*words: object) -> tuple[int, dict[str, Any]]:
    """(exit code, document) of `fastload WORDS --json`."""
    done = command(*words, "--json")
    assert done.stdout, (done.output, done.exception)
    return done.exit_code, document(done.stdout)


def answer(*words: object, code: int = 0) -> dict[str, Any]:
    """The document that `fastload WORDS --json` printed last."""
    done = command(*words, "--json")
    assert done.exit_code == code, (done.output, done.exception)
    return document(done.stdout)


def store_words(options: Mapping[str, Any], *names: str) -> list[str]:
    """Storage options as a command takes them: by `--storage-option`, or by each of `names`."""
    names = names or ("--storage-option",)
    return [word for key, value in options.items() for name in names for word in (name, f"{key}={value}")]


@contextmanager
def start(*words: object) -> Iterator[subprocess.Popen[str]]:
    """`fastload WORDS` in a process and a session of its own, which is killed if it outlives the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "fastload", *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            yield running
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)


def script(code: str, *arguments: object, environment: Mapping[str, str] | None = None) -> str:
    """What a script printed, in a process where warnings are errors; it has to end with 0."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_FORKS = """
import json, os, runpy, sys
import torch.utils.data

folder, runs = sys.argv[1], json.loads(sys.argv[2])
for number, (words, variables) in enumerate(runs):
    pid = os.fork()
    if pid == 0:
        for descriptor, end in (1, "out"), (2, "err"):
            os.dup2(os.open(f"{folder}/{number}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        os.environ.update(variables)
        sys.argv = words
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def run_scripts(
    folder: Path, *runs: tuple[list[Any], dict[str, str]]
) -> list[subprocess.CompletedProcess[str]]:
    """Run scripts one after the other, each as (words, variables), and keep what they print in `folder`.

    Each has a process of its own, forked from one that has torch, whose import takes 2 s, and no fastload.
    """
    told = json.dumps([[[str(word) for word in words], variables] for words, variables in runs])
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, folder, told],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    codes = list(map(int, done.stdout.split()))
    assert (done.returncode, len(codes)) == (0, len(runs)), done.stderr
    return [
        subprocess.CompletedProcess(
            words, code, (folder / f"{number}.out").read_text(), (folder / f"{number}.err").read_text()
        )
        for number, ((words, _), code) in enumerate(zip(runs, codes, strict=True))
    ]
