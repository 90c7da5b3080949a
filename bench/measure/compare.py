"""fastload and the loaders that a user would choose instead: the same photos, the same work, one run.

    python -m bench compare [--quick] [--resume]        (`make bench`: on a fresh machine, unattended)

2,000 photos of 138 KB on the local disk and on an S3 server behind a round trip; RandomResizedCrop(224) and a
flip to uint8 in batches of 64. The most important rows are measured again beside a process that keeps one
core busy, and with smaller photos (see `bench.photographs`). Each contender runs in a process of its own,
and peers in an environment of their own, with the number of workers that was fastest in a trial. All take
turns, and each turn begins with another one. A first epoch has new workers and empty caches; a later one has
whatever the loader kept. Server and round trip run on the same cores. The page cache is warm.

Writes bench/results/compare-DATE.json (its schema: bench/show/compare.schema.json; with --quick the name ends
in -quick), and prints its tables as docs/benchmarks.md shows them (see `bench.show.report`). --resume
continues an interrupted run. --quick measures fewer photos, turns and latencies; it installs nothing, and
compares with what is there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.status import Status

from bench.command import describe_machine, make_parser, write_result
from bench.data import BATCH, SIZE, WORKERS, WORKPLACE, make_shards, photo_folder
from bench.measure import growth, handover, object_sizes, parts
from bench.measure.limits import Limits, bare_get, handing_over, machine_limits
from bench.measure.record import QUICK, Record, Scale, commit
from bench.measure.sections import CORES, Case, Course, Place, choose_workers, load, take_turns
from bench.peers.contenders import (
    COLD,
    DECODE,
    GROWING,
    HEADLINE,
    LATER,
    OUTSIDE,
    Contender,
)
from bench.peers.environment import Unavailable, build_pillow, is_installed, python_of
from bench.peers.peer import make_own_files
from bench.show import report, report_page
from bench.show.figures import BUSY
from fastload.cli.demo.s3_server import S3Server, delay_proxy, serve_s3

SAY_EVERY = 60.0  # seconds
ALL = [
    *COLD,
    *(contender for modes in (LATER, DECODE) for group in modes.values() for contender in group),
]


# --- before anything is measured


def install(console: Console) -> dict[str, Any]:
    """Makes the missing environments, two at a time: {"reasons": {script: why it failed}, "minutes"}."""
    start = time.perf_counter()
    reasons: dict[str, str] = {}

    def make(script: str) -> None:
        try:
            python_of(script)
            console.print(f"installed: {script}")
        except Unavailable as error:
            reasons[script] = str(error)
            console.print(f"[red]not installed: {script}[/]: {error}")

    build_pillow()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make, sorted({*(contender.script for contender in ALL), *parts.SCRIPTS})))
    return {"reasons": reasons, "minutes": (time.perf_counter() - start) / 60}


def prepare(folder: Path, photographs: Path, count: int) -> None:
    """Makes the shards and the peers' own files: before the server starts, because it keeps its listings."""
    for form in ("tar", "tfrecord"):
        make_shards(folder, count, form)
    make_shards(photographs, count, "tar")
    make_own_files(folder, [contender for contender in ALL if is_installed(contender.script)])


# --- sections


@contextmanager
def place(server: S3Server, folder: Path, latency_ms: int) -> Iterator[Place]:
    with delay_proxy(server.endpoint_url, latency_ms / 1000) as proxy:
        yield Place(folder, server, proxy)


def contenders_here(record: Record, section: str, group: tuple[Contender, ...]) -> list[Contender]:
    """The installed ones of the group; the record notes the others."""
    reasons = record.parts.get("installed", {}).get("reasons", {})
    here = []
    for contender in group:
        if is_installed(contender.script):
            here.append(contender)
        else:
            why = reasons.get(contender.script, "not installed (--quick installs nothing)")
            record.miss(contender.name, section, why)
    return here


def with_workers(record: Record, course: Course, group: list[Contender], key: str) -> list[Contender]:
    """The group, each with its best number of workers on this course; untried, with its first."""
    if not record.scale.tried:
        return [replace(contender, workers=contender.workers[:1]) for contender in group]
    best = record.part(
        f"workers, {key}", lambda: {c.name: choose_workers(course, c).workers[0] for c in group}
    )
    return [replace(contender, workers=(best[contender.name],)) for contender in group]


