"""One section of `python -m bench compare`: contenders and limits take turns at one kind of epoch."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from bench.data import BATCH, SIZE, WORKPLACE
from bench.peers.contenders import Contender
from bench.peers.environment import Unavailable
from bench.peers.peer import Peer, Run
from fastload.cli.demo.s3_server import Proxy, S3Server

T = TypeVar("T")
AT_LEAST = 1.0  # seconds
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Place:
    """The place of the photos: a folder, and a bucket behind a round trip."""

    folder: Path
    server: S3Server
    proxy: Proxy

    def job(self, contender: Contender, *, later: bool, scratch: Path) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "bucket": self.folder.name,
            "endpoint": self.proxy.url,
            "key": self.server.key,
            "secret": self.server.secret,
            "batch": BATCH,
            "size": SIZE,
            "workers": contender.workers[0],
            "mode": contender.mode,
            "later": later,
            "scratch": tempfile.mkdtemp(dir=scratch),
        }


@dataclass
class Entrant:
    """A running contender, and its measurements."""

    contender: Contender
    peer: Peer
    runs: list[Run] = field(default_factory=list)
    store_bytes: int = 0
    store_requests: int = 0
    pss: int | None = None

    def row(self, section: str, case: str, limit: str | None) -> dict[str, Any]:
        """The row of the document."""
        images = sum(run.images for run in self.runs)
        return {
            "section": section,
            "case": case,
            "contender": self.contender.name,
            "workers": self.contender.workers[0],
            "rates": [round(run.rate, 1) for run in self.runs],
            "first_batch_seconds": [round(run.first_batch, 3) for run in self.runs],
            "start_seconds": round(self.peer.start_seconds, 2),
            "cpu_seconds_per_1000": [round(1000 * run.cpu_seconds / run.images, 3) for run in self.runs],
            "store_bytes_per_image": round(self.store_bytes / images, 1),
            "store_requests_per_image": round(self.store_requests / images, 4),
            "pss_bytes": self.pss,
            "limit": limit,
        }


@dataclass(frozen=True)
class Course:
    """The way in which a section runs.

    Attributes:
        later: later epochs, from full caches, instead of first ones.
        repeats: turns that count; before them each contender has `warm_ups` epochs that do not.
        seconds: an epoch is cut off after this time.
        step: called once an epoch with the name of the current work.
    """

    place: Place
    later: bool
    repeats: int
    seconds: float
    step: Callable[[str], None]
    warm_ups: int = 1

    @contextlib.contextmanager
    def started(self, contenders: Sequence[Contender], failed: dict[str, str]) -> Iterator[list[Entrant]]:
        """The contenders that run here, after their warm-up; `failed` gets the reasons of the others."""
        with tempfile.TemporaryDirectory(dir=WORKPLACE) as scratch, ExitStack() as stack:
            entrants = []
            for contender in contenders:
                self.step(f"{contender.name}: warming up")
                try:
                    job = self.place.job(contender, later=self.later, scratch=Path(scratch))
                    entrant = Entrant(contender, stack.enter_context(Peer(contender.script, job)))
                    self._warm_up(entrant)
                except Unavailable as error:
                    failed[contender.name] = str(error)
                    continue
                entrants.append(entrant)
            yield entrants

    def _warm_up(self, entrant: Entrant) -> None:
        for _ in range(self.warm_ups - 1):
            entrant.peer.epoch(4 * self.seconds)  # fills the caches
        if self.warm_ups:
            with entrant.peer.watched() as seen:
                entrant.peer.epoch(self.seconds)
            entrant.pss = max(seen, default=None)

    def run(self, entrant: Entrant) -> None:
        """An epoch; of short later ones as many as fill a second."""
        self.step(entrant.contender.name)
        before = self.place.proxy.counts()
        runs = [entrant.peer.epoch(self.seconds)]
        while self.later and sum(run.seconds for run in runs) < AT_LEAST:
            runs.append(entrant.peer.epoch(self.seconds))
        entrant.runs.append(together(runs))
        after = self.place.proxy.counts()
        entrant.store_bytes += after.bytes_down - before.bytes_down
        entrant.store_requests += after.object_gets - before.object_gets


@dataclass(frozen=True)
class Case:
    """One kind of epoch.

    Attributes:
        limits: its limits, each measured once a turn: images per second.
        begin: called before each turn.
        without: the names of contenders that do not take part.
    """

    limits: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    begin: Callable[[], None] = lambda: None
    without: frozenset[str] = frozenset()


@dataclass
class Turns:
    """The measurements of a case.

    Attributes:
        limits: the rates of each limit, one a turn.
        failed: the reason for each contender that did not run here.
    """

    entrants: list[Entrant]
    limits: dict[str, list[float]]
    failed: dict[str, str]

    def first_limit(self) -> str | None:
        """The lowest limit."""
        return min(self.limits, key=lambda name: statistics.median(self.limits[name]), default=None)

    def take(self, course: Course, case: Case, turn: int) -> None:
        """One turn: the limits, then all contenders that still run."""
        case.begin()
        for name, limit in case.limits.items():
            course.step(name)
            self.limits[name].append(round(limit(), 1))
        for entrant in rotated([e for e in self.entrants if e.contender.name not in self.failed], turn):
            try:
                course.run(entrant)
            except Unavailable as error:
                self.failed[entrant.contender.name] = str(error)


def take_turns(
    course: Course, contenders: Sequence[Contender], cases: Mapping[str, Case]
) -> dict[str, Turns]:
    """All contenders and limits in all cases, `course.repeats` times, by processes that keep running.

    Each turn begins with another case, and with another contender.
    """
    failed: dict[str, str] = {}
    with course.started(contenders, failed) as running:
        found = {
            name: Turns(
                [replace(e, runs=[]) for e in running if e.contender.name not in case.without],
                {limit: [] for limit in case.limits},
                failed,
            )
            for name, case in cases.items()
        }
        for turn in range(course.repeats):
            for name in rotated(list(cases), turn):
                found[name].take(course, cases[name], turn)
    for turns in found.values():
        turns.entrants = [entrant for entrant in turns.entrants if entrant.contender.name not in failed]
    return found


def together(runs: Sequence[Run]) -> Run:
    """Several epochs as one."""
    images, seconds, _, cpu = map(sum, zip(*runs, strict=True))
    return Run(int(images), seconds, runs[0].first_batch, cpu)


def rotated(items: list[T], turn: int) -> list[T]:
    """The items, rotated so that each turn begins with another one."""
    first = turn * (len(items) // 5 + 1) % max(1, len(items))
    return items[first:] + items[:first]


def choose_workers(course: Course, contender: Contender) -> Contender:
    """The contender with its fastest number of workers; with the first where it does not run.

    Each number has one epoch, after one that fills caches where the section needs them full. With more than
    two cores, as many workers as cores are tried too.
    """
    trial = replace(course, warm_ups=int(course.later))
    rates: dict[int, float] = {}
    counts = sorted({*contender.workers, CORES} if CORES > 2 else contender.workers)
    for count in counts if len(counts) > 1 else ():
        tried = replace(contender, workers=(count,))
        course.step(f"{contender.name}: {count} workers?")
        with trial.started([tried], {}) as entrants:
            for entrant in entrants:
                trial.run(entrant)
                rates[count] = entrant.runs[0].rate
    best = max(rates, key=lambda count: rates[count]) if rates else contender.workers[0]
    return replace(contender, workers=(best,))


def load() -> float:
    return round(os.getloadavg()[0], 1)
