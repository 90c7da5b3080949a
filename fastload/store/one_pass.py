"""Ranges of objects from a server that has none: they are cut out of one answer with the whole object.

    read(10, 20) ─▶ whole answer ─▶ [0, 10) kept for a while │ [10, 20) ─▶ caller
    read(20, 30) ─▶ the same answer goes on                  │ [20, 30) ─▶ caller

Whoever reads an object from its start to its end in ranges, in this order or nearly so, costs one request and
the bytes of one object. Who goes back asks for the object again.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

_OPEN = 64  # answers that are kept open: as many shards may be read by turns
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

        Without a version it is asked for anew: it may be another one by now.
        """
        if not version:
            return _Pass(self._kept_bytes).read(lambda: self._request(key, version), start, stop)
        with self._lock:
            one = self._open.setdefault((key, version), _Pass(self._kept_bytes))
            self._open.move_to_end((key, version))
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        try:
            return one.read(lambda: self._request(key, version), start, stop)
        finally:
            if one.is_over:
                with self._lock:
                    if self._open.get((key, version)) is one:
                        del self._open[key, version]

    def _kept_bytes(self) -> int:
        return sum(one.kept_bytes for one in list(self._open.values()))


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
        """The bytes from `start` on that were passed over; None where they are not kept any more."""
        end = min(stop, self._at)
        parts, at, left = [], start, list[tuple[int, bytes]]()
        for offset, chunk in self._kept:
            if at < end and offset <= at < offset + len(chunk):
                parts.append(chunk[at - offset : end - offset])
                before, at = chunk[: at - offset], at + len(parts[-1])
                pieces = [(offset, before), (at, chunk[at - offset :])]
            else:
                pieces = [(offset, chunk)]
            left.extend(piece for piece in pieces if piece[1])
        if at < end:
            return None
        self._kept = left
        self.kept_bytes -= sum(map(len, parts))
        return parts
