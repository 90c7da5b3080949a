"""What a `Cache` may be given, checked."""

from __future__ import annotations

import os
from pathlib import Path

from fastload.errors import ArgumentError

__all__ = ["absolute", "checked_int"]


def absolute(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"path={text!r}: give the path of a directory")
    if "://" in text:
        raise ArgumentError(f"path={text!r} is a URL; the cache needs a directory on a local disk")
    return str(Path(text).expanduser().absolute())


def checked_int(name: str, value: int, top: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= top:
        raise ArgumentError(f"{name}={value!r}; give a whole number from 1 to {top}")
    return value
