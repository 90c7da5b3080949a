"""`s3://` with `client="s3fs"`: the full alternative to obstore, with conditional reads and any key.

The requests go through s3fs's session and credentials, but not through its file-system methods:
those parse keys, send no If-Match and splice ranges without one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fsspec.asyn import sync

from fastload.errors import ArgumentError, ShortReadError
from fastload.store import options as known_options
from fastload.store.base import (
    PLAIN_READING,
    Buffer,
    ObjectInfo,
    Page,
    Reading,
    Store,
    check_end,
    check_length,
    check_version,
    is_error_document,
    is_time_version,
    time_version,
)
from fastload.store.failures import StoreLocation, public_url
from fastload.store.process import ProcessLocal

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
        with self._location.errors("list"):
            self._call("list_objects_v2", contact, _CONTACT_SECONDS)
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

    def _page(self, request: Mapping[str, Any]) -> dict[str, Any]:
        with self._location.errors("list"):
            return self._call("list_objects_v2", request)

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
