"""What workers cost: first batch, memory and connections, over their number and how they start.

`python -m bench starts [--images 1000] [--rounds 3] [--quick]`. RandomResizedCrop(224), batches of
64. First epochs fill a default cache from S3 20 ms away, whose server runs on the same cores. Starts read a
local folder with 8 workers, for each way to start a process. Contenders are fastload, whose workers are
threads of one process; the same with `processes=True`; and torch's loader over Pillow. All take turns, each
time in a new process, which knows its files before the clock starts. Memory is the PSS of all processes, at
its highest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from bench.command import begin, finish, make_parser

LOOK = 0.2  # seconds between two looks at memory and connections
THREADS, PROCESSES, TORCH = "fastload", "fastload, processes", "torch + Pillow"
Job = dict[str, Any]


class Photos(Dataset[Any]):
    """A folder as everybody reads it."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(Path(folder).glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        import numpy as np
        import torch
        from PIL import Image

        with Image.open(self.paths[index]) as photo:
            side = min(photo.size) * random.uniform(0.3, 1)
            x, y = (random.uniform(0, whole - side) for whole in photo.size)
            crop = photo.convert("RGB").resize(
                (224, 224), Image.Resampling.BILINEAR, (x, y, x + side, y + side)
            )
        return torch.from_numpy(np.asarray(crop)).permute(2, 0, 1), 0


def loader_of(job: Job) -> Any:
    """Return the loader of a job, over a dataset that knows its files."""
    options = {
        "batch_size": 64,
        "shuffle": True,
        "num_workers": job["workers"],
        "multiprocessing_context": job["context"],
    }
    if job["side"] == TORCH:
        return TorchLoader(Photos(job["url"]), **options)
    import fastload

    cache = {"cache": fastload.Cache(job["cache"])} if job["cache"] else {}
    crop = fastload.RandomResizedCrop(224, flip=0.5)
    dataset = fastload.ImageFolder(job["url"], crop, storage_options=job["access"], **cache)
    assert len(dataset) > 0
    return fastload.DataLoader(dataset, processes=job["side"] == PROCESSES, **options)


def run(job: Job) -> None:
    """Do a job in this process, and print its figures."""
    from bench.peers.peer import (  # not above: spawned workers import this module too
        connections_of,
        memory_of,
    )

    loader = loader_of(job)
    start = time.perf_counter()
    looked, first, images, memory, connections = start, 0.0, 0, 0.0, 0
    for batch, _ in loader:
        now = time.perf_counter()
        first = first or now - start
        images += len(batch)
        if now - looked > LOOK:
            memory = max(memory, memory_of(os.getpid()) / 1e6)
            connections = max(connections, connections_of(os.getpid()))
            looked = time.perf_counter()
    rate = images / (time.perf_counter() - start)
    print(json.dumps({"first": first, "rate": rate, "memory": memory, "connections": connections}))


def measured(job: Job) -> Job:
    """Do a job in a new process; return its figures."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.measure.starts", "--job", json.dumps(job)]
    with tempfile.TemporaryDirectory(dir=job["cache"]) as cache:
        command[-1] = json.dumps(job | {"cache": cache if job["cache"] else None})
        said = subprocess.check_output(command, text=True)
    figures: Job = json.loads(said.splitlines()[-1])
    return figures


def jobs(place: Any, folder: Path, workplace: Path, *, quick: bool) -> list[Job]:
    """The jobs of a round."""
    filling = {"url": f"s3://{place.bucket}/", "access": place.options, "cache": str(workplace)}
    local = {"url": str(folder), "access": None, "cache": None, "workers": 2 if quick else 8}
    counts, contexts = ([2], ["fork"]) if quick else ([2, 8, 16], ["fork", "forkserver", "spawn"])
    return [
        *(
            filling | {"what": "first epoch from S3", "context": "fork", "workers": workers, "side": side}
            for workers in counts
            for side in (THREADS, PROCESSES)
        ),
        *(
            local | {"what": "start, local folder", "context": context, "side": side}
            for context in contexts
            for side in (THREADS, PROCESSES, TORCH)
        ),
    ]


def main() -> None:
    parser = make_parser(__doc__, results=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="2 workers, fork, one round")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        run(given.job)
        return
    from bench.data import ROUND_TRIP, WORKPLACE, photo_folder
    from bench.measure.cold import places

    result = begin("starts")
    taken: dict[str, list[Job]] = {}
    with places(given.images) as at:
        todo = jobs(at[int(ROUND_TRIP * 1000)], photo_folder(given.images), WORKPLACE, quick=given.quick)
        for _ in range(1 if given.quick else given.rounds):
            for job in todo:
                named = {name: job[name] for name in ("what", "context", "workers", "side")}
                taken.setdefault(json.dumps(named), []).append(measured(job))
    rows = [
        json.loads(job) | {name: statistics.median(each[name] for each in figures) for name in figures[0]}
        for job, figures in taken.items()
    ]
    result |= {"images": given.images, "rounds": given.rounds, "rows": rows}
    finish(result, given.results)


if __name__ == "__main__":
    main()
