"""Stores read by obstore's own calls: s3, gs, az and http(s).

obstore's fsspec adapter is not used: it costs three times the CPU per object.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from fastload.errors import ArgumentError, ShortReadError, StoreError
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
from fastload.store.failures import StoreLocation, as_bucket, public_url
from fastload.store.node import ProcessLocal
from fastload.store.workarounds import Answer, OnePass, SlashKeys

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta

NATIVE_PROTOCOLS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "http": "http",
    "https": "http",
}
_UNREAD = ", or its key ends in a slash (client='s3fs' can read it)"
_PAGE = 1000
_LIST_FAILURES = 5  # in a row
# A first contact must fail within 10 s: at most 4 s of attempts begin, each ends in 4 s.
_CONTACT = {
    "client": {"connect_timeout": "2s", "read_timeout": "4s", "timeout": "4s"},
    "retry": {"max_retries": 4, "retry_timeout": timedelta(seconds=4)},
}
# A stalled body ends by lack of progress, not by its total time.
_PATIENT = {"connect_timeout": "5s", "read_timeout": "20s", "timeout": "24h"}
# Listings outlast a server's bad minutes by obstore's own retries. Time bounds them, not their number, for
# its backoff grows slowly (12 retries take 5 s).
_LISTER = {
    "client": _PATIENT,
    "retry": {
        "max_retries": 1000,
        "retry_timeout": timedelta(minutes=3),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=15), "base": 3},
    },
}
# So do writes, and a part that fails is sent again by itself. No answer comes while a part is on its way.
_WRITER = {**_LISTER, "client": {**_PATIENT, "read_timeout": "120s"}}
_FIRST_WRITE = timedelta(seconds=4)  # a store that never took anything is wrong, not busy
_PART = 8 << 20  # bytes of one request of a large write
_PARTS = 4  # on their way at a time
# Idle connections keep their buffers, and many are needed only at the start of an epoch.
_READER = {
    "client": {**_PATIENT, "pool_idle_timeout": "5s"},
    "retry": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
}
# A prefix that no object has; listing it answers at once where the real listing may take its time.
_CONTACT_PREFIX = ".fastload-contact"


def _first(patience: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the same, but it gives up within seconds."""
    return {**patience, "retry": {**patience["retry"], "retry_timeout": _FIRST_WRITE}}


class _Address(NamedTuple):
    service: str  # "s3", "gs", "az" or "http"
    bucket: str  # bucket or container; for http the base URL
    prefix: str  # without slashes at its ends
    account: str  # az only, and only where the URL names it


