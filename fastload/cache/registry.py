"""The directories that this process has open: one Directory each, whatever path leads there.

LMDB forbids a file to be open twice in one process, and to be used in a forked child. So directories are
known by their inode, and a fork waits until no transaction is open. The child then closes the inherited
environments, and opens its own on first use.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from multiprocessing import util as mp_util

import lmdb

from fastload.cache.directory import Directory, identity, open_root
from fastload.store.process import ProcessLocal

__all__ = ["abandon", "acquire", "close_all", "release"]

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


def acquire(path: str, user: object) -> Directory:
    """The opened directory, shared in this process; `user` holds it until `release`."""
    with _lock:
        _finalizer.get()
        root_fd = open_root(path)
        directory = _opened.get(identity(root_fd))
        if directory is not None:
            os.close(root_fd)
        else:
            directory = Directory(path, root_fd)
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
    """`release` for a collected user. Collection happens in any thread at any moment, also in one that holds
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
