"""The protocol between the trainer's process and one worker: messages, errors, and the channel.

A `Channel` is a Unix socket pair of sequenced packets: a message arrives whole or not at all, file
descriptors travel with it, and the death of either side is an end-of-file on the other. A
`multiprocessing.Queue` was rejected: it needs a feeder thread in the trainer's process, cannot carry
descriptors, and does not notice the end of its peer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import socket
import struct
import traceback
import weakref
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, raised_by_us
from fastload.metrics.machine import call_in_forks
from fastload.order.state import WorkerState
from fastload.workers.memory_limit import MemoryLimit
from fastload.workers.slots import PackedBatch, anonymous_file

# Above this a message travels as an anonymous file: the socket's send buffer (208 KiB) bounds a packet.
_PACKET_LIMIT = 64 << 10
_FDS_PER_MESSAGE = 253  # the kernel's limit
_FD_BYTES = array("i", [0]).itemsize
_HEADER = struct.Struct("=?Q")  # whether the message is in an anonymous file, and its number from 1


@dataclass(frozen=True)
class WorkerSetup:
    """The arguments of a worker; inherited under fork, pickled otherwise."""

    dataset: Any
    collate_fn: Any
    auto_collation: bool
    drop_last: bool
    worker_init_fn: Any
    num_workers: int
    prefetch_factor: int
    base_seed: int
    on_error: str
    seeded: bool
    logged: bool  # a sample log wants each row of a fingerprint
    threads: int  # that make samples
    kernel_threads: int  # in a worker, that make the rows of a batch; 0: the worker's own
    batch_size: int
    memory_limit: MemoryLimit | None
    positions: list[WorkerState] | None  # where each worker resumes the dataset
    other_draws: bool  # the process-wide generators may have stood elsewhere when the resumed epoch began
    timeout: float  # seconds that the consumer waits for a batch; 0: for ever


class EpochStart(NamedTuple):
    """An epoch begins."""

    first: int  # sequence number of its first batch; older work is void
    seed: int
    epoch: int
    streamed: bool  # index batches are `TakeNext`
    shared_seed: int | None  # the same for all workers and ranks, for torch's iterable data pipes
    excluded: frozenset[int] = frozenset()  # see `Exclude`


class Exclude(NamedTuple):
    """From the next batch on, these samples replace no bad ones."""

    samples: frozenset[int]


class Work(NamedTuple):
    """An index batch for one worker."""

    consumed: int  # batches of this epoch and worker that have left the loader, or were dropped
    released: list[int]  # slots
    given_up: list[int]  # slots that must not be used again
    seq: int  # -1: there are no more index batches in this epoch
    index: Any
    encoded: bool  # the trainer's process decodes its images
    ahead: int = 2  # finished batches that may wait for the trainer, where they are small
    kernel_threads: int = 0  # that may be busy, where threads make the rows
    again: bool = False  # it was made by rules that have changed: it comes before all other work


class Failure(NamedTuple):
    """A worker's exception, which the trainer raises again.

    The exception travels as bytes: one that cannot be rebuilt there must not spoil the message.
    """

    pickled: bytes  # (the exception or None, its type or None)
    name: str
    text: str  # the worker's traceback; "": it tells nothing that the message does not
    sample: str  # the sample or samples at fault, and why; or ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describe an exception that was just caught."""
        text = "".join(traceback.format_exception(error))
        if isinstance(error, FastloadError):  # it arrives with its notes, and its address is read once
            text = "" if raised_by_us(error) else text.replace(f"see {error.help}\n", "")
        sample = error.__dict__.pop("fastload_sample", "")
        pickled = _round_trip((error, type(error))) or _round_trip((None, type(error))) or _NOTHING
        return cls(pickled, type(error).__name__, text, sample)

    def reraise(self, where: str) -> NoReturn:
        """Raise the exception in its own type, with the worker's traceback in its text or as its cause.

        An error of fastload's own code is raised without: its message names the stage and the sample.
        """
        error: Any = None
        text = f"Caught {self.name} {where}.\nOriginal {self.text}"
        if self.sample:
            text += f"({self.sample})\n"
        kind: Any = None
        with contextlib.suppress(Exception):
            error, kind = pickle.loads(self.pickled)
        try:
            if isinstance(error, FastloadError) and not self.text:
                raise error from None
            if isinstance(error, FastloadError) or not (error is None or _is_one_text(error)):
                raise error from RuntimeError(text)
            raise _rebuilt(error, kind, text)
        finally:
            del error  # its traceback holds this frame, and that the iterator, until the next collection


def _rebuilt(error: Exception | None, kind: Any, text: str) -> Exception:
    """Return the exception with this text, as torch's workers rebuild theirs, or else a RuntimeError."""
    try:
        # A subclass of KeyError shows its argument's repr, which would hide the line breaks.
        rebuilt: Exception = kind(_Verbatim(text) if issubclass(kind, KeyError) else text)
    except Exception:  # its constructor takes more than one text
        if error is None:
            return RuntimeError(text)
        error.__cause__ = RuntimeError(text)
        return error
    rebuilt.__dict__.update(error.__dict__ if error is not None else {})
    return rebuilt


