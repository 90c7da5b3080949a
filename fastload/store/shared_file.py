"""Bytes in one file that all processes of a node map: a file on disk, or one in memory.

Forked processes share the mapping. A process that is being spawned gets a descriptor of the same file.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any

from fastload.metrics.platform import memory_file

__all__ = ["SharedFile"]


class SharedFile:
    """A mapped file that is only read. Pickling it for a process that is being spawned passes a descriptor.

    Any other pickle has the bytes; a copy is the file itself.

    Args:
        descriptor: of the file, with all of its content. This object owns it from here on.

    Attributes:
        map: its content.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)

    @classmethod
    def written(cls, name: str, write: Callable[[int], None]) -> SharedFile:
        """A file in memory with what `write(descriptor)` puts there.

        Raises:
            What `write` raises.
        """
        descriptor = memory_file(name)
        try:
            write(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedFile:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None:
            return _from_handle, (reduction.DupFd(self._descriptor),)
        return _from_bytes, (self.map[:],)


def _from_handle(handle: Any) -> SharedFile:
    return SharedFile(handle.detach())


def _from_bytes(content: bytes) -> SharedFile:
    def write(descriptor: int) -> None:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)

    return SharedFile.written("fastload-shared", write)
