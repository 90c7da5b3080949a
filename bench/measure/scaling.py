"""Throughput of examples/resnet50 over the number of ranks: `python -m bench scaling --ranks 1,2 [--node 2]`.

Each number of ranks is a run of its own under torchrun on this machine, one after the other. Each rank has a
simulated device of 505 images/s, MLPerf Storage v3's B200, and exchanges no gradients: the table shows the
losses of loader and trainer, not those of a GPU. --rate 0 takes the real devices. Other options go to the
trainer: `--rate 0 --amp fp16`.

The columns are MoXing's. speedup is the FPS of N GPUs over N times the FPS of one; dist_speedup is that
over the speedup of one full node of --node GPUs (default: the most ranks), so it shows the loss between
nodes alone. The run of one rank is the baseline. It has all cores for itself, so the losses from shared
cores are in the speedup. FPS are medians over the epochs from the second on, after the first step; the
first run fills the cache.

Prints the table and writes scaling-DATE.json and its chart, for light and dark pages, into bench/results.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.command import begin, make_parser, write_result
from bench.data import RESULTS, WORKPLACE
from bench.measure.trainer import TRAIN, epochs_of, photo_tree
from bench.show import scaling_table


def counts(ranks: list[int], node: int | None) -> tuple[list[int], int]:
    """The numbers of ranks to run, with those that the columns need, 1 and a full node; and the latter."""
    if min(ranks) < 1 or (node or 1) < 1:
        raise SystemExit(f"--ranks and --node count GPUs from 1 on, found {ranks} and {node}")
    full = node or max(ranks)
    return sorted({1, full, *ranks}), full


class Runs:
    """Runs of the trainer on photos and a cache in one directory."""

    def __init__(self, directory: Path, given: argparse.Namespace, options: list[str]) -> None:
        self._directory = directory
        self._options = [str(photo_tree(directory, given.images)), "--cache", str(directory / "cache")]
        self._options += ["--no-eval", "--on-error", "raise", "--batch-size", str(given.batch_size)]
        self._options += ["--num-workers", str(given.workers), "--epochs", str(given.epochs), *options]
        if given.rate:
            self._options += ["--simulate-gpu-rate", str(given.rate)]

    def __call__(self, ranks: int) -> list[dict[str, Any]]:
        """The report of each epoch."""
        out = self._directory / f"run-{ranks}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(TRAIN), *self._options, "--out", str(out)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        return epochs_of(out)


def row(epochs: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the table, without the columns that need other rows."""
    later, last = epochs[1:] or epochs, epochs[-1]
    rate = statistics.median(line["FPS after the first step"] for line in later)
    return {
        "GPUs": last["GPUs"],
        "batch/s": round(rate / last["batch size"], 3),
        "batch size": last["batch size"],
        "FPS": rate,
        "FPS of epochs": [line["FPS after the first step"] for line in later],
        "utilisation": statistics.median(line["utilisation"] for line in later),
        "limit": last["limit"],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, as 1,2,4")
    parser.add_argument("--node", type=int, help="GPUs of a full node; default: the most ranks")
    parser.add_argument("--rate", type=float, default=505, help="images/s of a device; 0: the real one")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=24, help="of a rank")
    parser.add_argument("--workers", type=int, default=1, help="of a rank")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON and the chart")
    given, options = parser.parse_known_args()
    ranks, node = counts([int(count) for count in given.ranks.split(",")], given.node)
    document = begin("scaling")
    WORKPLACE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORKPLACE) as directory:
        run = Runs(Path(directory), given, options)
        rows = [row(run(count)) for count in ranks]
    document |= {
        "images": given.images,
        "device_rate": given.rate or None,
        "epochs": given.epochs,
        "batch_size": given.batch_size,
        "workers": given.workers,
        "options": options,
        "node": node,
        "rows": scaling_table.speedups(rows, node),
        "load_after": os.getloadavg(),
    }
    print(scaling_table.markdown(document))
    path = write_result(document, folder=given.results)
    for written in (path, *scaling_table.draw(document, path.with_suffix(".png"))):
        print(f"written: {written}")
