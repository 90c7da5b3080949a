"""`make train-demo`: 2 ranks on this machine's CPU learn eight shapes from an S3 bucket, in minutes.

    python examples/resnet50/demo.py [--images 2000] [--epochs 8] [--ranks 2] [--target 0.95] [--dir DIR]

It makes the pictures, serves them with the S3 server of `fastload demo`, and runs train.py under torchrun. It
fails if the accuracy on new pictures is below the target. Other options go to train.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from fastload.demo.s3_server import serve_s3

HERE = Path(__file__).parent
SIDE = 96  # pixels

Plane = np.ndarray[Any, Any]
# Each maps coordinates, in units of the shape's radius, to a mask of its inside. All are symmetric.
SHAPES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "bars": lambda x, y: (abs(x) < 1) & (abs(y) < 1) & (np.floor(y * 2.5) % 2 == 0),
    "checks": lambda x, y: (abs(x) < 1) & (abs(y) < 1) & ((np.floor(x * 2) + np.floor(y * 2)) % 2 == 0),
    "columns": lambda x, y: (abs(x) < 1) & (abs(y) < 1) & (np.floor(x * 2.5) % 2 == 0),
    "cross": lambda x, y: ((abs(x) < 0.3) & (abs(y) < 1)) | ((abs(y) < 0.3) & (abs(x) < 1)),
    "disc": lambda x, y: np.hypot(x, y) < 1,
    "frame": lambda x, y: (np.maximum(abs(x), abs(y)) < 1) & (np.maximum(abs(x), abs(y)) > 0.6),
    "ring": lambda x, y: (np.hypot(x, y) < 1) & (np.hypot(x, y) > 0.6),
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 1,
}


def picture(shape: str, seed: int) -> bytes:
    """A JPEG of `shape`, bright on dark noise; the seed determines its size, place and colours."""
    rng = np.random.default_rng([seed, sorted(SHAPES).index(shape)])
    radius = rng.uniform(0.28, 0.4) * SIDE
    x0, y0 = rng.uniform(0.42, 0.58, 2) * SIDE
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    inside = SHAPES[shape]((x - x0) / radius, (y - y0) / radius)
    ground = rng.uniform(20, 110, 3)
    ink = ground + rng.uniform(70, 140, 3)
    pixels = np.where(inside[..., None], ink, ground) + rng.normal(0, 10, (SIDE, SIDE, 3))
    data: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels.clip(0, 255).astype(np.uint8)), quality=90
    )
    return data


def make_pictures(directory: Path, count: int, first_seed: int) -> None:
    """`count` pictures in `directory`/SHAPE/NUMBER.jpg, equally many of each shape."""

    def make(number: int) -> None:
        shape = sorted(SHAPES)[number % len(SHAPES)]
        (directory / shape / f"{number:05d}.jpg").write_bytes(picture(shape, first_seed + number))

    for shape in SHAPES:
        (directory / shape).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(make, range(count)))


def train(directory: Path, ranks: int, arguments: list[str]) -> int:
    """Serve `directory`/s3, train on its bucket "shapes" under torchrun; returns torchrun's exit status."""
    with serve_s3(directory / "s3") as server:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(HERE / "train.py"), "s3://shapes", *arguments]
        environment = os.environ | {
            "AWS_ENDPOINT_URL": server.endpoint_url,
            "AWS_ACCESS_KEY_ID": server.key,
            "AWS_SECRET_ACCESS_KEY": server.secret,
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(command, env=environment).returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=int, default=2000, help="to train on; a quarter of it to evaluate on"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--target", type=float, default=0.95, help="the accuracy to reach")
    parser.add_argument("--dir", type=Path, default=Path("train-demo"), help="for pictures, cache and run")
    args, others = parser.parse_known_args()

    shutil.rmtree(args.dir / "run", ignore_errors=True)
    shutil.rmtree(args.dir / "cache", ignore_errors=True)
    make_pictures(args.dir / "s3" / "shapes" / "train", args.images, 0)
    make_pictures(args.dir / "s3" / "shapes" / "val", args.images // 4, args.images)
    options = f"--model small --resolution 0:48,{args.epochs // 2}:64 --min-area 0.5 --num-workers 1"
    options += f" --epochs {args.epochs} --batch-size 32 --base-lr 1.6 --warmup 1 --bn-batches 4"
    options += f" --cache {args.dir / 'cache'} --out {args.dir / 'run'} --checkpoint-steps 20"
    status = train(args.dir, args.ranks, [*options.split(), *others])
    if status:
        raise SystemExit(status)
    summary = json.loads((args.dir / "run" / "summary.json").read_text())
    if summary["accuracy"] < args.target:
        raise SystemExit(f"accuracy {summary['accuracy']:.1%}: below the target of {args.target:.0%}")
    chart = args.dir / "run" / "chart.png"
    print(f"accuracy {summary['accuracy']:.1%}, target {args.target:.0%}; chart: {chart}")


if __name__ == "__main__":
    main()
