"""Deep Gradient Compression behind a slow link, beside a dense exchange: `python -m bench dgc_link`, as root.

Two ranks of examples/resnet50 in two network namespaces, joined by a link of 1 Gbit/s (a token bucket in
each direction). Both runs take the same steps with the same samples: first with all gradients in fp32, then
with DGC and its warm-up from 75 to 99.9 % sparsity, an epoch each. The network is a ResNet-50 on images of
32 pixels, so that a step's gradients (94 MB) are large beside its computation.

By epoch: MB that a rank sends in a step, as the trainer counts them and as the network device does; the
time that they need at the link's rate; a rank's CPU time, without the checkpoints (DGC's are larger); the
step's time; images/s; loss.

Prints the table and writes dgc_link-DATE-1000mbit.json into bench/results. Namespaces and ranks end with this
command.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import simplejpeg

from bench.command import begin, make_parser, write_result
from bench.data import RESULTS
from bench.measure.link import ADDRESSES, DEVICE, Link, missing
from bench.measure.trainer import TRAIN, epochs_of
from bench.show.figures import number, table

EXCHANGES = {"dense": "fp32", "DGC": "dgc"}
SPARSITY = (0.75, 0.9375, 0.984375, 0.996, 0.999)  # of the epochs; the last holds from then on
CLASSES, SIDE = 8, 48
LOOK_EVERY = 0.02  # seconds between two looks at a run
HEADINGS = (
    "epoch",
    "sparsity",
    "MB a step",
    "on the wire",
    "link, s",
    "CPU, s",
    "step, s",
    "images/s",
    "loss",
)


def make_gratings(folder: Path, count: int) -> None:
    """`count` JPEGs in folder/train/CLASS: noisy stripes; their direction is the class."""
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    for i in range(count):
        rng, kind = np.random.default_rng(i), i % CLASSES
        turn = np.pi * kind / CLASSES
        stripes = np.sin((x * np.cos(turn) + y * np.sin(turn)) * rng.uniform(0.5, 0.9) + rng.uniform(0, 6.28))
        pixels = 128 + 60 * stripes[..., None] + rng.normal(0, 25, (SIDE, SIDE, 3))
        path = folder / "train" / str(kind) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels.clip(0, 255).astype(np.uint8))))


class Runs:
    """Runs of two ranks over the link, on pictures in one directory."""

    def __init__(self, link: Link, directory: Path, given: argparse.Namespace) -> None:
        self._link, self._directory = link, directory
        self._options = ["--model", given.model, "--resolution", "32", "--min-area", "0.8", "--no-eval"]
        self._options += ["--batch-size", str(given.batch_size), "--epochs", str(given.epochs)]
        self._options += ["--num-workers", "1", "--ceiling-steps", "1", "--base-lr", "0.1", "--warmup", "1"]
        self._options += ["--checkpoint-steps", "1000000", "--device", "cpu", "--on-error", "raise"]
        make_gratings(directory / "pictures", given.images)

    def __call__(self, exchange: str) -> list[dict[str, Any]]:
        """The trainer's report of each epoch, with what rank 0 had spent by then: bytes sent, CPU seconds.

        "CPU after": with the checkpoint that follows, so that of the next epoch's beginning; None where the
        next epoch had ended before a look saw it.
        """
        out = self._directory / exchange
        command = [sys.executable, str(TRAIN), str(self._directory / "pictures"), *self._options]
        command += ["--communication", EXCHANGES[exchange], "--out", str(out)]
        ranks = []
        for side in range(len(ADDRESSES)):
            with (self._directory / f"{exchange}-{side}.txt").open("wb") as log:
                ranks.append(self._link.start(side, command, env=_environment(side), stdout=log, stderr=log))
        spent: list[dict[str, float | None]] = []
        checkpoint = out / "checkpoint.pt"
        seen = None  # the last checkpoint that is in "CPU after"
        while True:
            codes = [rank.poll() for rank in ranks]
            for side, code in enumerate(codes):
                if code:
                    said = (self._directory / f"{exchange}-{side}.txt").read_text(errors="replace")
                    raise SystemExit(f"{exchange}: rank {side} failed\n{said[-2000:]}")
            if (out / "epochs.jsonl").exists() and len(epochs_of(out)) > len(spent):
                if spent and spent[-1]["CPU after"] is None:
                    seen = _written(checkpoint)
                spent.append(
                    {"sent": self._link.sent(0), "CPU": _cpu_seconds(ranks[0].pid), "CPU after": None}
                )
            elif spent and spent[-1]["CPU after"] is None and _written(checkpoint) != seen:
                seen = _written(checkpoint)
                spent[-1]["CPU after"] = _cpu_seconds(ranks[0].pid)
            elif None not in codes:
                return [line | then for line, then in zip(epochs_of(out), spent, strict=True)]
            time.sleep(LOOK_EVERY)


def _cpu_seconds(pid: int) -> float | None:
    """Of a process, without its children; None if it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return None
    return times.user + times.system


