"""A second, empty machine that takes a published cache.

    python -m bench published [--peers] [--save]

Each run is a new process, one epoch of `ImageFolder` over the S3 server 20 ms away, whose proxy counts the
requests. Contenders take turns: "alone" an empty cache, "remote" an empty cache with `Cache(remote=)`,
"pulled" one that is pulled before the epoch, and "warm" a cache that has all. A node with `push=True`
publishes first. The requests are all of a run, those for listings and the pull included.

The rate counts from the first batch on; "wait" is the time from the beginning of the epoch to its first
batch, with the pull of "pulled".

With --peers, loaders that read shards of their own take part, with 2 workers, each in a process that keeps
running, from the second epoch on; such an epoch reads all again, as on a machine without a cache.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

import fastload
from bench.command import begin, finish, make_parser
from bench.data import BATCH, ROOT, ROUND_TRIP, SIZE, WORKERS, make_shards, photo_folder
from bench.measure.sections import Course, Entrant, Place
from bench.peers.contenders import COLD, Contender
from bench.peers.peer import Run, make_own_files
from fastload.cache.exchange import pull
from fastload.cache.remote import close_all
from fastload.cli.demo.delay_proxy import Counts
from fastload.cli.demo.s3_server import Proxy, delay_proxy, serve_s3
from fastload.cli.report import figures

CONTENDERS = ("alone", "remote", "pulled", "warm")
PEERS = ("WebDataset", "LitData, chunks", "MosaicML Streaming")


class Job(NamedTuple):
    """One process: one of `CONTENDERS`, or "publishing", which fills a cache and publishes it."""

    contender: str
    cache: str
    photos: str
    options: dict[str, str]


def run_node(job: Job) -> None:
    """One node, one epoch; prints what it took."""
    packs = fastload.open_store("s3://packs/run", **job.options)
    publishing = job.contender == "publishing"
    remote = packs if publishing or job.contender == "remote" else None
    cache = fastload.Cache(job.cache, "raw", remote=remote, push=publishing)
    transform = fastload.RandomResizedCrop(SIZE)
    dataset = fastload.ImageFolder(f"s3://{job.photos}", transform, cache=cache, storage_options=job.options)
    loader = fastload.DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS)
    begin = time.perf_counter()
    if job.contender == "pulled":
        pull(cache, packs)
    first, samples = 0.0, 0
    for images, _ in loader:
        first = first or time.perf_counter()
        samples += len(images)
    end = time.perf_counter()
    counters = loader.stats()["counters"]
    dataset.close()
    close_all()
    report = {
        "samples": samples,
        "rate": (samples - BATCH) / (end - first),
        "with_wait": samples / (end - begin),
        "wait": first - begin,
        "pulled": counters.get("cache.pulled", 0),
        "child_peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3,
    }
    print(json.dumps(report))


def run(job: Job, proxy: Proxy, samples: int) -> dict[str, Any]:
    """The report of one node, and its requests."""
    before = proxy.counts()
    command = [sys.executable, "-m", "bench", "published", "--node", json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    after = proxy.counts()
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if report["samples"] != samples:
        raise SystemExit(f"an epoch had {report['samples']} samples, not {samples}")
    report["requests"] = requests_between(before, after)
    return report


def requests_between(before: Counts, after: Counts) -> int:
    names = ("object_gets", "listings", "other_requests")
    return sum(getattr(after, name) - getattr(before, name) for name in names)


def peers() -> list[Contender]:
    return [replace(one, workers=(WORKERS,)) for one in COLD if one.name in PEERS]


def prepare(photos: Path, count: int) -> None:
    """Make the shards of the peers: before their server starts, because it keeps its listings."""
    make_shards(photos, count, "tar")
    make_own_files(photos, peers())


@contextmanager
def started_peers(photos: Path) -> Iterator[tuple[Course, list[Entrant]]]:
    with serve_s3(photos.parent) as server, delay_proxy(server.endpoint_url, ROUND_TRIP) as proxy:
        course = Course(
            Place(photos, server, proxy), later=False, repeats=1, seconds=300, step=lambda _: None
        )
        failed: dict[str, str] = {}
        with course.started(peers(), failed) as entrants:
            if failed:
                raise SystemExit(f"peers that do not run here: {failed}")
            yield course, entrants


def report_of(run: Run, requests: int) -> dict[str, Any]:
    return {
        "samples": run.images,
        "rate": (run.images - BATCH) / (run.seconds - run.first_batch),
        "with_wait": run.rate,
        "wait": run.first_batch,
        "requests": requests,
    }


def run_peer(course: Course, entrant: Entrant) -> dict[str, Any]:
    before = course.place.proxy.counts()
    run = entrant.peer.epoch(course.seconds)
    return report_of(run, requests_between(before, course.place.proxy.counts()))


def rounds(photos: Path, count: int, repeats: int, with_peers: bool) -> dict[str, list[dict[str, Any]]]:
    """The reports of each contender, which take turns."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with ExitStack() as stack:
        course, entrants = stack.enter_context(started_peers(photos)) if with_peers else (None, [])
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=photos.parent)))
        (root / "s3" / "packs").mkdir(parents=True)
        shutil.copytree(photos, root / "s3" / "photos", copy_function=os.link)
        server = stack.enter_context(serve_s3(root / "s3", read_only=False))
        proxy = stack.enter_context(delay_proxy(server.endpoint_url, ROUND_TRIP))
        options = {**server.options, "endpoint_url": proxy.url}
        run(Job("publishing", str(root / "full"), "photos", options), proxy, count)
        for turn in range(repeats):
            for name in CONTENDERS:
                cache = root / ("full" if name == "warm" else f"{name}-{turn}")
                runs[name].append(run(Job(name, str(cache), "photos", options), proxy, count))
            for entrant in entrants:
                assert course is not None
                runs.setdefault(entrant.contender.name, []).append(run_peer(course, entrant))
    return runs


def main() -> None:
    parser = make_parser(__doc__, save=True)
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help=f"beside {'; '.join(PEERS)}")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.node:
        return run_node(Job(*json.loads(given.node)))
    document = begin("published")
    photos = photo_folder(given.photos)
    if given.peers:
        prepare(photos, given.photos)
    runs = rounds(photos, given.photos, given.repeats, given.peers)
    document |= {"photos": given.photos, "repeats": given.repeats}
    names = ("rate", "with_wait", "wait", "requests", "pulled", "child_peak_mb")
    document["medians"] = {
        name: {one: statistics.median(run[one] for run in reports) for one in names if one in reports[0]}
        for name, reports in runs.items()
    }
    document["of_warm"] = [
        remote["rate"] / warm["rate"] for remote, warm in zip(runs["remote"], runs["warm"], strict=True)
    ]
    document["runs"] = runs
    show(document)
    finish(document, save=given.save)


def show(document: dict[str, Any]) -> None:
    table = figures("", "images/s", "with the wait", "wait s", "requests")
    table.title = f"First epoch of {document['photos']} photos, {document['repeats']} interleaved rounds"
    for name, found in document["medians"].items():
        rates = [f"{found['rate']:,.0f}", f"{found['with_wait']:,.0f}", f"{found['wait']:.1f}"]
        table.add_row(name, *rates, f"{found['requests']:,.0f}")
    Console().print(table)
    ratios = ", ".join(f"{ratio:.2f}" for ratio in document["of_warm"])
    print(f"remote of warm, by rounds: {ratios}")
