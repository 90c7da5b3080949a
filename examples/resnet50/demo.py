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
from pathlib import Path

from extras.pictures import make_pictures
from fastload.cli.demo.s3_server import serve_s3

HERE = Path(__file__).parent


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
    options += f" --cache {args.dir / 'cache'} --out {args.dir / 'run'} --checkpoint-steps 20 --chart"
    status = train(args.dir, args.ranks, [*options.split(), *others])
    if status:
        raise SystemExit(status)
    summary = json.loads((args.dir / "run" / "summary.json").read_text())
    if summary["accuracy"] is None:
        return  # --no-eval
    if summary["accuracy"] < args.target:
        raise SystemExit(f"accuracy {summary['accuracy']:.1%}: below the target of {args.target:.0%}")
    chart = args.dir / "run" / "chart.png"
    print(f"accuracy {summary['accuracy']:.1%}, target {args.target:.0%}; chart: {chart}")


if __name__ == "__main__":
    main()
