"""Workarounds for obstore, which takes slashes away, and for servers that have no ranges.

Slashes: obstore lists "name/" as "name", and cannot read it. An empty "name/" is a directory marker and no
sample; one with content is an error that names the key. An entry listed as "name" is

* the key "name/", if "name" was listed before: keys come in order, and "name" comes before "name/";
* in doubt, if it is empty, if keys "name/..." are listed too, or if it is one of few keys without extension;
* otherwise the object "name". A "name/" with content among many keys without extension is found when read.

Entries in doubt are checked by a HEAD each, or, if a directory has many, by a listing of the directory with a
delimiter, 1,000 names a request. With HEADs alone, a million empty objects would cost a million requests.

Ranges: a server that has none answers with the whole object, and the ranges are cut out of that answer.

    read(10, 20) ─▶ whole answer ─▶ [0, 10) kept for a while │ [10, 20) ─▶ caller
    read(20, 30) ─▶ the same answer goes on                  │ [20, 30) ─▶ caller

Whoever reads an object from its start to its end in ranges, in this order or nearly so, costs one request and
the bytes of one object. Who goes back asks for the object again.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from fastload.errors import StoreError
from fastload.store.base import ObjectInfo, Page

_THREADS = 16
_FEW = 64  # HEADs that are always made; and keys without an extension that are asked for
_PAGE = 1000


class SlashKeys:
    """Takes the keys that end in a slash out of one listing.

    Args:
        client: -> obstore's client of the prefix that is listed.
    """

    def __init__(self, client: Callable[[], Any]) -> None:
        self._client = client
        self._listed = 0
        self._open: list[ObjectInfo] = []  # what was listed last, each key a beginning of the next one's
        self._empty: dict[str, ObjectInfo] = {}
        self._in_doubt: set[str] = set()  # with content
        self._bare: set[str] | None = set()  # with content and without extension; None: there are many

    def without(self, page: Page) -> Page:
        """Return the objects of a page that are certain.

        Raises:
            StoreError: a key that ends in a slash has content.
        """
        self._listed += len(page)
        return [info for info in page if self._certain(info)]

    def rest(self) -> Page:
        """Return the empty objects among what was in doubt, at the end of the listing.

        Raises:
            StoreError: as `without`.
        """
        doubtful = self._in_doubt | (self._bare or set())
        sizes = self._ask({*self._empty, *doubtful})
        for key in sorted(doubtful - sizes.keys()):
            if self._is_there(key):  # else it was deleted meanwhile
                raise _refused(f"{key}/")
        return [info for key, info in self._empty.items() if sizes.get(key) == 0]

    def _certain(self, info: ObjectInfo) -> bool:
        key, size, _ = info
        opened = self._open
        while opened and not key.startswith(opened[-1].key):
            opened.pop()
        again = not key or (bool(opened) and opened[-1].key == key)  # "" is the prefix with its slash
        if again and size:
            raise _refused(f"{key}/")
        if again:
            return False
        self._in_doubt.update(known.key for known in opened if known.size and key[len(known.key)] == "/")
        opened.append(info)
        if not size:
            self._empty.setdefault(key, info)
        elif self._bare is not None and "." not in key.rpartition("/")[2]:
            self._bare.add(key)
            if len(self._bare) > _FEW:
                self._bare = None
        return size > 0

    def _ask(self, keys: Iterable[str]) -> dict[str, int]:
        """Return key -> size, of those that are there without a slash."""
        by_parent: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            by_parent[key.rpartition("/")[0]].append(key)
        heads: list[str] = []
        sizes_found: dict[str, int] = {}
        for parent, inside in by_parent.items():
            # A directory has no more pages than the listing had. Sixteen HEADs go at once, pages do not.
            if len(inside) <= max(_FEW, _THREADS * self._listed // _PAGE):
                heads += inside
            else:
                sizes_found |= self._directory(parent)
        with ThreadPoolExecutor(_THREADS) as pool:
            sizes = zip(heads, pool.map(self._size, heads), strict=True)
            return sizes_found | {key: size for key, size in sizes if size is not None}

    def _size(self, key: str) -> int | None:
        import obstore

        try:
            return int(obstore.head(self._client(), key)["size"])
        except FileNotFoundError:
            return None

    def _is_there(self, key: str) -> bool:
        """Return whether there is the object "key/": the first one below that prefix."""
        import obstore

        for page in obstore.list(self._client(), prefix=key, chunk_size=1):
            return any(entry["path"] == key for entry in page)
        return False

    def _directory(self, path: str) -> dict[str, int]:
        import obstore

        answer = obstore.list_with_delimiter(self._client(), path or None)
        return {entry["path"]: entry["size"] for entry in answer["objects"]}


def _refused(key: str) -> StoreError:
    return StoreError(
        f"the key {key!r} ends in a slash and is not empty; obstore cannot read such a key. Pass "
        "client='s3fs' (s3:// only), or rename or delete the object",
        stage="list",
        key=key,
    )


_OPEN = 64  # answers that are kept open: as many shards may be read alternately
_KEPT_BYTES = 64 << 20  # of all objects, passed over: several threads read one, not quite in order
_OVERLAP = 64 << 10  # of a range, which the next one may want too


class Answer(NamedTuple):
    """The answer to a request for a whole object: its size, and its body."""

    size: int
    body: Iterator[bytes]


class OnePass:
    """The answers of one process that are being read. Threads may share it.

    Args:
        request: (key, version or None) -> the answer with that object. Raises where there is none.
    """

    def __init__(self, request: Callable[[str, str | None], Answer]) -> None:
        self._request = request
        self._open: OrderedDict[tuple[str, str | None], _Pass] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, key: str, version: str | None, start: int, stop: int) -> tuple[bytes, int]:
        """Return the bytes [start, stop) of an object, fewer if it is shorter, and its size.

        Without a version it is asked for again: it may be another one by now.
        """
        if not version:
            nothing_kept = _Pass(lambda: _KEPT_BYTES + 1)
            return nothing_kept.read(lambda: self._request(key, version), start, stop)
        with self._lock:
            current = self._open.setdefault((key, version), _Pass(self._kept_bytes))
            self._open.move_to_end((key, version))
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        try:
            return current.read(lambda: self._request(key, version), start, stop)
        finally:
            if current.is_over:
                with self._lock:
                    if self._open.get((key, version)) is current:
                        del self._open[key, version]

    def _kept_bytes(self) -> int:
        return sum(each.kept_bytes for each in list(self._open.values()))


class _Pass:
    """One object: an answer, how far it was read, and what was passed over lately.

    Args:
        all_kept: gives the bytes that were passed over and are kept, of all objects.

    Attributes:
        kept_bytes: of this object.
    """

    def __init__(self, all_kept: Callable[[], int]) -> None:
        self._all_kept = all_kept
        self.kept_bytes = 0
        self._turn = threading.Condition()
        self._waiting: list[int] = []  # the starts of the ranges that are wanted
        self._answer: Answer | None = None
        self._at = 0
        self._rest = b""  # of the chunk that was read last
        self._kept: list[tuple[int, bytes]] = []  # (offset, bytes), in order

    @property
    def is_over(self) -> bool:
        """Whether nobody reads it, and there is nothing more to come."""
        return self._answer is None and not self._waiting

    def read(self, request: Callable[[], Answer], start: int, stop: int) -> tuple[bytes, int]:
        self._waiting.append(start)  # without the lock, which another thread has for a whole range
        try:
            with self._turn:
                self._turn.wait_for(lambda: start == min(self._waiting))
                return self._cut(request, start, stop)
        except BaseException:
            self._answer = None  # the next one asks again
            raise
        finally:
            self._waiting.remove(start)
            with self._turn:
                self._turn.notify_all()

    def _cut(self, request: Callable[[], Answer], start: int, stop: int) -> tuple[bytes, int]:
        parts = None if self._answer is None else self._take_kept(start, stop)
        if self._answer is None or parts is None:
            self._answer, self._at, self._rest, parts = request(), 0, b"", []
            self._kept.clear()
            self.kept_bytes = 0
        answer = self._answer
        start += sum(map(len, parts))
        while start < stop and (chunk := self._next(answer)):
            begin, end = self._at, self._at + len(chunk)
            if begin < start:
                self._keep(begin, chunk[: start - begin])
            if end > start:
                parts.append(chunk[max(0, start - begin) : stop - begin])
                start += len(parts[-1])
                self._rest = chunk[stop - begin :]
            self._at = end - len(self._rest)
        body = b"".join(parts)
        self._keep(start - len(body[-_OVERLAP:]), body[-_OVERLAP:])
        if self._at >= answer.size:
            self._answer = None
        return body, answer.size

    def _next(self, answer: Answer) -> bytes:
        chunk, self._rest = self._rest, b""
        return chunk or bytes(next(answer.body, b""))

    def _keep(self, offset: int, chunk: bytes) -> None:
        bisect.insort(self._kept, (offset, chunk))
        self.kept_bytes += len(chunk)
        while self._kept and self._all_kept() > _KEPT_BYTES:
            self.kept_bytes -= len(self._kept.pop(0)[1])

    def _take_kept(self, start: int, stop: int) -> list[bytes] | None:
        """Return the bytes from `start` on that were passed over; None where they are not kept any more."""
        end = min(stop, self._at)
        parts, position, left = [], start, list[tuple[int, bytes]]()
        for offset, chunk in self._kept:
            if position < end and offset <= position < offset + len(chunk):
                parts.append(chunk[position - offset : end - offset])
                before, position = chunk[: position - offset], position + len(parts[-1])
                pieces = [(offset, before), (position, chunk[position - offset :])]
            else:
                pieces = [(offset, chunk)]
            left.extend(piece for piece in pieces if piece[1])
        if position < end:
            return None
        self._kept = left
        self.kept_bytes -= sum(map(len, parts))
        return parts
