"""The arguments of a `Cache`, checked before anything is opened."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fastload.errors import ArgumentError


def check_kernel() -> None:
    """Refuse mode "dct" where nothing can decode its records."""
    from fastload.images import dct  # only here, for it brings torch along

    if not dct.available():
        raise ArgumentError(
            "mode='dct' needs fastload's compiled kernel, which is missing here: use mode='raw', or 'auto', "
            "which is 'raw' without it; fastload doctor says what to install"
        )


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
