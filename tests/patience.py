"""How long tests wait for what has to come (and go): a bound on what hangs, never a measure of speed.

It is long, as machines are shared: nothing waits that long while all is well.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

PATIENCE = 240.0  # seconds

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str) -> T:
    """Look until `condition()` holds; its value."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {PATIENCE:.0f} s it was not so: {what}"
        time.sleep(0.01)
    return value


def interrupt_when(condition: Callable[[], Any]) -> threading.Thread:
    """Ctrl-C, as this process gets it, once the condition holds."""

    def interrupt() -> None:
        wait_until(condition, "what is to be interrupted has begun")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    return thread


def runs(process: psutil.Process) -> bool:
    """Whether it does: one that is dead, and only not yet collected by whoever started it, does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it has gone between the two questions
        return False


def of_session(session: int) -> list[psutil.Process]:
    """The processes that run in a session: its leader and all that it started, which need not be children."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and runs(process):
                members.append(process)
        except ProcessLookupError:
            continue
    return members
