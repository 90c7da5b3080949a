"""One case: a reader gets files of an attacker in a process of its own, which is measured and judged.

A server has all imported and starts no thread; it forks for each case, so that a case costs some
milliseconds, and what it takes is its own. Measured are the processor time and the peak of memory of that
process and of those that it started: a busy machine makes no case fail.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import fastload
from fastload.errors import FastloadError

ROOT = Path(__file__).parents[2]
MAX_INFLATED = (
    128 << 20
)  # the limit that the readers of datasets are given; the default takes longer to reach
SECONDS, SECONDS_A_MB = 2.0, 2.0  # of processor time, of which a slow core takes twice as much as a fast one
MEMORY, MEMORY_A_BYTE = MAX_INFLATED + (128 << 20), 4  # above what the server has
_CEILING = 4 << 30  # bytes of data at which the kernel refuses more: the machine has other work


class Outcome(NamedTuple):
    """What became of a case. `fault` is "" where all is as promised."""

    fault: str
    said: str
    seconds: float = 0.0
    memory: int = 0


class Server:
    """A process that reads hostile files; one case at a time.

    Args:
        module: the one whose `readers()` it knows.
        patience: times the limit of processor time, as time of the clock: the machine may be busy.
    """

    def __init__(self, module: str = "tests.hostile.readers", patience: float = 30.0) -> None:
        self._patience = patience
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.oracle", module],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def judge(self, reader: str, files: dict[str, bytes | int]) -> Outcome:
        """Let a reader read these files."""
        from tests.hostile.readers import write

        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory(prefix="fastload-hostile-") as folder:
            size = write(Path(folder), files)
            told = {"reader": reader, "folder": folder, "size": size, "patience": self._patience}
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()
            return Outcome(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve(module: str) -> None:
    """Judge the cases that stand on the standard input, line by line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a reader's own words
    warnings.simplefilter("ignore")
    known = importlib.import_module(module).readers()
    for name in fastload.__all__:
        getattr(fastload, name)  # imported on first use
    gc.collect()
    gc.freeze()
    resting = _run(None, "", SECONDS, 60.0).memory
    for line in sys.stdin:
        told = json.loads(line)
        outcome = _judged(known[told.pop("reader")], resting=resting, **told)
        answers.write(json.dumps(outcome) + "\n")
        answers.flush()


def _judged(reader: Any, folder: str, size: int, patience: float, resting: int) -> Outcome:
    allowed, most = SECONDS + SECONDS_A_MB * size / 1e6, MEMORY + MEMORY_A_BYTE * size
    fault, said, took, memory = _run(reader, folder, allowed, patience * allowed)
    memory -= resting
    if took > allowed or memory > most:
        fault = (
            f"took {took:.1f} s and {memory >> 20:,} MB, allowed for {size:,} bytes are {allowed:.1f} s and "
            f"{most >> 20:,} MB"
        )
    return Outcome(fault, said, took, memory)


def _run(reader: Any, folder: str, seconds: float, patience: float) -> Outcome:
    """What became of a process that lets the reader read, and all it took."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        _attempt(reader, folder, seconds, sender)
    os.close(sender)
    with os.fdopen(receiver, "rb") as answer:
        ended = bool(select.select([answer], [], [], patience)[0])
        text = answer.read() if ended else b""
    if not ended:
        os.killpg(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    fault, said = f"ended by signal {-code}" if ended else f"hung for {patience:.0f} s", ""
    if text.endswith(b"\n"):
        fault, said = json.loads(text)
    return Outcome(fault, said, used.ru_utime + used.ru_stime, used.ru_maxrss << 10)


def _attempt(reader: Any, folder: str, seconds: float, sender: int) -> NoReturn:
    """The life of the process of one case."""
    most = int(seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + _CEILING, data + _CEILING))
    fault = said = ""
    try:
        if reader is not None:
            said = f"read {reader.read(Path(folder))!s:.200}"
    except FastloadError as error:
        said = f"{type(error).__name__}: {error!s:.400}"
        if (
            "Traceback (most recent" in str(error)
            or " process ended" in said
            or " process was killed" in said
        ):
            fault = f"a {type(error).__name__} that wraps another error: {str(error)[-400:]}"
    except BaseException as error:
        said = "".join(traceback.format_exception(error))[-1500:]
        fault = f"raised {type(error).__name__}: {error!s:.300}"
    os.write(sender, json.dumps([fault, said]).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
