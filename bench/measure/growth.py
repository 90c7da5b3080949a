"""Growth of the data set: the start with more objects, and the rate with larger ones.

    python -m bench growth [--quick | --objects N]

Objects: the time from the start of a process to its first batch, with a thousand to ten million objects
behind the listing of `bench.measure.listing_server`, on this machine and without a round trip; 2 workers; a
new process each time. From 1,000,000 objects on, the two peers run beside each other, because each keeps only
one core busy; over 10,000,000 they do not run, as each takes 20 minutes. "again" is a second process with the
same cache. It lists again, as every run does that has no `listing_max_age=`. Memory is the PSS of all
processes at the first batch; the common pages of two contenders count half each.

Sizes: bytes per second of objects of 10 KiB to 10 MiB, nothing decoded, from the S3 server 20 ms away, with 2
workers that run already. obstore alone, in two processes with 32 threads each, is the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from bench.command import begin, finish, make_parser
from bench.data import BATCH, ROOT, SIZE, WORKERS
from bench.measure.object_sizes import BOTO3, OURS, S3FS, Bytes, sizes

TOGETHER = 1_000_000  # objects, from which on listing takes each peer more than a minute
TURNS_SECONDS = 10.0  # after which no further turn begins
ALONE = 10_000_000  # objects, from which on only fastload runs
MOST_SECONDS = 240.0


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="the two smallest of each, twice")
    parser.add_argument("--objects", type=int, metavar="N", help="only the start over so many objects")
    parser.add_argument("--start", metavar="JOB", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        return run_until_first_batch(SimpleNamespace(**json.loads(given.start)))
    # Not above: the processes whose start is measured import this module too.
    from bench.measure.record import QUICK, Scale, commit

    scale = QUICK if given.quick else Scale()
    repeats, counts, byte_counts = scale.repeats, scale.objects, scale.object_bytes
    document = begin("growth") | {"commit": commit()}
    if given.objects:
        counts, byte_counts = (given.objects,), ()
    found = {"objects": objects(counts, repeats), "sizes": sizes(byte_counts, repeats) if byte_counts else []}
    show(found)
    finish(document | found)


# --- objects


class Start(NamedTuple):
    """Seconds from the start of a process to its first batch, and the memory of its family at that time."""

    seconds: float
    pss: int


def objects(counts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each count and contender: at least one turn of all, at most `repeats`, within about 10 s.

    A contender without a first batch within 240 s has no row.
    """
    from bench.measure.listing_server import bucket_of, serve_listing

    # Now all packages are in the page cache: no contender is the first to read them from the disk.
    subprocess.run([sys.executable, "-c", "import torch, obstore, s3fs, boto3, PIL.Image"], check=True)
    rows = []
    with serve_listing() as endpoint:
        for count in counts:
            job = {"endpoint": endpoint, "bucket": bucket_of(count), "key": "any", "secret": "any"}
            begin, turns = time.monotonic(), 0
            found = {name: new_row(name, count) for name in (OURS, S3FS, BOTO3)}
            while turns < repeats and (not turns or time.monotonic() - begin < TURNS_SECONDS):
                take_turn(job, found, beside=count >= TOGETHER)
                turns += 1
            rows += [finished(row) for row in found.values() if row["start_seconds"]]
    return rows


def new_row(contender: str, count: int) -> dict[str, Any]:
    again = [] if contender == OURS else None
    row = {"contender": contender, "objects": count, "start_seconds": [], "again_seconds": again}
    return row | {"pss_bytes": [], "manifest_bytes": None}


def finished(row: dict[str, Any]) -> dict[str, Any]:
    memory = round(statistics.median(row["pss_bytes"]))
    return row | {"pss_bytes": memory, "again_seconds": row["again_seconds"] or None}


def take_turn(job: dict[str, Any], rows: dict[str, dict[str, Any]], *, beside: bool) -> None:
    """Start each contender once."""
    with tempfile.TemporaryDirectory() as cache:
        row = rows[OURS]
        note(row, start(job | {"contender": OURS, "cache": cache}))
        again = start(job | {"contender": OURS, "cache": cache})
        row["again_seconds"] += [round(again.seconds, 3)] if again else []
        row["manifest_bytes"] = sum(path.stat().st_size for path in Path(cache).rglob("*.manifest"))
    if row["objects"] >= ALONE:
        return
    with ThreadPoolExecutor(2 if beside else 1) as pool:
        jobs = [job | {"contender": name} for name in (S3FS, BOTO3)]
        for name, made in zip((S3FS, BOTO3), pool.map(start, jobs), strict=True):
            note(rows[name], made)


