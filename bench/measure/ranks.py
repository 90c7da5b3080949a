"""The wait of a step where some samples take 50 times as long: `python -m bench ranks [--ranks 4]`.

Each rank is a process with workers of its own and a part of the samples, and all ranks meet after each step,
as for an exchange of gradients (gloo). So a job waits for its slowest rank. A sample sleeps 1 ms, and one of
fifty sleeps 50 ms, the same ones for all contenders: sleeping takes no core, so that the figures show how
batches are spread, not how many cores there are. A step takes as long as the workers need on average, divided
by --load.

Contenders take turns, each time in new processes: torch's loader, and fastload's with two batches made ahead
(torch's default), with eight, and with num_workers="auto". The limit of "auto" is --workers here, and all
cores count as idle, as the samples only sleep. Each runs --epochs epochs, of which the last one counts.

The table has the job's wait at a step, in milliseconds, and the part of the time in which it did not wait.
The document also has the maximum, and the part of the workers' time in which they were held back, as they had
finished all that they may make ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import fastload
from bench.command import begin, finish, make_parser
from bench.data import ROOT
from fastload.workers.autoscale import Autoscaler

FAST = 0.001  # seconds
CONTENDERS: dict[str, dict[str, Any]] = {
    "torch, 2 ahead": {"torch": True, "prefetch_factor": 2},
    "2 ahead": {"prefetch_factor": 2},
    "8 ahead": {"prefetch_factor": 8},
    "auto": {},
}


class Job(NamedTuple):
    """One run of one contender."""

    contender: str
    ranks: int
    workers: int
    batch: int
    steps: int
    epochs: int
    slow: float  # part of the samples
    times: float  # as slow as the others
    load: float

    @property
    def step_seconds(self) -> float:
        """Of the training, so that workers are busy for `load` of their time."""
        sample = FAST * (1 + self.slow * (self.times - 1))
        return self.batch * sample / self.workers / self.load


class HeavyTail(Dataset[int]):
    """Samples that sleep; which ones do so for long is a function of the index."""

    def __init__(self, job: Job) -> None:
        chances = torch.rand(job.ranks * job.batch * job.steps, generator=torch.Generator().manual_seed(7))
        self._seconds: list[float] = torch.where(chances < job.slow, FAST * job.times, FAST).tolist()

    def __len__(self) -> int:
        return len(self._seconds)

    def __getitem__(self, index: int) -> int:
        time.sleep(self._seconds[index])
        return index


def run_rank(job: Job) -> None:
    """One rank; prints the waits of its last epoch, and what its workers did."""
    dist.init_process_group("gloo")
    rank, options = dist.get_rank(), dict(CONTENDERS[job.contender])
    kind: Any = torch.utils.data.DataLoader if options.pop("torch", False) else fastload.DataLoader
    options = {"num_workers": job.workers, "persistent_workers": True} | options
    dataset = HeavyTail(job)
    sampler = fastload.DistributedSampler(dataset, num_replicas=job.ranks, rank=rank, seed=1)
    loader = kind(dataset, job.batch, sampler=sampler, multiprocessing_context="fork", **options)
    if job.contender == "auto":
        cores = float(job.ranks * job.workers)
        loader._context.autoscaler = Autoscaler(job.workers, cores=cores, busy=lambda: 0.0)
    waits, found, seconds = list[float](), list[int](), 0.0
    held_back = 0.0
    for _ in range(job.epochs):
        waits, found, seconds, held_back = [], [], -time.perf_counter(), -held_back_seconds(loader)
        batches = iter(loader)
        while True:
            dist.barrier()
            begin = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            waits.append(time.perf_counter() - begin)
            found += batch.tolist()
            time.sleep(job.step_seconds)
        seconds += time.perf_counter()
    report: dict[str, Any] = {"waits": waits, "samples": len(set(found)), "held_back": None, "choice": ""}
    if isinstance(loader, fastload.DataLoader):
        stats = loader.stats()
        workers = stats["rates"]["workers"]
        report["held_back"] = (held_back + held_back_seconds(loader)) / (workers * seconds)
        report["choice"] = stats["autoscale"]
    reports: list[Any] = [None] * job.ranks
    dist.all_gather_object(reports, report)
    if rank == 0:
        print(json.dumps(reports))
    dist.destroy_process_group()


def held_back_seconds(loader: Any) -> float:
    """Of all epochs and workers; 0 for torch's loader."""
    if not isinstance(loader, fastload.DataLoader):
        return 0.0
    return float(loader.stats()["counters"].get("slot.seconds", 0.0))


def run(job: Job) -> list[dict[str, Any]]:
    """The reports of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bench", "ranks", "--rank", json.dumps(job)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    place |= {"WORLD_SIZE": str(job.ranks), "LOCAL_WORLD_SIZE": str(job.ranks)}
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(job.ranks)
    ]
    try:
        out = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"ranks ended with {[process.returncode for process in processes]}: see above")
    reports: list[dict[str, Any]] = json.loads(out[0].splitlines()[-1])
    expected = job.batch * job.steps
    if any(report["samples"] != expected for report in reports):
        raise SystemExit(f"{job.contender}: a rank did not get its {expected} samples exactly once")
    return reports


def row(job: Job, runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """What the job waited for at each step: its slowest rank."""
    of_ranks = ([report["waits"] for report in reports] for reports in runs)
    waits = sorted(max(step) for ranks in of_ranks for step in zip(*ranks, strict=True))
    total = sum(waits) + len(waits) * job.step_seconds
    held = [report["held_back"] for reports in runs for report in reports if report["held_back"] is not None]
    return {
        "contender": job.contender,
        "p50_ms": 1000 * statistics.median(waits),
        "p99_ms": 1000 * waits[int(0.99 * len(waits))],
        "max_ms": 1000 * waits[-1],
        "not_waiting": 1 - sum(waits) / total,
        "held_back": statistics.mean(held) if held else None,
        "choices": sorted({report["choice"] for reports in runs for report in reports} - {""}),
    }


def main() -> None:
    parser = make_parser(__doc__, results=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--workers", type=int, default=4, help="of a rank")
    parser.add_argument("--batch-size", type=int, default=8, help="of a rank")
    parser.add_argument("--steps", type=int, default=600, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--slow", type=float, default=0.02, help="part of the samples that are slow")
    parser.add_argument("--times", type=float, default=50, help="as slow as the others")
    parser.add_argument("--load", type=float, default=0.6, help="of the workers, if batches were all alike")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=list(CONTENDERS), action="append", help="these contenders")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        return run_rank(Job(*json.loads(given.rank)))
    numbers = (given.ranks, given.workers, given.batch_size, given.steps, given.epochs)
    jobs = [Job(name, *numbers, given.slow, given.times, given.load) for name in given.only or CONTENDERS]
    document = begin("ranks")
    runs: dict[str, list[Any]] = {job.contender: [] for job in jobs}
    for _ in range(given.repeats):
        for job in jobs:
            runs[job.contender].append(run(job))
    document |= {"job": jobs[0]._replace(contender="")._asdict(), "repeats": given.repeats}
    document["step_ms"] = 1000 * jobs[0].step_seconds
    document["rows"] = [row(job, runs[job.contender]) for job in jobs]
    finish(document, given.results)
