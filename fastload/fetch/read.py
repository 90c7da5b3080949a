"""What the fetch window knows of a sample on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Part", "Read"]


@dataclass
class Read:
    """One sample on its way."""

    index: int
    size: int
    key: bytes | None = None  # of the cache
    entry: Any = None  # where the cache has it
    line: Any = None  # of whom announced it; see `Lines`
    wanted: int = 1  # how often it was requested and not yet taken
    missing: int = 1  # parts that are queued or under way
    body: bytearray | None = None  # of an object read in parts; empty until the first one is asked for
    started: float = 0.0
    hedged: bool = False
    changes: int = 0  # how often the object was found to be another one
    claimed: bool = False
    put_off: float = 0.0  # since when another run is reading it
    awaited: bool = False
    done: bool = False
    payload: Any = None
    error: BaseException | None = None


class Part(NamedTuple):
    """The bytes [start, stop) of a sample, to be read by one request."""

    read: Read
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the sample."""
        return self.stop - self.start == self.read.size
