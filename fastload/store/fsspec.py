"""Stores read by fsspec: `memory://`, and every other file system that fsspec knows; and their identity.

The identity is the URL and the options of the file system, without secrets. A repository, an account, an
endpoint, a branch or a port may each be an option, under a name that only its file system knows. So every
option counts, except secrets and options that are known not to affect the place, such as a timeout. At worst
an unknown option makes a second identity, and the data is read once more.

Secrets are left out, not hashed: a reader of the cache directory could test passwords against a digest. Where
only a token identifies the account (Dropbox, Google Drive), two accounts have the same identity, and each one
needs its own cache directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.config import apply_config

from fastload.errors import ArgumentError, NotFoundError
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
from fastload.store.failures import StoreLocation, public_url
from fastload.store.options import public_options, secret_values
from fastload.store.process import ProcessLocal

_PAGE = 1000
_COPY = 8 << 20
# What file systems call the version of an object (Azure, WebDAV, OCI: ETags; Hugging Face: blob_id; GitHub:
# sha; Git: hex; DVC: md5; lakeFS: checksum; Dropbox: content_hash; zip: CRC) ...
_VERSION_FIELDS = (
    *("ETag", "etag", "e_tag", "md5Hash", "generation", "content_md5", "checksum", "blob_id", "oid", "sha"),
    *("sha256", "hex", "md5", "md5Checksum", "content_hash", "Content-MD5", "CRC"),
)
# ... and its time where they have no version (SFTP, SMB, tar, HDFS: mtime; OSS: LastModified; Jupyter:
# last_modified; WebDAV: modified; webhdfs: modificationTime; Google Drive: modifiedTime; Box: modified_at;
# FTP: modify). A time of creation is the last resort: objects are written as a whole, files are not.
_TIME_FIELDS = (
    *("mtime", "LastModified", "last_modified", "Last-Modified", "modified", "updated", "modificationTime"),
    *("modification_time", "modifiedTime", "modified_at", "timeModified", "server_modified", "modify"),
    *("created", "timeCreated"),
)
# FTP servers without MLSD give "Nov 21 10:30" or, half a year later, "Nov 21 2025": too coarse for a version.
_FTP_TIME = re.compile(r"\d{14}(\.\d+)?")


_PASSWORD = re.compile(r"^[^/@]*:[^/@]*@")  # where a file system leaves it in its paths


class FsspecStore(Store):
    """A directory of an fsspec file system, by its synchronous calls.

    fsspec has no conditional reads: the version is compared before and after the read, where the file system
    has one. Asynchronous file systems serve these calls from fsspec's own loop thread.
    """

    def __init__(
        self, url: str, protocol: str, options: Mapping[str, Any], reading: Reading = PLAIN_READING
    ) -> None:
        self._url, self._protocol, self._options = url, protocol, dict(options)
        cls = fsspec.get_filesystem_class(protocol)
        try:
            self._arguments = {**cls._get_kwargs_from_urls(url), **options}
            self._root = str(cls._strip_protocol(url)).rstrip("/")
        except ValueError:  # its text may have a part of a password that was taken for a port
            raise ArgumentError(
                f"a url of {protocol}:// cannot be read: write / : @ # in a user or password as %2F %3A %40 "
                "%23, or pass these as storage options; a port must be a number"
            ) from None
        self._asynchronous = bool(cls.async_impl)
        shown = public_url(url)
        self._location = StoreLocation(
            shown, f"the directory of {shown!r}", secrets=secret_values(self._arguments)
        )
        place, why = identity_of(cls, self._arguments)
        super().__init__(shown, f"{protocol}|{place}|{_PASSWORD.sub('', self._root)}", reading)
        self.unidentified = why
        self._fs = ProcessLocal(self._build)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._url, self._protocol, self._options, self.reading), self._state()

    def public_options(self) -> tuple[dict[str, Any], list[str]]:
        return public_options(self._options)

    @property
    def native(self) -> bool:
        return self._asynchronous

    def _list(self) -> Iterator[Page]:
        with self._location.errors("list"):
            fs, root = self._fs.get(), self._root or "/"
            if not fs.isdir(root):
                raise NotFoundError(f"no such directory: check the url {self.url!r}", stage="list")
            page: Page = []
            for _, _, files in fs.walk(root, detail=True, on_error="raise"):
                for details in files.values():
                    page.append(_info(str(details["name"])[len(self._root) :].lstrip("/"), details))
                if len(page) >= _PAGE:
                    yield page
                    page = []
            if page:
                yield page

    def _folders(self) -> set[str]:
        with self._location.errors("list"):
            entries = self._fs.get().ls(self._root or "/", detail=True)
            names = [str(entry["name"]).rstrip("/") for entry in entries if entry["type"] == "directory"]
            # Some name the directory itself too.
            return {name.rpartition("/")[2] for name in names if name.strip("/") != self._root.strip("/")}

    def _head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._location.errors("get", key):
            return self._stat(key, path)

    def _read(self, key: str, version: str | None, size: int | None) -> Buffer:
        return self._cat(key, {}, version, size)

    def _read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        return self._cat(key, {"start": start, "end": stop}, version, stop - start)

    def _cat(self, key: str, span: dict[str, int], version: str | None, size: int | None) -> Buffer:
        path = self._path(key)
        with self._location.errors("get", key):
            if version:
                self._check(key, path, version)
            body: bytes = self._fs.get().cat_file(path, **span)
            if version:
                self._check(key, path, version)
            if span and size is not None and len(body) < size:
                check_end(key, span["end"], self._stat(key, path).size)
            check_length(key, body, size)
            return body

    def _write(self, key: str, body: Buffer | Path) -> None:
        path = self._path(key)
        with self._location.errors("put", key):
            fs = self._fs.get()
            fs.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)
            if type(fs).mv is fsspec.AbstractFileSystem.mv:
                # Object stores (renaming would be a copy), and memory. A file of theirs that is closed by an
                # error would appear half, so no file is opened.
                if isinstance(body, Path) and self._asynchronous:
                    fs.put_file(str(body), path)
                else:
                    fs.pipe_file(path, body.read_bytes() if isinstance(body, Path) else bytes(body))
                return
            part = f"{path}.{secrets.token_hex(6)}.part"
            try:
                with fs.open(part, "wb") as file:
                    if isinstance(body, Path):
                        with body.open("rb") as source:
                            shutil.copyfileobj(source, file, _COPY)
                    else:
                        file.write(body)
                fs.mv(part, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    fs.rm_file(part)
                raise

    def _stat(self, key: str, path: str) -> ObjectInfo:
        return _info(key, self._details(path))

    def _details(self, path: str) -> Mapping[str, Any]:
        fs = self._fs.get()
        fs.invalidate_cache()  # a listing kept by the file system would answer with the old version
        details: Mapping[str, Any] = fs.info(path)
        return details

    def _check(self, key: str, path: str, version: str) -> None:
        """Compare with the field that the listing had: what is asked for one file may name more of them."""
        versions = list(_versions(self._details(path)))
        check_version(key, version if version in versions else (versions or [""])[0], version)

    def _path(self, key: str) -> str:
        check_key(key, why="keys are paths below the opened url, without '.' and '..' in them")
        return f"{self._root}/{key}"

    def _build(self) -> Any:
        return fsspec.filesystem(self._protocol, skip_instance_cache=True, **self._arguments)


def _info(key: str, details: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(key, int(details["size"] or 0), next(_versions(details), ""))


def _versions(details: Mapping[str, Any]) -> Iterator[str]:
    """Yield every name of a file's version in what a file system says of it, the best one first."""
    for name in _VERSION_FIELDS:
        if details.get(name) not in (None, ""):  # the CRC of an empty file is 0
            yield str(details[name]).strip('"')
    for name in _TIME_FIELDS:
        time = details.get(name)
        if isinstance(time, datetime):
            # One without a time zone would be another number on each machine.
            time = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        if time and (name != "modify" or _FTP_TIME.fullmatch(str(time))):
            yield f"{int(details['size'] or 0)}-{time}"


