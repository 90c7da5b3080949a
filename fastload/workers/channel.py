"""Messages and file descriptors between the trainer's process and one worker.

A Unix socket pair of sequenced packets: a message arrives whole or not at all, file descriptors travel with
it, and the death of either side is an end-of-file on the other. A `multiprocessing.Queue` was rejected: it
needs a feeder thread in the trainer's process, cannot carry descriptors, and does not see its peer go.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import weakref
from array import array
from collections import deque
from typing import Any, ClassVar

__all__ = ["Channel", "anonymous_file"]

# Above this a message travels as an anonymous file: the socket's send buffer (208 KiB) bounds a packet.
_PACKET_LIMIT = 64 << 10
_FDS_PER_MESSAGE = 253  # the kernel's limit
_FD_BYTES = array("i", [0]).itemsize


def anonymous_file(nbytes: int) -> int:
    """A descriptor of a new memory file of `nbytes` bytes, with no name that could leak in /dev/shm."""
    fd = os.memfd_create("fastload", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


class Channel:
    """One end of the pair. `send` never blocks: what the socket cannot take yet waits in an outbox."""

    _trainer_ends: ClassVar[weakref.WeakSet[Channel]] = weakref.WeakSet()

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._outbox: deque[tuple[bytes, list[int]]] = deque()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """(the trainer's end, the worker's end)."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        trainer = cls(ours)
        cls._trainer_ends.add(trainer)
        return trainer, cls(theirs)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """True while messages wait in the outbox for room in the socket."""
        return bool(self._outbox)

    def send(self, message: Any, fds: list[int] | None = None) -> None:
        """Queue `message` and descriptors `fds`, which this call takes over and closes once they are sent."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        fds = list(fds or ())
        if len(data) > _PACKET_LIMIT:
            spill = anonymous_file(len(data))
            os.pwrite(spill, data, 0)
            data, fds = b"", [spill, *fds]
        self._outbox.append((data, fds))
        self.flush(wait=False)

    def flush(self, *, wait: bool) -> None:
        """Send what the outbox holds; with `wait`, block until the peer has taken all of it.

        Raises:
            BrokenPipeError, ConnectionResetError: the peer is gone.
        """
        while self._outbox:
            data, fds = self._outbox[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
            try:
                # The leading byte keeps a message that is all spill from looking like an end-of-file.
                self._socket.sendmsg([b"s" if not data else b"d", data], rights, flags)
            except BlockingIOError:
                return
            self._outbox.popleft()
            for fd in fds:
                os.close(fd)

    def receive(self, *, wait: bool) -> tuple[Any, list[int]] | None:
        """The next message with its descriptors, or None where there is none yet (only without `wait`).

        Raises:
            EOFError: the peer closed its end or died.
            OSError: this process has too many open files to take the message's descriptors.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            data, rights, truncated, _ = self._socket.recvmsg(
                _PACKET_LIMIT + 1, socket.CMSG_SPACE(_FDS_PER_MESSAGE * _FD_BYTES), flags
            )
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise EOFError("the peer died") from None
        if not data:
            raise EOFError("the peer closed its end")
        fds = array("i")
        for _, _, raw in rights:
            fds.frombytes(raw[: len(raw) - len(raw) % _FD_BYTES])
        received = list(fds)
        if truncated & socket.MSG_CTRUNC:
            for fd in received:
                os.close(fd)
            raise OSError(errno.EMFILE, "Too many open files: raise the limit with `ulimit -n`")
        if data[:1] == b"s":
            with os.fdopen(received.pop(0), "rb") as spill:
                spill.seek(0)
                return pickle.load(spill), received
        return pickle.loads(memoryview(data)[1:]), received

    def close(self) -> None:
        """Close this end and every descriptor that was not sent. The peer reads an end-of-file."""
        self._socket.close()
        while self._outbox:
            for fd in self._outbox.popleft()[1]:
                os.close(fd)


def _close_trainer_ends() -> None:
    # A forked child must not hold the trainer's ends, or workers would not see the trainer die.
    for channel in list(Channel._trainer_ends):
        channel.close()


os.register_at_fork(after_in_child=_close_trainer_ends)