def cold(record: Record, server: S3Server, folder: Path, bare: Limits) -> dict[str, Any]:
    """First epochs over all latencies by the same processes; the round trip changes between turns."""
    scale = record.scale
    with place(server, folder, 20) as at:
        course = Course(at, False, scale.repeats, scale.seconds, record.step)
        group = with_workers(record, course, contenders_here(record, "cold", COLD), "cold")
        name, decoding = bare.decoding("raw")
        cases = {
            ms: Case(
                {"bare parallel GET": bare_get(at), f"{name}, {CORES} threads": decoding},
                lambda ms=ms: at.proxy.set_round_trip(ms / 1000),
                frozenset(contender.name for contender in group if contender.is_away(ms)),
            )
            for ms in scale.latencies
        }
        turns = take_turns(course, group, cases)
        return joined(record.rows("cold", f"{ms} ms", turns[ms]) for ms in sorted(turns))


def later(record: Record, server: S3Server, folder: Path, mode: str, bare: Limits) -> dict[str, Any]:
    """Later epochs; whatever is still read from the store comes without a latency."""
    with place(server, folder, 0) as at:
        course = Course(at, True, record.scale.repeats, record.scale.seconds, record.step, warm_ups=3)
        group = contenders_here(record, "later", LATER[mode])
        group = with_workers(record, course, group, f"later {mode}")
        name, decoding = bare.decoding(mode)
        turns = take_turns(course, group, {mode: Case({f"{name}, {CORES} threads": decoding})})
        return record.rows("later", mode, turns[mode])


@contextmanager
def busy_core() -> Iterator[Callable[[bool], None]]:
    """A process that computes without end while it is switched on; yields the switch."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            yield lambda on: process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        finally:
            process.kill()


def headline(
    record: Record,
    server: S3Server,
    folder: Path,
    section: str,
    conditions: Mapping[str, Callable[[], None]] = MappingProxyType({"": lambda: None}),
) -> dict[str, Any]:
    """First and later epochs of the most important contenders under each condition, which take turns.

    Args:
        conditions: what ends the names of its cases -> how it begins; "" is that of the warm-up.
    """
    parts, scale = [], record.scale
    for epoch, chosen in HEADLINE.items():
        is_later = epoch == "later epochs"
        conditions[""]()
        with place(server, folder, 0 if is_later else 20) as at:
            warm_ups = 3 if is_later else 1
            course = Course(at, is_later, scale.repeats, scale.seconds, record.step, warm_ups)
            group = contenders_here(record, section, chosen)
            group = with_workers(record, course, group, "later raw" if is_later else "cold")
            cases = {f"{epoch}{words}": Case({}, begin) for words, begin in conditions.items()}
            turns = take_turns(course, group, cases)
            parts += [record.rows(section, case, turns[case]) for case in cases]
    return joined(parts)


def beside_load(record: Record, server: S3Server, folder: Path) -> dict[str, Any]:
    with busy_core() as switch:
        conditions = {"": partial(switch, False), BUSY: partial(switch, True)}
        return headline(record, server, folder, "load", conditions)


def worker_counts(record: Record, server: S3Server, folder: Path) -> list[dict[str, Any]]:
    """Some contenders with 1, 2, 4 ... workers, up to the cores, and with 8."""
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= max(8, CORES)]
    found = []
    for case, names in GROWING.items():
        is_cold = case.startswith("cold")
        chosen = [c for c in (COLD if is_cold else LATER["raw"]) if c.name in names]
        many = [replace(c, workers=(n,)) for c in chosen if is_installed(c.script) for n in counts]
        with place(server, folder, 20 if is_cold else 0) as at:
            course = Course(at, not is_cold, record.scale.repeats, 3.0, record.step, 1 if is_cold else 2)
            found += record.rows("growth", case, take_turns(course, many, {case: Case()})[case])["rows"]
    kept = ("contender", "case", "workers", "rates", "pss_bytes")
    return [{name: row[name] for name in kept} for row in found]


def decoding(record: Record, server: S3Server, folder: Path, mode: str) -> dict[str, Any]:
    """Decoding and cropping 256 photos in memory by one core, no loader."""
    with place(server, folder, 0) as at:
        course = Course(at, True, record.scale.repeats, record.scale.seconds, record.step)
        group = contenders_here(record, "decode", DECODE[mode])
        bounds = {}
        if mode != "decoded":  # there, nothing is decoded: the work is the resize itself
            name, bare = Limits(folder, threads=1, most=256).decoding(mode)
            bounds = {f"{name}, 1 thread": bare}
        return record.rows("decode", mode, take_turns(course, group, {mode: Case(bounds)})[mode])


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The rows and limits of several cases."""
    found: dict[str, Any] = {"rows": [], "limits": []}
    for part in parts:
        for name, entries in part.items():
            found[name] += entries
    return found


