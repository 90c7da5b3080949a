"""Readers that break each promise, to see that the suite finds them."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

from fastload.errors import DecodeError, StoreError
from tests.hostile.readers import Reader


def _spins(folder: Path) -> None:
    while True:
        pass


def _waits(folder: Path) -> None:
    signal.pause()


def _grows(folder: Path) -> int:
    return len(b"x" * (400 << 20))


def _grows_in_a_child(folder: Path) -> None:
    pid = os.fork()
    if pid == 0:
        _grows(folder)
        os._exit(0)
    os.waitpid(pid, 0)


def _raises(folder: Path) -> None:
    struct.unpack("<I", b"")


def _recurses(folder: Path) -> None:
    _recurses(folder)


def _hides(folder: Path) -> None:
    raise StoreError("the process failed:\nTraceback (most recent call last):\n ...", stage="list")


def _dies(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _refuses(folder: Path) -> None:
    raise DecodeError("this is no file")


_kept: list[object] = []


def _keeps(folder: Path) -> None:
    _kept.append(b"x" * (150 << 20))


def _remembers(folder: Path) -> None:
    if _kept:
        raise ValueError("not the first")
    _kept.append(folder)


READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "spins": (_spins, r"took \d\.\d s and|hung for"),
    "waits": (_waits, "hung"),
    "grows": (_grows, r"and \d{3} MB"),
    "grows in a child": (_grows_in_a_child, r"and \d{3} MB"),
    "raises": (_raises, "raised error: unpack"),
    "recurses": (_recurses, "raised RecursionError"),
    "hides": (_hides, "wraps another error"),
    "dies": (_dies, "ended by signal 11"),
    "refuses": (_refuses, "^$"),
    "keeps": (_keeps, "^$"),
    "remembers": (_remembers, "^$"),
}  # fmt: skip


def readers() -> dict[str, Reader]:
    """Name -> reader."""
    return {name: Reader(dict, "", read) for name, (read, _) in READERS.items()}
