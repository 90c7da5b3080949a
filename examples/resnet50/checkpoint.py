"""The state of a run in one file: whole or the one before, whatever happens while it is written."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ranks import Ranks

__all__ = ["load", "save"]


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings, and lists and dicts of these) to `path`; by rank 0.

    A file beside it is written and forced to disk, then renamed: after a power failure too, `path` is either
    the new state or the one before.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
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
    for left in path.parent.glob(f"{path.name}.*.tmp"):  # of a run that was killed while it wrote
        with suppress(OSError):
            left.unlink()


def load(path: Path, ranks: Ranks) -> dict[str, Any] | None:
    """The state in `path`, on every rank; None where there is none. Nothing is unpickled.

    Rank 0 reads and the others get its bytes: they need not see its disk, and no rank can see another version
    of the file.

    Raises:
        RuntimeError: there is a file, and it is no checkpoint.
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
            f"{path} is no checkpoint of this trainer ({error}): move it away to start anew"
        ) from error
    return state
