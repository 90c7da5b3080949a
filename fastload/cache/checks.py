"""The arguments of a `Cache`, checked before anything is opened."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fastload.errors import ArgumentError


def absolute(path: str | os.PathLike[str]) -> str:
    """The absolute path of a directory on a local disk."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"path={text!r}: give the path of a directory")
    if "://" in text:
        raise ArgumentError(f"path={text!r} is a URL; the cache needs a directory on a local disk")
    if re.search(r"(^|/)\$(\w|{)", text):
        raise ArgumentError(
            f"path={text!r} names a variable, which only a shell replaces: use os.path.expandvars"
        )
    return str(Path(text).expanduser().absolute())


def whole_number(name: str, value: int, top: int) -> int:
    """The value of the argument `name`, from 1 to `top`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= top:
        raise ArgumentError(f"{name}={value!r}; give a whole number from 1 to {top}")
    return value