class NativeStore(Store):
    """A prefix of a bucket, or an http(s) base URL, read by obstore.

    obstore's paths have no empty, "." or ".." segments, no slash at the ends and no control characters. A
    listing fails at such a key and names it (for a slash at the end, see `slash_keys`); a read of one is
    refused. `client="s3fs"` takes them.
    """

    native = True

    def __init__(self, url: str, options: Mapping[str, Any], reading: Reading = PLAIN_READING) -> None:
        self._url, self._options = url, dict(options)
        self._address = _address(url)
        self._connection = _connection(self._address, options)
        service, bucket, prefix, _ = self._address
        account = str(self._connection.config.get("account_name", ""))
        self._location = self._described(self._connection)
        where = "/".join(filter(None, (self._connection.endpoint.rstrip("/"), account)))
        identity = public_url(bucket) if service == "http" else f"{service}|{where}|{bucket}|{prefix}"
        super().__init__(public_url(url), identity, reading)
        # Readers are the only ones that most processes need, and building a client takes milliseconds.
        self._reader = ProcessLocal(lambda: self._client(_READER))
        self._lister = ProcessLocal(lambda: self._client(_LISTER))
        self._writer = ProcessLocal(lambda: self._client(_WRITER))
        self._first_writer = ProcessLocal(lambda: self._client(_first(_WRITER)))
        self._passes = ProcessLocal(lambda: OnePass(self._whole_answer))
        self._server = self._location.endpoint or "{0.scheme}://{0.netloc}".format(urlsplit(url))
        self._first_range = threading.Lock()  # one request tells whether the server keeps ranges
        self._renewing, self._renewed = threading.Lock(), 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return NativeStore, (self._url, self._options, self.reading), self._state()

    def public_options(self) -> tuple[dict[str, Any], list[str]]:
        service, connection = self._address.service, self._connection
        options = {"region": connection.config["region"]} if service == "s3" else {}
        named = {"endpoint", "endpoint_url", "base_url", "client_kwargs"} & self._options.keys()
        if connection.endpoint and service != "http" and not named:
            options["endpoint_url"] = connection.endpoint
        return known_options.public_options(options | self._options)

    def _described(self, connection: known_options.Connection) -> StoreLocation:
        shown = public_url(self._url)
        return StoreLocation(
            url=shown,
            bucket=shown if self._address.service == "http" else f"bucket {self._address.bucket!r}",
            endpoint=connection.endpoint,
            tried=connection.tried,
            secrets=connection.secrets,
            unread=_UNREAD if self._address.service == "s3" else "",
        )

    def _list(self) -> Iterator[Page]:
        if self._address.service == "http":
            raise ArgumentError(
                f"{self.url!r}: http servers have no listing: {as_bucket(self.url)}. What is named needs "
                "none: ImageFolder and ObjectDataset take keys=, and datasets of shards a list of URLs, or "
                f"'{self.url.rstrip('/')}/{{000..099}}.tar'"
            )
        self._contact(self._ask_first)
        with self._location.errors("list"):
            pages = _pages(self._lister.get())
        slashes, over = SlashKeys(self._lister.get), False
        while not over:
            with self._location.errors("list"):
                page = next(pages, None)
                over = page is None
                infos = [ObjectInfo(m["path"], m["size"], _version(m)) for m in page or ()]
                objects = slashes.rest() if page is None else slashes.without(infos)
            yield objects

    def _ask_first(self) -> None:
        import obstore

        with self._location.errors("list"):
            for _ in obstore.list(self._client(_CONTACT), _CONTACT_PREFIX):
                pass

    def _folders(self) -> set[str]:
        import obstore

        with self._location.errors("list"):
            return set(obstore.list_with_delimiter(self._lister.get())["common_prefixes"])

    def _head(self, key: str) -> ObjectInfo:
        import obstore

        with self._errors(key):
            meta = obstore.head(self._reader.get(), key)
            return ObjectInfo(key, meta["size"], _version(meta))

    def _read(self, key: str, version: str | None, size: int | None) -> Buffer:
        import obstore

        with self._errors(key):
            result = obstore.get(self._reader.get(), key, options=_conditions(version))
            return _whole(result.bytes(), key, result, version, size)

    def _read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        with self._errors(key):
            piece: Buffer | None = None
            if self._server not in _keeps_ranges:
                with self._first_range:
                    if self._server not in _keeps_ranges:  # else all who waited here ask side by side
                        piece = self._ask_range(key, start, stop, version)
            if piece is None and _keeps_ranges[self._server]:
                piece = self._ask_range(key, start, stop, version)
            if piece is not None:
                return piece
            if self.budget is not None and any(self.budget.limits):
                raise StoreError(
                    "the server sends whole objects where ranges are asked for, so max_gets and "
                    "max_egress cannot be kept: remove them from the storage options",
                    key=key,
                )
            piece, size = self._passes.get().read(key, version, start, stop)
            if len(piece) < stop - start:
                check_end(key, stop, size)
            check_length(key, piece, stop - start)
            return piece

    def _ask_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer | None:
        """Return a range by one request, and note whether the server keeps ranges: None if it does not."""
        import obstore

        try:
            result = obstore.get(self._reader.get(), key, options=_conditions(version, (start, stop)))
            body = result.bytes()
        except (obstore.exceptions.GenericError, obstore.exceptions.NotSupportedError) as error:
            if not _range_ignored(error):
                raise
            _keeps_ranges[self._server] = False
            return None
        _keeps_ranges[self._server] = True
        return _cut(body, key, start, stop, result, version)

    def _whole_answer(self, key: str, version: str | None) -> Answer:
        import obstore

        result = obstore.get(self._reader.get(), key, options=_conditions(version))
        _check(key, result.meta, version)
        return Answer(result.meta["size"], map(bytes, result))

    def _answers_ranges(self) -> bool:
        return _keeps_ranges.get(self._server, True)

    def _renew(self, since: float) -> bool:
        with self._renewing:
            if self._renewed > since:
                return True
            try:
                connection = _connection(self._address, self._options)
            except ArgumentError:
                return False
            if connection.credentials is not None and connection.credentials == self._connection.credentials:
                return False
            self._connection, self._renewed = connection, time.monotonic()
            self._location = self._described(connection)
            self._reader.drop()
            self._lister.drop()
            self._writer.drop()
            self._first_writer.drop()
            return True

    def _write(self, key: str, body: Buffer | Path) -> None:
        import obstore

        if self._address.service == "http":
            raise ArgumentError(f"{self.url!r}: http servers are for reading; write to the bucket as s3://")
        with self._errors(key, "put"):
            writer = self._writer if self._written else self._first_writer
            # What fits into a part is one request; S3 shows the parts of a larger one when all are there.
            obstore.put(writer.get(), key, body, chunk_size=_PART, max_concurrency=_PARTS)

    def _errors(self, key: str, stage: str = "get") -> Any:
        why = "obstore would read another key instead. For s3:// pass client='s3fs', or rename it"
        check_key(key, why=why)
        return self._location.errors(stage, key)

    def _client(self, patience: Mapping[str, Any]) -> Any:
        _refuse_forked()
        from obstore import store as stores

        connection = self._connection
        config: Any = connection.config
        common: dict[str, Any] = {
            "client_options": {**connection.client_options, **patience["client"]},
            "retry_config": patience["retry"],
        }
        if self._address.service == "http":
            return stores.HTTPStore(public_url(self._url), **common)
        if self._address.prefix:
            common["prefix"] = self._address.prefix
        if self._address.service == "gs":
            return stores.GCSStore(config=config, **common)
        if self._address.service == "az":
            return stores.AzureStore(config=config, **common)
        provider = _credential_provider(connection)
        return stores.S3Store(config=config, credential_provider=provider, **common)