def handover_rows(record: Record) -> dict[str, Any]:
    """Batches of ready samples from two workers: only collating and passing on."""
    found: dict[str, Any] = {"rows": [], "limits": []}
    limit, sides = "copying the batch, 1 thread", {"fastload": "fastload", "torch DataLoader": "torch"}
    for case, dtype in (("float32", torch.float32), ("uint8", torch.uint8)):
        about, copying = {"section": "handover", "case": case}, handing_over(dtype.itemsize)
        rates: dict[str, list[float]] = {name: [] for name in (limit, *sides)}
        for turn in range(record.scale.repeats):
            record.step(f"hand-over, {case}")
            rates[limit].append(round(copying(), 1))
            for name in sorted(sides, reverse=turn % 2 == 1):
                rates[name].append(round(handover.rate(handover.LOADERS[sides[name]], dtype, 100), 1))
        found["limits"].append({**about, "name": limit, "rates": rates[limit], "unit": "images/s"})
        for name in sides:
            row = {**about, "contender": name, "workers": WORKERS, "rates": rates[name], "limit": limit}
            found["rows"].append(record.bare_row("ours", **row))
    return found


# --- the whole


def measure(record: Record, console: Console) -> dict[str, Any]:
    """All parts, in turn; the document."""
    scale, before = record.scale, load()
    installed = record.part("installed", lambda: install(console)) if scale.tried else {"minutes": 0.0}
    start = time.perf_counter()
    folder, photographs = photo_folder(scale.images), photo_folder(scale.images, photos="photographs")
    prepare(folder, photographs, scale.images)
    for (name, section), reason in OUTSIDE.items():
        record.miss(name, section, reason)
    machine = record.part("machine", lambda: machine_limits(WORKPLACE))
    bare = Limits(folder, CORES)
    with serve_s3(WORKPLACE) as server:
        found = [record.part("cold", lambda: cold(record, server, folder, bare))]
        found += [
            record.part(f"later {mode}", lambda mode=mode: later(record, server, folder, mode, bare))
            for mode in LATER
        ]
        found.append(record.part("load", lambda: beside_load(record, server, folder)))
        found.append(record.part("photographs", lambda: headline(record, server, photographs, "photographs")))
        found += [
            record.part(f"decode {mode}", lambda mode=mode: decoding(record, server, folder, mode))
            for mode in DECODE
        ]
        workers = record.part("growth, workers", lambda: worker_counts(record, server, folder))
    found.append(record.part("handover", lambda: handover_rows(record)))
    record.step("more objects")
    objects = record.part("growth, objects", lambda: growth.objects(scale.objects, scale.repeats))
    record.step("larger objects")
    sizes = record.part("growth, sizes", lambda: object_sizes.sizes(scale.object_bytes, scale.repeats))
    singles = {}
    for words in scale.parts:
        record.step(words[0])
        singles[words[0]] = record.part(words[0], lambda words=words: parts.measured(words))
    return {
        "bench": "compare",
        "schema": 1,
        "commit": commit(),
        "quick": scale.quick,
        **describe_machine(),
        "minutes": {
            "installing": round(installed["minutes"], 1),
            "measuring": round((time.perf_counter() - start) / 60, 1),
        },
        "settings": {
            "images": scale.images,
            "image_bytes": mean_bytes(folder),
            "photograph_bytes": mean_bytes(photographs),
            "size": SIZE,
            "batch": BATCH,
            "repeats": scale.repeats,
            "page_cache": "warm",
        },
        "load": {"before": before, "after": load()},
        "contenders": record.contenders,
        "unavailable": record.unavailable,
        "rows": [row for part in found for row in part["rows"]],
        "limits": [limit for part in found for limit in part["limits"]],
        "machine_limits": machine,
        "growth": {"workers": workers, "objects": objects, "sizes": sizes},
        "parts": singles,
    }


def mean_bytes(folder: Path) -> int:
    sizes = [path.stat().st_size for path in folder.rglob("*.jpg")]
    return round(sum(sizes) / len(sizes))


class Steps:
    """Reports progress: on a terminal in its last line, elsewhere once a minute; and each finished part."""

    def __init__(self, console: Console, status: Status) -> None:
        self.console, self.status = console, status
        self.began = self.said = time.perf_counter()

    def __call__(self, what: str, ended: bool = False) -> None:
        now = time.perf_counter()
        line = f"{(now - self.began) / 60:4.1f} min  {what}"
        if ended or (not self.console.is_terminal and now - self.said > SAY_EVERY):
            self.said = now
            self.console.print(line)
        else:
            self.status.update(line)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a short form; installs nothing")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True, width=110)
    WORKPLACE.mkdir(exist_ok=True)
    with console.status("starting") as status:
        step = Steps(console, status)
        record = Record(QUICK if given.quick else Scale(), given.resume, step)
        document = measure(record, console)
    path = write_result(document, "-quick" if given.quick else "")
    report.check(document)
    record.finish()
    print(report_page.markdown(document))
    console.print(f"written: {path}")
