"""`python -m fastload`, forked from a process that has torch. Each fork imports this and little else."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastload.cli import main


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
    """What a forked process does: all as in one that Python starts, but for torch, which it has."""
    os.setsid()
    for descriptor, name in enumerate(streams, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)
    sys.argv = words
    try:
        main()
    finally:
        atexit._run_exitfuncs()
