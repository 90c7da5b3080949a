"""Files on this machine: written whole or not at all, and the nearest directory that exists."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["is_part", "nearest_existing", "whole_file"]

_PART = ".part"


@contextlib.contextmanager
def whole_file(
    path: str | Path, *, folder: int | None = None, mode: int = 0o600, durable: bool = False
) -> Iterator[BinaryIO]:
    """A file to write. When the block ends it takes the name `path`, in place of an older file.

    Other processes see the older file until then, and nothing changes if the block raises. A process that is
    killed leaves a hidden file behind, see `is_part`.

    Args:
        folder: the descriptor of an open directory, to which `path` is relative.
        mode: the permissions of the file, before the umask.
        durable: write the bytes to the disk first: after a power cut the name would else stand for an empty
            file.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    path = Path(path)
    # Shortened in bytes: a name has 255 of them, whatever its alphabet.
    start = os.fsdecode(os.fsencode(path.name)[:200])
    part = path.with_name(f".{start}.{secrets.token_hex(8)}{_PART}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(part, flags, mode, dir_fd=folder), "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(part, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise


def is_part(name: str) -> bool:
    """Whether this is the name of a `whole_file` that is being written, or that a killed process left."""
    return name.startswith(".") and name.endswith(_PART)


def nearest_existing(path: str | Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    here = Path(path)
    while not here.exists() and here != here.parent:
        here = here.parent
    return here
