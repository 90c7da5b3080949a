"""What a run says of its data: the states and sample logs that `prove` compares."""

from __future__ import annotations

import bisect
import functools
import itertools
import mmap
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ArgumentError, DecodeError
from fastload.formats.sample_log import MAGIC, RunBegins, frames, rank_of, step_at
from fastload.order.state import content_of, find_states, parse_state
from fastload.trace.digest import Digest, merged
from fastload.workers.witness import LANES, Witness, sums_of

Place = tuple[int, int]  # (epoch, step)

_MASK = (1 << 64) - 1
_NEVER = (1 << 63) - 1
_NAMED = 8  # ranks that an error names
_LOGS = "rank-*.samples"


class Row(NamedTuple):
    """A row of a logged step."""

    rank: int
    row: int
    sample: int  # its index
    witness: int


@dataclass
class Step:
    """A step of all ranks together."""

    samples: int = 0
    sums: tuple[int, ...] = (0,) * LANES

    def add(self, witnesses: NDArray[np.uint64]) -> None:
        self.samples += len(witnesses)
        if len(witnesses):
            both = zip(self.sums, sums_of(witnesses), strict=True)
            self.sums = tuple([(a + b) & _MASK for a, b in both])


class _Run(NamedTuple):
    """The steps that a log has between two frames "R"."""

    begins: RunBegins
    steps: array[int]  # of each: run step, epoch, step, where its frame is


class _Log:
    """The log of one rank."""

    def __init__(self, path: Path) -> None:
        if not path.stat().st_size:
            raise DecodeError("the log is empty: its run has handed out little, and did not write it yet")
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.rank = rank_of(self._data)
        self.runs: list[_Run] = []
        for at, frame in frames(self._data):
            if isinstance(frame, RunBegins):
                if frame.world_size <= self.rank:
                    raise DecodeError(
                        f"the log is of rank {self.rank}, and its run has {frame.world_size} ranks"
                    )
                self.runs.append(_Run(frame, array("q")))
            elif self.runs:
                self.runs[-1].steps.extend((frame.run_step, frame.epoch, frame.step, at))

    def kept(self, others: list[RunBegins]) -> NDArray[np.int64]:
        """The steps that no later run has made again: (n, 5), as in `_Run`, with the number of ranks.

        Args:
            others: runs of other ranks. This rank has no part in those that have too few ranks for it.
        """
        void = sorted((one.time, one.run_step) for one in others if one.world_size <= self.rank)
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

    def witnesses(self, at: int) -> NDArray[np.uint64]:
        return step_at(self._data, at).witnesses

    def rows(self, at: int) -> Iterator[Row]:
        step = step_at(self._data, at)
        pairs = zip(step.indices.tolist(), step.witnesses.tolist(), strict=True)
        for row, (index, witness) in enumerate(pairs):
            yield Row(self.rank, row, index, witness)


class Side:
    """One of the two runs that are compared.

    Args:
        name: of the argument, for errors and answers.
        digests: of the ranks' states; or none, and `logs` are given.
        logs: of the ranks.

    Attributes:
        parts: (how often the number of ranks had changed, number of ranks) -> the ranks that are known.
        uneven: the states of the ranks are of different steps.
        finished: of such a side: all its ranks have finished the epochs before this one.
        begin: the steps that its run had made before the first one here. They are not 0 where sample_log= was
            given only to a run that resumed.
    """

    def __init__(self, name: str, digests: list[Digest], logs: list[_Log]) -> None:
        self.name = name
        self.logged = bool(logs)
        self.parts: dict[tuple[int, int], list[int]]
        self._digest = None
        self.uneven, self.finished = False, 0
        self.begin = 0
        if logs:
            runs = [run.begins for log in logs for run in log.runs]
            self.begin = min((one.run_step for one in runs), default=0)
            self._world_size = max(runs, key=lambda one: one.time).world_size if runs else 1
            self._tables = [(log, log.kept(runs)) for log in logs]
            sizes = [int(table[:, 4].max()) for _, table in self._tables if len(table)]
            self.parts = {
                (0, max([1, *sizes])): sorted(log.rank for log, table in self._tables if len(table))
            }
        elif digests:
            groups = _groups(name, digests)
            self.parts = {place: sorted(ranks) for place, ranks in groups.items()}
            last = groups[max(groups)].values()
            self.uneven = len({one.steps for one in last}) > 1
            self.finished = min(one.epochs[-1].epoch if one.epochs else 0 for one in last)
            self._digest = merged(list(ranks.values()) for ranks in groups.values())

    @functools.cached_property
    def steps(self) -> dict[Place, Step]:
        """Place -> the step there, of a side with logs, as far as all ranks go."""
        found: dict[Place, Step] = {}
        end = min(_last(table) for log, table in self._tables if log.rank < self._world_size)
        for log, table in self._tables:
            for _, epoch, step, at, _ in table.tolist():
                if (epoch, step) <= end:
                    found.setdefault((epoch, step), Step()).add(log.witnesses(at))
        return found

    def rows(self, place: Place) -> list[Row]:
        """The rows of a step, rank by rank."""
        found: list[Row] = []
        for log, table in self._tables:
            for at in table[(table[:, 1] == place[0]) & (table[:, 2] == place[1]), 3].tolist():
                found += log.rows(at)
        return sorted(found)

    def digest(self, steps: int | None) -> Digest:
        """Of a state; or of the first `steps` steps of a log, as a state would have it."""
        if self._digest is not None:
            return self._digest
        digest = Digest()
        for (epoch, step), one in sorted(self.steps.items())[:steps]:
            digest.add(epoch, step, Witness(one.samples, one.sums, None))
        return digest

    def check_begin(self, other: Side) -> None:
        """Raise ArgumentError if the beginning is missing here, and is in the other."""
        if self.begin > other.begin:
            raise ArgumentError(
                f"{self.name} is a log that begins at step {self.begin:,} of its run, and {other.name} "
                "begins before: compare the states, or logs that begin at the same step"
            )

    def check_whole(self) -> None:
        """Raise ArgumentError unless all ranks are there."""
        for (_, world_size), ranks in self.parts.items():
            known = set(ranks)
            absent = (rank for rank in range(world_size) if rank not in known)
            missing = list(itertools.islice(absent, _NAMED))
            if missing:
                more = " and others" if next(absent, None) is not None else ""
                raise ArgumentError(
                    f"{self.name} lacks ranks {missing}{more} of {world_size}: give a list with the state or "
                    "log of each rank, or the directory of all logs. Of a run that went on with other ranks, "
                    "add the states that none of them loaded"
                )


