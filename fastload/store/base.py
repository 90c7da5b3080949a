"""What a store is: a prefix in some object store, with keys relative to it."""

from __future__ import annotations

import functools
import io
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fastload.checks import whole_number
from fastload.errors import (
    AccessDeniedError,
    ArgumentError,
    NotFoundError,
    ObjectChangedError,
    ShortReadError,
    StoreError,
    address,
)
from fastload.formats.pieces import MAX_INFLATED
from fastload.store import failures
from fastload.store.budget import RequestBudget
from fastload.store.client_process import ClientProcess, clients_live_here
from fastload.store.failures import CHANGED_REMEDY, Wait

T = TypeVar("T")

# What a read returns: `bytes`, or a client's own read-only buffer (no copy is made of it). Both have
# `len()` and the buffer protocol, for which Python has a name from 3.12 on.
Buffer: TypeAlias = bytes | memoryview | Any
_said: set[str] = set()  # servers of which this process has said that they have no ranges
_TIME_VERSION = re.compile(r"\d+-\d{15,}")


class ObjectInfo(NamedTuple):
    """One listed object.

    `key` is relative to the opened URL. `version` is the ETag without its quotes; where a store has none it
    is "size-mtime", the latter in ns; where it has no time either it is "". No change of such an object is
    ever noticed, so nothing of it is cached.
    """

    key: str
    size: int
    version: str


class Reading(NamedTuple):
    """How a loader reads a store. Part of `storage_options`, whatever the protocol.

    Args:
        max_requests: in flight from this node, all ranks and workers together; None: found by measuring.
        hedge: request a slow read a second time, if it takes longer than 95 % of the reads, and for at most
            3 % of them.
        max_inflated: bytes that a compressed record, a row group or a table may become in memory.
        budget: the requests made so far, and their limits; None: they are not counted.
    """

    max_requests: int | None = None
    hedge: bool = False
    max_inflated: int = MAX_INFLATED
    budget: RequestBudget | None = None

    def at_once(self, most: int) -> int:
        """Return how many requests one process may have in flight, where it would have `most`."""
        return min(most, self.max_requests or most)


PLAIN_READING = Reading()
Page = list[ObjectInfo]  # a name of its own, since `list` is a method below


