"""What a `Cache` may be given, checked."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fastload.errors import ArgumentError

__all__ = ["absolute", "checked_int", "parse_size"]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE | re.ASCII)


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


def parse_size(value: int | str, name: str = "size_limit") -> int:
    """Bytes, from an int or from text such as "500GB" or "200MiB"."""
    size = None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else None
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    if size is None or size < 1:
        raise ArgumentError(
            f'{name}={value!r}; give bytes as a positive int, or text such as "500GB" or "200MiB"'
        )
    return size
