"""Utilisation of an accelerator by examples/resnet50: of a simulated one, or of the GPU here.

    python -m bench trainer [--images 3000] [--epochs 3] [--workers 2]
    python -m bench trainer --gpu

Simulated: the loader's own rate is measured first (a device that takes no time). Then devices of 50, 70, 90,
120 and 150 % of it are fed, each in its own run of train.py, from a cache that epoch 1 fills. Goals: at least
99 % utilisation from epoch 2 on at up to 90 %, and the loader named as the limit above 100 %.

On a GPU: ResNet-50, 224 pixels, bf16, channels_last, batch 256, from local files through each mode of the
cache, against the synthetic rate of the same run. Goals: 99 % from epoch 2 on, 97 % in epoch 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.command import describe_machine, make_parser
from bench.data import ROOT, photo_folder
from bench.show.figures import MODES

TRAIN = ROOT / "examples" / "resnet50" / "train.py"
SHARES = (0.5, 0.7, 0.9, 1.2, 1.5)
BATCH, FEWEST = 64, 256  # of simulated devices; photos: the first step of an epoch does not count
WANTED, WANTED_FIRST = 0.99, 0.97


def simulated(directory: Path, images: int, epochs: int, workers: int) -> dict[str, Any]:
    """Utilisation of simulated devices; `directory` gets the photos, the caches and the runs."""
    if images < FEWEST:
        raise SystemExit(f"--images {images} are too few to tell a rate: give at least {FEWEST}")
    photos = photo_tree(directory, images)
    options = ["--num-workers", str(workers), "--batch-size", str(BATCH), "--epochs", str(epochs)]
    options += ["--cache-mode", "raw"]
    run = _Runs(directory, photos, options)
    own = run("own rate", "--simulate-gpu-rate", "1e9", "--epochs", str(epochs + 1))
    rate = _median([line["FPS after the first step"] for line in own[1:]])
    devices = []
    for share in SHARES:
        lines = run(f"{share:.0%}", "--simulate-gpu-rate", str(rate * share))
        devices.append(
            {
                "share of the loader's rate": share,
                "device images/s": round(rate * share, 1),
                "utilisation epoch 1": lines[0]["utilisation"],
                "utilisation epoch 2 on": [line["utilisation"] for line in lines[1:]],
                "limit": lines[-1]["limit"],
            }
        )
    met = all(_as_wanted(device) for device in devices)
    return {"loader images/s": round(rate, 1), "devices": devices, "met": met}


def _as_wanted(device: dict[str, Any]) -> bool:
    share = device["share of the loader's rate"]
    if share <= 0.9:
        return min(device["utilisation epoch 2 on"]) >= WANTED and device["limit"] == "the device"
    return str(device["limit"]).startswith("the loader")


def gpu(directory: Path, images: int, epochs: int, workers: int | None, quick: bool) -> dict[str, Any]:
    """Utilisation of the GPU of this machine, for `make gpu-check`. This has not run on a GPU yet.

    Args:
        directory: for the caches and the runs.
        images: photos of an epoch.
        workers: None: one core is left to the trainer.
        quick: a small network on the CPU, to see that every step runs.
    """
    workers = workers or max(1, len(os.sched_getaffinity(0)) - 1)
    photos = photo_tree(directory, images)
    options = ["--num-workers", str(workers), "--epochs", str(epochs), "--amp", "bf16", "--channels-last"]
    if quick:
        options += ["--device", "cpu", "--model", "small", "--resolution", "32", "--batch-size", "16"]
        options += ["--ceiling-steps", "2"]
    else:
        options += ["--device", "cuda", "--model", "resnet50", "--batch-size", "256"]
    run = _Runs(directory, photos, options)
    ceiling = run("synthetic", "--synthetic")
    result: dict[str, Any] = {"synthetic images/s": _median([line["FPS"] for line in ceiling])}
    for mode in MODES:
        lines = run(mode, "--cache-mode", mode, cached=directory / f"cache-{mode}")
        first, later = lines[0]["utilisation"], [line["utilisation"] for line in lines[1:]]
        result[mode] = {
            "images/s epoch 1": lines[0]["FPS"],
            "images/s epoch 2 on": [line["FPS"] for line in lines[1:]],
            "utilisation epoch 1": first,
            "utilisation epoch 2 on": later,
            "data wait per step": lines[-1]["data wait per step"],
            "limit": lines[-1]["limit"],
            "met": first >= WANTED_FIRST and min(later, default=0) >= WANTED,
        }
    return result


class _Runs:
    """Runs train.py, each time with another --out, and reads its report."""

    def __init__(self, directory: Path, photos: Path, options: list[str]) -> None:
        self._directory, self._photos, self._options = directory, photos, options

    def __call__(self, name: str, *more: str, cached: Path | None = None) -> list[dict[str, Any]]:
        out = self._directory / "runs" / name.replace(" ", "-")
        with tempfile.TemporaryDirectory(dir=self._directory) as fresh:
            command = [sys.executable, str(TRAIN), str(self._photos), "--out", str(out), "--no-eval"]
            command += ["--cache", str(cached or fresh), "--on-error", "raise", *self._options, *more]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return epochs_of(out)


def epochs_of(out: Path) -> list[dict[str, Any]]:
    """The report of each epoch of a run of train.py."""
    return [json.loads(line) for line in (out / "epochs.jsonl").read_text().splitlines()]


def photo_tree(directory: Path, images: int) -> Path:
    """`images` photos of 138 KB in the layout of train.py: train/CLASS/NUMBER.jpg."""
    root = directory / f"photos-{images}"
    root.mkdir(exist_ok=True)
    if not (root / "train").exists():
        (root / "train").symlink_to(photo_folder(images).resolve())
    return root


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gpu", action="store_true", help="the GPU here instead of simulated devices")
    parser.add_argument(
        "--quick", action="store_true", help="with --gpu: every step on the CPU, as a trial of the steps"
    )
    parser.add_argument("--images", type=int)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--dir", type=Path, help="for photos and caches; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.dir or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        if args.gpu:
            images = args.images or (64 if args.quick else 20_000)
            result = gpu(directory, images, args.epochs, args.workers, args.quick)
        else:
            result = simulated(directory, args.images or 3000, args.epochs, args.workers or 2)
            for device in result["devices"]:
                print(*device.values(), sep="  ")
    print(json.dumps({"bench": "trainer", **describe_machine(), **result}))
