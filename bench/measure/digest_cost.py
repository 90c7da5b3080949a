"""The CPU time that the digest and the sample log cost, against a checkout that has neither.

    python -m bench digest_cost [--before DIR] [--rounds 7]

First what is done for each batch, alone: its fingerprint, the way through a pipe, and the sum. Then whole
epochs. DIR is an older checkout with its compiled kernel. The sides take turns, each in a process of its own,
which makes batches itself (`num_workers=0`): so the CPU time of that process is all there is. Each process
reads one epoch that fills the cache, and then measures whole epochs.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.data import ROOT, photo_folder
from fastload import ImageFolder, RandomResizedCrop
from fastload.datasets.wrappers import view_of
from fastload.trace.digest import Digest
from fastload.workers.batch import fingerprint_of

IMAGES, BATCH = 256, 64
EPOCHS = {"raw": 4, "decoded": 40, "numbers": 4}
_CHILD = """
import sys, time
import torch
from fastload import Cache, DataLoader, ImageFolder, RandomResizedCrop

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 50_000
    def __getitem__(self, index): return index

case, folder, cache, epochs, batch, log = sys.argv[1:]
if case == "numbers":
    dataset = Numbers()
else:
    dataset = ImageFolder(folder, RandomResizedCrop(224, flip=0.5), cache=Cache(cache, case))
options = {"sample_log": log} if log else {}
loader = DataLoader(dataset, int(batch), shuffle=True, **options)
count = sum(1 for _ in loader) * 0 + len(dataset)
begin = time.process_time()
for _ in range(int(epochs)):
    for _ in loader:
        pass
print((time.process_time() - begin) / count / int(epochs) * 1e6)
"""


def cpu_per_sample(checkout: Path, case: str, photos: Path, scratch: Path, log: str = "") -> float:
    """Microseconds."""
    command = [sys.executable, "-c", _CHILD, case, str(photos), str(scratch / case)]
    command += [str(EPOCHS[case]), str(BATCH), log]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


def alone(dataset: Any, size: int, *, logged: bool) -> float:
    """Microseconds a sample: the fingerprint of a batch, pickled and unpickled, and added to the digest."""
    view, digest = view_of(dataset), Digest()
    indices = [random.Random(0).randrange(len(dataset)) for _ in range(size)]
    times = []
    for _ in range(9):
        begin = time.process_time()
        for step in range(300):
            made = fingerprint_of(view, indices, 1, 0, seeded=False, logged=logged)
            digest.add(0, step, pickle.loads(pickle.dumps(made)))
        times.append((time.process_time() - begin) / 300 / size * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    photos, found = photo_folder(IMAGES), {}
    folder = ImageFolder(str(photos), RandomResizedCrop(224, flip=0.5))
    for size in (32, 64, 256):
        for name, dataset in {"ImageFolder": folder, "numbers": list(range(100_000))}.items():
            digest, log = (alone(dataset, size, logged=logged) for logged in (False, True))
            print(
                f"{name}, batches of {size}: {digest:.2f} us a sample, with a log {log:.2f}", file=sys.stderr
            )
    if options.before is None:
        return
    for case in EPOCHS:
        sides: dict[str, list[float]] = {"before": [], "digest": [], "digest and log": []}
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            for _ in range(options.rounds):
                sides["before"].append(cpu_per_sample(options.before, case, photos, scratch))
                sides["digest"].append(cpu_per_sample(ROOT, case, photos, scratch))
                log = str(scratch / "log")
                sides["digest and log"].append(cpu_per_sample(ROOT, case, photos, scratch, log))
            Console(stderr=True).print(case, sides)
        found[case] = {name: statistics.median(times) for name, times in sides.items()}
        ratios = zip(sides["digest"], sides["before"], strict=True)
        found[case]["ratio"] = statistics.median([after / before for after, before in ratios])
    table = Table("epochs of", *next(iter(found.values())), title="CPU microseconds a sample, medians")
    for case, row in found.items():
        table.add_row(case, *[f"{value:.3f}" for value in row.values()])
    Console().print(table)


if __name__ == "__main__":
    main()
