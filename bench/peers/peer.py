"""A loader in a process of its own, fastload included: it runs epochs on demand, measured from outside."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.data import BATCH, SIZE
from bench.peers.contenders import WITH_OWN_FILES, Contender
from bench.peers.environment import SCRIPTS, Unavailable, python_of

TO_START = 180.0
TO_ANSWER = 180.0  # beyond the seconds of an epoch: MosaicML waits for 60 s before its first batch
TO_END = 10.0
LOOK_EVERY = 0.2


class Run(NamedTuple):
    """One epoch: images, wall time, time to the first batch, CPU time of all processes."""

    images: int
    seconds: float
    first_batch: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.images / self.seconds


class Peer:
    """`bench/peers/scripts/SCRIPT.py` at work on a job (see `bench/peers/scripts/peer_side.py`).

    Attributes:
        versions: of the packages that it uses.
        start_seconds: from the start of its process until it was ready: imports, listing.

    Raises:
        Unavailable: it cannot be installed or does not run here; the message says why.
    """

    def __init__(self, script: str, job: dict[str, Any]) -> None:
        begin = time.perf_counter()
        self._unread = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [str(python_of(script)), str(SCRIPTS / f"{script}.py"), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        try:
            self.said = self._read(TO_START)
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = self.said.get("versions", {})
        self.start_seconds = time.perf_counter() - begin

    def epoch(self, at_most: float = 3600.0) -> Run:
        """One epoch, or its part of `at_most` seconds."""
        assert self._process.stdin is not None
        before = self._cpu_seconds()
        self._process.stdin.write(json.dumps({"seconds": at_most}).encode() + b"\n")
        self._process.stdin.flush()
        said = self._read(at_most + TO_ANSWER)
        cpu = self._cpu_seconds() - before
        if not said["images"]:
            raise Unavailable("an epoch had no images")
        return Run(said["images"], said["seconds"], said["first_batch"], cpu)

    @contextmanager
    def watched(self) -> Iterator[list[int]]:
        """Samples the memory (PSS) of all its processes within the block; yields the list of samples."""
        found: list[int] = []
        done = threading.Event()

        def look() -> None:
            while True:
                ended = done.wait(LOOK_EVERY)
                found.append(memory_of(self._process.pid))
                if ended:
                    return

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield found
        finally:
            done.set()
            thread.join()

    def close(self) -> None:
        """Ask it to end, then kill what is left of it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(TO_END)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, within: float) -> dict[str, Any]:
        """The next line that is a JSON document: some peers print to stdout too."""
        assert self._process.stdout is not None
        fd, deadline = self._process.stdout.fileno(), time.monotonic() + within
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                if line.startswith(b"{"):
                    document: dict[str, Any] = json.loads(line)
                    return document
                continue
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Unavailable(f"no answer within {within:.0f} s")
            if not (data := os.read(fd, 1 << 16)):
                raise Unavailable(self._last_error())
            self._unread += data

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it ended without an error message"

    def _cpu_seconds(self) -> float:
        """CPU time of its processes and of their ended children."""
        total = 0.0
        for process in _family(self._process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total


def make_own_files(folder: Path, contenders: Iterable[Contender]) -> None:
    """Have contenders that read a format of their own make their files from the photos of a folder."""
    for script, mode in sorted({(contender.script, contender.mode) for contender in contenders}):
        if script in WITH_OWN_FILES:
            job = {"prepare": True, "folder": str(folder), "mode": mode, "size": SIZE, "batch": BATCH}
            try:
                Peer(script, job).close()
            except Unavailable as error:
                raise SystemExit(f"{script} could not make its files: {error}") from None


def memory_of(pid: int) -> int:
    """PSS, in bytes, of a process and all below it."""
    total = 0
    for process in _family(pid):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def connections_of(pid: int) -> int:
    """TCP connections of a process and all below it."""
    total = 0
    for process in _family(pid):
        with contextlib.suppress(psutil.Error):
            total += len(process.net_connections("tcp"))
    return total


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
