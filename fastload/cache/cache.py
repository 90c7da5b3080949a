"""`Cache`: what the rest of fastload, and its users, know of the cache."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import warnings
from pathlib import Path
from typing import Any, Literal, get_args

import lmdb

from fastload.cache import survey
from fastload.cache.arguments import absolute, checked_int
from fastload.cache.directory import DAMAGED, MANIFESTS, Directory
from fastload.cache.memory import IN_MEMORY, Memory
from fastload.cache.record import (
    KEY_SIZE,
    MAX_PAYLOAD,
    CorruptRecordError,
    Digest,
    Entry,
    checksum,
    record_size,
)
from fastload.cache.registry import abandon, acquire, release
from fastload.cache.writer import Item
from fastload.errors import ArgumentError, CacheError
from fastload.metrics.counters import Counters
from fastload.metrics.units import parse_size
from fastload.store.folder import may_keep, refuse_unsafe

__all__ = ["Cache", "as_cache"]

Mode = Literal["raw", "shrunk", "decoded"]
Fit = Literal["yes", "too large", "full"]

# This process is short of something; the entry is not to blame.
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def as_cache(cache: Cache | str | os.PathLike[str] | None) -> Cache | None:
    """What a dataset's `cache=` names: a `Cache`, or the path of one in mode "raw".

    Raises:
        ArgumentError: it is neither, or the name of a mode alone.
    """
    if cache is None or isinstance(cache, Cache):
        return cache
    if not isinstance(cache, str | os.PathLike):
        raise ArgumentError(
            f"cache must be a fastload.Cache, the path of a directory, or None: found {cache!r}"
        )
    if cache in get_args(Mode):
        raise ArgumentError(
            f"cache={cache!r} is a mode, and where to keep it is not said: give Cache(directory, {cache!r}); "
            f"a directory of that name is './{cache}'"
        )
    return Cache(cache)


class Cache:
    """A cache directory on local disk, shared by any number of processes.

    Fills, then stops: nothing is evicted. Every read is verified; a record that is not exactly what was
    written is a miss. Whatever goes wrong with the directory, `lookup`, `read` and `write` raise nothing: the
    cache passes through, warns once (RuntimeWarning) and counts "cache.failures".

    The object opens its directory on first use in each process, and pickles as its arguments. Threads may
    share it.

    Args:
        path: directory, made if absent, for this user only. On a local disk, not a network file system.
        mode: what is kept: "raw" the object's bytes, "shrunk" a smaller JPEG, "decoded" pixels (uint8, HWC).
        size_limit: bytes on disk over all processes that use the directory with this limit, as int or as text
            such as "500GB" or "200MiB". None: until the disk is nearly full (1 %, at most 256 MiB, stays
            free). The index comes on top, about 100 bytes an object.
        short_side: "shrunk" and "decoded": pixels of the shorter side.
        quality: "shrunk": JPEG quality, 1 to 100.
        memory: bytes of host memory, as int or text, for records that are then read where they lie, by all
            processes of this node together: neither disk nor copy nor checksum. Filled as the records are
            read, then it stays; the rest comes from the directory. Worth it for mode "decoded", where reading
            a record costs as much as using it; the bytes must be free. The processes that share it are those
            of one user and one pid namespace; the first one's budget counts.

    Raises:
        ArgumentError: an argument that cannot work.
        CacheError: `path` is a file, belongs to another user, or is writable for everybody.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Mode = "raw",
        *,
        size_limit: int | str | None = None,
        short_side: int = 256,
        quality: int = 90,
        memory: int | str | None = None,
    ) -> None:
        self.path = absolute(path)
        if mode not in get_args(Mode):
            raise ArgumentError(f"mode={mode!r} is unknown; use one of {', '.join(get_args(Mode))}")
        self.mode: Mode = mode
        self.size_limit = None if size_limit is None else parse_size(size_limit)
        self.short_side = checked_int("short_side", short_side, 65535)
        self.quality = checked_int("quality", quality, 100)
        self.memory = None if memory is None else Memory(parse_size(memory, "memory"))
        try:
            refuse_unsafe(self.path, Path(self.path).stat())
        except FileNotFoundError:
            pass
        except OSError as error:
            if isinstance(error, CacheError):
                raise
            raise CacheError(f"path={self.path!r} cannot be used: {error.strerror}") from None
        self._reset()

    def _reset(self) -> None:
        """The state that belongs to one process."""
        self._pid = os.getpid()
        self._tried = False
        self._opened: Directory | None = None
        self._warned = False
        self._writer_failed = False
        self._counters = Counters()
        if self.memory is not None:
            self.memory.detach()
        parameters = {"raw": (), "shrunk": (self.short_side, self.quality), "decoded": (self.short_side,)}
        salt = repr((self.mode, *parameters[self.mode])).encode()
        self._hash = hashlib.blake2b(salt, digest_size=KEY_SIZE, person=b"fastload")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __del__(self) -> None:
        if getattr(self, "_opened", None) is not None and self._pid == os.getpid():
            abandon(self._opened, self)

    def __repr__(self) -> str:
        limit = "" if self.size_limit is None else f", size_limit={self.size_limit}"
        return f"Cache({self.path!r}, {self.mode!r}{limit})"

    def key(self, *parts: str | bytes, beginning: Digest | None = None) -> bytes:
        """A 16-byte digest of the parts (in order, boundaries kept), the mode and the mode's parameters.

        What tells two payloads apart must be among the parts: the store's identity, the object's key and
        version, the decoder's name and version.

        Args:
            beginning: of the parts before these; see `key_beginning`.
        """
        return _add(beginning or self._hash, parts).digest()

    def key_beginning(self, *parts: str | bytes) -> Digest:
        """The first parts of many keys, digested once."""
        return _add(self._hash, parts)

    @property
    def counters(self) -> Counters:
        """Counters of this process, "cache.*" as in `fastload.metrics.counters`."""
        self._notice_fork()
        return self._counters

    @property
    def manifests(self) -> Path | None:
        """The folder in which datasets keep their listings. `clear` deletes these too.

        None, with a RuntimeWarning, where other users can have written them: they would decide which objects
        and labels a dataset has.
        """
        folder = Path(self.path) / MANIFESTS
        return folder if may_keep(folder) else None

    # -- reading

    def lookup(self, key: bytes) -> Entry | None:
        """The index entry of `key`, or None (a miss, counted). Reads no payload."""
        directory = self._open()
        entry = None if self.memory is None else self.memory.find(key)
        if entry is None and directory is not None:
            try:
                entry = directory.index.get(key)
            except CorruptRecordError:
                self._counters.add("cache.corrupt")
            except (OSError, lmdb.Error) as error:
                self._failed(error)
        if entry is None:
            self._counters.add("cache.misses")
        return entry

    def will_need(self, entry: Entry) -> None:
        """Ask the kernel to read the record ahead."""
        directory = self._open()
        if directory is not None and entry.segment != IN_MEMORY:
            # What goes wrong here, the read will find out.
            with contextlib.suppress(CorruptRecordError, OSError, OverflowError, lmdb.Error):
                directory.files.get(entry.segment).will_need(entry)

    def read(self, key: bytes, entry: Entry | None = None) -> memoryview | None:
        """The payload of `key`, verified, in memory of its own; or None (a miss, counted).

        A record that does not verify loses its index entry, and counts "cache.corrupt".
        """
        if entry is None:
            entry = self.lookup(key)
            if entry is None:
                return None
        directory = self._open()
        if entry.segment == IN_MEMORY:
            payload = None if self.memory is None else self.memory.read(entry)
            if payload is not None:
                self._count_hit(payload, "cache.memory_hits")
                return payload
        elif directory is not None:
            try:
                payload = directory.read(key, entry)
            except CorruptRecordError:
                self._counters.add("cache.corrupt")
                self._drop(directory, key, entry)
            except (OSError, lmdb.Error) as error:
                self._failed(error)
                if isinstance(error, OSError) and error.errno not in _TRANSIENT:
                    self._drop(directory, key, entry)
            else:
                if payload is not None:
                    self._count_hit(payload)
                    if self.memory is not None:
                        self.memory.keep(key, payload)
                    return payload
        self._counters.add("cache.misses")
        return None

    def _count_hit(self, payload: memoryview, *also: str) -> None:
        for name in ("cache.hits", *also):
            self._counters.add(name)
        self._counters.add("cache.bytes", len(payload))

    def _drop(self, directory: Directory, key: bytes, entry: Entry) -> None:
        if directory.writer is not None:
            directory.writer.drop(key, entry)

    # -- writing

    def write(self, key: bytes, payload: bytes | bytearray | memoryview, wait: float = 0.0) -> bool:
        """Queue a payload for the writer thread. False when it was dropped.

        Any object with the buffer protocol does. A read-only buffer is kept until written, not copied; a
        writable one is copied. A key that the cache has already is not written again.

        Args:
            wait: seconds to wait for room in the queue. By default none: filling must not slow training.
        """
        directory = self._open()
        if self.memory is not None:
            self.memory.keep(key, memoryview(payload).cast("B"))
        if directory is None:
            return False
        try:
            kept = self._put(directory, key, payload, wait)
        except (OSError, lmdb.Error) as error:
            self._failed(error)
            kept = False
        if not kept:
            self._counters.add("cache.dropped")
            self.unclaim(key)
        return kept

    def claim(self, key: bytes) -> bool:
        """Say that this process is about to read the object of `key` from the store, to `write` it.

        False when there is no need to: the cache has it by now, or another process (or thread) has said the
        same and is not done, so that its result may soon be here. The claim ends once the payload can be
        looked up, or was dropped, or with this process; where nothing is written, by `unclaim`. Where the
        cache cannot be used every claim is granted.
        """
        directory = self._open()
        if directory is None or directory.claims is None:
            return True
        if not directory.claims.take(key):
            return False
        try:
            known = directory.index.get(key) is not None
        except (CorruptRecordError, OSError, lmdb.Error):
            known = False
        if known:
            directory.claims.drop(key)
        return not known

    def unclaim(self, key: bytes) -> None:
        """Give a claim back whose payload will not be written."""
        directory = self._open()
        if directory is not None and directory.claims is not None:
            directory.claims.drop(key)

    def fits(self, nbytes: int) -> Fit:
        """Whether a payload of that size would be kept: "yes"; "too large", for a record or for what is left
        of `size_limit`, where smaller ones are kept; "full", where even a record of average size is not.

        Raises:
            OSError, lmdb.Error: the index cannot be read.
        """
        if nbytes > MAX_PAYLOAD:
            return "too large"
        directory = self._open()
        if self.size_limit is None or directory is None or directory.writer is None:
            return "yes"
        used = directory.index.used_bytes()
        left = self.size_limit - used - directory.writer.queued_bytes
        if record_size(nbytes) <= left:
            return "yes"
        count = directory.index.count()
        return "full" if count and left < used / count else "too large"

    def _put(
        self, directory: Directory, key: bytes, payload: bytes | bytearray | memoryview, wait: float
    ) -> bool:
        if not self._writable(directory) or len(key) != KEY_SIZE:
            return False
        writer = directory.writer
        view = memoryview(payload)
        if writer is None or self.fits(view.nbytes) != "yes":
            return False
        view = view.cast("B") if view.readonly and view.c_contiguous else memoryview(view.tobytes())
        # Summed here, not in the writer thread: from now on the bytes are what the caller handed over, and
        # the writer has one reason less to wait for the GIL. 138 KB take a few microseconds.
        return writer.put(Item(key, view, checksum(view), self.size_limit, self._counters), wait)

    def _writable(self, directory: Directory) -> bool:
        """Whether this process can write; reports a failed writer once."""
        if directory.writer is None:
            self._fail_writing(CacheError(f"cache {self.path} {directory.readonly}: it serves what it holds"))
        elif directory.writer.error is not None:
            self._fail_writing(directory.writer.error)
        return not self._writer_failed

    def _fail_writing(self, error: BaseException) -> None:
        if not self._writer_failed:
            self._writer_failed = True
            self._failed(error)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until what was written before can be read by every process. False after `timeout` seconds, or
        when writing failed."""
        self._notice_fork()
        if self._opened is None or self._opened.writer is None:
            return not self._tried
        return self._opened.writer.flush(timeout) and self._writable(self._opened)

    def close(self) -> None:
        """Write out, sync the index, let go of the directory. The next call opens it again."""
        self._notice_fork()
        directory, self._opened, self._tried = self._opened, None, False
        if self.memory is not None:
            self.memory.detach()
        if directory is not None:
            try:
                release(directory, self)
            except (OSError, lmdb.Error) as error:
                self._failed(error)
            if directory.writer is not None and directory.writer.error is not None:
                self._fail_writing(directory.writer.error)

    # -- opening and failing

    def _open(self) -> Directory | None:
        """The directory, opened in this process; None when it cannot be used."""
        self._notice_fork()
        if not self._tried:
            try:
                self._opened = self._acquire()
            except (OSError, lmdb.Error) as error:
                self._failed(error)
            self._tried = True
        return self._opened

    def _acquire(self) -> Directory:
        """Open the directory and the memory. Threads may do so at once; `_tried` is set once all is there."""
        directory = None
        try:
            directory = acquire(self.path, self)
            return directory
        finally:
            if self.memory is not None:
                self.memory.attach(None if directory is None else directory.root_fd)

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():  # counters, warnings and the open directory are the parent's
            self._reset()

    def _failed(self, error: BaseException) -> None:
        self._counters.add("cache.failures")
        if isinstance(error, DAMAGED) and self._opened is not None:
            self._opened.mark_damaged()
        if self._warned:
            return
        self._warned = True
        text = f"fastload passes through its cache {self.path}: {error}"
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        except RuntimeWarning:  # under -W error; training goes on all the same
            logging.getLogger("fastload").warning(text)

    # -- for people and for `fastload cache`

    info = survey.info
    check = survey.check
    clear = survey.clear

    def open_aloud(self) -> Directory:
        """For calls that may fail aloud: the opened directory, with all that was written before in it."""
        self._notice_fork()
        if self._opened is None:
            self._opened, self._tried = self._acquire(), True
        if self._opened.writer is not None:
            self._opened.writer.flush(60.0)
        return self._opened


def _add(digest: Digest, parts: tuple[str | bytes, ...]) -> Digest:
    digest = digest.copy()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"%d:%b" % (len(data), data))
    return digest
