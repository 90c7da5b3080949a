"""An S3-like server of buckets that are only listings: a million objects without a million files.

    with serve_listing() as url:
        fastload.ImageFolder("s3://objects-1000000/", storage_options={"endpoint_url": url, "anon": True})

Bucket objects-N has N objects, class_000/img_0000000.jpg and so on, in 1,000 classes. Pages of
ListObjectsV2 are made when they are asked for. Every object is the same small JPEG, under an ETag of its own.
Nothing can be written, and any signature will do.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from bench.data import ROOT
from fastload.cli.demo.photos import make_photo
from fastload.cli.demo.s3_server import tethered
from fastload.datasets.objects import ReadOnlyList

CLASSES = 1000
PAGE = 1000
SECONDS_TO_START = 20.0
KEY = re.compile(r"class_(\d{3})/img_(\d{7})\.jpg")
STAMP = 1_767_225_600  # 2026-01-01


def bucket_of(count: int) -> str:
    """The bucket of `count` objects."""
    return f"objects-{count}"


class Keys(ReadOnlyList[str]):
    """The keys of a bucket, in order, each made when it is asked for."""

    def __init__(self, count: int) -> None:
        def keys(start: int, stop: int) -> list[str]:
            return [f"class_{i * CLASSES // count:03d}/img_{i:07d}.jpg" for i in range(start, stop)]

        super().__init__(count, keys, "a bucket of another size has other keys")

    def index_of(self, key: str) -> int | None:
        """The number of the object with that key; None where there is none."""
        found = KEY.fullmatch(key)
        index = int(found[2]) if found else len(self)
        return index if index < len(self) and self[index] == key else None


class Page(NamedTuple):
    """A page of a listing: indices of objects, prefixes that stand for many, where the next begins."""

    objects: list[int]
    prefixes: list[str]
    next: int | None


def list_page(keys: Keys, prefix: str = "", delimiter: str = "", start: int = 0, most: int = PAGE) -> Page:
    """What ListObjectsV2 answers, from object number `start` on."""
    at = max(start, bisect_left(keys, prefix))
    stop = bisect_left(keys, prefix + "\U0010ffff")
    if not delimiter:
        end = min(stop, at + most)
        return Page(list(range(at, end)), [], end if end < stop else None)
    objects: list[int] = []
    prefixes: list[str] = []
    while at < stop and len(objects) + len(prefixes) < most:
        head, found, _ = keys[at][len(prefix) :].partition(delimiter)
        if found:
            prefixes.append(prefix + head + delimiter)
            at = bisect_left(keys, prefixes[-1] + "\U0010ffff")
        else:
            objects.append(at)
            at += 1
    return Page(objects, prefixes, at if at < stop else None)


def etag_of(index: int) -> str:
    """As long as an MD5, and different for each object."""
    return f"{(index + 1) * 0x9E3779B97F4A7C15:032x}"


def to_xml(keys: Keys, page: Page, size: int) -> bytes:
    contents = "".join(
        f"<Contents><Key>{keys[i]}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;{etag_of(i)}&quot;</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for i in page.objects
    )
    prefixes = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in page.prefixes)
    more = "" if page.next is None else f"<NextContinuationToken>{page.next}</NextContinuationToken>"
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket_of(len(keys))}</Name><KeyCount>{len(page.objects) + len(page.prefixes)}</KeyCount>"
        f"<IsTruncated>{'false' if page.next is None else 'true'}</IsTruncated>{more}{contents}{prefixes}"
        "</ListBucketResult>"
    ).encode()


class Answer(NamedTuple):
    status: str
    body: bytes
    etag: str = ""


class Bucket:
    """Answers to requests for objects-N."""

    def __init__(self, count: int, photo: bytes) -> None:
        self.keys, self.photo = Keys(count), photo

    def answer(self, key: str, query: dict[str, list[str]]) -> Answer:
        if not key:
            return self._listing({name: values[-1] for name, values in query.items()})
        index = self.keys.index_of(key)
        if index is None:
            return Answer("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
        return Answer("200 OK", self.photo, etag_of(index))

    def _listing(self, query: dict[str, str]) -> Answer:
        most = min(PAGE, int(query.get("max-keys", PAGE)))
        start = int(query["continuation-token"]) if "continuation-token" in query else 0
        if not start and "start-after" in query:
            start = bisect_right(self.keys, query["start-after"])
        page = list_page(self.keys, query.get("prefix", ""), query.get("delimiter", ""), start, most)
        return Answer("200 OK", to_xml(self.keys, page, len(self.photo)))


class Connection(asyncio.Protocol):
    """One connection: requests without bodies, answered in their order."""

    buckets: dict[str, Bucket]
    photo: bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._unread = b""

    def data_received(self, data: bytes) -> None:
        *heads, self._unread = (self._unread + data).split(b"\r\n\r\n")
        for head in heads:
            method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
            self._transport.write(self._respond(method, target))  # type: ignore[attr-defined]

    def _respond(self, method: str, target: str) -> bytes:
        url = urlsplit(target)
        name, _, key = unquote(url.path).lstrip("/").partition("/")
        answer = self._bucket(name).answer(key, parse_qs(url.query))
        etag = f'ETag: "{answer.etag}"\r\n' if answer.etag else ""
        kind = "image/jpeg" if answer.etag else "application/xml"
        head = (
            f"HTTP/1.1 {answer.status}\r\nContent-Length: {len(answer.body)}\r\n"
            f"Content-Type: {kind}\r\n{etag}Last-Modified: {formatdate(STAMP, usegmt=True)}\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else answer.body)

    def _bucket(self, name: str) -> Bucket:
        if name not in self.buckets:
            self.buckets[name] = Bucket(int(name.rpartition("-")[2]), self.photo)
        return self.buckets[name]


async def serve() -> None:
    """Serve on a free port, which is printed, until the process ends."""
    Connection.buckets, Connection.photo = {}, make_photo(0, 96, 72)
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def serve_listing() -> Iterator[str]:
    """The endpoint's URL; the server is a process of its own, which ends with the block."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with tethered([sys.executable, "-m", "bench.measure.listing_server"], env=environment) as child:
        deadline = time.monotonic() + SECONDS_TO_START
        while "\n" not in (said := child.said()):
            if child.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the listing server did not start: {said}")
            time.sleep(0.02)
        yield f"http://127.0.0.1:{int(said)}"


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve())