obstore_in_use = ProcessLocal(lambda: True)
_keeps_ranges: dict[str, bool] = {}  # server -> whether it answers a range with that range


def _refuse_forked() -> None:
    """Record that this process uses obstore.

    Raises:
        StoreError: it was forked from a process that had used obstore, whose threads it lacks. Every request
            would hang, and could crash the parent, which shares its epoll instance.
    """
    if obstore_in_use.inherited:
        raise StoreError(
            "this process was forked from a worker that had already used the object store's client, which "
            "does not survive a fork; start it with the 'forkserver' or 'spawn' method instead"
        )
    obstore_in_use.get()


def _address(url: str) -> _Address:
    scheme, _, rest = url.partition("://")
    service = NATIVE_PROTOCOLS[scheme.lower()]
    if service == "http":
        parts = urlsplit(url)
        if not parts.hostname:
            raise ArgumentError(f"url {public_url(url)!r} names no host")
        return _Address(service, url, "", "")
    bucket, _, prefix = rest.partition("/")
    account = ""
    if service != "az" or ":" in bucket:
        known_options.refuse_user("url", url, "for credentials (key and secret for s3://)")
    if service == "az" and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        account = host.partition(".")[0]
    if not bucket:
        raise ArgumentError(f"url {public_url(url)!r} names no bucket: write {scheme}://bucket/prefix")
    prefix = prefix.strip("/")
    if prefix:
        check_key(prefix, why=f"it is the prefix of url {url!r}; for s3:// client='s3fs' may accept it")
    return _Address(service, bucket, prefix, account)


