"""Stores read by fsspec: `memory://`, every other file system that fsspec knows, their identity; and s3fs.

The identity is the URL and the options of the file system, without secrets. A repository, an account, an
endpoint, a branch or a port may each be an option, under a name that only its file system knows. So every
option counts, except secrets and options that are known not to affect the place, such as a timeout. At worst
an unknown option makes a second identity, and the data is read once more.

Secrets are left out, not hashed: a reader of the cache directory could test passwords against a digest. Where
only a token identifies the account (Dropbox, Google Drive), two accounts have the same identity, and each one
needs its own cache directory.

`s3://` with `client="s3fs"` is the full alternative to obstore, with conditional reads and any key. Its
requests go through s3fs's session and credentials, but not through its file-system methods: those parse keys,
send no If-Match and splice ranges without one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import sync
from fsspec.config import apply_config
from fsspec.implementations.ftp import FTPFileSystem

from fastload.errors import ArgumentError, FastloadError, NotFoundError, ShortReadError, StoreError
from fastload.store import options as known_options
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
    is_error_document,
    is_time_version,
    time_version,
)
from fastload.store.failures import StoreLocation, public_url
from fastload.store.ftp import Ftp
from fastload.store.node import ProcessLocal, is_part, part_name
from fastload.store.options import PARTS, SECRET, public_options, secret_values

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
# Synchronous file systems whose client threads may share: without a connection (memory), by libhdfs, or by
# httpx. Another one gets one request at a time: threads would get each other's answers (ftplib), or wait for
# an answer that another one threw away (paramiko).
_SHARED_BY_THREADS = frozenset(("memory", "hdfs", "hf", "webdav"))
_SFTP_SECONDS = 60.0  # without an answer; paramiko has no limit

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
        self._takes_turns = not self._asynchronous and protocol not in _SHARED_BY_THREADS
        turn = threading.RLock if self._takes_turns else contextlib.nullcontext
        self._turn: ProcessLocal[Any] = ProcessLocal(turn)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._url, self._protocol, self._options, self.reading), self._state()

    def public_options(self) -> tuple[dict[str, Any], list[str]]:
        return public_options(self._options)

    @property
    def native(self) -> bool:
        return self._asynchronous

    @contextlib.contextmanager
    def _client(self, stage: str, key: str | None = None) -> Iterator[Any]:
        """Give the file system for one request. A single connection that failed is not used again."""
        with self._location.errors(stage, key), self._turn.get():
            try:
                yield self._fs.get()
            except (FastloadError, FileNotFoundError, PermissionError):
                raise
            except BaseException:  # one that was interrupted has an answer on its way
                if self._takes_turns:
                    self._fs.drop()
                raise

    def _list(self) -> Iterator[Page]:
        self._retried(self._check_root, patient=False)
        page: Page = []
        folders = {self._root or "/": None}
        while folders:
            folder = folders.popitem()[0]
            for details in self._retried(functools.partial(self._entries, folder)):
                name = str(details["name"])
                if details["type"] == "directory":
                    folders[name.rstrip("/")] = None
                elif not is_part(name.rpartition("/")[2]):
                    page.append(_info(self._key(name), details))
            if len(page) >= _PAGE:
                yield page
                page = []
        if page:
            yield page

    def _check_root(self) -> None:
        root = self._root or "/"
        with self._client("list") as fs:
            fs.invalidate_cache()  # it may keep an older listing
            try:
                is_folder = fs.info(root)["type"] == "directory"
            except FileNotFoundError:  # some know nothing of their root
                is_folder = fs.isdir(root)
            if not is_folder:
                raise NotFoundError(f"no such directory: check the url {self.url!r}", stage="list")

    def _entries(self, folder: str) -> list[Mapping[str, Any]]:
        """Return what lies in a folder. fsspec's `walk` would leave out folders that it cannot list."""
        with self._client("list", self._key(folder) or None) as fs:
            entries = [self._followed(each) for each in fs.ls(folder, detail=True)]
        return [each for each in entries if not self._is_own(folder, each)]

    def _is_own(self, folder: str, entry: Mapping[str, Any]) -> bool:
        """Return whether an entry is the folder itself, which some list too: by its name or as a marker."""
        name = str(entry["name"])
        if entry["type"] != "directory" or name.strip("/") != folder.strip("/"):
            return False
        if name.endswith("/") and name != folder and not any(_versions(entry)):
            key = f"{self._key(folder)}//"
            raise StoreError(
                f"the keys that begin with {key!r} have an empty segment and cannot be read: rename or "
                "delete these objects",
                stage="list",
                key=key,
            )
        return True

    def _followed(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the file that a link leads to, under the link's name: sftp lists links as such."""
        if entry["type"] != "link":
            return entry
        try:
            details = self._fs.get().info(entry["name"])
        except FileNotFoundError:
            raise NotFoundError(
                f"{entry['name']!r} is a link to a file that is not there: remove it"
            ) from None
        if details["type"] == "directory":
            raise StoreError(
                f"{entry['name']!r} is a link to a folder, which is not followed: put the folder itself there"
            )
        return {**details, "name": entry["name"]}

    def _key(self, path: str) -> str:
        return path[len(self._root) :].lstrip("/")

    def _folders(self) -> set[str]:
        names = [entry["name"] for entry in self._entries(self._root or "/") if entry["type"] == "directory"]
        return {str(name).rstrip("/").rpartition("/")[2] for name in names}

    def _head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._client("get", key):
            return _info(key, self._details(path))

    def _read(self, key: str, version: str | None, size: int | None) -> Buffer:
        return self._cat(key, {}, version, size)

    def _read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        return self._cat(key, {"start": start, "end": stop}, version, stop - start)

    def _cat(self, key: str, span: dict[str, int], version: str | None, size: int | None) -> Buffer:
        path = self._path(key)
        with self._client("get", key) as fs:
            if version:
                self._check(key, path, version)
            body: bytes = fs.cat_file(path, **span)
            if version:
                self._check(key, path, version)
            if span and size is not None and len(body) < size:
                check_end(key, span["end"], _info(key, self._details(path)).size)
            check_length(key, body, size)
            return body

    def _write(self, key: str, body: Buffer | Path) -> None:
        path = self._path(key)
        with self._client("put", key) as fs:
            fs.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)
            if type(fs).mv is fsspec.AbstractFileSystem.mv:
                # Object stores (renaming would be a copy), and memory. A file of theirs that is closed by an
                # error would appear half, so no file is opened.
                if isinstance(body, Path) and self._asynchronous:
                    fs.put_file(str(body), path)
                else:
                    fs.pipe_file(path, body.read_bytes() if isinstance(body, Path) else bytes(body))
                return
            folder, _, name = path.rpartition("/")
            part = f"{folder}/{part_name(name)}"
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
        cls = fsspec.get_filesystem_class(self._protocol)
        if cls is FTPFileSystem:
            cls = Ftp
        fs = cls(skip_instance_cache=True, **self._arguments)
        if self._protocol in ("sftp", "ssh") and not self._asynchronous:
            fs.ftp.get_channel().settimeout(_SFTP_SECONDS)
        return fs


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
        if value is None or name in _NOT_A_PLACE or SECRET.search(name):
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
    return ";".join(part for part in PARTS.split(text) if not SECRET.search(part.partition("=")[0]))


