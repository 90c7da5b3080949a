"""In-flight locks: of the processes that share a cache directory, one at a time reads an object.

A lock is on one byte of a file `claims*` in the cache directory: the byte that the object's key names. The
kernel keeps it (a file of 0 bytes can be locked anywhere), and frees it when the process ends, however it
ends: nothing expires, is refreshed or cleaned up. The locks belong to the open file (`F_OFD_SETLK`), not to
the process: `lockf`'s would all be gone once any copy of the file is closed.

A lock is advice. A process that does not get it waits a little for the other's result, then reads by itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading

_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid: of 64-bit Linux
_TAKEN = (errno.EAGAIN, errno.EACCES)
# The kernel goes through all locks of a file for each new one. Measured for one lock and unlock while
# 2,000 others are held: 28 us with one file, 7 us with eight.
FILES = tuple(f"claims{number}" for number in range(8))


class InflightLocks:
    """The in-flight locks of one process in one cache directory. Threads may share it.

    Where a lock cannot be tried (a file system without such locks, no permission), it is granted.
    """

    def __init__(self, root_fd: int) -> None:
        self._guard = threading.RLock()  # a payload that is collected gives its lock back, in any thread
        self._held: set[bytes] = set()
        self._fds: list[int] = []
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            for name in FILES:
                self._fds.append(os.open(name, flags, 0o600, dir_fd=root_fd))
        except OSError:
            self.close()

    def lock(self, key: bytes) -> bool:
        """Lock the object with this cache key. False: it is locked, perhaps by another thread here."""
        with self._guard:
            if key in self._held:
                return False
            try:
                self._set(key, fcntl.F_WRLCK)
            except OSError as error:
                if error.errno in _TAKEN:
                    return False
            self._held.add(key)
        return True

    def unlock(self, key: bytes) -> None:
        """Unlock the object; nothing happens where this process has no lock on it."""
        with self._guard:
            if key not in self._held:
                return
            self._held.discard(key)
            with contextlib.suppress(OSError):
                self._set(key, fcntl.F_UNLCK)

    def _set(self, key: bytes, kind: int) -> None:
        fds = self._fds
        if not fds:
            return
        # 63 bits of a digest: two objects in flight that share a byte are unlikely, and would only wait for
        # each other.
        byte = int.from_bytes(key[:8], "little") >> 1
        fcntl.fcntl(fds[key[8] % len(fds)], fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))

    def close(self) -> None:
        """Unlock all. In a forked child this leaves the parent's locks as they are."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
