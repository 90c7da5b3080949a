"""`prove`: whether two runs got the same data, and if not, where they differ.

sides     states, logs, or directories of logs, one per rank ──▶ `Side`
logs      step by step, then row by row in the first step that differs
states    epoch by epoch, then by the partial sums of the epoch that ran
mixed     the log is added up to the step of the state, and is then a state
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ArgumentError, DecodeError
from fastload.order.state import content_of, find_states, parse_state, reading_state
from fastload.trace.digest import Digest, EpochSums, merged
from fastload.trace.sample_log import LOGS, MAGIC, Row, SampleLog
from fastload.workers.batch import LANES, sums_of
from fastload.workers.protocol import Fingerprint


class Proof(NamedTuple):
    """What `prove` found. Its truth value is `same`, and its text is `why`.

    Attributes:
        same: no step that both sides have differs. One side may go on for longer.
        epoch, step: the first ones that differ; None: not known, or none.
        rank, row: of the first row that differs in that step, of `b`; of `a` where `b` lacks a row. `row` is
            its place in the batch.
        why: the whole answer in one sentence.
    """

    same: bool
    why: str
    epoch: int | None = None
    step: int | None = None
    rank: int | None = None
    row: int | None = None

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        return self.why


def prove(a: Any, b: Any) -> Proof:
    """Compare the data that two runs got: from the states of their loaders, or from their sample logs.

    Example::

        from fastload import DataLoader, ImageFolder, RandomResizedCrop, prove

        dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224))

        def state(workers):
            loader = DataLoader(dataset, 8, num_workers=workers, seed=1)
            for images, labels in loader:
                pass
            return loader.state_dict()

        print(prove(state(0), state(2)))  # the same data in all 3 steps

    Each side is a state dict, the path of one (a file of `torch.save` or JSON, where it may lie inside a
    bigger checkpoint), the path of a rank's log or of a directory of logs, or a list of these, one per rank.
    The two sides may have other numbers of ranks and workers, and other caches. Logs give the first row that
    differs. States give the range of steps that it is in. Where the global batches have other sizes, whole
    epochs are compared.

    If one side ends earlier, what both have is compared.

    Raises:
        ArgumentError: a side is neither a state nor a log, has no digest or no step, or lacks ranks; or
            nothing of the two can be compared.
    """
    left, right = read_side(a, "a"), read_side(b, "b")
    if left.parts != right.parts:
        left.check_whole()
        right.check_whole()
    for side, other in ((left, right), (right, left)):
        side.check_begin(other)
    if left.logged and right.logged:
        return _compare_logs(left, right)
    return _compare_states(left, right)


# --- logs


def _compare_logs(a: Side, b: Side) -> Proof:
    batch_a, batch_b = (max(step.samples for step in side.steps.values()) for side in (a, b))
    if batch_a != batch_b:
        return _compare_epochs(a, b, a.digest(None), b.digest(None))
    last = min(max(a.steps), max(b.steps))
    places = sorted(place for place in a.steps.keys() | b.steps.keys() if place <= last)
    for epoch, step in places:
        step_a, step_b = a.steps.get((epoch, step)), b.steps.get((epoch, step))
        if step_a is None or step_b is None:
            lacks, has = (a, b) if step_a is None else (b, a)
            why = f"{lacks.name} has no step {step} of epoch {epoch}, which {has.name} has"
            return Proof(False, why, epoch, step)
        if step_a.sums != step_b.sums:
            return _name_row(a, b, (epoch, step))
    return _same(len(places), a, b, len(a.steps), len(b.steps))


def _name_row(a: Side, b: Side, place: Place) -> Proof:
    """Return the first row that stands in this step on one side only."""
    rows_a, rows_b = a.rows(place), b.rows(place)
    new, gone = _without(rows_b, rows_a), _without(rows_a, rows_b)
    epoch, step = place
    begins = f"the data differs from step {step} of epoch {epoch} on"
    if not new:
        row = gone[0]
        why = f"{begins}: {b.name} lacks sample {row.sample}, in row {row.row} of rank {row.rank} of {a.name}"
        return Proof(False, why, epoch, step, row.rank, row.row)
    row = new[0]
    if any(other.sample == row.sample for other in gone):
        what = f"sample {row.sample} has another key, version, label, crop or random numbers than in {a.name}"
    elif gone:
        at_home = (other for other in gone if (other.rank, other.row) == (row.rank, row.row))
        what = f"sample {row.sample} stands where {a.name} has sample {next(at_home, gone[0]).sample}"
    else:
        what = f"sample {row.sample} is not in that step of {a.name}"
    why = f"{begins}: in row {row.row} of rank {row.rank} of {b.name}, {what}"
    sums = b.steps[place].sums
    elsewhere = next((other for other, step_a in a.steps.items() if step_a.sums == sums), None)
    if elsewhere is not None:
        why += f". {b.name}'s step is step {elsewhere[1]} of epoch {elsewhere[0]} of {a.name}"
    return Proof(False, why, epoch, step, row.rank, row.row)


def _without(rows: list[Row], others: list[Row]) -> list[Row]:
    """Return the rows that have no equal among the others: of their own rank first, then of any."""
    of_rank = Counter((row.rank, row.fingerprint) for row in others)
    left = Counter(row.fingerprint for row in others)
    rest = []
    for row in rows:
        if of_rank[row.rank, row.fingerprint]:
            of_rank[row.rank, row.fingerprint] -= 1
            left[row.fingerprint] -= 1
        else:
            rest.append(row)
    missing = []
    for row in rest:
        left[row.fingerprint] -= 1
        if left[row.fingerprint] < 0:
            missing.append(row)
    return missing


def _same(steps: int, a: Side, b: Side, end_a: int, end_b: int) -> Proof:
    if end_a == end_b:
        return Proof(
            True, "the same data in the only step" if steps == 1 else f"the same data in all {steps:,} steps"
        )
    longer = a if end_a > end_b else b
    counted = "1 step" if steps == 1 else f"{steps:,} steps"
    return Proof(True, f"the same data as far as both go, {counted}; {longer.name} goes on after that")


# --- states


def _compare_states(a: Side, b: Side) -> Proof:
    """Compare sides of which one has no logs. Where ranks of one are ahead: what all have finished."""
    uneven = [side for side in (a, b) if side.uneven]
    steps = None if uneven else min(side.digest(None).steps for side in (a, b) if not side.logged)
    digest_a, digest_b = a.digest(steps), b.digest(steps)
    if digest_a.batch != digest_b.batch and not uneven:
        return _compare_epochs(a, b, a.digest(None), b.digest(None))
    if digest_a.sums == digest_b.sums and (uneven or digest_a.steps == digest_b.steps):
        return _same(digest_a.steps, a, b, a.digest(None).steps, b.digest(None).steps)
    ends_a, ends_b = _before(digest_a), _before(digest_b)
    begun, passed = 0, 0
    for epoch in sorted(ends_a.keys() & ends_b.keys()):
        if any(epoch > side.finished for side in uneven):
            break
        if ends_a[epoch] != ends_b[epoch]:
            return _differs_in_epochs(begun, epoch - 1, "a state keeps one sum of a past epoch")
        begun, passed = epoch, ends_a[epoch].steps
    if uneven:
        name = uneven[0].name
        raise ArgumentError(f"{name} has states of different steps: give those that were saved together")
    return _compare_last(a, b, digest_a, digest_b, begun, passed)


def _before(digest: Digest) -> dict[int, EpochSums]:
    """Return epoch -> the sums over all epochs before it."""
    whole, before = EpochSums(0), {}
    for sums in digest.epochs:
        before[sums.epoch] = replace(whole)
        whole.add(sums)
    return before


def _differs_in_epochs(first: int, last: int, why: str) -> Proof:
    if first == last:
        return Proof(False, f"the data differs in epoch {first} ({why})", first)
    return Proof(False, f"the data differs in one of the epochs {first} to {last} ({why})")


def _compare_last(a: Side, b: Side, digest_a: Digest, digest_b: Digest, epoch: int, passed: int) -> Proof:
    """Return the epoch that is the last one in common, by its partial sums."""
    last_a, last_b = digest_a.epochs[-1].epoch, digest_b.epochs[-1].epoch
    if last_a == last_b == epoch:
        marks_a, marks_b = digest_a.partial_sums(), digest_b.partial_sums()
        agreed = 0
        for step in sorted(marks_a.keys() & marks_b.keys()):
            if marks_a[step] != marks_b[step]:
                return _differs_in_steps(epoch, agreed, step - 1)
            agreed = step
        if digest_a.next_step == digest_b.next_step:
            raise ArgumentError(
                "a and b cannot be compared: their sums differ, and none of their partial sums does, which "
                "no run leads to. Give the sample logs"
            )
        return _same(passed + agreed, a, b, digest_a.steps, digest_b.steps)
    sums_a, sums_b = (next(e for e in digest.epochs if e.epoch == epoch) for digest in (digest_a, digest_b))
    if sums_a.steps == sums_b.steps and sums_a != sums_b:
        return _differs_in_epochs(epoch, epoch, "a state keeps one sum of a past epoch")
    passed += sums_a.steps if sums_a == sums_b else 0
    if not passed:
        raise ArgumentError(
            f"a and b cannot be compared: one of them ends within epoch {epoch}, of which the other has the "
            "sum of all steps only. Give the sample logs, or states of the same step"
        )
    return _same(passed, a, b, digest_a.steps, digest_b.steps)


def _differs_in_steps(epoch: int, first: int, last: int) -> Proof:
    if first == last:
        return Proof(False, f"the data differs from step {first} of epoch {epoch} on", epoch, first)
    why = f"the data differs from one of the steps {first} to {last} of epoch {epoch} on"
    return Proof(False, f"{why}: the sample logs have the step and the row", epoch)


# --- runs whose global batches have other sizes


def _compare_epochs(a: Side, b: Side, digest_a: Digest, digest_b: Digest) -> Proof:
    sizes = (
        f"the global batches have {digest_a.batch:,} and {digest_b.batch:,} samples, so whole epochs are "
        "compared"
    )
    last = min(digest.epochs[-1].epoch for digest in (digest_a, digest_b))
    begun = sorted({each.epoch for each in digest_a.epochs} & {each.epoch for each in digest_b.epochs})
    sums_a, sums_b = (_from_each(begun, last, digest) for digest in (digest_a, digest_b))
    ends, end = [*begun[1:], last + 1], 0
    for epoch, next_one in zip(begun, ends, strict=True):
        x, y = sums_a[epoch], sums_b[epoch]
        if epoch == begun[-1] and x.samples != y.samples:
            break  # one of them ends within it
        if (x.samples, x.unordered) != (y.samples, y.unordered):
            return _differs_in_epochs(epoch, next_one - 1, sizes)
        end = next_one
    if not end:
        raise ArgumentError(f"{sizes}, and there is no whole epoch that both have")
    epochs = end - begun[0]
    counted = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    return Proof(True, f"the same data in {counted} ({sizes})")


def _from_each(begun: list[int], last: int, digest: Digest) -> dict[int, EpochSums]:
    """Return each of these epochs -> the sums from it up to the next one of them, or up to epoch `last`.

    A long run has one sum of several epochs, where a shorter run still has each.
    """
    from_each: dict[int, EpochSums] = {}
    for sums in digest.epochs:
        if sums.epoch in begun:
            from_each[sums.epoch] = replace(sums)
        elif from_each and sums.epoch <= last:
            from_each[max(from_each)].add(sums)
    return from_each


# --- what a run says of its data: states and sample logs

Place = tuple[int, int]  # (epoch, step)

_MASK = (1 << 64) - 1
_NAMED = 8  # ranks that an error names


@dataclass
class Step:
    """A step of all ranks together."""

    samples: int = 0
    sums: tuple[int, ...] = (0,) * LANES

    def add(self, fingerprints: NDArray[np.uint64]) -> None:
        self.samples += len(fingerprints)
        if len(fingerprints):
            both = zip(self.sums, sums_of(fingerprints), strict=True)
            self.sums = tuple([(a + b) & _MASK for a, b in both])


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

    def __init__(self, name: str, digests: list[Digest], logs: list[SampleLog]) -> None:
        self.name = name
        self.logged = bool(logs)
        self.parts: dict[tuple[int, int], list[int]]
        self._digest = None
        self.uneven, self.finished = False, 0
        self.begin = 0
        if logs:
            runs = [run.begins for log in logs for run in log.runs]
            self.begin = min((begins.run_step for begins in runs), default=0)
            self._world_size = max(runs, key=lambda begins: begins.time).world_size if runs else 1
            self._tables = [(log, log.kept(runs)) for log in logs]
            sizes = [int(table[:, 4].max()) for _, table in self._tables if len(table)]
            self.parts = {
                (0, max([1, *sizes])): sorted(log.rank for log, table in self._tables if len(table))
            }
        elif digests:
            groups = _groups(name, digests)
            self.parts = {place: sorted(ranks) for place, ranks in groups.items()}
            last = groups[max(groups)].values()
            self.uneven = len({digest.steps for digest in last}) > 1
            self.finished = min(digest.epochs[-1].epoch if digest.epochs else 0 for digest in last)
            self._digest = merged(list(ranks.values()) for ranks in groups.values())

    @functools.cached_property
    def steps(self) -> dict[Place, Step]:
        """Place -> the step there, of a side with logs, as far as all ranks go."""
        steps: dict[Place, Step] = {}
        end = min(_last(table) for log, table in self._tables if log.rank < self._world_size)
        for log, table in self._tables:
            for _, epoch, step, offset, _ in table.tolist():
                if (epoch, step) <= end:
                    steps.setdefault((epoch, step), Step()).add(log.fingerprints(offset))
        return steps

    def rows(self, place: Place) -> list[Row]:
        """Return the rows of a step, rank by rank."""
        rows: list[Row] = []
        for log, table in self._tables:
            for offset in table[(table[:, 1] == place[0]) & (table[:, 2] == place[1]), 3].tolist():
                rows += log.rows(offset)
        return sorted(rows)

    def digest(self, steps: int | None) -> Digest:
        """Return that of a state; or of the first `steps` steps of a log, as a state would have it."""
        if self._digest is not None:
            return self._digest
        digest = Digest()
        for (epoch, step), summed in sorted(self.steps.items())[:steps]:
            digest.add(epoch, step, Fingerprint(summed.samples, summed.sums, None))
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
    """Return the digests as in `Side.parts`."""
    groups: dict[tuple[int, int], dict[int, Digest]] = {}
    for digest in digests:
        parts = [*map(Digest.of_part, digest.earlier), replace(digest, earlier=[])]
        for level, part in enumerate(parts):
            known = groups.setdefault((level, part.world_size), {}).setdefault(part.rank, part)
            if known != part:
                raise ArgumentError(
                    f"{name} has two states of rank {part.rank}: give one state of each rank, of one run"
                )
    return groups


def _last(table: NDArray[np.int64]) -> Place:
    return max(((epoch, step) for _, epoch, step, _, _ in table.tolist()), default=(-1, -1))


def read_side(sides: Any, name: str) -> Side:
    """Return a side of the comparison: see `prove`.

    Raises:
        ArgumentError: it is none, or two of its parts are of the same rank.
    """
    parts: list[Digest | SampleLog] = []
    for item in sides if isinstance(sides, list | tuple) else [sides]:
        parts += _read(item, name)
    digests = [part for part in parts if isinstance(part, Digest)]
    logs = [part for part in parts if isinstance(part, SampleLog)]
    if digests and logs:
        raise ArgumentError(f"{name} mixes states and sample logs: give one kind of them for all its ranks")
    ranks = [log.rank for log in logs]
    if len(set(ranks)) < len(ranks):
        raise ArgumentError(f"{name} has several logs of one rank: give one log of each rank, of one run")
    side = Side(name, digests, logs) if logs or any(item.steps for item in digests) else None
    if side is None or not side.digest(None).steps:
        raise ArgumentError(f"{name} has no step yet, so there is nothing to compare")
    if not side.digest(None).samples:
        raise ArgumentError(f"{name} has steps without samples: those of an iterable dataset have no index")
    return side


def _read(side: Any, name: str) -> Sequence[Digest | SampleLog]:
    if isinstance(side, Mapping):
        return _digests_in(side, f"{name}: the dict")
    if not isinstance(side, str | os.PathLike):
        raise ArgumentError(
            f"{name} must be a state dict, a path or a list of these, found {type(side).__name__}"
        )
    path = Path(side)
    text = f"{name}: {str(path)!r}"
    try:
        if path.is_dir():
            logs, opened = sorted(path.glob(LOGS)), []
            if not logs:
                raise ArgumentError(f"{text} has no sample log ({LOGS})")
            for log in logs:
                text = f"{name}: {str(log)!r}"
                opened.append(SampleLog(log))
            return opened
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC or path.match(LOGS):
                return [SampleLog(path)]
    except OSError as error:
        raise ArgumentError(f"{text} cannot be read: {error.strerror or error}") from None
    except DecodeError as error:
        raise ArgumentError(f"{text}: {error.message}") from None
    return _digests_in(content_of(path), text)


def _digests_in(checkpoint: Any, text: str) -> list[Digest]:
    """Return the digest of the one state in a checkpoint, or those of all ranks where it has their states."""
    states = find_states(checkpoint)
    if not states:
        raise ArgumentError(f"{text} has no state of a fastload.DataLoader")
    digests = [_digest_of(state, f"{text} at {place!r}" if place else text) for place, state in states]
    ranks = sorted(digest.rank for digest in digests)
    if len(states) > 1 and (ranks != list(range(len(states))) or len(states) != digests[0].world_size):
        places = ", ".join(repr(place) for place, _ in states)
        raise ArgumentError(f"{text} has the states of several loaders, at {places}: give one of them")
    return digests


def _digest_of(state: Mapping[str, Any], text: str) -> Digest:
    saved = parse_state(state, text)
    with reading_state(text, "give it as state_dict() returned it"):
        return Digest.of(saved.digest)