def _written(path: Path) -> int | None:
    """The time of the last write of a file, in ns; None if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _environment(side: int) -> dict[str, str]:
    """Of a rank, as torchrun would set it on a node of its own."""
    place = {"RANK": str(side), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(ADDRESSES)), "LOCAL_WORLD_SIZE": "1"}
    first = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    return {**os.environ, **place, **first, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}


def rows(epochs: list[dict[str, Any]], exchange: str, rate: float) -> list[dict[str, Any]]:
    """A row for each epoch of a run over a link of `rate` bits a second.

    The first epoch of a sparsity has no bytes on the wire and no CPU seconds: after it the trainer measures
    its ceiling, which costs some too.
    """
    found: list[dict[str, Any]] = []
    for i, line in enumerate(epochs):
        sparsity = SPARSITY[min(i, len(SPARSITY) - 1)] if exchange == "DGC" else 0.0
        megabytes = line["communication MB per step"]
        updates = round(line["communication MB"] / megabytes)
        sent = seconds = None
        if found and found[-1]["sparsity"] == sparsity:
            sent = line["sent"] - epochs[i - 1]["sent"]
            if line["CPU"] is not None and epochs[i - 1]["CPU after"] is not None:
                seconds = line["CPU"] - epochs[i - 1]["CPU after"]
        found.append(
            {
                "epoch": line["epoch"],
                "sparsity": sparsity,
                "MB a step": round(megabytes, 3),
                "on the wire": None if sent is None else round(sent / updates / 1e6, 3),
                "link, s": round(megabytes * 8e6 / rate, 4),
                "CPU, s": None if seconds is None else round(seconds / updates, 3),
                "step, s": round(line["batch size"] / line["FPS after the first step"], 3),
                "images/s": line["FPS after the first step"],
                "loss": round(line["loss"], 3),
            }
        )
    return found


def markdown(document: dict[str, Any]) -> str:
    parts = []
    for exchange, lines in document["runs"].items():
        cells = [[_cell(name, line[name]) for name in HEADINGS] for line in lines]
        parts.append(f"{exchange}:\n\n{table(HEADINGS, cells, texts=0)}")
    machine, load = document["machine"], (document["load_before"][0], document["load_after"][0])
    parts.append(
        f"`python -m bench dgc_link --rate {document['rate'] / 1e6:g}`, {document['date'][:10]}: "
        f"{document['model']}, {document['images']} images an epoch, 2 ranks of batch "
        f"{document['batch size']}, 32 pixels, {machine['cores']} cores of {machine['cpu']}; link "
        f"{document['rate'] / 1e6:,.0f} Mbit/s, of which one bare connection gets "
        f"{document['bare rate'] / 1e6:,.0f}; load {load[0]:.1f} before, {load[1]:.1f} after."
    )
    return "\n\n".join(parts)


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name == "sparsity":
        return f"{100 * value:.4g}%"
    return str(value) if name == "epoch" else number(value)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rate", type=float, default=1000, help="of the link, Mbit/s")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--images", type=int, default=192, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8, help="of a rank")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    given = parser.parse_args()
    if lack := missing():
        raise SystemExit(f"this measurement needs {lack}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    document = begin("dgc_link") | {"rate": given.rate * 1e6}
    document |= {"model": given.model, "images": given.images, "batch size": given.batch_size}
    with tempfile.TemporaryDirectory() as directory, Link(given.rate * 1e6) as link:
        document["bare rate"] = round(link.measure(given.rate / 8))
        run = Runs(link, Path(directory), given)
        document["runs"] = {}
        for exchange in EXCHANGES:
            print(f"{exchange} ...", flush=True)
            document["runs"][exchange] = rows(run(exchange), exchange, given.rate * 1e6)
    document["load_after"] = os.getloadavg()
    print(markdown(document))
    print(f"written: {write_result(document, f'-{given.rate:g}mbit', given.results)}")
