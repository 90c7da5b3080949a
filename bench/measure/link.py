"""Two network namespaces joined by a link of a limited rate: what runs in one reaches only the other.

It needs Linux, root, iproute2 and util-linux, and a kernel with the token bucket (tbf); `missing` says in
words what is not there. The namespaces have no names: they end with the two processes that hold them, and
the link with them, so nothing stays behind, however this process ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "link0"  # in both namespaces
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
PACKAGES |= {"setpriv": "util-linux"}
BURST = "256kb"

_RECEIVE = """
import socket
with socket.create_server(("{address}", 9000)) as server:
    print("ready", flush=True)
    with server.accept()[0] as connection:
        while connection.recv(1 << 20):
            pass
"""
_SEND = """
import socket, time
start = time.perf_counter()
with socket.create_connection(("{address}", 9000)) as connection:
    connection.sendall(bytes({size}))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print({size} / (time.perf_counter() - start))
"""


def missing() -> str:
    """What the link needs and this machine lacks, in words; empty if nothing."""
    if sys.platform != "linux":
        return "network namespaces: they exist on Linux only"
    if os.geteuid() != 0:
        return "root: network namespaces and the shaping of a link are root's"
    absent = sorted(tool for tool in PACKAGES if shutil.which(tool) is None)
    if absent:
        return f"{', '.join(absent)}: install {' and '.join(sorted({PACKAGES[tool] for tool in absent}))}"
    return ""


class Link:
    """A context manager: the two namespaces, side 0 and side 1, while it is open.

    Args:
        rate: bits a second, in each direction.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._holders: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Link:
        if lack := missing():
            raise SystemExit(f"a limited link needs {lack}")
        try:
            for _ in ADDRESSES:
                # It reads from a pipe of this process, so it ends when this process does.
                holder = ["unshare", "--net", "sh", "-c", "echo ready; exec cat"]
                self._holders.append(
                    subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
                )
                assert self._holders[-1].stdout is not None and self._holders[-1].stdout.readline()
            first, second = (str(holder.pid) for holder in self._holders)
            _call(
                "ip", "link", "add", DEVICE, "netns", first, "type", "veth", "peer", DEVICE, "netns", second
            )
            for side, address in enumerate(ADDRESSES):
                self._configure(side, address)
        except BaseException:
            self.close()
            raise
        return self

    def _configure(self, side: int, address: str) -> None:
        _call(*self.command(side, "ip", "link", "set", "lo", "up"))
        _call(*self.command(side, "ip", "address", "add", f"{address}/24", "dev", DEVICE))
        _call(*self.command(side, "ip", "link", "set", DEVICE, "up"))
        bucket = ["tbf", "rate", f"{self.rate:.0f}bit", "burst", BURST, "latency", "50ms"]
        try:
            _call(*self.command(side, "tc", "qdisc", "add", "dev", DEVICE, "root", *bucket))
        except RuntimeError as error:
            raise SystemExit(
                f"a limited link needs a kernel with tbf (CONFIG_NET_SCH_TBF): {error}"
            ) from error

    def command(self, side: int, *words: str) -> list[str]:
        """The command that runs `words` on that side."""
        return ["nsenter", f"--net=/proc/{self._holders[side].pid}/ns/net", *words]

    def start(self, side: int, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on that side; it is killed, with its children, when the link closes."""
        command = ["setpriv", "--pdeathsig", "KILL", *self.command(side, *words)]
        self._started.append(subprocess.Popen(command, start_new_session=True, **options))
        return self._started[-1]

    def sent(self, side: int) -> int:
        """Bytes that this side has sent, with all headers."""
        devices = Path(f"/proc/{self._holders[side].pid}/net/dev").read_text()
        counters = next(line for line in devices.splitlines() if line.strip().startswith(f"{DEVICE}:"))
        return int(counters.split(":")[1].split()[8])  # eight of what was received stand before

    def measure(self, megabytes: float) -> float:
        """Bits a second of one bare TCP connection from side 0 to side 1."""
        words = {"address": ADDRESSES[1], "size": int(megabytes * 1e6)}
        receiver = self.start(
            1, [sys.executable, "-c", _RECEIVE.format(**words)], stdout=subprocess.PIPE, text=True
        )
        assert receiver.stdout is not None and receiver.stdout.readline()
        rate = 8 * float(_call(*self.command(0, sys.executable, "-c", _SEND.format(**words))))
        receiver.wait()
        return rate

    def close(self) -> None:
        for process in self._started:
            with process:  # closes its pipes, and waits
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # its workers too
        for holder in self._holders:
            with holder:
                holder.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
