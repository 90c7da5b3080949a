"""A cache directory as one process uses it: opened at first use, once however often it is named, and passed
by where it fails.

LMDB forbids a file to be open twice in one process, and to be used in a forked child. So directories are
known by their inode, and a fork waits until no transaction is open. The child then closes the inherited
environments, and opens its own on first use.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import util as mp_util

import lmdb

from fastload.cache.directory import DAMAGED, LOCK_DEADLINE, Directory, LockedError, identity, open_root
from fastload.errors import CacheError, address, warn
from fastload.metrics.counters import Counters
from fastload.store.node import ProcessLocal, speaks

_FLUSH_SECONDS = 60.0
_AGAIN_SECONDS = 10.0  # that a locked directory is left alone
_NO_ACCESS = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


class Access:
    """The access of one process to one cache directory. Threads may share it.

    Args:
        path: of the cache.

    Attributes:
        counters: the counters "cache.*" of this process.
    """

    def __init__(self, path: str) -> None:
        self.counters = Counters()
        self._path = path
        self._directory: Directory | None = None
        self._tried = False
        self._again = math.inf  # when a directory that was locked is tried again
        self._warned = False
        self._writer_failed = False
        self._disk_full = False

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then all are closed, and names of modules may be None
            abandon(self._directory, self)

    def open(self) -> Directory | None:
        """Return the directory; None where it cannot be used, which is reported once."""
        if not self._tried or (self._directory is None and time.monotonic() >= self._again):
            patience = 0.0 if self._tried else LOCK_DEADLINE  # only the first try holds up the training
            try:
                self._directory = acquire(self._path, self, patience)
            except (OSError, lmdb.Error) as error:
                # All workers of a loader find the same: one of them says it.
                self._warned |= not speaks()
                self.report(error)
                locked = isinstance(error, LockedError)
                self._again = time.monotonic() + _AGAIN_SECONDS if locked else math.inf
            self._tried = True
        return self._directory

    @property
    def opened(self) -> Directory | None:
        """The directory, if it is open."""
        return self._directory

    @property
    def is_rebuilding(self) -> bool:
        """Whether this process rebuilds the index, and writes no record before that is done."""
        directory = self._directory
        return directory is not None and directory.writer is not None and directory.writer.has_first_job

    @property
    def has_failed(self) -> bool:
        """Whether the directory cannot be opened, or not be written any more."""
        return self._writer_failed or (self._tried and self._directory is None)

    def open_or_raise(self) -> Directory:
        """Return the directory, with all that was written before in it.

        Raises:
            CacheError: it cannot be opened.
        """
        if self._directory is None:
            try:
                self._directory = acquire(self._path, self)
            except (OSError, lmdb.Error) as error:
                if isinstance(error, CacheError):
                    raise
                raise CacheError(f"cache {self._path} cannot be used: {error}") from error
            self._tried = True
        if self._directory.writer is not None:
            self._directory.writer.flush(_FLUSH_SECONDS)
        return self._directory

    def is_writable(self, directory: Directory) -> bool:
        """Return whether this process can write; if not, the reason is reported once."""
        if directory.writer is None:
            self._report_writer(
                CacheError(
                    f"cache {self._path} {directory.readonly}: its records are read, and none are added"
                )
            )
        elif directory.writer.error is not None:
            self._report_writer(directory.writer.error)
        elif directory.writer.full is not None:
            self._report_full(directory.writer.full)
            return False
        return not self._writer_failed

    def flush(self, timeout: float) -> bool:
        """Wait as `Cache.flush` does."""
        directory = self._directory
        if directory is None or directory.writer is None:
            return not self._tried
        return directory.writer.flush(timeout) and self.is_writable(directory)

    def close(self) -> None:
        """Write out, sync the index, let go of the directory. The next `open` opens it again."""
        directory, self._directory, self._tried = self._directory, None, False
        if directory is None:
            return
        try:
            release(directory, self)
        except (OSError, lmdb.Error) as error:
            self.report(error)
        if directory.writer is not None and directory.writer.error is not None:
            self._report_writer(directory.writer.error)

    def report(self, error: BaseException) -> None:
        """Count a failure, and warn of the first one."""
        self.counters.add("cache.failures")
        if isinstance(error, DAMAGED) and self._directory is not None:
            self._directory.mark_damaged()
        if self._warned:
            return
        self._warned = True
        advice = ""
        if isinstance(error, OSError) and error.errno in _NO_ACCESS:
            advice = ". Training reads the store in every epoch: give a directory that you can write to"
        warn(
            f"fastload passes through its cache {self._path}: {error}{advice}. "
            f"See {address('cache-passes-through')}"
        )

    def _report_full(self, error: BaseException) -> None:
        """Warn once of a disk that is full for now; other failures are still warned of."""
        if not self._disk_full:
            self._disk_full = True
            self.counters.add("cache.failures")
            warn(
                f"fastload passes through its cache {self._path}: {error}. "
                f"It is filled again when there is room. See {address('cache-passes-through')}"
            )

    def _report_writer(self, error: BaseException) -> None:
        if not self._writer_failed:
            self._writer_failed = True
            self.report(error)


FORK_DEADLINE = 1.0  # seconds that a fork waits for a transaction to end

_lock = threading.Lock()
_opened: dict[tuple[int, int], Directory] = {}
# Directories of collected users, until somebody can close them.
_abandoned: deque[Directory] = deque()
# While a fork is under way: the directories, and whether no transaction of theirs is open.
_held: list[tuple[Directory, bool]] = []
# In a child: directories whose LMDB environment was in use at the fork. It can neither be closed, which would
# touch the parent's locks, nor be opened again; the child passes through.
_unforgettable: list[Directory] = []
# Closes all directories at the end of this process. atexit would not run in a multiprocessing child.
_finalizer = ProcessLocal(lambda: mp_util.Finalize(None, close_all, exitpriority=10))


def acquire(path: str, user: object, patience: float = LOCK_DEADLINE) -> Directory:
    """Return the opened directory, shared in this process; `user` holds it until `release`.

    It waits `patience` seconds for another process that has it locked.
    """
    with _lock:
        _finalizer.get()
        root_fd = open_root(path)
        directory = _opened.get(identity(root_fd))
        if directory is not None:
            os.close(root_fd)
        else:
            directory = Directory(path, root_fd, patience)
            _opened[directory.identity] = directory
        directory.users.add(user)
    _close_abandoned()
    return directory


def release(directory: Directory, user: object) -> None:
    """Let go; the last user in this process closes the directory."""
    with _lock:
        directory.users.discard(user)
        _close_unused(directory)
    _close_abandoned()


def _close_unused(directory: Directory) -> None:
    if directory.users or _opened.get(directory.identity) is not directory:
        return
    del _opened[directory.identity]  # first: an error leaves it closed, too
    if not directory.close():
        _opened[directory.identity] = directory


def abandon(directory: Directory | None, user: object) -> None:
    """Release for a collected user. Collection happens in any thread at any moment, also in one that holds
    the lock here: so this never waits for the lock, which is not reentrant, and does not let a writer thread
    join itself. What cannot be closed now is closed by the next call, or by the holder of the lock."""
    if directory is not None:
        directory.users.discard(user)
        _abandoned.append(directory)
        _close_abandoned()


def _close_abandoned() -> None:
    while _abandoned and _lock.acquire(blocking=False):
        try:
            directory = _abandoned.popleft()
            if directory.writer is not None and directory.writer.is_current_thread():
                _abandoned.append(directory)
                return
            with contextlib.suppress(OSError, lmdb.Error):
                _close_unused(directory)
        except IndexError:  # another thread was faster
            return
        finally:
            _lock.release()


def close_all() -> None:
    """Close every directory that this process has open, even if one of them fails."""
    with _lock:
        for directory in list(_opened.values()):
            with contextlib.suppress(OSError, lmdb.Error):
                directory.close()
        _opened.clear()


def _before_fork() -> None:
    _lock.acquire()
    for directory in _opened.values():
        _held.append((directory, directory.index.hold(FORK_DEADLINE)))


def _after_fork_in_parent() -> None:
    for directory, held in _held:
        if held:
            directory.index.release()
    _held.clear()
    _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for directory, held in _held:
        directory.forget(held)
        if not held:
            _unforgettable.append(directory)
    _held.clear()
    _opened.clear()
    _abandoned.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
