"""Messages between a trainer and its client process: a kind, a length, and that many bytes."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BYTES", "ERROR", "ITEM", "RESULT", "FileArgument", "receive", "receive_request", "send"]

BYTES, RESULT, ITEM, ERROR = range(4)  # kinds
_HEADER = struct.Struct("<BQ")  # kind and length
_MOST_FILES = 4  # sent with a request


class FileArgument:
    """Stands for a file among the arguments of a request: its descriptor comes with the message."""


def send(connection: socket.socket, kind: int, body: Any, files: Sequence[int] = ()) -> None:
    """Send one message, and these descriptors with it."""
    header = _HEADER.pack(kind, len(body))
    # All at once: the other side is woken once.
    sent = socket.send_fds(connection, (header, body), files) if files else connection.sendmsg((header, body))
    if sent < len(header) + len(body):
        connection.sendall(header[sent:])
        connection.sendall(memoryview(body)[max(sent - len(header), 0) :])


def receive_request(connection: socket.socket) -> tuple[list[int], tuple[str, list[Any]]]:
    """(descriptors that came with it, (method, arguments)). Raises EOFError when the sender has closed."""
    header, files, _, _ = socket.recv_fds(connection, _HEADER.size, _MOST_FILES)
    if not header:
        raise EOFError
    method, arguments = pickle.loads(_exactly(connection, _HEADER.unpack(header)[1], lambda: None))
    left = iter(files)
    arguments = [
        Path(f"/proc/self/fd/{next(left)}") if isinstance(one, FileArgument) else one for one in arguments
    ]
    return files, (method, arguments)


def receive(connection: socket.socket, silent: Callable[[], None]) -> tuple[int, Any]:
    """(kind, body or object); `silent` is called from time to time while nothing comes, and may raise.

    Raises:
        EOFError: the other side has ended.
    """
    kind, length = _HEADER.unpack(_exactly(connection, _HEADER.size, silent))
    body = _exactly(connection, length, silent)
    return kind, body if kind == BYTES else pickle.loads(body)


def _exactly(connection: socket.socket, length: int, silent: Callable[[], None]) -> bytes:
    parts: list[bytes] = []  # more than one: a signal came between, or it is larger than one call gives
    missing = length
    while missing:
        try:
            parts.append(connection.recv(missing, socket.MSG_WAITALL))
        except BlockingIOError:
            silent()
            continue
        if not parts[-1]:
            raise EOFError
        missing -= len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)
