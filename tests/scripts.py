"""Scripts in processes of their own, forked from one that has torch, whose import takes 2 s."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[1]

# A script runs at the top level of its process, and Python ends that process. So errors, Ctrl-C and what is
# left behind have their usual effects.
_SERVER = """
import json, os, socket, sys
IMPORTS
import tests.settled

server = socket.socket(fileno=int(sys.argv[1]))
while True:
    told, streams, *_ = socket.recv_fds(server, 1 << 20, 3)
    if not told:
        os._exit(0)
    if not streams:
        server.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(int(told), 0)[1]))
        continue
    pid = os.fork()
    if pid == 0:
        break
    server.send(b"%d" % pid)
    for stream in streams:
        os.close(stream)

os.setsid()
server.close()
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
if launcher := sys.modules.get("fastload.distributed.launcher"):
    launcher._forked = False  # it has no connection of the process that it is a fork of
text, sys.argv, variables = json.loads(told)
os.environ.update(variables)
if sys.argv[0] != "-c":
    __file__ = sys.argv[0]
    sys.path[0] = os.path.dirname(__file__)
exec(compile(text, sys.argv[0], "exec"))
"""


class Script:
    """A script that runs, with what it prints; as of `subprocess.Popen`."""

    def __init__(self, pid: int, server: socket.socket, out: int, err: int) -> None:
        self.pid = pid
        self.stdout = os.fdopen(out)
        self.returncode: int | None = None
        self._server = server
        self._err = os.fdopen(err)

    def communicate(self) -> tuple[str, str]:
        """Wait for the end of the script, and of all that has its stdout; what they printed."""
        with self.stdout, self._err:
            out = self.stdout.read()
            self._server.send(b"%d" % self.pid)
            self.returncode = int(self._server.recv(99))
            self._err.seek(0)
            return out, self._err.read()


class Scripts:
    """Starts scripts, each in a process and a session of its own."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server

    def start(
        self,
        text: str,
        *words: object,
        path: Path | None = None,
        stdin: int | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Script:
        """Start a script.

        Args:
            path: its file, which other start methods than fork can import; written where there is none.
        """
        text = textwrap.dedent(text)
        if path is not None and not path.exists():
            path.write_text(text)
        told = json.dumps([text, [str(path or "-c"), *map(str, words)], dict(variables)])
        out, theirs = os.pipe()
        err, name = tempfile.mkstemp()
        Path(name).unlink()
        with Path(os.devnull).open() as nothing:
            streams = [nothing.fileno() if stdin is None else stdin, theirs, err]
            socket.send_fds(self._server, [told.encode()], streams)
        os.close(theirs)
        return Script(int(self._server.recv(99)), self._server, out, err)

    def run(self, text: str, *words: object, **options: Any) -> tuple[int | None, str, str]:
        """(exit code, stdout, stderr) of a script, which `start` starts."""
        script = self.start(text, *words, **options)
        out, err = script.communicate()
        return script.returncode, out, err

    def run_files(self, *runs: tuple[list[Any], dict[str, str]]) -> list[subprocess.CompletedProcess[str]]:
        """Run files one after the other, each as (words, variables)."""
        done = []
        for words, variables in runs:
            path = Path(words[0])
            found = self.run(path.read_text(), *words[1:], path=path, variables=variables)
            done.append(subprocess.CompletedProcess(words, *found))
        return done


@contextmanager
def serve_scripts(imports: str = "from fastload import DataLoader, ImageFolder") -> Iterator[Scripts]:
    """Start the process that is forked.

    Args:
        imports: what it imports, and each script has from the start.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(PATIENCE)
    with theirs:
        words = [sys.executable, "-c", _SERVER.replace("IMPORTS", imports), str(theirs.fileno())]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(words, cwd=ROOT, env=variables, pass_fds=[theirs.fileno()])
    with ours, server:
        yield Scripts(ours)
        ours.shutdown(socket.SHUT_RDWR)
