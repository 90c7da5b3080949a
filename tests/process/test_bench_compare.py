"""The comparison's machinery: environments, peers' processes, turns, what an interrupted run leaves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bench.measure import record, sections
from bench.measure.sections import Case
from bench.peers import contenders, environment, peer
from bench.peers.contenders import Contender
from bench.peers.environment import Unavailable
from bench.peers.peer import Peer, Run
from bench.peers.scripts import peer_side
from tests.patience import runs, wait_until

SCRIPT = """
import os, subprocess, sys, time
sys.path.insert(0, {peers!r})
from peer_side import serve

def start(job):
    if job.mode == "broken":
        raise ValueError("no such bucket")
    def epoch():
        print("peers may print")
        if job.mode == "ends":
            os._exit(3)
        if job.mode == "sleeps":
            subprocess.Popen(["sleep", "1000"])
            time.sleep(1000)
        if job.mode == "works":
            subprocess.run([sys.executable, "-S", "-c", "sum(range(20_000_000))"])
        for _ in range(0 if job.mode == "empty" else 10):
            yield job.batch
    return epoch

def prepare(job):
    return 17

serve(start, "torch", prepare=prepare)
"""


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "scripted.py").write_text(SCRIPT.format(peers=str(environment.SCRIPTS)))
    monkeypatch.setattr(environment, "SCRIPTS", tmp_path)
    monkeypatch.setattr(peer, "SCRIPTS", tmp_path)
    yield


def job(mode: str = "", **more: Any) -> dict[str, Any]:
    return {"mode": mode, "batch": 4, "workers": 2} | more


# --- a peer's process


def test_peer_runs_epochs_and_ends(scripted: None) -> None:
    with Peer("scripted", job()) as running:
        assert set(running.versions) == {"torch"} and running.start_seconds > 0
        for _ in range(3):
            run = running.epoch()
            assert run.images == 40 and 0 < run.first_batch <= run.seconds
    assert running._process.returncode == 0


def test_cpu_time_of_a_peer_includes_its_children(scripted: None) -> None:
    with Peer("scripted", job()) as idle, Peer("scripted", job("works")) as busy:
        assert busy.epoch().cpu_seconds > idle.epoch().cpu_seconds + 0.1


def test_memory_of_a_peer_is_sampled(scripted: None) -> None:
    with Peer("scripted", job()) as running, running.watched() as seen:
        running.epoch()
    assert max(seen) > 5_000_000


@pytest.mark.parametrize(
    ("mode", "said"),
    [("broken", "no such bucket"), ("ends", "without an error message"), ("empty", "had no images")],
)
def test_failed_peer_is_unavailable_with_its_reason(scripted: None, mode: str, said: str) -> None:
    with pytest.raises(Unavailable, match=said), Peer("scripted", job(mode)) as running:
        running.epoch()


def test_hanging_peer_is_killed_with_its_children(scripted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "TO_ANSWER", 0.5)
    monkeypatch.setattr(peer, "TO_END", 0.1)
    with Peer("scripted", job("sleeps")) as running:
        with pytest.raises(Unavailable, match="no answer within"):
            running.epoch(0.1)
        own = psutil.Process(running._process.pid)
        family = [own, *own.children(recursive=True)]
    wait_until(lambda: not any(map(runs, family)), "all processes have ended")


def test_long_epoch_is_cut_at_the_end_of_a_round() -> None:
    def epoch() -> Iterator[int]:
        while True:
            yield 64

    for workers in (1, 3, 8):
        assert peer_side.run(epoch, 0.001, workers)["images"] % (64 * workers) == 0


def test_prepared_files_are_whole_or_absent(tmp_path: Path) -> None:
    def fails(target: str) -> None:
        Path(target).mkdir()
        (Path(target) / "half").write_bytes(b"1")
        raise OSError("disk full")

    def writes_two_bytes(target: str) -> None:
        Path(target).mkdir()
        (Path(target) / "a").write_bytes(b"12")

    target = tmp_path / "shards"
    with pytest.raises(OSError, match="disk full"):
        peer_side.made(str(target), fails)
    assert not target.exists()
    assert peer_side.made(str(target), writes_two_bytes) == 2


# --- environments


def test_needs_are_read_from_the_first_lines_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "SCRIPTS", tmp_path)
    steps = ["apt install ffmpeg", "pip install a==1 b==2", "    c==3", "pip install --no-deps d==4"]
    (tmp_path / "one.py").write_text("".join(f"# {step}\n" for step in steps) + "\n# not this\n")
    found = environment.needs("one")
    assert found.apt == ["ffmpeg"] and found.pip == [["a==1", "b==2", "c==3"], ["--no-deps", "d==4"]]
    (tmp_path / "two.py").write_text("# a comment\n")
    with pytest.raises(ValueError, match="neither a step"):
        environment.needs("two")


def test_failed_installation_is_unavailable_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "SCRIPTS", tmp_path)
    monkeypatch.setattr(environment, "WORKPLACE", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    really = environment._run

    def run(command: list[str], **options: str) -> None:
        if command[1:3] != ["-m", "venv"]:
            return really(command, **options)
        python = Path(command[3], "bin", "python")  # this one, in place of one with a pip of its own
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)

    monkeypatch.setattr(environment, "_run", run)
    (tmp_path / "one.py").write_text("# pip install no-such-package-at-all==1\n\n")
    with pytest.raises(Unavailable, match="could not be installed"):
        environment.python_of("one")
    assert not environment.is_installed("one")


def test_scripts_of_all_contenders_pin_their_needs() -> None:
    groups = [contenders.COLD, *contenders.LATER.values(), *contenders.DECODE.values()]
    everyone = [contender for group in groups for contender in group]
    for script in {contender.script for contender in everyone}:
        for step in environment.needs(script).pip:
            assert [word for word in step if not word.startswith("-") and "==" not in word] == []
    for names in contenders.GROWING.values():
        assert set(names) <= {contender.name for contender in everyone}


# --- turns, with peers that need no process


class Scripted:
    """A peer whose epochs take what it is told."""

    start_seconds, versions = 1.0, {"torch": "1"}

    def __init__(self, script: str, job: dict[str, Any]) -> None:
        self.log, self.name = LOG, f"{job['mode']} {job['workers']}"
        if job["mode"] == "missing":
            raise Unavailable("not here")

    def epoch(self, at_most: float) -> Run:
        self.log.append(self.name)
        if self.name.startswith("dies") and self.log.count(self.name) > 2:
            raise Unavailable("died")
        workers = int(self.name.split()[1])
        return Run(100, 1 / workers if workers < 8 else 1.0, 0.1, 0.5)

    @contextmanager
    def watched(self) -> Iterator[list[int]]:
        yield [5, 9, 7]

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        pass


LOG: list[str] = []


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> sections.Course:
    LOG.clear()
    monkeypatch.setattr(sections, "Peer", Scripted)
    monkeypatch.setattr(sections, "CORES", 2)
    monkeypatch.setattr(sections, "WORKPLACE", tmp_path)
    counts = SimpleNamespace(bytes_down=0, object_gets=0)
    proxy = SimpleNamespace(url="http://", counts=lambda: counts)
    server = SimpleNamespace(key="", secret="")
    place = sections.Place(tmp_path, server, proxy)  # type: ignore[arg-type]
    return sections.Course(place, False, 5, 6.0, lambda *_: None)


def ways(*names: str) -> list[Contender]:
    return [Contender(name, "scripted", name) for name in names]


def test_each_turn_has_all_contenders_and_begins_with_another(course: sections.Course) -> None:
    cases = {"raw": Case({"limit": lambda: 500.0})}
    turns = sections.take_turns(course, ways("a", "b", "c", "d", "e"), cases)["raw"]
    made = [LOG[5 + 5 * turn : 10 + 5 * turn] for turn in range(5)]
    assert all(sorted(turn) == sorted(made[0]) for turn in made)
    assert len({turn[0] for turn in made}) == 5
    assert turns.limits == {"limit": [500.0] * 5} and turns.first_limit() == "limit"
    row = turns.entrants[0].row("cold", "20 ms", "limit")
    assert row["rates"] == [200.0] * 5 and row["pss_bytes"] == 9 and row["cpu_seconds_per_1000"] == [5.0] * 5


def test_cases_take_turns_too(course: sections.Course) -> None:
    def case(name: str, without: frozenset[str] = frozenset()) -> Case:
        return Case(begin=lambda: LOG.append(name), without=without)

    cases = {"near": case("near"), "far": case("far", frozenset("b"))}
    found = sections.take_turns(replace(course, repeats=2), ways("a", "b"), cases)
    assert LOG[2:8] == ["near", "a 2", "b 2", "far", "a 2", "far"]
    assert [entrant.contender.name for entrant in found["far"].entrants] == ["a"]
    assert [len(entrant.runs) for turns in found.values() for entrant in turns.entrants] == [2, 2, 2]


def test_failed_contender_is_named_and_the_others_continue(course: sections.Course) -> None:
    turns = sections.take_turns(course, ways("a", "missing", "dies", "b"), {"raw": Case()})["raw"]
    assert turns.failed == {"missing": "not here", "dies": "died"}
    assert [entrant.contender.name for entrant in turns.entrants] == ["a", "b"]
    assert all(len(entrant.runs) == 5 for entrant in turns.entrants)


def test_fastest_number_of_workers_is_chosen(
    course: sections.Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = replace(ways("a")[0], workers=(1, 4, 8))
    assert sections.choose_workers(course, several).workers == (4,)
    monkeypatch.setattr(sections, "CORES", 6)
    assert sections.choose_workers(course, several).workers == (6,)
    missing = replace(ways("missing")[0], workers=(8, 2))
    assert sections.choose_workers(course, missing).workers == (8,)


def test_short_later_epochs_are_combined(course: sections.Course) -> None:
    course = replace(course, later=True, repeats=1)
    run = sections.take_turns(course, ways("a"), {"raw": Case()})["raw"].entrants[0].runs[0]
    assert run.images == 200 and run.seconds >= 1.0


# --- what is kept


def test_interrupted_comparison_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "UNFINISHED", tmp_path / "unfinished.json")
    monkeypatch.setattr(record, "commit", lambda: "abc")

    def begin(scale: record.Scale = record.QUICK, resumed: bool = True) -> record.Record:
        return record.Record(scale, resumed, lambda *_: None)

    first = begin()
    first.miss("DALI", "cold", "no reader")
    assert first.part("machine", lambda: {"memcpy": 1}) == {"memcpy": 1}
    again = begin()
    assert again.part("machine", lambda: pytest.fail("measured twice")) == {"memcpy": 1}
    assert again.unavailable == [{"name": "DALI", "section": "cold", "reason": "no reader"}]
    assert begin(resumed=False).parts.keys() == {"contenders", "unavailable"}
    assert "machine" not in begin(record.Scale()).parts
    monkeypatch.setattr(record, "commit", lambda: "abd")
    assert "machine" not in begin().parts
    again.finish()
    assert not (tmp_path / "unfinished.json").exists()