# Options of fsspec and its file systems that say how to read, not where.
_NOT_A_PLACE = frozenset(
    (
        *("asynchronous", "batch_size", "block_size", "cache_options", "cache_type", "default_block_size"),
        *("default_cache_type", "default_fill_cache", "listings_expiry_time", "loop", "max_concurrency"),
        *("max_paths", "retries", "skip_instance_cache", "timeout", "use_listings_cache"),
    )
)
# Names of options that hold secrets, and of the parts of one ("AccountKey=...;", "?sig=...").
_SECRET = re.compile(
    r"secret|token|passw|passphrase|passcode|pwd|credential|cookie|signature|authorization|"
    r"(?:^|[_-])(?:auth|acct|pass|sas|sig|tok)(?:$|[_-])|keys?(?:$|[_-](?:id|data|file|filename|base64)$)",
    re.IGNORECASE,
)
_PARTS = re.compile(r"[;&]")
_PATHS = ("fo", "path")  # an archive or a repository on this machine, unless a protocol is given for it


class _Opaque(Exception):
    """An option that cannot be described; its argument is the option's name."""


def identity_of(cls: type[AbstractFileSystem], arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Return a digest of the arguments that name the place, and why two places may share it ("": they do
    not).

    Args:
        cls: the file system's class. What fsspec's configuration sets for it counts too.
        arguments: its arguments: the options given, and what its URL says of the host.
    """
    why = ""
    try:
        described = _described_options(apply_config(cls, dict(arguments)))
    except _Opaque as error:
        described = {}
        why = f"its storage option {error} is an object that fastload cannot describe"
    text = json.dumps(described, sort_keys=True, ensure_ascii=True)
    return blake2b(text.encode(), digest_size=8).hexdigest(), why


def _described_options(options: Mapping[str, Any]) -> dict[str, Any]:
    local = not options.get("target_protocol")
    described = {}
    for name, value in options.items():
        if value is None or name in _NOT_A_PLACE or _SECRET.search(name):
            continue
        if local and name in _PATHS and isinstance(value, str | os.PathLike):
            path = os.fsdecode(value)
            value = path if "://" in path else os.path.abspath(path)  # noqa: PTH100 - no link is resolved
        described[name] = _described(name, value)
    return described


def _described(name: str, value: Any) -> Any:
    """Describe `value` in JSON, the same in every process."""
    if isinstance(value, Enum):
        return _described(name, value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return str(value)  # in a URL it is a text
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, str | os.PathLike):
        return _without_secrets(os.fspath(value))
    if isinstance(value, Mapping):
        return _described_options({str(key): inner for key, inner in value.items()})
    if isinstance(value, list | tuple):
        return [_described(name, inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((_described(name, inner) for inner in value), key=repr)
    if isinstance(value, AbstractFileSystem):
        class_name = f"{type(value).__module__}.{type(value).__qualname__}"
        return [
            class_name,
            _described(name, value.storage_args),
            _described_options(value.storage_options),
        ]
    raise _Opaque(name)


def _without_secrets(text: str | bytes) -> str:
    """Remove a URL's user information and query, or the secret parts of a connection string."""
    text = os.fsdecode(text)
    if "://" in text:
        _, mark, query = text.partition("?")
        return f"{public_url(text)}{mark}{_without_secret_parts(query)}"
    return _without_secret_parts(text) if "=" in text else text


def _without_secret_parts(text: str) -> str:
    return ";".join(part for part in _PARTS.split(text) if not _SECRET.search(part.partition("=")[0]))
