"""Child processes that end with their parent, even after a SIGKILL.

A context manager ends its server at the end of its block, but SIGKILL skips that. So each child asks the
kernel to be killed when its parent dies. `python tether.py PARENT_PID COMMAND...` does that and becomes the
command: the request survives exec. The alternative, a fork hook (`preexec_fn`), is unsafe in a process with
threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
SECONDS_TO_END = 3.0


class Child(NamedTuple):
    """A running child process."""

    process: subprocess.Popen[bytes]
    output: int

    def said(self) -> str:
        """The output of the child so far, stdout and stderr."""
        size = os.fstat(self.output).st_size
        return os.pread(self.output, size, 0).decode(errors="replace")


@contextmanager
def tethered(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> Iterator[Child]:
    """Run `command` (an absolute path and its arguments) for the length of the block.

    The child gets a session of its own, so Ctrl-C reaches only the parent, which then ends the child. Call
    this from the main thread: the kernel watches the thread that started the child.
    """
    # Output goes to memory, not to a pipe: a pipe that nobody reads stops its writer after 64 KB.
    from fastload.metrics.machine import memory_file  # this file is also a program, which has no fastload

    output = memory_file("fastload-child-output")
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        try:
            yield Child(process, output)
        finally:
            _end(process)
    finally:
        os.close(output)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _become(parent: int, command: list[str]) -> None:
    """Ask the kernel to kill this process with `parent`, then run `command` in it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent ended before its child had started")
    os.execv(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