# s3fs and botocore have deadlines of a minute; a first contact must fail within 10 s.
_CONTACT_SECONDS = 7.0
_MOST_IN_A_PUT = 5 << 30  # S3's own limit


class S3fsStore(Store):
    """A prefix of a bucket, read by s3fs. Takes every option of `s3fs.S3FileSystem`."""

    native = True

    def __init__(self, url: str, options: Mapping[str, Any], reading: Reading = PLAIN_READING) -> None:
        self._url, self._options = url, dict(options)
        bucket, _, prefix = url.partition("://")[2].partition("/")
        if not bucket:
            raise ArgumentError(f"url {public_url(url)!r} names no bucket: write s3://bucket/prefix")
        known_options.refuse_user("url", url, "key and secret")
        self._bucket, self._prefix = bucket, f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""
        self._arguments, endpoint, secrets = known_options.s3fs(options)
        self._location = StoreLocation(
            public_url(url),
            f"bucket {bucket!r}",
            endpoint,
            "options key, secret, token, profile; AWS_* variables; ~/.aws; machine roles (for a public "
            "bucket give anon=True)",
            secrets,
        )
        identity = f"s3|{endpoint.rstrip('/')}|{bucket}|{self._prefix.strip('/')}"
        super().__init__(public_url(url), identity, reading)
        self._fs = ProcessLocal(self._build)
        self._renewing, self._renewed = threading.Lock(), 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return S3fsStore, (self._url, self._options, self.reading), self._state()

    def public_options(self) -> tuple[dict[str, Any], list[str]]:
        endpoint = {"endpoint_url": self._location.endpoint} if self._location.endpoint else {}
        return known_options.public_options(endpoint | self._options)

    def _list(self) -> Iterator[Page]:
        request = {"Bucket": self._bucket, "Prefix": self._prefix}
        # An answer at once or not at all: the pages themselves may take their time.
        contact = {**request, "Prefix": f"{self._prefix}.fastload-contact/", "MaxKeys": 1}
        self._contact(lambda: self._page(contact, _CONTACT_SECONDS))
        for answer in self._pages(request):
            entries = answer.get("Contents", ())
            objects = [entry for entry in entries if entry["Size"] or not entry["Key"].endswith("/")]
            yield [self._info(entry["Key"][len(self._prefix) :], entry["Size"], entry) for entry in objects]

    def _folders(self) -> set[str]:
        request = {"Bucket": self._bucket, "Prefix": self._prefix, "Delimiter": "/"}
        folders: set[str] = set()
        for answer in self._pages(request):
            prefixes = [entry["Prefix"] for entry in answer.get("CommonPrefixes", ())]
            folders.update(prefix[len(self._prefix) :].rstrip("/") for prefix in prefixes)
        return folders

    def _pages(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answers to a request for a listing, each with retries of its own."""
        asked = dict(request)
        while True:
            answer = self._retried(lambda: self._page(asked))
            yield answer
            if not answer.get("IsTruncated"):
                return
            asked["ContinuationToken"] = answer["NextContinuationToken"]

    def _page(self, request: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        with self._location.errors("list"):
            return self._call("list_objects_v2", request, timeout)

    def _head(self, key: str) -> ObjectInfo:
        with self._location.errors("get", key):
            answer = self._call("head_object", self._object(key, None), _CONTACT_SECONDS)
            return self._info(key, answer["ContentLength"], answer)

    def _read(self, key: str, version: str | None, size: int | None) -> Buffer:
        return self._get(key, self._object(key, version), version, size)

    def _read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        request = {**self._object(key, version), "Range": f"bytes={start}-{stop - 1}"}
        return self._get(key, request, version, stop - start)

    def _get(self, key: str, request: dict[str, Any], version: str | None, size: int | None) -> Buffer:
        with self._location.errors("get", key):
            fs = self._fs.get()
            answer, body = sync(fs.loop, _get, fs, request)
            if "ETag" not in answer and is_error_document(body):
                raise ShortReadError(
                    "the store answered 200 with an XML error in place of the object", key=key
                )
            whole = int(answer.get("ContentRange", f"/{answer['ContentLength']}").rpartition("/")[2])
            timed = time_version(whole, answer.get("LastModified"))
            check_version(key, self._info(key, whole, answer).version, version, timed)
            if "Range" in request and "ContentRange" not in answer and len(body) > (size or 0):
                raise StoreError(
                    "the server answers a range with the whole object, which client='s3fs' does not take: "
                    "leave client= out, or use a server with ranges",
                    key=key,
                )
            if "Range" in request and "ContentRange" in answer:
                start = request["Range"].replace("=", " ").partition("-")[0]
                if answer["ContentRange"].partition("-")[0] != start:
                    raise ShortReadError("the server answered with another range than was asked for", key=key)
            if "ContentRange" in answer and size is not None and len(body) < size:
                stop = int(request["Range"].rpartition("-")[2]) + 1
                check_end(key, stop, whole)
            check_length(key, body, answer["ContentLength"] if size is None else size)
            return body

    def _write(self, key: str, body: Buffer | Path) -> None:
        request = {"Bucket": self._bucket, "Key": self._prefix + key}
        with self._location.errors("put", key):
            if isinstance(body, Path):
                if body.stat().st_size > _MOST_IN_A_PUT:
                    raise ArgumentError(
                        f"{key!r} has more than 5 GiB: only the default client, not 's3fs', writes that"
                    )
                with body.open("rb") as file:
                    self._call("put_object", {**request, "Body": file})
            else:
                self._call("put_object", {**request, "Body": bytes(body)})

    def _renew(self, since: float) -> bool:
        if not {"key", "secret", "token", "anon"}.isdisjoint(self._arguments):
            return False
        with self._renewing:
            if self._renewed <= since:
                self._renewed = time.monotonic()
                self._fs.drop()
            return True

    def _object(self, key: str, version: str | None) -> dict[str, Any]:
        request = {"Bucket": self._bucket, "Key": self._prefix + key}
        # One that is weak, or made of size and time, cannot be a condition; the answer's is compared anyway.
        if not version or version.startswith("W/") or is_time_version(version):
            return request
        return {**request, "IfMatch": f'"{version}"'}

    def _call(self, method: str, request: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        fs = self._fs.get()
        answer: dict[str, Any] = sync(fs.loop, fs._call_s3, method, timeout=timeout, **request)
        return answer

    def _info(self, key: str, size: int, entry: Mapping[str, Any]) -> ObjectInfo:
        etag = str(entry.get("ETag", "")).strip('"')
        return ObjectInfo(key, size, etag or time_version(size, entry.get("LastModified")))

    def _build(self) -> Any:
        import s3fs  # type: ignore[import-not-found,unused-ignore]

        # Retries are the store's, see `retry`: neither s3fs's nor botocore's below them.
        config = {"retries": {"max_attempts": 0}, **self._arguments.get("config_kwargs", {})}
        fs = s3fs.S3FileSystem(skip_instance_cache=True, **{**self._arguments, "config_kwargs": config})
        fs.retries = 1
        return fs


async def _get(fs: Any, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    answer: dict[str, Any] = await fs._call_s3("get_object", **request)
    try:
        return answer, await answer["Body"].read()
    finally:
        answer["Body"].close()
