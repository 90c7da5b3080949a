"""Directories: `file://` URLs and plain paths, by the system's own calls."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastload.errors import NotFoundError, ObjectChangedError
from fastload.store.base import (
    PLAIN_READING,
    Buffer,
    ObjectInfo,
    Page,
    Reading,
    Store,
    check_end,
    check_key,
    check_length,
    check_version,
)
from fastload.store.failures import CHANGED_REMEDY, StoreLocation
from fastload.store.node import is_part, whole_file

_BROKEN_SCHEME = re.compile(r"(s3a?|gcs|gs|az|abfss?|https?|hf):/*(?=\w)")
_UNREAD = ", or it is a link to a file that is not there (a mount may be missing)"
_PAGE = 1000
_COPY = 8 << 20


class LocalStore(Store):
    """The files below a directory. Links are followed; a key never leads out of the directory by itself.

    A link to nothing is listed, and its read is an error: what it leads to may be on a mount that is missing.
    """

    native = False

    def __init__(self, url: str, root: str, reading: Reading = PLAIN_READING) -> None:
        self._root = os.path.abspath(root)  # noqa: PTH100 - no link must be resolved
        self._location = StoreLocation(url=url, bucket=f"directory {self._root!r}", unread=_UNREAD)
        super().__init__(url, f"file||{self._root}", reading)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalStore, (self.url, self._root, self.reading), self._state()

    @property
    def address(self) -> str:
        return self._root

    def holds(self, path: str) -> bool:
        root, inner = os.path.realpath(self._root), os.path.realpath(path)
        return os.path.commonpath([root, inner]) == root

    def _list(self) -> Iterator[Page]:
        with self._location.errors("list"):
            if not Path(self._root).exists():
                raise NotFoundError(
                    f"directory {self._root!r} does not exist; check the url{_bucket_meant(self.url)}",
                    stage="list",
                )
            if not Path(self._root).is_dir():
                raise NotFoundError(f"{self._root!r} is a file; give its directory", stage="list")
            page: Page = []
            for info in self._walk("", frozenset()):
                page.append(info)
                if len(page) == _PAGE:
                    yield page
                    page = []
            if page:
                yield page

    def _folders(self) -> set[str]:
        with self._location.errors("list"), os.scandir(self._root) as entries:
            return {entry.name for entry in entries if _leads(entry.is_dir)}

    def _walk(self, below: str, parents: frozenset[tuple[int, int]]) -> Iterator[ObjectInfo]:
        """Yield files of a directory and those under it; `parents` ends the round trips of looping links."""
        directory = os.path.join(self._root, below)  # noqa: PTH118 - `below` is "" for the root
        try:
            status = os.stat(directory)  # noqa: PTH116
            scanned = os.scandir(directory)
        except FileNotFoundError:
            if not below:
                raise
            return  # deleted, or renamed, since its parent was read
        identity = (status.st_dev, status.st_ino)
        with scanned as entries:
            if identity in parents:
                return
            directories = []
            for entry in entries:
                key = f"{below}{entry.name}"
                if _leads(entry.is_dir):
                    directories.append(f"{key}/")
                elif not is_part(entry.name) and (_leads(entry.is_file) or _leads_nowhere(entry)):
                    try:
                        info = _info(key, entry.stat(follow_symlinks=_leads(entry.is_file)))
                    except FileNotFoundError:  # deleted, or renamed, since the directory was read
                        continue
                    yield info
        for name in directories:
            yield from self._walk(name, parents | {identity})

    def _head(self, key: str) -> ObjectInfo:
        with self._location.errors("get", key):
            status = os.stat(self._path(key))  # noqa: PTH116
            if not stat.S_ISREG(status.st_mode):  # as `list` has it: a directory is no object
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
            return _info(key, status)

    def _read(self, key: str, version: str | None, size: int | None) -> Buffer:
        with self._location.errors("get", key), open(self._path(key), "rb", buffering=0) as file:  # noqa: PTH123
            before = _info(key, os.fstat(file.fileno()))
            check_version(key, before.version, version)
            body = file.readall()
            _check_unchanged(before, _info(key, os.fstat(file.fileno())))
            check_length(key, body, before.size if size is None else size)
            return body

    def _read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        with self._location.errors("get", key), open(self._path(key), "rb", buffering=0) as file:  # noqa: PTH123
            before = _info(key, os.fstat(file.fileno()))
            check_version(key, before.version, version)
            check_end(key, stop, before.size)
            body = _pread(file.fileno(), start, stop)
            _check_unchanged(before, _info(key, os.fstat(file.fileno())))
            check_length(key, body, stop - start)
            return body

    def _write(self, key: str, body: Buffer | Path) -> None:
        path = Path(self._path(key))
        with self._location.errors("put", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path, mode=0o666, durable=True) as file:
                if isinstance(body, Path):
                    with body.open("rb") as source:
                        shutil.copyfileobj(source, file, _COPY)
                else:
                    file.write(body)

    def _path(self, key: str) -> str:
        check_key(key, why="keys are paths below the opened directory, without '.' and '..' in them")
        return f"{self._root}/{key}"


def _bucket_meant(url: str | os.PathLike[str]) -> str:
    """Return a question, where a path that is not there looks like a URL that lost its beginning."""
    text = os.fspath(url)
    broken = _BROKEN_SCHEME.match(text)
    if broken:  # pathlib makes one slash of two
        return f" (is it {broken[1]}://{text[broken.end() :]}?)"
    if "://" in text or "/" not in text or text.startswith(("/", ".", "~")):
        return ""
    return f" (is it s3://{text}?)"


def _leads(there: Callable[[], bool]) -> bool:
    """Return whether an entry leads to a file, or to a directory; a link in a circle leads to neither."""
    try:
        return there()
    except OSError:
        return False


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    """Return whether it is a link to nothing. It is listed, as torchvision does, and its read fails."""
    return entry.is_symlink() and not Path(entry).exists()


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def _check_unchanged(before: ObjectInfo, after: ObjectInfo) -> None:
    if before != after:
        raise ObjectChangedError(f"the file changed while it was read: {CHANGED_REMEDY}", key=before.key)


def _pread(descriptor: int, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop), fewer only at the end of the file."""
    parts = []
    while start < stop and (part := os.pread(descriptor, stop - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
