"""This node: what one process has, what its processes share, and files that appear whole or not at all.

A forked child must not use its parent's clients, threads and locks. `ProcessLocal` is the rule for values.
Some modules need more than that when a process forks, and register hooks of their own:

* `store.client_process` closes the parent's connections in the child, so that the client process can see its
  trainer end.
* `cache.access` lets no LMDB transaction be open at a fork, and closes the environment in the child.
* `metrics.counters` starts the child's counters at zero, and `metrics.machine` lifts the limits of payloads.
* `distributed.launcher` leaves the connection of torch's key-value store to the parent.
* `workers.protocol` closes the trainer's ends of channels in the child; `workers.slots` uses the slots that
  the child can see no more.

A `SharedFile` is bytes in one file that all processes of a node map. Forked processes share the mapping. A
process that is being spawned gets a descriptor of the same file.

Listings and shard indexes are kept in folders that only this user can change. A kept file is read only if no
other user can have written it: a listing decides which objects and labels a run gets. Everything is
checked by its descriptor: a path may lead to another file when it is opened.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import stat
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import context, reduction, resource_sharer
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from fastload.errors import CacheError, user_level
from fastload.metrics.machine import call_in_forks, memory_file

DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PART = re.compile(r"\..*\.[0-9a-f]{16}\.part", re.DOTALL)


@contextlib.contextmanager
def whole_file(
    path: str | Path, *, folder: int | None = None, mode: int = 0o600, durable: bool = False
) -> Iterator[BinaryIO]:
    """Open a file to write. When the block ends it takes the name `path`, in place of an older file.

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
    part = path.with_name(part_name(path.name))
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


def part_name(name: str) -> str:
    """Return the name of a file until it is whole, in the directory where it is then called `name`."""
    # Shortened in bytes: a name has 255 of them, whatever its alphabet.
    start = os.fsdecode(os.fsencode(name)[:200])
    return f".{start}.{secrets.token_hex(8)}.part"


def is_part(name: str) -> bool:
    """Return whether `part_name` made this: the file is being written, or a killed process left it."""
    return name.startswith(".") and _PART.fullmatch(name) is not None


def nearest_existing(path: str | Path) -> Path:
    """Return the path itself, or the nearest directory above it that exists."""
    here = Path(path)
    while not here.exists() and here != here.parent:
        here = here.parent
    return here


