"""The commands of a page's shell, forked from a process that has torch: to import it takes 1.5 s of CPU.

`install` forks such a process, the server, and puts shims in a folder: `fastload`, `python` and `torchrun`. A
shim is a small program. It hands its words, environment, folder and streams to the server, which forks the
command; it passes signals on, and ends as the command does.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import selectors
import socket
import sys
from pathlib import Path

from fastload.cli import main
from tests.forked import run_program

_SHIM = """#!{python} -IS
import array, json, os, signal, socket, sys

name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
if name == "python" and not (words[:1] in (["-m"], ["-u"]) or "".join(words[:1]).endswith(".py")):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
told = json.dumps([name, words, dict(os.environ), os.getcwd(), os.getpgrp()]).encode()
server.sendmsg([told], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
command = int(server.recv(99))
for number in signal.SIGHUP, signal.SIGINT, signal.SIGTERM:
    signal.signal(number, lambda number, _: os.kill(command, number))
code = int(server.recv(99))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def install(folder: Path) -> None:
    """Fork a server, and put the shims for it in `folder`."""
    address = f"\0shims-{os.getpid()}"  # not a path, as those are limited to 107 characters
    for name in ("fastload", "python", "torchrun"):
        (folder / name).write_text(_SHIM.format(python=sys.executable, address=address))
        (folder / name).chmod(0o755)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    if os.fork() == 0:
        _serve(listener)
    listener.close()


def _serve(listener: socket.socket) -> None:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        key, _ = selector.select()[0]
        if key.fileobj is listener:
            shim = listener.accept()[0]
            told, streams, *_ = socket.recv_fds(shim, 1 << 20, 3)
            command = multiprocessing.Process(target=_run, args=(streams, *json.loads(told)))
            command.start()
            for stream in streams:
                os.close(stream)
            with contextlib.suppress(BrokenPipeError):
                shim.send(b"%d" % command.pid)
            selector.register(shim, selectors.EVENT_READ, command)
            selector.register(os.pidfd_open(command.pid), selectors.EVENT_READ, (command, shim))
        elif isinstance(key.fileobj, socket.socket):  # SIGKILL ended the shim
            selector.unregister(key.fileobj)
            key.data.kill()
        else:
            command, shim = key.data
            command.join()
            with contextlib.suppress(KeyError, BrokenPipeError):  # the shim has ended
                selector.unregister(shim)
                shim.send(b"%d" % command.exitcode)
            shim.close()
            selector.unregister(key.fileobj)
            os.close(key.fd)


def _run(
    streams: list[int], name: str, words: list[str], environment: dict[str, str], folder: str, group: int
) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with contextlib.suppress(PermissionError):  # the shim of a rank has a session of its own
        os.setpgid(0, group)
    programs = {"fastload": main, "python": _python, "torchrun": _torchrun}
    run_program(programs[name], [name, *words], environment, Path(folder))


def _python() -> None:
    """`python FILE` or `python -m MODULE`, and its arguments."""
    del sys.argv[0]
    if sys.argv[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _torchrun() -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous  # here, as torch may be without it
    from torch.distributed.run import main

    dynamic_rendezvous.get_method_name = lambda: ""  # for logs; it took 0.2 s to look for it in all modules
    main()