class Store(ABC):
    """One opened URL. Starts no thread, client or connection before its first request, then one per process.

    Attributes:
        url: the URL as it was given, without user information and query.
        identity: names the place (protocol, endpoint, bucket, prefix); equal for equal places, no secrets.
        unidentified: the reason why `identity` may stand for several places, in words, or "". Nothing of such
            a store is cached.
        reading: how a loader reads it.
        reached: whether it ever answered. A store that never answered fails fast; one that has is retried.

    Reads return `bytes` or a read-only buffer of the client. They raise `NotFoundError`,
    `AccessDeniedError`, `ObjectChangedError`, `ShortReadError`, `StoreTimeoutError` or plain `StoreError`,
    each naming the key. A failure that may pass is retried for three minutes; the error then says how often
    and how long. The first write is given up after seconds. Threads may share it.
    """

    def __init__(self, url: str, identity: str, reading: Reading = PLAIN_READING) -> None:
        self.url = url
        self.identity = identity
        self.unidentified = ""
        self.reading = reading
        self.reached = self._written = False
        self._has_ranges: bool | None = None  # not known
        self._server = identity  # that has ranges or not
        self._process = ClientProcess()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @property
    def budget(self) -> RequestBudget | None:
        """The requests made so far, and their limits; None: they are not counted."""
        return self.reading.budget

    def __fingerprint__(self) -> Any:
        """Return the place, without whether it ever answered: see `datasets.fingerprint`."""
        return self.identity

    @property
    def address(self) -> str:
        """The URL as it opens the store from any directory; without user information and query."""
        return self.url

    def public_options(self) -> tuple[dict[str, Any], list[str]]:
        """Return options for `open_store` that open it again, without secrets, and the names of the others.

        An endpoint that the environment named is among them.
        """
        return {}, []

    def _state(self) -> dict[str, Any]:
        """Return the state that a copy in another process takes over."""
        return {"reached": self.reached}

    @property
    def has_ranges(self) -> bool:
        """Whether it answers a range with that range, as far as this process knows: a first one tells.

        Otherwise an object is best read by one request, or in ranges from its start to its end.
        """
        return self._has_ranges is not False

    @property
    @abstractmethod
    def native(self) -> bool:
        """Whether its client has threads that do not survive a fork of the process that uses it.

        Such a client lives in a `ClientProcess`, or in a worker.
        """

    def list(self) -> Iterator[Page]:
        """Yield the objects below the URL in pages, in no promised order, without directory markers.

        A file that `write` has not finished, or that it left when it was killed, is none of them.

        Raises within 10 s when the bucket or directory does not exist, the credentials are refused, or the
        endpoint does not answer. A prefix without objects yields nothing.
        """
        pages = self._list() if self._client_is_here() else self._process.iterate(self, "_list")
        self._count_lists(2)  # the first contact, and the first page, which may be empty
        first = True
        for page in pages:
            if page and not first:
                self._count_lists(1)
            first = first and not page
            yield page

    def folders(self) -> set[str]:
        """Return the names of the folders directly below the URL that the store knows of by themselves.

        With objects in them or without: empty directories, and directory markers such as an empty "name/".
        """
        names: set[str] = self._retried(lambda: self._attempt("_folders"))
        self._count_lists(1)
        return names

    def head(self, key: str, *, wait: Wait = failures.sleep) -> ObjectInfo:
        """Return size and version of one object. `wait` as in `read`."""
        info: ObjectInfo = self._retried(lambda: self._attempt("_head", key), wait)
        return info

    def read(
        self, key: str, version: str | None = None, size: int | None = None, *, wait: Wait = failures.sleep
    ) -> Buffer:
        """Return one object's bytes; with `version` only of that version, with `size` only that many.

        `wait(error, seconds)` is called before the request is repeated; it may raise to end that.
        """
        if size is None and self.budget is not None and self.budget.limits.egress is not None:
            info = self.head(key, wait=wait)  # what is asked for must be known before
            size, version = info.size, version or info.version or None
        body = self._retried(lambda: self._attempt("_read", key, version, size), wait)
        if size is None and self.budget is not None:
            self.budget.count(egress=len(body))
        return body

    def read_range(
        self, key: str, start: int, stop: int, version: str | None = None, *, wait: Wait = failures.sleep
    ) -> Buffer:
        """Return the bytes [start, stop) of one object, all of which must exist. `wait` as in `read`."""
        check_range(key, start, stop)
        if start == stop:
            return b""
        body = self._retried(lambda: self._attempt("_read_range", key, start, stop, version), wait)
        if self._has_ranges is None:
            self._note_ranges(self._attempt("_answers_ranges"))
        return body

    def _note_ranges(self, kept: bool) -> None:
        self._has_ranges = kept
        if not kept and self._server not in _said:
            _said.add(self._server)
            logging.getLogger("fastload").warning(
                f"{self.url}: the server answers a range with the whole object, so objects are read from the "
                "beginning: what is read in part, or at random, costs many more bytes. Use a server with "
                f"ranges, or read whole objects. See {address('no-ranges')}"
            )

    def open(self, key: str, *, buffer_size: int = 1 << 20) -> io.BufferedReader:
        """Open one object as a binary file, for libraries that read from one, such as PyAV or soundfile.

        The file reads ranges of `buffer_size` bytes as they are asked for, of the version that is there now.

        Example::

            import fastload

            store = fastload.open_store("s3://bucket/train")
            with store.open("cat/0000.jpg") as file:
                file.seek(-2, 2)
                file.read()  # the last two bytes

        Args:
            key: the object.
            buffer_size: bytes of a request, at least 1. A reader that jumps needs a small one: what it jumps
                over was read in vain.

        Raises:
            ArgumentError: of `buffer_size`.
            NotFoundError, ObjectChangedError, StoreError: here, or by a read.
        """
        buffer_size = whole_number("buffer_size", buffer_size)
        info = self.head(key)
        return io.BufferedReader(RangedFile(self, key, info.size, info.version), buffer_size)

    def write(self, key: str, body: Buffer | Path, *, wait: Wait = failures.sleep) -> None:
        """Put an object there, in place of one that has this key already. `wait` as in `read`.

        Readers see it whole or not at all, even if this process is killed. A `Path` is a local file that is
        sent piece by piece, for bodies that are too large for memory.
        """
        if not isinstance(body, Path) and not self._client_is_here():
            body = bytes(body)
        # A store that never took a write may be read-only: retries end soon.
        self._retried(lambda: self._attempt("_write", key, body), wait, patient=self._written)
        self._written = True

    def holds(self, path: str) -> bool:
        """Return whether a path on this machine lies within what this store lists."""
        return False

    def _client_is_here(self) -> bool:
        return not self.native or clients_live_here()

    def _attempt(self, method: str, *arguments: Any) -> Any:
        """Make one attempt of a method below, in the process that has the client."""
        reserve = functools.partial(self._reserve, method, *arguments)
        reserve()
        if self._client_is_here():
            return getattr(self, method)(*arguments)
        return self._process.call(self, method, *arguments, before_repeat=reserve)

    def _reserve(self, method: str, *arguments: Any) -> None:
        """Count a request that reads. Never called in a client process, which closes inherited files."""
        if self.budget is None:
            return
        if method == "_head":
            self.budget.reserve(arguments[0], None)
        elif method == "_read":
            self.budget.reserve(arguments[0], arguments[2] or 0)
        elif method == "_read_range":
            self.budget.reserve(arguments[0], arguments[2] - arguments[1])

    def _count_lists(self, pages: int) -> None:
        if self.budget is not None:
            self.budget.count(lists=pages)

    # One attempt each.

    def _answers_ranges(self) -> bool:
        """Return whether the server kept the last range that was asked for here. No request."""
        return True

    def _folders(self) -> set[str]:
        return set()

    @abstractmethod
    def _list(self) -> Iterator[Page]: ...

    @abstractmethod
    def _head(self, key: str) -> ObjectInfo: ...

    @abstractmethod
    def _read(self, key: str, version: str | None, size: int | None) -> Buffer: ...

    @abstractmethod
    def _read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer: ...

    def _write(self, key: str, body: Buffer | Path) -> None:
        raise ArgumentError(f"{self.url} can only be read", key=key)

    def _renew(self, since: float) -> bool:
        """Get new credentials unless they are newer than `since`; False where there can be none."""
        return False

    def _contact(self, request: Callable[[], Any]) -> None:
        """Make the request that begins a listing. It fails soon, unless new credentials may help."""
        start = time.monotonic()
        try:
            request()
        except AccessDeniedError as error:
            if error.retry != "renewed" or not self._renew(start):
                raise
            request()

    def _retried(self, attempt: Callable[[], T], wait: Wait = failures.sleep, patient: bool = True) -> T:
        result = failures.retried(attempt, functools.partial(self._attempts, patient=patient), wait)
        self.reached = True
        return result

    def _attempts(self, start: float, patient: bool = True) -> failures.Attempts:
        policy = (
            failures.READ_POLICY
            if patient
            else failures.READ_POLICY._replace(budget=failures.CONTACT_SECONDS)
        )
        return failures.Attempts(start, policy, functools.partial(self._attempt, "_renew"), self.reached)


