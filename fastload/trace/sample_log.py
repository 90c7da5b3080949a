"""The sample log of a rank: written while it trains, read by `prove`, in a file that only grows.

    "fastsmpl" | version | rank |   frame | frame | ...
    frame    kind | size of the body | checksum | body
    "R"      a run begins or resumes: JSON {"run_step", "time", "world_size"}
    "S"      a step: run step, epoch, step | rows | bytes of an index | indices | fingerprints (uint64)

The run step counts the steps since the run began, over its resumes. A run that resumes makes some steps
again: what stands before its "R" with that run step or a later one is void. A process that was killed may
leave a torn last frame, and a power cut zeros behind it, which are not read. Logging never stops or slows the
training: see `LogWriter`.
"""

from __future__ import annotations

import bisect
import itertools
import json
import mmap
import os
import re
import struct
import time
import warnings
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import ArgumentError, DecodeError
from fastload.metrics.counters import Counters
from fastload.workers.protocol import Fingerprint

MAGIC = b"fastsmpl"
_VERSION = 1
_HEADER = struct.Struct("<8sII")
_FRAME = struct.Struct("<c3xII")
_STEP = struct.Struct("<QIIII")
_CHECKED = 0xFFFFFFFF  # of the checksum
_WIDTHS = (4, 8)  # bytes of an index
_MOST = 2**62  # run steps
_MOST_RANKS = 2**31 - 1
_MOST_OF_RUN = 400  # bytes of a "R"
_LAST_TIME = 2.0**53
_CANDIDATES = 1000  # that look like the head of a frame; the index 82 does too


class RunBegins(NamedTuple):
    """From here on, the steps of a run that begins, or resumes.

    Attributes:
        run_step: of its next step.
        time: seconds since 1970.
        world_size: the number of ranks.
    """

    run_step: int
    time: float
    world_size: int

    def dump(self) -> bytes:
        """As a frame."""
        return _framed(b"R", json.dumps(self._asdict()).encode())

    @classmethod
    def load(cls, body: memoryview) -> RunBegins:
        """Return the run that `dump` made the body of.

        Raises:
            DecodeError: it made no such body.
        """
        try:
            if len(body) > _MOST_OF_RUN:
                raise ValueError(f"{len(body):,} bytes")
            told = json.loads(bytes(body))
            if not isinstance(told, dict) or told.keys() != {*cls._fields}:
                raise ValueError(f"not the entries {', '.join(cls._fields)}")
            found = cls(**told)
            whole = type(found.run_step) is int and type(found.world_size) is int
            if not (whole and 0 <= found.run_step <= _MOST and 1 <= found.world_size <= _MOST_RANKS):
                raise ValueError(f"{found.run_step!r} steps of {found.world_size!r} ranks")
            if not (type(found.time) in (int, float) and 0 <= found.time < _LAST_TIME):
                raise ValueError(f"time {found.time!r}")
        except (ValueError, RecursionError) as error:
            raise DecodeError(
                f"the sample log has a beginning of a run that fastload does not write: {error}"
            ) from None
        return found


class LoggedStep(NamedTuple):
    """A step; without rows where its error was raised.

    Attributes:
        run_step: see above.
        epoch, step: see above.
        indices: of the samples in the dataset.
        fingerprints: see `fastload.workers.protocol`.
    """

    run_step: int
    epoch: int
    step: int
    indices: NDArray[np.int64]
    fingerprints: NDArray[np.uint64]

    def dump(self) -> bytes:
        """As a frame."""
        indices = self.indices
        small = bool(len(indices)) and indices.min() >= -(2**31) and indices.max() < 2**31
        width = 4 if small else 8
        head = _STEP.pack(self.run_step, self.epoch, self.step, len(indices), width)
        body = head + indices.astype(f"<i{width}").tobytes() + self.fingerprints.astype("<u8").tobytes()
        return _framed(b"S", body)

    @classmethod
    def load(cls, body: memoryview) -> LoggedStep:
        """Return the step that `dump` made the body of.

        Raises:
            DecodeError: it made no such body.
        """
        start = _STEP.size
        if len(body) < start:
            raise DecodeError(
                f"the sample log has a step of {len(body)} bytes, less than its head of {start}"
            )
        run_step, epoch, step, count, width = _STEP.unpack_from(body)
        if width not in _WIDTHS or run_step > _MOST or len(body) != start + count * (width + 8):
            raise DecodeError(
                f"the sample log has a step of {len(body):,} bytes that says run step {run_step}, "
                f"{count:,} rows and {width} bytes an index: fastload writes no such step"
            )
        indices = np.frombuffer(body, f"<i{width}", count, start).astype(np.int64)
        fingerprints = np.frombuffer(body, "<u8", count, start + count * width).astype(np.uint64)
        return cls(run_step, epoch, step, indices, fingerprints)


