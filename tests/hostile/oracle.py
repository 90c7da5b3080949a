"""One case: a reader gets files of an attacker in a process that is measured and judged.

A server has all imported and starts no thread; it forks for each reader, whose cases follow each other in
one process: a case costs some milliseconds. Measured are the processor time and the peak of memory of that
process and of those that it started, during the case: a busy machine makes no case fail. A case that seems at
fault behind others is judged again in a process of its own.
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
        more: a module whose `readers()` it knows beside those of `tests.hostile.readers`.
    """

    def __init__(self, *more: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.oracle", "tests.hostile.readers", *more],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def judge(self, reader: str, files: dict[str, bytes | int], patience: float = 30.0) -> Outcome:
        """Let a reader read these files.

        Args:
            patience: times the limit of processor time, as time of the clock: the machine may be busy.
        """
        from tests.hostile.readers import write

        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory(prefix="fastload-hostile-") as folder:
            size = write(Path(folder), files)
            told = {"reader": reader, "folder": folder, "size": size, "patience": patience}
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()
            return Outcome(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve(modules: list[str]) -> None:
    """Judge the cases that stand on the standard input, line by line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a reader's own words
    warnings.simplefilter("ignore")
    known: dict[str, Any] = {"": None}
    for module in modules:
        known |= importlib.import_module(module).readers()
    for name in fastload.__all__:
        getattr(fastload, name)  # imported on first use
    gc.collect()
    gc.freeze()
    nothing = _Host(known[""], resting=0)
    resting = nothing.judge("", 0, 60.0).memory
    nothing.end()
    last, host = "", nothing
    for line in sys.stdin:
        told = json.loads(line)
        name = told.pop("reader")
        if name != last or host.ended:
            host.end()
            last, host = name, _Host(known[name], resting)
        outcome = host.judge(**told)
        if outcome.fault:
            host.end()
            if host.cases > 1:
                outcome = _alone(_Host(known[name], resting), told, outcome)
        answers.write(json.dumps(outcome) + "\n")
        answers.flush()
    host.end()


def _alone(host: _Host, told: dict[str, Any], behind_others: Outcome) -> Outcome:
    """The outcome of a case that was at fault behind others: what it took there may have been theirs."""
    outcome = host.judge(**told)
    host.end()
    if outcome.fault or behind_others.fault.startswith(("took", "hung")):
        return outcome
    return outcome._replace(fault=f"behind other cases of this reader: {behind_others.fault}")


class _Host:
    """A process that lets a reader read, case after case, and what each took.

    Args:
        resting: the memory of one that reads nothing.
    """

    def __init__(self, reader: Any, resting: int) -> None:
        self.cases = 0
        self.ended = False
        self._resting = resting
        self._used = 0.0
        (tasks, self._tasks), (self._answers, answers) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.setpgid(0, 0)
            os.close(self._tasks)
            os.close(self._answers)
            _attempts(reader, tasks, answers)
        os.close(tasks)
        os.close(answers)

    def judge(self, folder: str, size: int, patience: float) -> Outcome:
        """What became of a case, and all it took."""
        self.cases += 1
        allowed, most = SECONDS + SECONDS_A_MB * size / 1e6, MEMORY + MEMORY_A_BYTE * size
        os.write(self._tasks, json.dumps([folder, allowed]).encode() + b"\n")
        text, ended = b"", True
        while ended and not text.endswith(b"\n"):
            ended = bool(select.select([self._answers], [], [], patience * allowed)[0])
            if not ended or not (more := os.read(self._answers, 1 << 16)):
                break
            text += more
        if text.endswith(b"\n"):
            fault, said, used, memory = json.loads(text)
        else:
            code, used, memory = self._end(kill=not ended)
            fault = f"ended by signal {-code}" if ended else f"hung for {patience * allowed:.0f} s"
            said = ""
        took, self._used = used - self._used, used
        memory -= self._resting
        if took > allowed or memory > most:
            fault = (
                f"took {took:.1f} s and {memory >> 20:,} MB, allowed for {size:,} bytes are {allowed:.1f} s "
                f"and {most >> 20:,} MB"
            )
        return Outcome(fault, said, took, memory)

    def end(self) -> None:
        if not self.ended:
            self._end(kill=False)

    def _end(self, kill: bool) -> tuple[int, float, int]:
        """(exit code, processor time, peak of memory)"""
        self.ended = True
        if kill:
            os.killpg(self._pid, signal.SIGKILL)
        os.close(self._tasks)
        os.close(self._answers)
        _, status, used = os.wait4(self._pid, 0)
        return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss << 10


def _attempts(reader: Any, tasks: int, answers: int) -> NoReturn:
    """The life of the process of a reader's cases."""
    try:
        _limit(resource.RLIMIT_CORE, 0)
        for line in os.fdopen(tasks):
            folder, seconds = json.loads(line)
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the peak of memory is that from here on
            _limit(resource.RLIMIT_CPU, int(_used()[0] + seconds) + 1)
            data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            _limit(resource.RLIMIT_DATA, data + _CEILING)
            answer = [*_attempt(reader, folder), *_used()]
            os.write(answers, json.dumps(answer).encode() + b"\n")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _limit(what: int, most: int) -> None:
    resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


def _used() -> tuple[float, int]:
    """(processor time, peak of memory) of this process and those that it started."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used), max(one.ru_maxrss for one in used) << 10


def _attempt(reader: Any, folder: str) -> tuple[str, str]:
    """(fault, what was said) of one case."""
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
    return fault, said


if __name__ == "__main__":
    serve(sys.argv[1:])
