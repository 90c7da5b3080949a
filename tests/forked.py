"""Programs forked from a process that has torch and the command line: they import little else."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastload.cli.app  # noqa: F401 - its forks have it
from fastload.distributed import launcher


class Forked:
    """`python -m MODULE`, or a script, as of `subprocess.Popen`, but a fork of a process with torch."""

    def __init__(
        self,
        words: list[str],
        *,
        env: Mapping[str, str],
        stdout: Any,
        stderr: Any = subprocess.STDOUT,
        cwd: Path | None = None,
        **_: Any,
    ) -> None:
        self._streams = (stdout.name, stdout.name if stderr == subprocess.STDOUT else stderr.name)
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(words[1:], dict(env), self._streams, cwd)
        )
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("fastload", timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote, once it has ended."""
        self.wait(timeout)
        out, err = (Path(name).read_text() for name in self._streams)
        return out, err


def _run(words: list[str], env: dict[str, str], streams: tuple[str, str], cwd: Path | None) -> None:
    os.setsid()
    for descriptor, name in enumerate(streams, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    is_module = words[0] == "-m"
    run = (
        partial(runpy.run_module, words[1], alter_sys=True)
        if is_module
        else partial(runpy.run_path, words[0])
    )
    run_program(lambda: run(run_name="__main__"), words[is_module:], env, cwd)


def start_afresh() -> None:
    """Let a forked process be as one that Python starts: its workers are forks, too."""
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)
    launcher._forked = False  # it has no connection of the process that it is a fork of


def run_program(
    program: Callable[[], object], words: list[str], env: Mapping[str, str], cwd: Path | None
) -> None:
    """What a forked process does: all as in one that Python starts, but for the modules that it has."""
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    start_afresh()
    sys.argv = words
    try:
        program()
    finally:
        atexit._run_exitfuncs()
