"""Writes the sample log of this rank. Logging never stops or slows the training: see `LogWriter`."""

from __future__ import annotations

import mmap
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fastload.errors import ArgumentError, DecodeError
from fastload.formats.sample_log import LoggedStep, RunBegins, end_of_frames, header, rank_of
from fastload.metrics.counters import Counters
from fastload.workers.witness import Witness

_BUFFERED = 256 << 10  # bytes
_NONE = np.array([], np.int64), np.array([], np.uint64)


def log_name(rank: int) -> str:
    """The name of a rank's log in the directory."""
    return f"rank-{rank:05}.samples"


class LogWriter:
    """Appends the steps of one loader to the log of its rank, 256 KB at a time.

    Where the file cannot be written, one warning says so, a counter counts it, and nothing more is written.

    Args:
        directory: where the logs of all ranks are; made with the first step.
        counters: counts log.bytes and log.errors.
    """

    def __init__(self, directory: str | os.PathLike[str], counters: Counters) -> None:
        self.directory = Path(directory)
        self._counters = counters
        self._file = -1
        self._owner = 0  # the process that opened it
        self._size = 0  # as this writer left the file
        self._failed = False
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._announced = False  # that this run begins here

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": -1, "_buffer": [], "_buffered": 0, "_announced": False}

    def run_resumes(self) -> None:
        """What is handed out next follows on a state that was loaded."""
        self.flush()
        self._announced = False

    def begin(self, rank: int, world_size: int, run_step: int) -> None:
        """Before an iteration of the loader.

        Raises:
            ArgumentError: the file of that name is something else.
        """
        if not self._failed and self._file < 0:
            self._open(self.directory / log_name(rank), rank)
        if not self._announced:
            self._announced = True
            self._put(RunBegins(run_step, time.time(), world_size).dump())

    def add(self, run_step: int, epoch: int, step: int, witness: Witness | None) -> None:
        """A step was handed out."""
        indices, witnesses = _NONE if witness is None or witness.rows is None else witness.rows
        self._put(LoggedStep(run_step, epoch, step, indices, witnesses).dump())

    def flush(self) -> None:
        """Write what is buffered."""
        if self._failed or not self._buffer:
            return
        data = b"".join(self._buffer)
        self._buffer, self._buffered = [], 0
        try:
            if os.fstat(self._file).st_size != self._size:
                raise OSError("another loader writes to the same file: give each its own sample_log=")
            while data:
                written = os.write(self._file, data)
                self._size += written
                self._counters.add("log.bytes", written)
                data = data[written:]
        except OSError as error:
            self._fail(error)

    def _put(self, frame: bytes) -> None:
        if self._failed:
            return
        self._buffer.append(frame)
        self._buffered += len(frame)
        if self._buffered >= _BUFFERED:
            self.flush()

    def _open(self, path: Path, rank: int) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # No link that somebody left in a directory where others may write too.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(path, flags, 0o644)
            self._owner = os.getpid()
            self._size = os.fstat(self._file).st_size
            if header(rank).startswith(os.pread(self._file, 64, 0)):  # it is empty, or torn in its header
                os.ftruncate(self._file, 0)
                self._size = 0
                self._buffer.insert(0, header(rank))
                return
            with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as content:
                if rank_of(content) != rank:
                    raise DecodeError(f"this is the sample log of rank {rank_of(content)}")
                self._size = end_of_frames(content)
            os.ftruncate(self._file, self._size)  # a process that was killed may have left half a frame
        except DecodeError as error:
            os.close(self._file)
            self._file = -1
            raise ArgumentError(f"sample_log: {str(path)!r} cannot be continued: {error.message}") from None
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failed = True
        self._buffer = []
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._counters.add("log.errors")
        warnings.warn(
            f"the sample log in {str(self.directory)!r} cannot be written, and ends here: {error}",
            stacklevel=2,
        )

    def __del__(self) -> None:
        """A loop that ended with `break` has the rest of its steps here."""
        if self._file >= 0 and self._owner == os.getpid():  # a fork has the buffer too
            self.flush()
            os.close(self._file)
