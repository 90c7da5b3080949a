"""Fixtures for all tests: the S3 server, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_PATIENCE = 10.0  # seconds that processes, threads and descriptors have to go away


def _held() -> dict[str, set[object]]:
    """What this process holds that could leak. LMDB environments and read-only maps count as descriptors."""
    me = psutil.Process()
    return {
        "processes": {child.pid for child in me.children(recursive=True)},
        "threads": {thread.ident for thread in threading.enumerate()},
        "descriptors": {_describe(fd) for fd in os.listdir("/proc/self/fd")} - {None},
        "shared memory": {name for name in os.listdir("/dev/shm") if "torch" in name or "fastload" in name},
    }


def _describe(fd: str) -> tuple[str, str] | None:
    try:
        return fd, str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return None


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails the test if it leaves processes, threads, descriptors or shared memory behind."""
    before = _held()
    yield
    deadline = time.monotonic() + _PATIENCE
    while True:
        gc.collect()
        left = {kind: now - before[kind] for kind, now in _held().items() if now - before[kind]}
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind after {_PATIENCE:.0f} s: {left}")
        time.sleep(0.05)
