"""Text as a terminal, a log or a page may show it, wherever it came from."""

from __future__ import annotations

__all__ = ["printable"]


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
