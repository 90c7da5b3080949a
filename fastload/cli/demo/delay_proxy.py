"""A TCP proxy that adds a round trip between a client and a server on one machine, and counts S3 requests.

    client ──▶ [ +half a round trip ] ──▶ server
    client ◀── [ +half a round trip ] ◀── server

Every chunk waits half the round trip in its direction; the order is kept, and bandwidth is not limited. A
connection costs one round trip before its first byte, as a TCP handshake does. All delays are equal, so
chunks of all connections leave in the order of their arrival: one queue and one timer are enough. The proxy
takes CPU from the measured programs, so it does nothing else per chunk.

It makes one correction, unless it is told not to: rclone answers a ranged request with status 200 instead of
206, and clients that check the status refuse that.

Run as a process of its own: `python delay_proxy.py HOST PORT BOARD_FD [as-it-is]`. The board is memory with
the parent: the counts, and the round trip in microseconds, which may change while nothing is in transit.
"""

from __future__ import annotations

import asyncio
import collections
import mmap
import struct
import sys
import time
from typing import NamedTuple, cast

BOARD = struct.Struct("=6q")
ROUND_TRIP = 5  # the place of the round trip, after the counts


class Counts(NamedTuple):
    """The traffic of a proxy since its start."""

    object_gets: int
    listings: int
    other_requests: int
    connections: int
    bytes_down: int


class Tally:
    """Memory shared with the parent, which reads the counts and writes the round trip."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, BOARD.size)
        self._values = memoryview(self._memory).cast("q")

    @property
    def round_trip(self) -> float:
        """Seconds."""
        return self._values[ROUND_TRIP] / 1e6

    def add(self, counter: str, amount: int = 1) -> None:
        self._values[Counts._fields.index(counter)] += amount


class RequestReader:
    """Finds the heads of requests in the chunks from a client, and counts them.

    Attributes:
        wants_range: whether the latest request was ranged.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self.wants_range = False
        self._head = b""
        self._body_left = 0

    def feed(self, data: bytes) -> None:
        while data:
            if self._body_left:
                skipped = min(self._body_left, len(data))
                self._body_left -= skipped
                data = data[skipped:]
                continue
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._head = b""
            self._count(head)

    def _count(self, head: bytes) -> None:
        line, *fields = head.split(b"\r\n")
        method, target, _ = line.split(b" ", 2)
        self.wants_range = False
        for field in fields:
            name, _, value = field.partition(b":")
            if name.lower() == b"content-length":
                self._body_left = int(value)
            elif name.lower() == b"range":
                self.wants_range = True
        path, _, query = target.partition(b"?")
        if method != b"GET":
            self._tally.add("other_requests")
        elif b"/" in path.strip(b"/") and b"list-type=" not in query:
            self._tally.add("object_gets")
        else:
            self._tally.add("listings")


class DelayLine:
    """Chunks in transit, in the order of their arrival, each with the time of its departure."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tally: Tally) -> None:
        self._loop = loop
        self._tally = tally
        self._queue: collections.deque[tuple[float, Side, bytes | None]] = collections.deque()

    def send(self, side: Side, data: bytes | None) -> None:
        """Deliver `data` (None: end of stream) to `side` when it is due."""
        seconds = self._tally.round_trip / 2
        if not seconds and not self._queue:
            side.deliver(data)
            return
        if not self._queue:
            self._loop.call_later(seconds, self._release)
        self._queue.append((time.monotonic() + seconds, side, data))

    def _release(self) -> None:
        now = time.monotonic()
        queue = self._queue
        while queue and queue[0][0] <= now:
            _, side, data = queue.popleft()
            side.deliver(data)
        if queue:
            self._loop.call_later(queue[0][0] - now, self._release)


class Side(asyncio.Protocol):
    """One of the two sockets of a connection; its data goes through the delay line to the other."""

    other: Side

    def __init__(self, line: DelayLine, tally: Tally) -> None:
        self._line = line
        self._tally = tally
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not subclasses of it
        for data in self._early:
            self.deliver(data)
        self._early.clear()

    def connection_lost(self, error: Exception | None) -> None:
        self._line.send(self.other, None)

    def deliver(self, data: bytes | None) -> None:
        """Write data of the other side; None closes, after all earlier data."""
        if self._transport is None:
            self._early.append(data)
        elif data is None:
            self._transport.close()
        elif not self._transport.is_closing():
            self._transport.write(data)

    # A side that cannot write stops the reading on the other side, so memory holds a round trip of data and
    # no backlog.
    def pause_writing(self) -> None:
        if self.other._transport is not None:
            self.other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other._transport is not None:
            self.other._transport.resume_reading()


class ServerSide(Side):
    """The socket to the server."""

    range_due = False  # whether the next data is the response to a ranged request

    def data_received(self, data: bytes) -> None:
        self._tally.add("bytes_down", len(data))
        if self.range_due:
            self.range_due = False
            data = mend_status(data)
        self._line.send(self.other, data)


class ClientSide(Side):
    """A connection that a client opened."""

    def __init__(self, line: DelayLine, tally: Tally, server: tuple[str, int], corrects: bool) -> None:
        super().__init__(line, tally)
        self._requests = RequestReader(tally)
        self._server = server
        self._corrects = corrects
        self.other: ServerSide = ServerSide(line, tally)
        self.other.other = self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._tally.add("connections")
        self._reaching = asyncio.get_running_loop().create_task(self._reach_server())

    async def _reach_server(self) -> None:
        # One round trip for the handshake, and half of one for the first byte: until then nothing could be
        # there.
        await asyncio.sleep(1.5 * self._tally.round_trip)
        try:
            await asyncio.get_running_loop().create_connection(lambda: self.other, *self._server)
        except OSError:
            self.deliver(None)

    def data_received(self, data: bytes) -> None:
        self._requests.feed(data)
        # No client here sends a request before it has the answer to its last one.
        self.other.range_due = self._requests.wants_range and self._corrects
        self._line.send(self.other, data)


def mend_status(answer: bytes) -> bytes:
    """Return the first chunk of an answer, with status 206 where it is that of a range under status 200."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 200 OK\r\n") and b"\r\ncontent-range:" in head.lower():
        head = head.replace(b"200 OK", b"206 Partial Content", 1)
    return head + end + body


async def serve(upstream: tuple[str, int], tally: Tally, corrects: bool) -> None:
    """Accept connections for the server on a free port, which is printed, until the process ends."""
    loop = asyncio.get_running_loop()
    line = DelayLine(loop, tally)
    server = await loop.create_server(
        lambda: ClientSide(line, tally, upstream, corrects), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
    await server.serve_forever()


def main() -> None:
    import uvloop

    host, port, board, *how = sys.argv[1:]
    uvloop.run(serve((host, int(port)), Tally(int(board)), how != ["as-it-is"]))


if __name__ == "__main__":
    main()
