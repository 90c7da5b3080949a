"""Text as a terminal, a log or a page may show it, wherever it came from."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

# The folder of the files whose frames are fastload's. Not of fastload_train.py beside it.
PACKAGE = str(Path(__file__).parent) + os.sep


def printable(text: str, keep: str = "") -> str:
    r"""Return `text` with escapes, those of `repr`, in place of its characters that are not printable.

    They are the controls of a terminal (C0, DEL, C1), those that hide or reorder text (bidirectional and
    others), separators of lines and paragraphs, spaces that are not " ", and lone surrogates.

    Example::

        printable("a\x1b[2J.jpg")  # a\x1b[2J.jpg, with a backslash

    Args:
        text: from a key, a file, a server or a library.
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def user_level() -> int:
    """Return the `stacklevel` with which a warning of the caller shows the line outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def warn(text: str) -> None:
    """Warn of what training goes on with: a RuntimeWarning; under `-W error` a line of the log."""
    try:
        warnings.warn(printable(text), RuntimeWarning, user_level())
    except RuntimeWarning:
        logging.getLogger("fastload").warning("%s", printable(text))
