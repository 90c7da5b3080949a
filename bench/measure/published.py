"""A second, empty machine that takes a published cache.

    python -m bench published

Each run is a new process, one epoch of `ImageFolder` over the S3 server 20 ms away, whose proxy counts the
requests. Contenders take turns: "alone" an empty cache, "remote" an empty cache with `Cache(remote=)`,
"pulled" one that is pulled before the epoch, and "warm" a cache that has all. A node with `push=True`
publishes first. The requests are all of a run, those for listings and the pull included.

The rate counts from the first batch on; "wait" is the time from the beginning of the epoch to its first
batch, with the pull of "pulled".
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import fastload
from bench.command import begin, finish, make_parser
from bench.data import BATCH, ROOT, ROUND_TRIP, SIZE, WORKERS, photo_folder
from fastload.cache.exchange import pull
from fastload.cache.remote import close_all
from fastload.cli.demo.delay_proxy import Counts
from fastload.cli.demo.s3_server import Proxy, delay_proxy, serve_s3

CONTENDERS = ("alone", "remote", "pulled", "warm")


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


def rounds(photos: Path, count: int, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """The reports of each contender, which take turns."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with ExitStack() as stack:
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
    return runs


def main() -> None:
    parser = make_parser(__doc__, results=True)
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--node", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.node:
        return run_node(Job(*json.loads(given.node)))
    document = begin("published")
    runs = rounds(photo_folder(given.photos), given.photos, given.repeats)
    document |= {"photos": given.photos, "repeats": given.repeats}
    names = ("rate", "with_wait", "wait", "requests", "pulled", "child_peak_mb")
    document["medians"] = {
        name: {one: statistics.median(run[one] for run in reports) for one in names}
        for name, reports in runs.items()
    }
    finish(document | {"runs": runs}, given.results)
