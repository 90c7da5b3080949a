"""The trainer under Ray Train, which starts the ranks on a cluster and restarts them after a failure.

    pip install 'ray[train]'
    python examples/resnet50/ray_train.py --ranks 16 --cpus 8 -- s3://bucket/imagenet --cache /ssd/cache \\
        --partition node --out /shared/runs/a

The options after `--` are those of train.py. --out must be on storage that all nodes share. The tests run
it on two nodes of Ray's cluster simulation and kill a rank (tests/store/test_ray.py). No GPU has run it yet.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def train_rank(config: dict[str, list[str]]) -> None:
    """One rank. Ray has set torchrun's variables and joined the process group."""
    sys.path.insert(0, str(HERE))  # the example must be at this path on every node
    import train

    train.run(train.images, train.resnet, add_options=train.options, arguments=config["arguments"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, required=True, help="of all nodes")
    parser.add_argument("--cpus", type=int, default=8, help="for each rank, its workers included")
    parser.add_argument("--cpu", action="store_true", help="train without GPUs")
    parser.add_argument("--failures", type=int, default=3, help="restarts, each from the last checkpoint")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="-- and train.py's options")
    args = parser.parse_args()
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        raise SystemExit(f"{error}; type: pip install 'ray[train]'") from error

    arguments = [argument for argument in args.arguments if argument != "--"]
    scaling = ScalingConfig(
        num_workers=args.ranks, use_gpu=not args.cpu, resources_per_worker={"CPU": args.cpus}
    )
    TorchTrainer(
        train_rank,
        train_loop_config={"arguments": arguments},
        scaling_config=scaling,
        run_config=RunConfig(failure_config=FailureConfig(max_failures=args.failures)),
    ).fit()


if __name__ == "__main__":
    main()