def note(row: dict[str, Any], made: Start | None) -> None:
    if made is not None:
        row["start_seconds"].append(round(made.seconds, 3))
        row["pss_bytes"].append(made.pss)


def start(job: dict[str, Any]) -> Start | None:
    """A new process up to its first batch; None where there is none in time."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "bench.measure.growth", "--start", json.dumps(job)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, text=True, cwd=ROOT, env=environment
        ) as process,
    ):
        timer = threading.Timer(MOST_SECONDS, process.kill)
        timer.start()
        assert process.stdout is not None
        said = process.stdout.readline()
        seconds = time.perf_counter() - begin
        timer.cancel()
        if said == "first batch\n":
            from bench.peers.peer import memory_of

            return Start(seconds, memory_of(process.pid))
        errors.seek(0)
        last = errors.read()[-2000:]
        print(f"{job['contender']}, {job['bucket']}: no batch in {seconds:.0f} s\n{last}", file=sys.stderr)
        return None


def run_until_first_batch(job: SimpleNamespace) -> None:
    """The work of a new process: list, start two workers, take a batch, wait for stdin to close."""
    loader = our_loader(job) if job.contender == OURS else peer_loader(job)
    batches = iter(loader)
    images, labels = next(batches)
    assert images.shape == (BATCH, 3, SIZE, SIZE) and len(labels) == BATCH
    print("first batch", flush=True)
    sys.stdin.read()


def our_loader(job: SimpleNamespace) -> Any:
    from fastload import DataLoader, ImageFolder, RandomResizedCrop

    access = {"endpoint_url": job.endpoint, "key": job.key, "secret": job.secret}
    data = ImageFolder(
        f"s3://{job.bucket}/", RandomResizedCrop(SIZE, flip=0.5), cache=job.cache, storage_options=access
    )
    return DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS)


def peer_loader(job: SimpleNamespace) -> Any:
    from torch.utils.data import DataLoader

    keys = list_by_s3fs(job) if job.contender == S3FS else list_by_boto3(job)
    classes = {name: label for label, name in enumerate(sorted({key.split("/")[0] for key in keys}))}
    data = Photos(job, [(key, classes[key.split("/")[0]]) for key in keys])
    return DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS)


def list_by_s3fs(job: SimpleNamespace) -> list[str]:
    import s3fs

    fs = s3fs.S3FileSystem(endpoint_url=job.endpoint, key=job.key, secret=job.secret)
    return [path.partition("/")[2] for path in fs.find(job.bucket)]


def list_by_boto3(job: SimpleNamespace) -> list[str]:
    from bench.peers.scripts.peer_side import s3_client

    pages = s3_client(job).get_paginator("list_objects_v2").paginate(Bucket=job.bucket)
    return [found["Key"] for page in pages for found in page["Contents"]]


class Photos(Bytes):
    """Crops of photos, with labels; `keys` are pairs of (key, label)."""

    def __getitem__(self, index: int) -> Any:
        from bench.peers.scripts.peer_side import decode

        key, label = self.keys[index]
        return decode(self.read(key), SIZE), label


# --- the tables


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 100)
    table = Table("objects", "", "first batch, s", "again, s", "memory, MB", "listing on disk, MB")
    for row in found["objects"]:
        again = f"{statistics.median(row['again_seconds']):.2f}" if row["again_seconds"] else ""
        kept = f"{row['manifest_bytes'] / 1e6:.1f}" if row["manifest_bytes"] else ""
        first = f"{statistics.median(row['start_seconds']):.2f}"
        memory = f"{row['pss_bytes'] / 1e6:,.0f}"
        table.add_row(f"{row['objects']:,}", row["contender"], first, again, memory, kept)
    console.print(table)
    if not found["sizes"]:
        return
    table = Table("object, KiB", "", "MB/s", "lowest", "highest")
    for row in found["sizes"]:
        made = [rate / 1e6 for rate in row["bytes_per_second"]]
        shown = [f"{value:,.1f}" for value in (statistics.median(made), min(made), max(made))]
        table.add_row(f"{row['object_bytes'] >> 10:,}", row["contender"], *shown)
    console.print(table)


if __name__ == "__main__":
    main()
