"""A sample log: what one rank got, step by step, in a file that only grows.

    "fastsmpl" | version | rank |   frame | frame | ...
    frame    kind | size of the body | checksum | body
    "R"      a run begins or resumes: JSON {"run_step", "time", "world_size"}
    "S"      a step: run step, epoch, step | rows | bytes of an index | indices | fingerprints (uint64)

The run step counts the steps since the run began, over its resumes. A run that resumes makes some steps
again: what stands before its "R" with that run step or a later one is void. A process that was killed may
leave a torn last frame, which is not read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import DecodeError

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
    """Return (offset, content) of each frame, up to one that is torn or damaged.

    Raises:
        DecodeError: a frame is whole, and says what fastload does not write.
    """
    view, at = memoryview(data), _HEADER.size
    while at + _FRAME.size <= len(view):
        kind, size, checksum = _FRAME.unpack_from(view, at)
        body = view[at + _FRAME.size : at + _FRAME.size + size]
        if len(body) < size or _checksum(kind, body) != checksum:
            return
        if kind not in (b"R", b"S"):
            raise DecodeError(f"the sample log has a frame of kind {kind!r}: fastload writes b'R' and b'S'")
        yield at, LoggedStep.load(body) if kind == b"S" else RunBegins.load(body)
        at += _FRAME.size + size


def step_at(data: Any, at: int) -> LoggedStep:
    """Return the step in the frame there, which `frames` has found."""
    _, size, _ = _FRAME.unpack_from(data, at)
    return LoggedStep.load(memoryview(data)[at + _FRAME.size : at + _FRAME.size + size])


def end_of_frames(data: Any) -> int:
    """Return where the next frame goes: behind the last one that is whole."""
    at = _HEADER.size
    while at + _FRAME.size <= len(data):
        kind, size, checksum = _FRAME.unpack_from(data, at)
        end = at + _FRAME.size + size
        last = end + _FRAME.size > len(data)
        if end > len(data) or (last and _checksum(kind, data[at + _FRAME.size : end]) != checksum):
            break
        at = end
    return at


def _framed(kind: bytes, body: bytes) -> bytes:
    return _FRAME.pack(kind, len(body), _checksum(kind, body)) + body


def _checksum(kind: bytes, body: Any) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=kind[0]) & _CHECKED