def refuse_unsafe(path: str, status: os.stat_result) -> None:
    """Raise CacheError unless `path` is a directory into which no other user can put files.

    Its owner must be this user or root. World-writable is accepted with the sticky bit only (as /tmp).
    """
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"path={path!r} is not a directory; give the cache a directory of its own")
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheError(
            f"path={path!r} belongs to user id {status.st_uid}, this process runs as {os.geteuid()}; "
            "give a directory of your own, for example a new one inside it"
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise CacheError(f"path={path!r} is writable for everybody; type: chmod o-w {path}")


def make_root(path: str | Path) -> None:
    """Make the directory of a cache, for this user only, unless it exists.

    Raises:
        CacheError: it exists, and other users can put files into it.
        OSError: it cannot be made.
    """
    Path(path).mkdir(0o700, parents=True, exist_ok=True)
    refuse_unsafe(str(path), Path(path).stat())


def _refuse_foreign(path: Path, status: os.stat_result) -> None:
    """Raise CacheError unless only this user or root can have made and can change it."""
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheError(f"{path} belongs to user id {status.st_uid}, this process runs as {os.geteuid()}")
    if status.st_mode & 0o022:
        raise CacheError(f"{path} can be written by other users")


def _open_folder(folder: Path) -> int:
    fd = os.open(folder, DIR_FLAGS)
    try:
        _refuse_foreign(folder, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make_folder(folder: Path) -> int:
    """Return a descriptor of a folder of kept files, made with the cache's directory around it."""
    make_root(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    return _open_folder(folder)


def may_keep(folder: Path) -> bool:
    """Return whether the files in a folder can be trusted, and more kept; a RuntimeWarning says why not."""
    try:
        os.close(_open_folder(folder))
    except CacheError as error:
        warnings.warn(
            f"listings are not read or kept: {error.message}; remove it, or give the cache another path",
            RuntimeWarning,
            stacklevel=user_level(),
        )
        return False
    except OSError:  # it does not exist yet, or the next read or write reports the error
        return True
    return True


def is_ours(folder: Path) -> bool:
    """Return whether a folder exists and only this user or root can have written the files in it."""
    try:
        os.close(_open_folder(folder))
    except OSError:
        return False
    return True


def open_kept(path: Path) -> int:
    """Return a descriptor of a kept file, to read.

    Raises:
        CacheError: other users can have written it.
        OSError: it does not exist, or cannot be opened.
    """
    folder = _open_folder(path.parent)
    try:
        fd = os.open(path.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        status = os.fstat(fd)
        _refuse_foreign(path, status)
        if not stat.S_ISREG(status.st_mode):
            raise CacheError(f"{path} is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_lock(path: Path) -> int:
    """Return a descriptor of an empty file beside kept ones, to lock; it is made where it is not there.

    Raises:
        CacheError: other users can write there.
        OSError: it cannot be made or opened.
    """
    folder = _make_folder(path.parent)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path.name, flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)


def save_kept(path: Path, content: bytes | mmap.mmap) -> None:
    """Write a kept file, whole or not at all. Makes its folder and the cache's directory around it.

    Raises:
        CacheError: other users can write there.
        OSError: the disk is full, or cannot be written.
    """
    folder = _make_folder(path.parent)
    try:
        with whole_file(path.name, folder=folder) as file:
            file.write(content)
    finally:
        os.close(folder)


T = TypeVar("T")

# Forks between the first process and this one. Process ids were rejected: the system uses them again.
_generation = 0
# Values of parent processes. They stay alive: the destructor of a client would talk to threads that exist in
# the parent only.
_inherited: list[Any] = []


class ProcessLocal(Generic[T]):
    """A value of which each process has its own. Pickles without the value. Threads may share it.

    Args:
        make: called for this process's value at its first use, and again after a fork.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}  # by generation
        self._locks: dict[int, threading.RLock] = {}  # a thread of the parent may have held an older one

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessLocal, (self._make,)

    @property
    def inherited(self) -> bool:
        """Whether a process that this one was forked from has a value, and this one has none yet."""
        return bool(self._values) and _generation not in self._values

    def get(self) -> T:
        """Return the value of this process, made at first use."""
        try:
            return self._values[_generation]
        except KeyError:
            pass
        with self._lock():
            if _generation not in self._values:
                self._keep(self._make())
            return self._values[_generation]

    def peek(self) -> T | None:
        """Return the value of this process, or None if it was not made or set yet."""
        return self._values.get(_generation)

    def set(self, value: T) -> None:
        """Replace the value of this process."""
        with self._lock():
            self._keep(value)

    def drop(self) -> T | None:
        """Forget the value of this process and return it; `get` then makes a new one."""
        with self._lock():
            return self._values.pop(_generation, None)

    def _lock(self) -> threading.RLock:
        return self._locks.setdefault(_generation, threading.RLock())

    def _keep(self, value: T) -> None:
        _inherited.extend(old for generation, old in self._values.items() if generation != _generation)
        self._values = {_generation: value}


def _count_fork() -> None:
    global _generation
    _generation += 1


call_in_forks(_count_fork)


def speaks() -> bool:
    """Return whether this process speaks for all workers of its loader."""
    torch_data = sys.modules.get("torch.utils.data")  # else this is no worker
    worker = torch_data.get_worker_info() if torch_data is not None else None
    return worker is None or worker.id == 0


_AT_ONCE = 200  # descriptors: a message to the fork server has room for 251, and others need some


def share_descriptor(descriptor: int) -> Any:
    """Return a handle for the process that is being spawned: its `detach()` returns a descriptor there."""
    if len(context.get_spawning_popen()._fds) < _AT_ONCE:  # type: ignore[union-attr]
        return reduction.DupFd(descriptor)
    return resource_sharer.DupFd(descriptor)


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
        """Return a file in memory with what `write(descriptor)` puts there.

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

    @classmethod
    def of(cls, name: str, content: bytes) -> SharedFile:
        """Return a file in memory with this content."""

        def write(descriptor: int) -> None:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(content)

        return cls.written(name, write)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedFile:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is not None:
            return _from_handle, (share_descriptor(self._descriptor),)
        return SharedFile.of, ("fastload-shared", self.map[:])


def _from_handle(handle: Any) -> SharedFile:
    return SharedFile(handle.detach())