def header(rank: int) -> bytes:
    """Return the first bytes of a log."""
    return _HEADER.pack(MAGIC, _VERSION, rank)


def rank_of(data: Any) -> int:
    """Return the rank whose log this is.

    Raises:
        DecodeError: it is no log, or one of another version.
    """
    if len(data) < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise DecodeError("this is no sample log of fastload")
    _, version, rank = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise DecodeError(f"the sample log has version {version}, this fastload reads version {_VERSION}")
    return int(rank)


def frames(data: Any) -> Iterator[tuple[int, RunBegins | LoggedStep]]:
    """Return (offset, content) of each frame, up to one at the end that is torn.

    Raises:
        DecodeError: a frame is damaged, or it is whole and says what fastload does not write.
    """
    for at, kind, body in _walk(data):
        if kind not in (b"R", b"S"):
            raise DecodeError(f"the sample log has a frame of kind {kind!r}: fastload writes b'R' and b'S'")
        yield at, LoggedStep.load(body) if kind == b"S" else RunBegins.load(body)


def step_at(data: Any, at: int) -> LoggedStep:
    """Return the step in the frame there, which `frames` has found."""
    _, size, _ = _FRAME.unpack_from(data, at)
    return LoggedStep.load(memoryview(data)[at + _FRAME.size : at + _FRAME.size + size])


def end_of_frames(data: Any) -> int:
    """Return where the next frame goes: behind the last one that is whole.

    Raises:
        DecodeError: a frame is damaged.
    """
    end = _HEADER.size
    for at, _, body in _walk(data):
        end = at + _FRAME.size + len(body)
    return end


def _walk(data: Any) -> Iterator[tuple[int, bytes, memoryview]]:
    """Yield (offset, kind, body) of each frame, up to one at the end that is torn."""
    view, at = memoryview(data), _HEADER.size
    while at + _FRAME.size <= len(view):
        kind, size, checksum = _FRAME.unpack_from(view, at)
        end = at + _FRAME.size + size
        body = view[at + _FRAME.size : end]
        if len(body) < size or _checksum(kind, body) != checksum:
            # A power cut may leave a file that is longer than what was written: zeros follow.
            if _has_content(view[end:]) or (len(body) < size and _has_frame(view[at + 1 :])):
                raise DecodeError(
                    f"the sample log is damaged at byte {at:,} of {len(view):,}, and what follows is lost"
                )
            return
        yield at, kind, body
        at = end


def _has_content(data: Any) -> bool:
    """Return whether there is a byte other than 0."""
    return bool(np.asarray(memoryview(data)).any())


def _has_frame(view: memoryview) -> bool:
    """Return whether a whole frame begins in it: the one before seems torn where its size is damaged."""
    for match in itertools.islice(re.finditer(rb"[RS]\0{3}", view), _CANDIDATES):
        rest = view[match.start() :]
        if len(rest) >= _FRAME.size:
            kind, size, checksum = _FRAME.unpack_from(rest)
            body = rest[_FRAME.size : _FRAME.size + size]
            if len(body) == size and _checksum(kind, body) == checksum:
                return True
    return False


def _framed(kind: bytes, body: bytes) -> bytes:
    return _FRAME.pack(kind, len(body), _checksum(kind, body)) + body


def _checksum(kind: bytes, body: Any) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=kind[0]) & _CHECKED


LOGS = "rank-*.samples"
_NEVER = (1 << 63) - 1
_BUFFERED = 256 << 10  # bytes
_NONE = np.array([], np.int64), np.array([], np.uint64)