def _connection(address: _Address, options: Mapping[str, Any]) -> known_options.Connection:
    if address.service == "s3":
        return known_options.s3(options, address.bucket)
    if address.service == "gs":
        return known_options.gcs(options, address.bucket)
    if address.service == "az":
        return known_options.azure(options, address.bucket, address.account)
    return known_options.http(options, address.bucket)


def _credential_provider(connection: known_options.Connection) -> Any:
    """Return what obstore asks for credentials; None leaves it to its own chain of machine identities."""
    if connection.credentials is not None:
        fixed = connection.credentials
        return lambda: fixed
    if connection.provider is not None or not connection.profile:
        return connection.provider
    try:
        import boto3  # type: ignore[import-untyped,import-not-found,unused-ignore]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError:
        raise ArgumentError(
            f"AWS profile {connection.profile!r} takes a role, SSO or a credential process, which boto3 "
            "resolves: pip install 'torch-fastload[aws]'"
        ) from None
    return Boto3CredentialProvider(boto3.Session(profile_name=connection.profile))


def _version(meta: ObjectMeta) -> str:
    etag = meta["e_tag"]
    if etag:
        return etag.strip('"') if etag.startswith('"') else etag
    return time_version(meta["size"], meta["last_modified"])


def _check(key: str, meta: ObjectMeta, wanted: str | None) -> None:
    version = _version(meta)
    if wanted and version != wanted:
        check_version(key, version, wanted, time_version(meta["size"], meta["last_modified"]))


def _pages(client: Any) -> Iterator[Any]:
    """Yield pages of a listing. One whose body breaks off, which obstore does not retry, comes again."""
    import obstore

    offset: str | None = None  # a key that was yielded; where the listing goes on after a failure
    seen: set[str] = set()  # the keys yielded at and after it
    failures, again = 0, False  # again: what was yielded may come once more
    pages = iter(obstore.list(client, chunk_size=_PAGE))
    while True:
        try:
            page = next(pages, None)
        except obstore.exceptions.GenericError as error:
            failures += 1
            if failures > _LIST_FAILURES or "response body" not in str(error):
                raise
            pages, again = iter(obstore.list(client, offset=offset, chunk_size=_PAGE)), True
            continue
        if page is None:
            return
        failures = 0
        # Else two entries of one path are two keys, "name" and "name/".
        fresh = [meta for meta in page if meta["path"] not in seen] if again else page
        # The path of an empty object may be that of a directory marker without its slash: it sorts elsewhere.
        sized = [meta["path"] for meta in page if meta["size"]]
        if sized:
            offset, seen = sized[-1], set()
        seen.update(meta["path"] for meta in page)
        yield fresh


def _whole(body: Buffer, key: str, result: GetResult, version: str | None, size: int | None) -> Buffer:
    """Return a checked answer to a read of the whole object."""
    meta = result.meta  # recreated each time
    if not meta["e_tag"] and is_error_document(body):
        raise ShortReadError("the store answered 200 with an XML error in place of the object", key=key)
    _check(key, meta, version)
    check_length(key, body, meta["size"] if size is None else size)
    return body


def _conditions(version: str | None, span: tuple[int, int] | None = None) -> Any:
    """Return options of a GET. A weak or made-up version is no condition; the answer's is compared."""
    conditions: dict[str, Any] = {}
    if version and not version.startswith("W/") and not is_time_version(version):
        conditions["if_match"] = f'"{version}"'
    if span is not None:
        conditions["range"] = span
    return conditions


def _range_ignored(error: Exception) -> bool:
    """Return whether the server answered 200 to a range, which obstore refuses (`rclone serve s3` does)."""
    text = str(error)
    return "non-partial response" in text or "Range request not supported" in text


def _cut(body: Buffer, key: str, start: int, stop: int, result: GetResult, version: str | None) -> Buffer:
    """Return the bytes [start, stop) of a checked answer, whose body may begin earlier than asked."""
    meta = result.meta
    _check(key, meta, version)
    first, last = result.range
    if first < start or last > stop:
        body = memoryview(body)[start - first : stop - first]
    if len(body) < stop - start:
        check_end(key, stop, meta["size"])
    check_length(key, body, stop - start)
    return body
