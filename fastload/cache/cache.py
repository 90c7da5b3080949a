"""`Cache`: the class that datasets and users see."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lmdb

from fastload.cache import maintenance
from fastload.cache.access import Access
from fastload.cache.codecs import CODECS, CacheCodec, Mode
from fastload.cache.directory import FOLDER, MANIFESTS, Directory
from fastload.cache.index import Digest, add_parts, first_digest
from fastload.cache.maintenance import Report
from fastload.cache.segment import (
    FORMAT,
    KEY_SIZE,
    MAX_PAYLOAD,
    CorruptRecordError,
    Entry,
    Places,
    checksum,
    record_size,
)
from fastload.cache.writer import Item
from fastload.checks import parse_size, whole_number
from fastload.errors import ArgumentError, CacheError, shorten_errors
from fastload.formats.jpeg import DCT_MAGIC
from fastload.metrics.counters import Counters
from fastload.metrics.machine import need_linux
from fastload.store import Store, open_store
from fastload.store.node import ProcessLocal, may_keep, refuse_unsafe

Fit = Literal["yes", "too large", "full"]

# This process is short of something; the entry is not to blame.
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def as_cache(cache: Cache | str | os.PathLike[str] | None) -> Cache | None:
    """Return the cache that a dataset's `cache=` names: a `Cache`, or the path of one in mode "auto".

    Raises:
        ArgumentError: it is neither, or the name of a mode alone.
    """
    if cache is None or isinstance(cache, Cache):
        return cache
    if not isinstance(cache, str | os.PathLike):
        raise ArgumentError(
            f"cache must be a fastload.Cache, the path of a directory, or None: found {cache!r}"
        )
    if cache in CODECS:
        raise ArgumentError(
            f"cache={cache!r} is a mode, and the directory is missing: give Cache(directory, {cache!r}); "
            f"for a directory of that name, write './{cache}'"
        )
    return Cache(cache)


class Cache:
    """A cache directory on local disk, shared by any number of processes.

    Example::

        from fastload import Cache, ImageFolder, RandomResizedCrop

        cache = Cache("/ssd/cache", "shrunk", size_limit="500GB", short_side=256, quality=90)
        dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224), cache=cache)
        cache.info()["entries"]  # 0, until an epoch has filled it

    It fills until it is full: nothing is evicted. Every read is verified; a record that is not exactly as it
    was written is a miss. `lookup`, `read` and `write` raise nothing when the directory fails: the cache
    passes through, warns once (RuntimeWarning) and counts "cache.failures".

    The object opens its directory on first use in each process, and pickles as its arguments. Threads may
    share it.

    Args:
        path: directory, made if absent, for this user only. It must be on a local disk: network file systems
            are not supported.
        mode: the kind of payload: "raw" the object's bytes; "dct" a JPEG without its Huffman codes, with the
            same pixels, which needs the compiled kernel; "shrunk" a smaller JPEG; "decoded" pixels (uint8,
            HWC). "auto": a JPEG with an index of its rows, or as "dct" where that slows no first epoch; see
            "Cache modes" in the documentation. Both keep samples that are no images as "raw" does.
        size_limit: bytes on disk for all processes that use the directory with this limit, as int or as text
            such as "500GB" or "200MiB". None: until the disk is nearly full (1 %, at most 256 MiB, stays
            free). The index is not included; it takes about 100 bytes per object.
        short_side: "shrunk" and "decoded": pixels of the shorter side.
        quality: "shrunk": JPEG quality, 1 to 100.
        remote: a URL, or what `open_store` returns for one that needs storage options, where nodes publish
            records for each other. When a loader begins an epoch, a background process pulls what is
            published there and not here, of the samples of its dataset, `Subset` or node's share. The epoch
            does not wait: samples that have not come are read from their objects. Records are verified, and
            found only by datasets over the same versions of the objects. Where the URL fails, training goes
            on without it, with one RuntimeWarning.
        push: publish what is in the cache at `remote`, in the background: at the end of each epoch, and when
            the trainer ends, which then waits for it.

    Raises:
        ArgumentError: an argument has an invalid value; or the mode is "dct", and the kernel is missing.
        CacheError: `path` is a file, belongs to another user, or is writable for everybody.
    """

    @shorten_errors
    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Mode = "auto",
        *,
        size_limit: int | str | None = None,
        short_side: int = 256,
        quality: int = 90,
        remote: str | os.PathLike[str] | Store | None = None,
        push: bool = False,
    ) -> None:
        self.path = absolute(path)
        need_linux()
        if mode not in list(CODECS):
            raise ArgumentError(f"mode={mode!r} is unknown; use one of {', '.join(CODECS)}")
        CODECS[mode].check_available()
        self.mode: Mode = mode
        self.size_limit = None if size_limit is None else parse_size(size_limit)
        self.short_side = whole_number("short_side", short_side, most=65535)
        self.quality = whole_number("quality", quality, most=100)
        self.remote = remote if remote is None or isinstance(remote, Store) else open_store(remote)
        self.push = push
        if push and remote is None:
            raise ArgumentError("push=True publishes records at remote=, and that is None: give it a URL")
        try:
            refuse_unsafe(self.path, Path(self.path).stat())
        except FileNotFoundError:
            pass
        except OSError as error:
            if isinstance(error, CacheError):
                raise
            raise CacheError(f"path={self.path!r} cannot be used: {error.strerror}") from None
        self._prepare()

    def _prepare(self) -> None:
        self._first_digests: dict[str, Digest] = {}  # by mode
        self._plain_codec = CODECS[self.mode](self.short_side, self.quality).without_choice()
        self._access = ProcessLocal(partial(Access, self.path))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def __repr__(self) -> str:
        limit = "" if self.size_limit is None else f", size_limit={self.size_limit}"
        return f"Cache({self.path!r}, {self.mode!r}{limit})"

    @property
    def _codec(self) -> CacheCodec:
        """What this cache keeps of an image."""
        return CODECS[self.mode](self.short_side, self.quality, self._keeps)

    def key(
        self, *parts: str | bytes, beginning: Digest | None = None, codec: CacheCodec | None = None
    ) -> bytes:
        """Return a 16-byte digest of the parts (in order, boundaries kept), the mode and its parameters.

        Whatever tells two payloads apart must be among the parts: the store's identity, the object's key and
        version, the decoder's name and version.

        Args:
            beginning: of the parts before these; see `_key_beginning`.
            codec: of the payload. Default: that of the cache's mode; in mode "auto" that of "raw".
        """
        return add_parts(beginning or self._first_digest(codec), parts).digest()

    def _key_beginning(self, *parts: str | bytes, codec: CacheCodec | None = None) -> Digest:
        """Return the first parts of many keys, digested once."""
        return add_parts(self._first_digest(codec), parts)

    def _first_digest(self, codec: CacheCodec | None) -> Digest:
        codec = codec or self._plain_codec
        if codec.key_mode not in self._first_digests:
            self._first_digests[codec.key_mode] = first_digest(codec)
        return self._first_digests[codec.key_mode]

    @property
    def counters(self) -> Counters:
        """Counters of this process, "cache.*" as in `fastload.metrics.counters`."""
        return self._access.get().counters

    @property
    def _manifests(self) -> Path | None:
        """The folder in which datasets keep their listings. `clear` deletes these too.

        None, with a RuntimeWarning, if other users may have written them: a forged listing would change the
        objects and labels of a dataset.
        """
        folder = Path(self.path) / MANIFESTS
        return folder if may_keep(folder) else None

    # -- reading

    def lookup(self, key: bytes) -> Entry | None:
        """Return the index entry of `key`, or None (a miss, counted). Reads no payload."""
        (entry,) = self._find_all([key])
        if entry is None:
            self.counters.add("cache.misses")
        return entry

    def _find_all(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the index entry of each key, or None, at the price of few. No miss is counted."""
        access = self._access.get()
        directory = access.open()
        packed: list[bytes | None] = [None] * len(keys)
        if directory is not None:
            try:
                packed = directory.index.packed(keys)
            except (OSError, lmdb.Error) as error:
                access.report(error)
        entries: list[Entry | None] = []
        for value in packed:
            try:
                entries.append(None if value is None else Entry.unpack(value))
            except CorruptRecordError:
                access.counters.add("cache.corrupt")
                entries.append(None)
        return entries

    def _locate(self, keys: Sequence[bytes]) -> Places:
        """Return where the records of these keys lie, for the kernel, which reads and verifies them itself.

        No miss is counted. Records that the kernel has used are counted by `_count_hits`.
        """
        access = self._access.get()
        directory = access.open()
        if directory is not None and keys:
            try:
                return directory.files.places(keys, directory.index.packed(keys))
            except (OSError, lmdb.Error) as error:
                access.report(error)
        return Places.none(len(keys))

    def _count_hits(self, count: int, nbytes: int) -> None:
        """Count records that were read where `_locate` has found them, and the bytes of their payloads."""
        self.counters.merge({"cache.hits": count, "cache.bytes": nbytes})

    def has(self, key: bytes) -> bool:
        """Return whether the index has `key`. No miss is counted, because nobody wanted the payload."""
        return self._find_all([key])[0] is not None

    def _will_need(self, entry: Entry) -> None:
        """Ask the kernel to read the record ahead."""
        directory = self._access.get().open()
        if directory is not None:
            # The read will find the same failure, and handle it.
            with contextlib.suppress(CorruptRecordError, OSError, OverflowError, lmdb.Error):
                directory.files.get(entry.segment).will_need(entry)

    def read(self, key: bytes, entry: Entry | None = None) -> memoryview | None:
        """Return the payload of `key`, verified, in memory of its own; or None (a miss, counted).

        A record that does not verify loses its index entry, and counts "cache.corrupt".
        """
        if entry is None:
            entry = self.lookup(key)
            if entry is None:
                return None
        access = self._access.get()
        directory = access.open()
        if directory is not None:
            try:
                payload = directory.read(key, entry)
            except CorruptRecordError:
                access.counters.add("cache.corrupt")
                _drop(directory, key, entry)
            except (OSError, lmdb.Error) as error:
                access.report(error)
                if isinstance(error, OSError) and error.errno not in _TRANSIENT:
                    _drop(directory, key, entry)
            else:
                if payload is not None:
                    access.counters.add("cache.hits")
                    access.counters.add("cache.bytes", len(payload))
                    return payload
                _drop(directory, key, entry)  # its segment has gone
        access.counters.add("cache.misses")
        return None

    def _forget(self, key: bytes) -> None:
        """Let go of a record that verifies and that its reader cannot use: the next write replaces it."""
        access = self._access.get()
        directory, entry = access.open(), self.lookup(key)
        access.counters.add("cache.corrupt")
        if directory is not None and entry is not None:
            _drop(directory, key, entry)

    # -- writing

    def write(
        self, key: bytes, payload: bytes | bytearray | memoryview, wait: float = 0.0, *, head: bytes = b""
    ) -> bool:
        """Queue a payload for the writer thread. False when it was dropped.

        Any object with the buffer protocol does. A read-only buffer is kept until written, not copied; a
        writable one is copied. A key that the cache has already is not written again.

        Args:
            wait: seconds to wait for room in the queue. By default none: filling must not slow training.
            head: what the payload begins with, before these bytes.
        """
        access = self._access.get()
        directory = access.open()
        if directory is None:
            return False
        try:
            kept = self._put(access, directory, key, payload, wait, head)
        except (OSError, lmdb.Error) as error:
            access.report(error)
            kept = False
        if not kept:
            access.counters.add("cache.dropped")
            self._unlock_inflight(key)
        return kept

    def _lock_inflight(self, key: bytes) -> bool:
        """Take the in-flight lock of `key`, before its object is read from the store.

        False when the read is not needed: the cache has the payload now, or another process or thread has the
        lock and is reading it. The lock ends when the payload can be looked up or was dropped, with
        `_unlock_inflight`, or with this process. If the cache cannot be used, every call succeeds.
        """
        directory = self._access.get().open()
        if directory is None or directory.inflight is None:
            return True
        if not directory.inflight.lock(key):
            return False
        try:
            known = directory.index.get(key) is not None
        except (CorruptRecordError, OSError, lmdb.Error):
            known = False
        if known:
            directory.inflight.unlock(key)
        return not known

    def _unlock_inflight(self, key: bytes) -> None:
        """Give back an in-flight lock whose payload will not be written. A closed cache holds none."""
        access = self._access.peek()
        directory = None if access is None else access.opened
        if directory is not None and directory.inflight is not None:
            directory.inflight.unlock(key)

    def _fits(self, nbytes: int) -> Fit:
        """Return whether a payload of that size would be kept.

        "yes"; "too large" for a record or for the rest of `size_limit`, where smaller payloads are kept;
        "full" when even a record of average size does not fit.

        Raises:
            OSError, lmdb.Error: the index cannot be read.
        """
        if nbytes > MAX_PAYLOAD:
            return "too large"
        directory = self._access.get().open()
        if self.size_limit is None or directory is None or directory.writer is None:
            return "yes"
        used = directory.index.used_bytes()
        left = self.size_limit - used - directory.writer.queued_bytes
        if record_size(nbytes) <= left:
            return "yes"
        count = directory.index.count()
        return "full" if count and left < used / count else "too large"

    def _keeps(self, nbytes: int) -> bool:
        """Return whether `write` would now take a payload of that size. Why not, is warned of once."""
        access = self._access.get()
        directory = access.open()
        if directory is None or not access.is_writable(directory):
            return False
        try:
            return self._fits(nbytes) == "yes"
        except (OSError, lmdb.Error) as error:
            access.report(error)
            return False

    def _put(
        self,
        access: Access,
        directory: Directory,
        key: bytes,
        payload: bytes | bytearray | memoryview,
        wait: float,
        head: bytes,
    ) -> bool:
        view = memoryview(payload)
        writer = directory.writer
        if not self._keeps(len(head) + view.nbytes) or writer is None or len(key) != KEY_SIZE:
            return False
        view = view.cast("B") if view.readonly and view.c_contiguous else memoryview(view.tobytes())
        # Summed here, not in the writer thread: from now on the bytes are those that the caller handed over,
        # and the writer has one reason less to wait for the GIL. 138 KB take a few microseconds.
        return writer.put(Item(key, view, checksum(view, head), self.size_limit, access.counters, head), wait)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until every process can read what was written before. False after `timeout` seconds, or when
        writing failed."""
        return self._access.get().flush(timeout)

    def _flush_epoch(self, timeout: float) -> None:
        """Wait as `flush` does, but not for an index that is being rebuilt: that may take minutes."""
        if not self._is_rebuilding:
            self._access.get().flush(timeout)

    @property
    def _is_rebuilding(self) -> bool:
        """Whether this process rebuilds the index, and writes no record before that is done."""
        return self._access.get().is_rebuilding

    def _used_bytes(self) -> int:
        """Return what counts against `size_limit`: what is written, and what is queued. It never waits.

        Raises:
            OSError, lmdb.Error: the index cannot be read.
        """
        directory = self._access.get().open()
        if directory is None:
            return 0
        queued = 0 if directory.writer is None else directory.writer.queued_bytes
        return directory.index.used_bytes() + queued

    def close(self) -> None:
        """Write what is queued, sync the index, close the directory. The next call opens it again."""
        self._access.get().close()

    @property
    def _is_open(self) -> bool:
        """Whether this process has the directory open through this object."""
        access = self._access.peek()
        return access is not None and access.opened is not None

    @property
    def _has_failed(self) -> bool:
        """Whether this process passes through: it found no way to open the directory, or to write to it."""
        access = self._access.peek()
        return access is not None and access.has_failed

    # -- for people and for `fastload cache`: unlike reads and writes, these raise

    def _open_or_raise(self) -> Directory:
        """Return the opened directory, after all queued payloads were written.

        Raises:
            CacheError: it cannot be opened.
        """
        return self._access.get().open_or_raise()

    def info(self) -> dict[str, Any]:
        """Return the contents and sizes of the directory, which is not created if it is missing.

        Keys: path, mode, format, size_limit, exists, entries, bytes (on disk, payloads with headers),
        index_bytes, segments, disk_free. The modes of the entries are not known: the mode is a part of the
        key's digest.

        Raises:
            CacheError: the directory cannot be opened.
        """
        known = {"path": self.path, "mode": self.mode, "format": FORMAT, "size_limit": self.size_limit}
        return known | maintenance.inspect(self.path, self._existing())

    def exists(self) -> bool:
        """Return whether the directory has ever been used as a cache of this format."""
        return (Path(self.path) / FOLDER).is_dir()

    def _dct_share(self) -> float | None:
        """Return the share of the records that hold images as mode "dct" keeps them, estimated from a few.

        None: there are no records.

        Raises:
            CacheError: the directory cannot be opened.
        """
        directory = self._existing()
        return None if directory is None else maintenance.share_containing(directory, DCT_MAGIC)

    def check(self, fix: bool = False, progress: Callable[[int, int], None] | None = None) -> Report:
        """Read and verify every record.

        Args:
            fix: drop bad entries, index sound records that the index has lost, and delete segments of dead
                processes that hold nothing of use.
            progress: called with (entries done, entries in all).

        Raises:
            CacheError: the directory cannot be opened; with `fix`: it cannot be written.
        """
        directory = self._existing()
        return Report() if directory is None else maintenance.verify(directory, fix, progress)

    def clear(self) -> int:
        """Delete every record, in all modes, and the listings kept beside them; return the bytes freed.

        Safe while other processes read and write; they continue with an empty cache. Files that fastload did
        not write stay.

        Raises:
            CacheError: the directory cannot be opened or written.
        """
        directory = self._existing()
        return 0 if directory is None else maintenance.clear(directory)

    def _existing(self) -> Directory | None:
        return self._open_or_raise() if self.exists() else None


def _drop(directory: Directory, key: bytes, entry: Entry) -> None:
    if directory.writer is not None:
        directory.writer.drop(key, entry)


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a directory on a local disk."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"path={text!r}: give the path of a directory")
    if "://" in text:
        raise ArgumentError(f"path={text!r} is a URL; the cache needs a directory on a local disk")
    if re.search(r"(^|/)\$(\w|{)", text):
        raise ArgumentError(
            f"path={text!r} names a variable, which only a shell replaces: use os.path.expandvars"
        )
    return str(Path(text).expanduser().absolute())
