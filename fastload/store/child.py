"""Work in a short-lived forked child, so that this process starts no native client and stays safe to fork.

The child lists a store and ends. The listing comes back in a file in memory (memfd) that both inherit.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

from fastload.errors import FastloadError, StoreError, StoreTimeoutError
from fastload.store.client_process import keep_clients_here

__all__ = ["run_in_child"]

_POLL_SECONDS = 0.5
# Longer than the store's own retries of one page can take.
_SILENT_SECONDS = 600.0
_PR_SET_PDEATHSIG = 1

Work = Callable[[Callable[[int], None]], None]


def run_in_child(work: Work, progress: Callable[[int], None]) -> None:
    """Run `work(report)` in a forked child, and `progress(n)` here for each `report(n)` there.

    Raises:
        FastloadError: what `work` raised.
        StoreError: the child died by a signal, or silently.
        StoreTimeoutError: the child reported nothing for 10 minutes.
    """
    receiver, sender = Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads. This child takes no lock of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        receiver.close()
        _child(work, sender, parent)
    sender.close()
    child = _Child(pid)
    try:
        _follow(child, receiver, progress)
    finally:
        child.kill()
        receiver.close()


class _Child:
    """A forked process, waited for exactly once."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def ended(self) -> bool:
        """Whether it has ended."""
        self._wait(os.WNOHANG)
        return self._status is not None

    def describe_end(self) -> str:
        """How it ended, in words. Waits for the end."""
        self._wait(0)
        status = self._status or 0
        if os.WIFSIGNALED(status):
            return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"ended with status {os.WEXITSTATUS(status)} and no result"

    def kill(self) -> None:
        """End it, if it has not ended."""
        if not self.ended():
            os.kill(self._pid, signal.SIGKILL)
            self._wait(0)

    def _wait(self, options: int) -> None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self._pid, options)
            except ChildProcessError:  # it was waited for elsewhere (SIGCHLD ignored)
                pid, status = self._pid, 0
            if pid:
                self._status = status


def _follow(child: _Child, receiver: Connection, progress: Callable[[int], None]) -> None:
    """Take the child's messages until its last one: an error, or None for success."""
    heard = time.monotonic()
    while True:
        try:
            if receiver.poll(_POLL_SECONDS):
                message = receiver.recv()
                heard = time.monotonic()
                if message is None:
                    return
                if isinstance(message, FastloadError):
                    raise message
                progress(message)
            elif child.ended() and not receiver.poll():
                raise EOFError
        except EOFError:
            raise StoreError(
                f"the listing process {child.describe_end()}; if memory ran out, list a smaller prefix",
                stage="list",
            ) from None
        if time.monotonic() - heard > _SILENT_SECONDS:
            raise StoreTimeoutError(f"the listing made no progress for {_SILENT_SECONDS:.0f} s", stage="list")


def _child(work: Work, sender: Connection, parent: int) -> NoReturn:
    """The child's whole life. It leaves by `_exit`: exit handlers belong to the parent."""
    try:
        keep_clients_here()
        gc.freeze()  # never collect the parent's garbage here: finalizers must run in the parent only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        try:
            work(sender.send)
            sender.send(None)
        except FastloadError as error:
            sender.send(error)
        except Exception:
            sender.send(StoreError(f"the listing process failed:\n{traceback.format_exc()}", stage="list"))
    finally:
        os._exit(0)