class RangedFile(io.RawIOBase):
    """One version of an object as an unbuffered binary file for reading, without a request to open it.

    Libraries that take an open file (PyAV, soundfile, pyarrow, h5py) then read of a large object only what
    they ask for. Each read is one request, however small, so it serves callers that read in large pieces.
    `Store.open` puts a buffer before it. One buffer and not several: a reader that jumps between two places
    pays a request for each jump, and what a file costs in memory stays known.

    Example::

        import fastload
        from fastload.store.base import RangedFile

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

    def __init__(self, store: Store, key: str, size: int, version: str = "") -> None:
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
        """Read at most `size` bytes from here, by one request; all if it is negative or None."""
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


def time_version(size: int, modified: datetime | None) -> str:
    """Return the version of an object that has no ETag; "" where it has no time either."""
    seconds = modified.timestamp() if modified else 0.0
    return f"{size}-{int(seconds * 1e9)}" if seconds > 0 else ""


def is_time_version(version: str) -> bool:
    """Return whether a version is made of size and time: no condition of a request can be made of it."""
    return _TIME_VERSION.fullmatch(version) is not None


def check_version(key: str, version: str, wanted: str | None, timed: str | None = None) -> None:
    """Raise `ObjectChangedError` unless the version found is the one wanted (None or "": any).

    Args:
        timed: of an object store's answer, its `time_version`. A listing may name no ETags where the answers
            to reads do: sizes and times are compared then, in seconds, as a header has no more digits.

    Raises:
        StoreError: the listing names ETags and the answer none, so that they cannot be compared.
    """
    if not wanted or version == wanted:
        return
    if timed is not None and is_time_version(wanted):
        if is_time_version(timed) and timed[:-9] == wanted[:-9]:
            return
    elif timed is not None and version == timed:
        raise StoreError(
            f"the listing has the ETag {wanted!r}, but the response to a read has none, so a change could "
            "not be detected: look for a proxy that removes the ETag header",
            key=key,
        )
    raise ObjectChangedError(
        f"the object changed since it was listed (version {version!r}, listed as {wanted!r}): "
        f"{CHANGED_REMEDY}",
        key=key,
    )


def check_length(key: str, body: Buffer, wanted: int | None) -> None:
    """Raise `ShortReadError` for fewer bytes than wanted (None: any), `ObjectChangedError` for more.

    An error document in place of the object is a short read whatever its length: asking again helps.
    """
    length = len(body)
    if wanted is None or length == wanted:
        return
    if is_error_document(body):
        raise ShortReadError("the store answered 200 with an XML error in place of the object", key=key)
    if length < wanted:
        raise ShortReadError(f"the store sent {length:,} bytes where {wanted:,} were expected", key=key)
    raise ObjectChangedError(
        f"the object has {length:,} bytes, but was listed with {wanted:,}: {CHANGED_REMEDY}", key=key
    )


def is_error_document(body: Buffer) -> bool:
    """Return whether a body is the XML in which S3 reports an error, now and then under status 200."""
    head = bytes(memoryview(body)[:200]).lstrip()
    return head.startswith((b"<?xml", b"<Error")) and b"<Error" in head


def check_range(key: str, start: int, stop: int) -> None:
    """Raise `ArgumentError` for a range that no object has."""
    if not 0 <= start <= stop:
        raise ArgumentError(f"range [{start}, {stop}) is not valid: 0 <= start <= stop must hold", key=key)


def check_end(key: str, stop: int, size: int) -> None:
    """Raise `NotFoundError` for a range that reaches past the end of an object of `size` bytes."""
    if stop > size:
        raise NotFoundError(f"the range's end {stop:,} is past the object's, {size:,} bytes", key=key)


def check_key(key: str, *, why: str) -> None:
    """Raise `NotFoundError` for a key that path rules would turn into another one.

    These are keys with an empty, "." or ".." segment, which includes a slash at either end. `why` says what
    refuses them and what to do.
    """
    segments = key.split("/")
    if "" in segments or "." in segments or ".." in segments:
        raise NotFoundError(f"this key cannot be read: {why}", key=key)
