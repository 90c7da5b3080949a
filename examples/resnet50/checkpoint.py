"""The state of a run in one file, which is whole at any moment: either the new state or the previous one."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ranks import Ranks

__all__ = ["load", "replace", "save"]


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings, and lists and dicts of these) to `path`. For rank 0."""
    replace(path, lambda file: torch.save(state, file))


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file at `path` as a whole.

    `write` fills a file beside it, which is forced to disk and then renamed. So `path` is either the new file
    or the previous one, even after a power failure.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename too
    finally:
        os.close(directory)
    for left in path.parent.glob(f"{path.name}.*.tmp"):  # from a run that was killed during a write
        with suppress(OSError):
            left.unlink()


def load(path: Path, ranks: Ranks) -> dict[str, Any] | None:
    """The state in `path`, on every rank; None if there is no file. Nothing is unpickled.

    Rank 0 reads the file and sends its bytes to the others: they need no access to its disk, and all ranks
    have the same version of the file.

    Raises:
        RuntimeError: the file is not a checkpoint.
    """
    data = None
    if ranks.first:
        with suppress(FileNotFoundError):
            data = path.read_bytes()
    data = ranks.broadcast(data)
    if data is None:
        return None
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise RuntimeError(
            f"{path} is not a checkpoint of this trainer ({error}): move it away to start a new run"
        ) from error
    return state