_NOTHING = pickle.dumps((None, None))


def _round_trip(thing: tuple[Exception | None, type[Exception]]) -> bytes | None:
    """Return its pickle; None where that cannot be loaded: an exception may pickle and still fail to load."""
    try:
        pickled = pickle.dumps(thing)  # by value: torch's would leave a tensor in this process
        return pickled if type(pickle.loads(pickled)[0]) is type(thing[0]) else None
    except Exception:
        return None


class _Verbatim(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _is_one_text(error: BaseException) -> bool:
    return len(error.args) <= 1 and all(isinstance(arg, str) for arg in error.args)


class Fingerprint(NamedTuple):
    """The fingerprint of a batch, see `fingerprint_of` in `fastload.workers.batch`.

    Attributes:
        samples: number of its rows.
        sums: four numbers over all rows.
        rows: index (int64) and fingerprint (uint64) of each row, for a sample log; else None.
    """

    samples: int
    sums: tuple[int, ...]
    rows: tuple[NDArray[np.int64], NDArray[np.uint64]] | None


class Result(NamedTuple):
    """The answer to one index batch."""

    seq: int
    packed: PackedBatch | None
    failure: Failure | None
    exhausted: bool  # an iterable dataset or a stream is over; this is not a batch
    counters: dict[str, float]
    bad: list[tuple[str, str]]
    memory: int = 0  # bytes that the worker uses, where the loader has a limit
    before: bytes | None = None  # pickled: the state of a dataset, with the first result of an epoch
    after: bytes | None = None  # pickled: the state after this batch; its stream's, in a streamed epoch
    fingerprint: Fingerprint | None = None  # what the batch was made of, where samples have an index


class Channel:
    """One end of the pair. `send` never blocks: an outbox keeps messages that do not fit the socket yet.

    `close()` closes it, as does the end of its last reference.
    """

    _trainer_ends: ClassVar[weakref.WeakSet[Channel]] = weakref.WeakSet()

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._outbox: deque[tuple[bytes, bytes, list[int]]] = deque()
        self._sent = self._taken = 0  # numbers of the last messages
        # Not left to the loader's `__del__` alone: a socket that is collected before it would warn.
        self.close = weakref.finalize(self, _close, sock, self._outbox)
        self.close.atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Channel, (self._socket,)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return (the trainer's end, the worker's end)."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        trainer = cls(ours)
        cls._trainer_ends.add(trainer)
        return trainer, cls(theirs)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Return whether messages wait in the outbox for room in the socket."""
        return bool(self._outbox)

    def send(self, message: Any, fds: list[int] | None = None) -> None:
        """Queue `message` and the descriptors `fds`, which are closed once they are sent."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        fds = list(fds or ())
        if len(data) > _PACKET_LIMIT:
            spill = anonymous_file(len(data))
            os.pwrite(spill, data, 0)
            data, fds = b"", [spill, *fds]
        self._sent += 1
        # The header keeps a message that is all spill from looking like an end-of-file.
        self._outbox.append((_HEADER.pack(not data, self._sent), data, fds))
        self.flush(wait=False)

    def flush(self, *, wait: bool) -> None:
        """Send the outbox; with `wait`, block until the peer has taken all of it.

        Raises:
            BrokenPipeError, ConnectionResetError: the peer is gone.
        """
        while self._outbox:
            header, data, fds = self._outbox[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
            try:
                self._socket.sendmsg([header, data], rights, flags)
            except BlockingIOError:
                return
            # Ctrl-C may come before this line. The message is then sent once more, which the peer ignores.
            self._outbox.popleft()
            for fd in fds:
                os.close(fd)

    def receive(self, *, wait: bool) -> tuple[Any, list[int]] | None:
        """Return the next message with its descriptors; None where none has arrived (only without `wait`).

        Raises:
            EOFError: the peer closed its end or died.
            OSError: this process has too many open files to take the message's descriptors.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            data, rights, truncated, _ = self._socket.recvmsg(
                _PACKET_LIMIT + _HEADER.size, socket.CMSG_SPACE(_FDS_PER_MESSAGE * _FD_BYTES), flags
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
        spilled, number = _HEADER.unpack_from(data)
        if number <= self._taken:
            for fd in received:
                os.close(fd)
            return self.receive(wait=wait)
        self._taken = number
        if spilled:
            with os.fdopen(received.pop(0), "rb") as spill:
                spill.seek(0)
                return pickle.load(spill), received
        return pickle.loads(memoryview(data)[_HEADER.size :]), received


def _close(sock: socket.socket, outbox: deque[tuple[bytes, bytes, list[int]]]) -> None:
    """Close an end and every descriptor that was not sent. The peer reads an end-of-file."""
    sock.close()
    while outbox:
        for fd in outbox.popleft()[2]:
            os.close(fd)


def _close_trainer_ends() -> None:
    # A forked child must not hold the trainer's ends, or workers would not see the trainer die.
    for channel in list(Channel._trainer_ends):
        channel.close()


call_in_forks(_close_trainer_ends)
