"""One run: trainers that are killed, and resumed with other workers and ranks; and its oracle."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import fastload
from tests.patience import of_session, wait_until
from tests.soak.world import World, key_of, label_of

SILENCE = 300.0  # seconds without a batch: it hangs
Point = tuple[int, int]  # (epoch, step): what was delivered up to there counts


class SoakError(Exception):
    """A promise that was broken."""


@dataclass
class Run:
    """The plan of a run, and what its trainers have delivered.

    Attributes:
        delivered: epoch -> rows, [number, version, label] each, of all legs and ranks.
        unbroken: (epoch, ranks) -> numbers by rank, of epochs that one leg made from end to end.
        notes: what happened, for the log.
    """

    world: World
    folder: Path
    rng: random.Random
    batch_size: int = 0
    epochs: int = 0
    seed: int = 0
    cache: dict[str, Any] | None = None
    excluded: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # a leg has one of these numbers
    delivered: dict[int, list[list[int]]] = field(default_factory=dict)
    unbroken: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.batch_size = rng.choice([3, 8, 16, 32])
        self.epochs = rng.choice([1, 2, 3])
        self.seed = rng.randrange(1000)
        self.ranks = [1] if rng.random() < 0.5 else rng.choice([[2], [1, 2, 3]])
        if rng.random() < 0.85:
            mode = rng.choice(["auto", "raw", "dct", "decoded"])
            folder = self.folder.parent / f"cache-{mode}-{rng.randrange(2)}"  # two of each: shared by runs
            self.cache = {
                "path": str(folder),
                "mode": mode,
                "size_limit": rng.choice([None, None, 300_000, 5_000_000]),
                "remote": rng.choice([None, None, f"s3://bucket/packs-{mode}/"]),
            }
        if rng.random() < 0.2:
            numbers = rng.sample(self.world.ordered(), 3)
            self.excluded = [key_of(number) for number in numbers]

    def go(self) -> None:
        """Run all legs, and check what they delivered.

        Raises:
            SoakError: a promise was broken.
        """
        point, state, leg = (0, 0), None, 0
        while True:
            killed_after = self.rng.choice([None, *range(1, 12)]) if leg < 5 else None
            with started(self, leg, state) as trainers:
                self._watch(trainers, killed_after)
            logs = [read_log(trainer.log) for trainer in trainers]
            if all(any("digest" in line for line in log) for log in logs):
                self._take(logs, point, (self.epochs, 0))
                break
            newest = newest_state(trainers[0].states, logs)
            if newest is not None:
                self._take(logs, point, newest[0])
                point, state = newest
            leg += 1
        self._check(logs[0][-1]["digest"] if self.ranks == [1] else None)

    def _watch(self, trainers: list[Trainer], killed_after: int | None) -> None:
        """Wait for the end of all ranks, or kill one of their processes after so many lines of a log."""
        victim, seen, heard = self.rng.choice(trainers), 0, time.monotonic()
        while any(trainer.process.poll() is None for trainer in trainers):
            time.sleep(0.05)
            lines = sum(trainer.lines() for trainer in trainers)
            if lines > seen:
                seen, heard = lines, time.monotonic()
            if time.monotonic() - heard > SILENCE:
                for trainer in trainers:
                    trainer.process.send_signal(signal.SIGABRT)  # faulthandler says where it is
                    trainer.process.wait(60)
                raise SoakError(f"no batch for {SILENCE:.0f} s:\n{trainers[0].said()[-4000:]}")
            if killed_after is not None and victim.lines() >= killed_after:
                self._kill(victim)
                killed_after = None
            if any(trainer.process.poll() for trainer in trainers):  # as a launcher does
                break
        for trainer in trainers:
            if trainer.process.poll() is None:
                trainer.process.kill()
            code = trainer.process.wait(60)
            if code > 0:
                self._explain(trainer)

    def _kill(self, trainer: Trainer) -> None:
        """Kill the trainer of a rank, or one of its processes."""
        try:
            children = psutil.Process(trainer.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        if children and self.rng.random() < 0.5:
            child = self.rng.choice(children)
            trainer.killed = child.pid
            try:
                self.notes.append(f"killed {child.name()}")
                child.kill()
            except psutil.NoSuchProcess:
                pass
        else:
            self.notes.append("killed the trainer")
            trainer.process.kill()

    def _explain(self, trainer: Trainer) -> None:
        """Accept an error of a trainer where one of its processes was killed, or the store failed."""
        text = trainer.said()
        if trainer.killed is not None and (str(trainer.killed) in text or "process of the store" in text):
            self.notes.append("ended by an error that names the process")
        elif "StoreError" in text:
            self.notes.append("ended by a StoreError")
        else:
            raise SoakError(f"killed {trainer.killed}, and the trainer ended with:\n{text[-4000:]}")

    def _take(self, logs: list[list[dict[str, Any]]], start: Point, stop: Point) -> None:
        """Count the batches after `start` up to `stop`."""
        whole: dict[int, list[list[int]]] = {}
        for log in logs:
            by_epoch: dict[int, list[int]] = {}
            for line in log:
                if "rows" in line and start < (line["epoch"], line["step"]) <= stop:
                    self.delivered.setdefault(line["epoch"], []).extend(line["rows"])
                    by_epoch.setdefault(line["epoch"], []).extend(row[0] for row in line["rows"])
            for epoch, numbers in by_epoch.items():
                whole.setdefault(epoch, []).append(numbers)
        self.unbroken += [
            (epoch, numbers) for epoch, numbers in whole.items() if start < (epoch, 1) and epoch < stop[0]
        ]

    def _check(self, digest: str | None) -> None:
        numbers = self.world.ordered()
        excluded = {number for number in numbers if key_of(number) in self.excluded}
        for epoch in range(self.epochs):
            rows = self.delivered.get(epoch, [])
            counted = Counter(row[0] for row in rows)
            missing, repeated = set(numbers) - set(counted) - excluded, len(rows) - len(numbers)
            if missing or repeated or (not excluded and max(counted.values()) > 1):
                raise SoakError(f"epoch {epoch}: {sorted(missing)} missing, {repeated} too many, {counted}")
            if wrong := [number for number in counted if number not in numbers or number in excluded]:
                raise SoakError(f"epoch {epoch}: {wrong} were excluded or do not exist")
            for number, version, label in rows:
                if (version, label) != (self.world.versions[number], label_of(number, numbers)):
                    raise SoakError(f"epoch {epoch}: {key_of(number)} has version {version}, class {label}")
        for epoch, by_rank in self.unbroken if not excluded else []:
            for rank, got in enumerate(by_rank):
                sampler = fastload.DistributedSampler(
                    numbers, len(by_rank), rank, seed=self.seed, mode="eval"
                )
                sampler.set_epoch(epoch)
                if got != [numbers[index] for index in sampler]:
                    raise SoakError(f"epoch {epoch}, rank {rank} of {len(by_rank)}: another order, {got}")
        if digest is not None and self.rng.random() < 0.3:
            self._compare_digest(digest)

    def _compare_digest(self, digest: str) -> None:
        """Let one process make the run again, without faults, cache and workers."""
        chance, self.world.server.chance = self.world.server.chance, 0.0
        with started(self, 99, None, quiet=True) as trainers:
            self._watch(trainers, None)
        self.world.server.chance = chance
        expected = read_log(trainers[0].log)[-1].get("digest")
        if digest != expected:
            raise SoakError(f"the digest is {digest}; an unbroken run has {expected}")
        self.notes.append("digest compared")


# --- the processes of a leg


@dataclass
class Trainer:
    """The process of a rank, with its files."""

    process: subprocess.Popen[bytes]
    log: Path
    states: Path
    output: Path
    killed: int | None = None  # the pid of a process of it that was killed

    def lines(self) -> int:
        return self.log.read_bytes().count(b"\n") if self.log.exists() else 0

    def said(self) -> str:
        return self.output.read_text(errors="replace")


@contextmanager
def started(run: Run, leg: int, state: Path | None, *, quiet: bool = False) -> Iterator[list[Trainer]]:
    """Start the ranks of a leg; at the end, nothing of them is left.

    Args:
        quiet: without cache and workers.
    """
    rng, ranks = run.rng, run.rng.choice(run.ranks)
    folder = run.folder / f"leg{leg}"
    (folder / "states").mkdir(parents=True)
    workers = 0 if quiet else rng.choice([0, 1, 2, 4])
    common = {
        "url": f"s3://bucket/{run.world.prefix}",
        "options": run.world.server.options,
        "ranks": ranks,
        "batch_size": run.batch_size,
        "epochs": run.epochs,
        "seed": run.seed,
        "cache": None if quiet else run.cache,
        "workers": workers,
        "processes": rng.random() < 0.3,
        "persistent": rng.random() < 0.5,
        "memory_limit": rng.choice([None, None, "400MB"]) if workers else None,
        "excluded": run.excluded,
        "state": state and str(state),
        "states": str(folder / "states"),
    }
    run.notes.append(f"{ranks} ranks, {workers} workers")
    trainers = []
    try:
        for rank in range(ranks):
            job, log, output = (folder / f"rank{rank}.{end}" for end in ("job", "log", "out"))
            job.write_text(json.dumps(common | {"rank": rank, "log": str(log)}))
            with output.open("wb") as said:
                process = subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-m", "tests.soak.trainer", str(job)],
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            trainers.append(Trainer(process, log, folder / "states", output))
        yield trainers
    finally:
        for trainer in trainers:
            if trainer.process.poll() is None:
                trainer.process.kill()
                trainer.process.wait(60)
        sessions = [trainer.process.pid for trainer in trainers]
        wait_until(lambda: not any(map(of_session, sessions)), "no process of a trainer is left")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a log."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def newest_state(states: Path, logs: list[list[dict[str, Any]]]) -> tuple[Point, Path] | None:
    """The newest state of rank 0 that all ranks have reached, and its point."""
    reached = [reach(log) for log in logs]
    for path in sorted(states.glob("*.json"), key=lambda path: point_of(path), reverse=True):
        epoch, step = point = point_of(path)
        if all(point <= last or ends.get(epoch, step + 1) <= step for last, ends in reached):
            return point, path
    return None


def reach(log: list[dict[str, Any]]) -> tuple[Point, dict[int, int]]:
    """(the last point of a log, epoch -> its last step where it has ended)."""
    points = [(line["epoch"], line["step"]) for line in log if "rows" in line]
    return max(points, default=(0, 0)), {line["epoch"]: line["end"] for line in log if "end" in line}


def point_of(path: Path) -> Point:
    epoch, _, step = path.stem.partition("-")
    return int(epoch), int(step)
