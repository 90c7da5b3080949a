"""The command line, in this process or in one of its own; and scripts in a fresh interpreter."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer.main
import typer.testing
from typer.testing import CliRunner

from fastload.cli.app import app
from tests.forked import Forked
from tests.patience import PATIENCE

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
def start(
    *words: object, module: str = "fastload", cwd: Path | None = ROOT, **variables: str
) -> Iterator[Forked]:
    """`python -m MODULE WORDS` in a process and a session of its own, killed if it outlives the block."""
    command = [sys.executable, "-m", module, *map(str, words)]
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "out").open("w") as out, (Path(folder) / "err").open("w") as err:
            running = Forked(command, env=os.environ | variables, stdout=out, stderr=err, cwd=cwd)
        try:
            yield running
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait(PATIENCE)


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
