"""`s3://` with `client="s3fs"`: the full alternative to obstore, with conditional reads and any key.

The requests go through s3fs's session, credentials and retries, but not through its file-system methods:
those parse keys, send no If-Match and splice ranges without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fsspec.asyn import sync

from fastload.errors import ArgumentError
from fastload.store import options as known_options
from fastload.store._translate import Place, public_url
from fastload.store.base import (
    Buffer,
    ObjectInfo,
    Page,
    PerProcess,
    Store,
    check_length,
    check_range,
    check_version,
    note_native_client,
)

__all__ = ["S3fsStore"]

# s3fs and botocore have deadlines of a minute; a first contact must fail within 10 s.
_CONTACT_SECONDS = 7.0


class S3fsStore(Store):
    """A prefix of a bucket, read by s3fs. Takes every option of `s3fs.S3FileSystem`."""

    native = True

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._options = url, dict(options)
        bucket, _, prefix = url.partition("://")[2].partition("/")
        if not bucket:
            raise ArgumentError(f"url {url!r} names no bucket: write s3://bucket/prefix")
        self._bucket, self._prefix = bucket, f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""
        self._arguments, endpoint = known_options.s3fs(options)
        self._place = Place(
            public_url(url),
            f"bucket {bucket!r}",
            endpoint,
            "what s3fs found: options key, secret, token, profile; AWS_* variables; ~/.aws; machine roles",
            known_options.secret_values(options),
        )
        super().__init__(public_url(url), f"s3|{endpoint.rstrip('/')}|{bucket}|{self._prefix.strip('/')}")
        self._fs = PerProcess(self._build)

    def __reduce__(self) -> tuple[Any, ...]:
        return S3fsStore, (self._url, self._options)

    def list(self) -> Iterator[Page]:
        request = {"Bucket": self._bucket, "Prefix": self._prefix}
        with self._place.errors("list"):
            # An answer at once or not at all: the pages themselves may take their time.
            contact = {**request, "Prefix": f"{self._prefix}.fastload-contact/", "MaxKeys": 1}
            self._call("list_objects_v2", contact, _CONTACT_SECONDS)
        while True:
            with self._place.errors("list"):
                answer = self._call("list_objects_v2", request)
            entries = answer.get("Contents", ())
            found = [entry for entry in entries if entry["Size"] or not entry["Key"].endswith("/")]
            yield [self._info(entry["Key"][len(self._prefix) :], entry["Size"], entry) for entry in found]
            if not answer.get("IsTruncated"):
                return
            request["ContinuationToken"] = answer["NextContinuationToken"]

    def head(self, key: str) -> ObjectInfo:
        with self._place.errors("get", key):
            answer = self._call("head_object", self._object(key, None), _CONTACT_SECONDS)
            return self._info(key, answer["ContentLength"], answer)

    def read(self, key: str, version: str | None = None, size: int | None = None) -> Buffer:
        return self._read(key, self._object(key, version), version, size)

    def read_range(self, key: str, start: int, stop: int, version: str | None = None) -> Buffer:
        check_range(key, start, stop)
        if start == stop:
            return b""
        request = {**self._object(key, version), "Range": f"bytes={start}-{stop - 1}"}
        return self._read(key, request, version, stop - start)

    def _read(self, key: str, request: dict[str, Any], version: str | None, size: int | None) -> Buffer:
        with self._place.errors("get", key):
            fs = self._fs()
            answer, body = sync(fs.loop, _retried_get, fs, request)
            check_version(key, self._info(key, len(body), answer).version, version)
            check_length(key, len(body), answer["ContentLength"] if size is None else size)
            return body

    def _object(self, key: str, version: str | None) -> dict[str, Any]:
        request = {"Bucket": self._bucket, "Key": self._prefix + key}
        return request if version is None else {**request, "IfMatch": f'"{version}"'}

    def _call(self, method: str, request: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        fs = self._fs()
        answer: dict[str, Any] = sync(fs.loop, fs._call_s3, method, timeout=timeout, **request)
        return answer

    def _info(self, key: str, size: int, entry: Mapping[str, Any]) -> ObjectInfo:
        return ObjectInfo(key, size, str(entry.get("ETag", "")).strip('"'))

    def _build(self) -> Any:
        note_native_client(obstore=False)
        import s3fs  # type: ignore[import-not-found,unused-ignore]

        return s3fs.S3FileSystem(skip_instance_cache=True, **self._arguments)


async def _retried_get(fs: Any, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """A GET and its body, begun again when the body breaks off; `_call_s3` retries up to the headers only."""
    from s3fs.core import _error_wrapper

    result: tuple[dict[str, Any], bytes] = await _error_wrapper(_get, args=(fs, request), retries=fs.retries)
    return result


async def _get(fs: Any, request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    answer: dict[str, Any] = await fs._call_s3("get_object", **request)
    try:
        return answer, await answer["Body"].read()
    finally:
        answer["Body"].close()