def _groups(name: str, digests: list[Digest]) -> dict[tuple[int, int], dict[int, Digest]]:
    """See `Side.parts`."""
    groups: dict[tuple[int, int], dict[int, Digest]] = {}
    for digest in digests:
        parts = [*map(Digest.of, digest.earlier), replace(digest, earlier=[])]
        for level, one in enumerate(parts):
            known = groups.setdefault((level, one.world_size), {}).setdefault(one.rank, one)
            if known != one:
                raise ArgumentError(
                    f"{name} has two states of rank {one.rank}: give one state of each rank, of one run"
                )
    return groups


def _last(table: NDArray[np.int64]) -> Place:
    return max(((epoch, step) for _, epoch, step, _, _ in table.tolist()), default=(-1, -1))


def read_side(given: Any, name: str) -> Side:
    """A side of the comparison: see `prove`.

    Raises:
        ArgumentError: it is none, or two of its parts are of the same rank.
    """
    parts: list[Digest | _Log] = []
    for one in given if isinstance(given, list | tuple) else [given]:
        parts += _read(one, name)
    digests = [part for part in parts if isinstance(part, Digest)]
    logs = [part for part in parts if isinstance(part, _Log)]
    if digests and logs:
        raise ArgumentError(f"{name} mixes states and sample logs: give one kind of them for all its ranks")
    ranks = [log.rank for log in logs]
    if len(set(ranks)) < len(ranks):
        raise ArgumentError(f"{name} has several logs of one rank: give one log of each rank, of one run")
    side = Side(name, digests, logs) if logs or any(one.steps for one in digests) else None
    if side is None or not side.digest(None).steps:
        raise ArgumentError(f"{name} has no step yet, so there is nothing to compare")
    if not side.digest(None).samples:
        raise ArgumentError(f"{name} has steps without samples: those of an iterable dataset have no index")
    return side


def _read(given: Any, name: str) -> Sequence[Digest | _Log]:
    if isinstance(given, Mapping):
        return _digests_in(given, f"{name}: the dict")
    if not isinstance(given, str | os.PathLike):
        raise ArgumentError(
            f"{name} must be a state dict, a path or a list of these, found {type(given).__name__}"
        )
    path = Path(given)
    text = f"{name}: {str(path)!r}"
    try:
        if path.is_dir():
            logs, found = sorted(path.glob(_LOGS)), []
            if not logs:
                raise ArgumentError(f"{text} has no sample log ({_LOGS})")
            for log in logs:
                text = f"{name}: {str(log)!r}"
                found.append(_Log(log))
            return found
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC or path.match(_LOGS):
                return [_Log(path)]
    except OSError as error:
        raise ArgumentError(f"{text} cannot be read: {error.strerror or error}") from None
    except DecodeError as error:
        raise ArgumentError(f"{text}: {error.message}") from None
    return _digests_in(content_of(path), text)


def _digests_in(given: Any, text: str) -> list[Digest]:
    """The digest of the one state in a checkpoint, or those of all ranks where it has the states of them."""
    found = find_states(given)
    if not found:
        raise ArgumentError(f"{text} has no state of a fastload.DataLoader")
    digests = [_digest_of(state, f"{text} at {place!r}" if place else text) for place, state in found]
    ranks = sorted(one.rank for one in digests)
    if len(found) > 1 and (ranks != list(range(len(found))) or len(found) != digests[0].world_size):
        places = ", ".join(repr(place) for place, _ in found)
        raise ArgumentError(f"{text} has the states of several loaders, at {places}: give one of them")
    return digests


def _digest_of(state: Mapping[str, Any], text: str) -> Digest:
    try:
        read = Digest.of(parse_state(state, text).digest)
        for part in read.earlier:
            Digest.of(part)
    except DecodeError as error:
        raise ArgumentError(f"{text}: {error.message}") from None
    return read
