"""An object of a store as a file: every read is a ranged request.

Libraries that take an open file (PyAV, soundfile, pyarrow, h5py) then read of a large object only what they
ask for. Each read of a `RangedFile` is one request, however small, so it serves callers that read in large
pieces. `Store.open` puts a buffer before it. One buffer and not several: a reader that jumps between two
places pays a request for each jump, and what a file costs in memory stays known.
"""

from __future__ import annotations

import io
import os
from typing import Any, Protocol


class _Ranged(Protocol):
    """The part of a `Store` that a file needs. `base` imports this module, so it cannot be named here."""

    url: str

    def read_range(self, key: str, start: int, stop: int, version: str | None = None) -> Any: ...


class RangedFile(io.RawIOBase):
    """One version of an object as an unbuffered binary file for reading, without a request to open it.

    Example::

        import fastload
        from fastload.store.ranged_file import RangedFile

        store = fastload.open_store("s3://bucket/train")
        info = store.head("cat/0000.jpg")
        file = RangedFile(store, info.key, info.size, info.version)
        file.seek(-2, 2)
        file.read()  # the last two bytes, by one request

    Args:
        store: reads the ranges, with its retries and errors.
        key: the object.
        size: bytes of the object.
        version: of the object, as listed. Another version is an `ObjectChangedError`. "": any.

    Attributes:
        name: the key, as files have it: libraries tell formats by it.
    """

    def __init__(self, store: _Ranged, key: str, size: int, version: str = "") -> None:
        self.name = key
        self._store, self._size, self._version = store, size, version
        self._at = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self._store.url}, {self._size:,} bytes>"

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, without a request. A place past the end is allowed, as in any file; a read there is empty."""
        self._check_open()
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}
        if whence not in starts:
            raise ValueError(f"whence must be 0, 1 or 2, found {whence!r}")
        if starts[whence] + offset < 0:
            raise ValueError(f"cannot seek to {starts[whence] + offset:,}, before the start of {self.name!r}")
        self._at = starts[whence] + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """At most `size` bytes from here, by one request; all that follow if it is negative or None."""
        return bytes(self._take(self._size if size is None or size < 0 else size))

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        body = self._take(len(view))
        view[: len(body)] = body
        return len(body)

    def _take(self, size: int) -> memoryview:
        self._check_open()
        stop = min(self._at + size, self._size)
        if stop <= self._at:
            return memoryview(b"")
        body = memoryview(self._store.read_range(self.name, self._at, stop, self._version)).cast("B")
        self._at = stop
        return body

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name!r} is closed")