def log_name(rank: int) -> str:
    """Return the name of a rank's log in the directory."""
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
        """Note that what is delivered next follows on a state that was loaded."""
        self.flush()
        self._announced = False

    def begin(self, rank: int, world_size: int, run_step: int) -> None:
        """Open the file, before an iteration of the loader.

        Raises:
            ArgumentError: the file of that name is something else.
        """
        self._leave_to_parent()
        if not self._failed and self._file < 0:
            self._open(self.directory / log_name(rank), rank)
        if not self._announced:
            self._announced = True
            self._put(RunBegins(run_step, time.time(), world_size).dump())

    def add(self, run_step: int, epoch: int, step: int, fingerprint: Fingerprint | None) -> None:
        """Log a step that was delivered."""
        indices, fingerprints = _NONE if fingerprint is None or fingerprint.rows is None else fingerprint.rows
        self._put(LoggedStep(run_step, epoch, step, indices, fingerprints).dump())

    def flush(self) -> None:
        """Write what is buffered."""
        self._leave_to_parent()
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

    def _leave_to_parent(self) -> None:
        """Forget, in a forked child, the file and what is buffered: its parent writes that."""
        if self._file >= 0 and self._owner != os.getpid():
            os.close(self._file)
            self.__dict__.update(self.__getstate__())

    def _put(self, frame: bytes) -> None:
        self._leave_to_parent()
        if self._file < 0:
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
            # Not in a `with`: an error keeps views of it, and it cannot be closed before them.
            content = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) if self._size else b""
            start = content[: _HEADER.size].rstrip(b"\0")
            if header(rank).startswith(start) and not _has_content(memoryview(content)[_HEADER.size :]):
                os.ftruncate(self._file, 0)  # it is empty, or torn in its header
                self._size = 0
                self._buffer.insert(0, header(rank))
                return
            if rank_of(content) != rank:
                raise DecodeError(f"this is the sample log of rank {rank_of(content)}")
            try:
                self._size = end_of_frames(content)
            except DecodeError as error:  # what is behind the damage stays as it is
                return self._fail(f"{error.message}; move {path.name} away")
            os.ftruncate(self._file, self._size)  # a process that was killed may have left half a frame
        except DecodeError as error:
            os.close(self._file)
            self._file = -1
            raise ArgumentError(f"sample_log: {str(path)!r} cannot be continued: {error.message}") from None
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError | str) -> None:
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
        """Write the rest: a loop that ended with `break` has its last steps here."""
        self.flush()
        if self._file >= 0:
            os.close(self._file)


class Row(NamedTuple):
    """A row of a logged step."""

    rank: int
    row: int
    sample: int  # its index
    fingerprint: int


class _Run(NamedTuple):
    """The steps that a log has between two frames "R"."""

    begins: RunBegins
    steps: array[int]  # of each: run step, epoch, step, where its frame is


class SampleLog:
    """The log of one rank, to be read."""

    def __init__(self, path: Path) -> None:
        if not path.stat().st_size:
            raise DecodeError("the log is empty: its run has delivered little, and did not write it yet")
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.rank = rank_of(self._data)
        self.runs: list[_Run] = []
        for offset, frame in frames(self._data):
            if isinstance(frame, RunBegins):
                if frame.world_size <= self.rank:
                    raise DecodeError(
                        f"the log is of rank {self.rank}, and its run has {frame.world_size} ranks"
                    )
                self.runs.append(_Run(frame, array("q")))
            elif self.runs:
                self.runs[-1].steps.extend((frame.run_step, frame.epoch, frame.step, offset))

    def kept(self, others: list[RunBegins]) -> NDArray[np.int64]:
        """Return the steps that no later run has repeated: (n, 5), as in `_Run`, with the number of ranks.

        Args:
            others: runs of other ranks. This rank has no part in those that have too few ranks for it.
        """
        void = sorted((begins.time, begins.run_step) for begins in others if begins.world_size <= self.rank)
        times = [time for time, _ in void]
        firsts = [
            _NEVER,
            *itertools.accumulate((step for _, step in reversed(void)), min),
        ]  # of the last ones
        tables, end = [], _NEVER
        for run in reversed(self.runs):
            elsewhere = firsts[len(void) - bisect.bisect_right(times, run.begins.time)]
            table = np.array(run.steps, np.int64).reshape(-1, 4)
            table = np.column_stack([table, np.full(len(table), run.begins.world_size)])
            tables.append(table[table[:, 0] < min(end, elsewhere)])
            end = min(end, run.begins.run_step)
        return np.concatenate([np.empty((0, 5), np.int64), *reversed(tables)])

    def fingerprints(self, offset: int) -> NDArray[np.uint64]:
        return step_at(self._data, offset).fingerprints

    def rows(self, offset: int) -> Iterator[Row]:
        step = step_at(self._data, offset)
        pairs = zip(step.indices.tolist(), step.fingerprints.tolist(), strict=True)
        for row, (index, fingerprint) in enumerate(pairs):
            yield Row(self.rank, row, index, fingerprint)
