"""A scripted S3-like HTTP server for tests: one bucket in memory, and faults per key and request number.

    with FaultServer({"a.jpg": b"..."}) as server:
        server.script("a.jpg", Fault(status=503), None)     # the first GET fails, later ones do not
        server.script(LIST, Fault(status=503), repeat=True)  # every listing page fails

It speaks what clients use of S3: ListObjectsV2 in pages, GET and HEAD with Range and If-Match, PUT, whole
or in parts.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import socket
import struct
import sys
import threading
import urllib.parse
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from types import TracebackType
from xml.sax.saxutils import escape

from tests.patience import PATIENCE

LIST = "\0list"  # stands for listing requests where a key is asked for
BUCKET = "bucket"
_CHUNK = 1 << 18  # bytes of a body that are written at once
_NO_BUCKET = "\0no bucket"
_REASONS = {200: "OK", 206: "Partial Content", 400: "Bad Request", 403: "Forbidden", 404: "Not Found"}
_REASONS |= {412: "Precondition Failed", 416: "Range Not Satisfiable", 500: "Internal Server Error"}
_REASONS |= {503: "Service Unavailable"}


@functools.lru_cache(64)
def _md5(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()


@dataclass(frozen=True)
class Fault:
    """What to do instead of, or on top of, the right answer.

    Args:
        status, code: answer with this error.
        delay: wait so many seconds first.
        stall_after: send so many bytes of the body, then nothing for ever.
        cut_after: close the connection in order after so many bytes of the body.
        reset_after: reset the connection after so many bytes of the body.
        flip: invert the bits of the body's byte at this offset.
        etag: claim this ETag.
        body: answer 200 with this body, its true length and the object's ETag.
        lost: do what is asked, and close the connection in place of the answer.
    """

    status: int = 0
    code: str = "InternalError"
    delay: float = 0
    stall_after: int | None = None
    cut_after: int | None = None
    reset_after: int | None = None
    flip: int | None = None
    etag: str | None = None
    body: bytes | None = None
    lost: bool = False


@dataclass(frozen=True)
class Request:
    """One request as it arrived. `key` is LIST for listings."""

    method: str
    key: str
    headers: Mapping[str, str] = field(repr=False)
    query: Mapping[str, str]
    body: bytes = field(default=b"", repr=False)

    @property
    def span(self) -> tuple[int, int] | None:
        """The range [start, stop) that is asked for."""
        if (asked := self.headers.get("range")) is None:
            return None
        first, _, last = asked.removeprefix("bytes=").partition("-")
        return int(first), int(last) + 1 if last else sys.maxsize


class FaultServer:
    """Serves `objects` as bucket "bucket" until the `with` block ends.

    Attributes:
        objects: key -> body; may be changed while it runs.
        parts: key -> part number -> body, of uploads that are not complete.
        requests: every request in order.
        most_at_once: how many requests for objects were in the making at the same time, at most.
        page_size: keys per listing page.
        honours_if_match, honours_ranges: a server that does not is allowed to exist.
        bytes_sent: of the bodies of all answers, as far as clients took them.
        lists_etags, answers_etags: so are those that name ETags in listings only, or in answers only.
        modified: key -> when it was written, in seconds since 1970. Listings tell it to the millisecond.
        checksums: send x-amz-checksum-crc32 to clients that ask for it.
        token: refuse requests whose session token is another one, as expired; None: take all.
    """

    def __init__(self, objects: Mapping[str, bytes], *, page_size: int = 1000) -> None:
        self.objects = dict(objects)
        self.parts: dict[str, dict[int, bytes]] = {}
        self.page_size = page_size
        self.honours_if_match = self.honours_ranges = True
        self.bytes_sent = 0
        self.lists_etags = self.answers_etags = True
        self.modified: dict[str, float] = {}
        self.checksums = False
        self.token: str | None = None
        self.requests: list[Request] = []
        self.most_at_once = self._at_once = 0
        self._scripts: dict[str, tuple[list[Fault | None], bool]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-server", daemon=True)
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint_url = ""

    @property
    def options(self) -> dict[str, str]:
        """`storage_options` that reach it."""
        return {"key": "fault-access-key", "secret": "fault-secret-key", "endpoint_url": self.endpoint_url}

    def script(self, key: str, *faults: Fault | None, repeat: bool = False) -> None:
        """Give the coming requests for `key` these faults in turn; `repeat` the last for ever."""
        self._scripts[key] = (list(faults), repeat)

    def count(self, key: str, method: str = "GET") -> int:
        """How many requests came for `key`."""
        return sum(request.key == key and request.method == method for request in self.requests)

    def spans(self, key: str, since: int = 0) -> list[tuple[int, int]]:
        """The ranges of `key` that were asked for, by the requests from number `since` on."""
        asked = self.requests[since:]
        return [one.span for one in asked if one.key == key and one.method == "GET" and one.span]

    def etag(self, key: str) -> str:
        """The ETag of an object, without quotes."""
        return _md5(self.objects[key])

    def __enter__(self) -> FaultServer:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._client, "127.0.0.1", 0))
        self.endpoint_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        # A connection that was just accepted needs an open server: asyncio would leave its socket unclosed.
        for listener in server.sockets:
            self._loop.remove_reader(listener.fileno())
        self._loop.run_until_complete(self._end_connections())
        server.close()
        self._loop.run_until_complete(asyncio.sleep(0))  # transports let go of their sockets
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _end_connections(self) -> None:
        """A connection that was just accepted becomes a task a little later: wait until none is left."""
        await asyncio.sleep(0)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(others, timeout=0.05)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (request := await _read_request(reader, writer)) is not None:
                if not await self._answer(request, writer):
                    break
        except (ConnectionError, asyncio.CancelledError):
            writer.transport.abort()  # a body may be half sent, to a client that has left
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False ends the connection."""
        self.requests.append(request)
        fault = self._next_fault(request.key) or Fault()
        self._at_once += request.key != LIST
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(fault.delay)
        self._at_once -= request.key != LIST
        token = request.headers.get("x-amz-security-token", "")
        if self.token is not None and token != self.token:
            status, headers, body = _error(400, "ExpiredToken", f"<Token-0>{token}</Token-0>")
        elif fault.status:
            status, headers, body = _error(fault.status, fault.code)
        elif request.key == _NO_BUCKET:
            status, headers, body = _error(404, "NoSuchBucket")
        elif request.key == LIST:
            status, headers, body = self._listing(request.query)
        elif request.method in ("PUT", "POST", "DELETE"):
            status, headers, body = self._upload(request)
        else:
            status, headers, body = self._object(request, fault)
        if fault.lost:
            return False
        if fault.body is not None:
            body = fault.body
        if fault.flip is not None:
            body = body[: fault.flip] + bytes([body[fault.flip] ^ 0xFF]) + body[fault.flip + 1 :]
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        reason = _REASONS.get(status, "Error")
        writer.write(f"HTTP/1.1 {status} {reason}\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode())
        if request.method == "HEAD":
            body = b""
        return await self._send_body(writer, body, fault)

    async def _send_body(self, writer: asyncio.StreamWriter, body: bytes, fault: Fault) -> bool:
        limits = [n for n in (fault.stall_after, fault.cut_after, fault.reset_after) if n is not None]
        sent = memoryview(body)[: limits[0]] if limits else memoryview(body)
        for start in range(0, len(sent) or 1, _CHUNK):
            writer.write(sent[start : start + _CHUNK])
            await writer.drain()
            self.bytes_sent += len(sent[start : start + _CHUNK])
        if fault.stall_after is not None:
            await asyncio.Event().wait()
        if fault.reset_after is not None:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return not limits

    def _next_fault(self, key: str) -> Fault | None:
        faults, repeat = self._scripts.get(key, ([], False))
        if not faults:
            return None
        return faults[0] if repeat and len(faults) == 1 else faults.pop(0)

    def _object(self, request: Request, fault: Fault) -> tuple[int, dict[str, str], bytes]:
        if request.key not in self.objects:
            return _error(404, "NoSuchKey")
        body, etag = self.objects[request.key], fault.etag or self.etag(request.key)
        wanted = request.headers.get("if-match")
        if wanted is not None and self.honours_if_match and wanted.strip('"') != etag:
            return _error(412, "PreconditionFailed")
        headers = {
            "Last-Modified": formatdate(int(self._written(request.key)), usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if self.answers_etags:
            headers["ETag"] = f'"{etag}"'
        span = request.span
        if self.checksums and span is None and "x-amz-checksum-mode" in request.headers:
            headers["x-amz-checksum-crc32"] = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
        if span is None or not self.honours_ranges:
            return 200, headers, body
        start, stop = span[0], min(span[1], len(body))
        if start >= len(body):
            return _error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
        return 206, headers, body[start:stop]

    def _upload(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        key, query = request.key, request.query
        etag = hashlib.md5(request.body).hexdigest()
        answer = ""
        if request.method == "DELETE":
            self.parts.pop(key, None)
        elif request.method == "POST" and "uploads" in query:
            self.parts[key] = {}
            answer = (
                f"<InitiateMultipartUploadResult><UploadId>{key}</UploadId></InitiateMultipartUploadResult>"
            )
        elif request.method == "POST":
            self.objects[key] = b"".join(body for _, body in sorted(self.parts.pop(key).items()))
            answer = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
        elif "partNumber" in query:
            self.parts[key][int(query["partNumber"])] = request.body
        else:
            self.objects[key] = request.body
        return 200, {"ETag": f'"{etag}"'}, answer.encode()

    def _written(self, key: str) -> float:
        return self.modified.get(key, 1735689600.0)  # 1 January 2025

    def _row(self, key: str, name: str) -> str:
        written = datetime.fromtimestamp(self._written(key), UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        etag = f"<ETag>&quot;{self.etag(key)}&quot;</ETag>" if self.lists_etags else ""
        return (
            f"<Contents><Key>{name}</Key><LastModified>{written}Z</LastModified>{etag}"
            f"<Size>{len(self.objects[key])}</Size></Contents>"
        )

    def _listing(self, query: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        prefix, after = query.get("prefix", ""), bytes.fromhex(query.get("continuation-token", ""))
        after = after or query.get("start-after", "").encode()
        size = min(self.page_size, int(query.get("max-keys", "1000")))
        order = lambda key: key.encode("utf-8", "surrogateescape")  # noqa: E731
        keys = sorted((k for k in self.objects if k.startswith(prefix)), key=order)
        if delimiter := query.get("delimiter", ""):  # a directory's name stands for all that is in it
            ends = ((key, key.find(delimiter, len(prefix))) for key in keys)
            keys = list(dict.fromkeys(key if end < 0 else key[: end + 1] for key, end in ends))
        keys = [key for key in keys if order(key) > after]
        folders: list[str] = []
        if query.get("delimiter") == "/":  # all folders with the first page, whatever its size
            below = {key for key in keys if "/" in key[len(prefix) :]}
            folders = sorted({prefix + key[len(prefix) :].partition("/")[0] for key in below})
            keys = [key for key in keys if key not in below]
        page, more = keys[:size], len(keys) > size
        quote = urllib.parse.quote if query.get("encoding-type") == "url" else escape
        rows = "".join(
            f"<CommonPrefixes><Prefix>{quote(key)}</Prefix></CommonPrefixes>"
            if delimiter and key.endswith(delimiter) and key != prefix
            else self._row(key, quote(key))
            for key in page
        )
        rows += "".join(f"<CommonPrefixes><Prefix>{quote(one)}/</Prefix></CommonPrefixes>" for one in folders)
        token = f"<NextContinuationToken>{order(page[-1]).hex()}</NextContinuationToken>" if more else ""
        encoding = "<EncodingType>url</EncodingType>" if "encoding-type" in query else ""
        return (
            200,
            {"Content-Type": "application/xml"},
            (
                f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>{BUCKET}</Name>{encoding}'
                f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{rows}{token}"
                "</ListBucketResult>"
            ).encode(),
        )


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }
    path, _, query_text = target.partition("?")
    query = dict(urllib.parse.parse_qsl(query_text, keep_blank_values=True))
    bucket, _, key = path[1:].partition("/")
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    sent = await reader.readexactly(int(headers.get("content-length", "0")))
    if urllib.parse.unquote(bucket) != BUCKET:
        return Request(method, _NO_BUCKET, headers, query)
    key = LIST if "list-type" in query else urllib.parse.unquote(key)
    return Request(method, key, headers, query, sent)


def _error(status: int, code: str, more: str = "") -> tuple[int, dict[str, str], bytes]:
    body = (
        f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>scripted</Message>{more}</Error>".encode()
    )
    return status, {"Content-Type": "application/xml"}, body
