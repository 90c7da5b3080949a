"""Programs forked from a process that has torch and the command line: they import little else."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import fastload.cli.app  # noqa: F401 - its forks have it
from fastload.cli import main
from fastload.distributed import launcher


class Forked:
    """`python -m fastload` as of `subprocess.Popen`, but forked from a server that has imported torch."""

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
        streams = (stdout.name, stdout.name if stderr == subprocess.STDOUT else stderr.name)
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_run_main, args=(words[2:], dict(env), streams, cwd)
        )
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("fastload", timeout or 0)
        return self._process.exitcode


def _run_main(words: list[str], env: dict[str, str], streams: tuple[str, str], cwd: Path | None) -> None:
    os.setsid()
    for descriptor, name in enumerate(streams, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    run_program(main, words, env, cwd)


def run_program(
    program: Callable[[], object], words: list[str], env: Mapping[str, str], cwd: Path | None
) -> None:
    """What a forked process does: all as in one that Python starts, but for the modules that it has."""
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)
    launcher._forked = False  # it has no connection of the process that it is a fork of
    for finalizer in list(weakref.finalize._registry):  # 20 ms for what `import torch` has registered
        finalizer.atexit = False
    sys.argv = words
    try:
        program()
    finally:
        atexit._run_exitfuncs()
