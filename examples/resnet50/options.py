"""The options of train.py, in the order in which a run uses them."""

from __future__ import annotations

import argparse
from pathlib import Path

from dgc import SPARSITY_STRATEGY
from model import MODELS
from schedule import DECAYS, resolutions
from step import AMP, COMMUNICATION

__all__ = ["parse"]


def shares(text: str) -> tuple[float, ...]:
    return tuple(float(share) for share in text.split(","))


def parse(arguments: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """The command line, sys.argv's by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for add in (_data, _model, _optimizer, _device, _run):
        add(parser)
    args = parser.parse_args(arguments)
    _check(parser, args)
    return args


def _data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "url", help="train/ and val/ with a folder per class: s3://, gs://, az://, a path, ..."
    )
    group.add_argument("--cache", help="a directory on a local SSD")
    group.add_argument("--cache-mode", default="raw", choices=["raw", "shrunk", "decoded"])
    group.add_argument("--num-workers", type=int, default=2, help="per rank")
    group.add_argument("--on-error", default="replace", choices=["raise", "skip", "replace"])
    group.add_argument("--partition", choices=["node"], help="each node keeps to its share of the samples")
    group.add_argument("--resolution", default="224", help="pixels, or EPOCH:PIXELS,...: 0:128,18:224,30:288")
    group.add_argument("--eval-size", type=int, help="pixels; default: the largest of --resolution")
    group.add_argument("--eval-batch", type=int, help="per rank; default: --batch-size")
    group.add_argument(
        "--min-area", type=float, default=0.08, help="smallest area of a crop, as a share of the image"
    )
    group.add_argument("--no-eval", action="store_true", help="train only")


def _model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", default="resnet50", choices=sorted(MODELS))
    group.add_argument("--variant", default="b", choices=["b", "d"], help="d: ResNet-D")
    group.add_argument("--blur", action="store_true", help="BlurPool before every subsampling")
    group.add_argument("--bn-momentum", type=float, default=0.1)
    group.add_argument(
        "--bn-batches",
        type=int,
        default=0,
        help="batches for batch norm's statistics before evaluation; 0: running averages",
    )


def _optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", default="sgd", choices=["sgd", "lars"])
    group.add_argument(
        "--batch-size", type=int, default=256, help="largest number of samples in one pass of a rank"
    )
    group.add_argument("--global-batch", type=int, help="of all ranks; default: --batch-size x ranks")
    group.add_argument("--base-lr", type=float, default=0.1, help="per 256 samples of the global batch")
    group.add_argument("--warmup", type=float, default=5, help="epochs")
    group.add_argument("--decay", default="cosine", choices=sorted(DECAYS))
    group.add_argument("--power", type=float, default=2, help="of the polynomial decay")
    group.add_argument("--momentum", type=float, default=0.9)
    group.add_argument("--nesterov", action="store_true")
    group.add_argument("--weight-decay", type=float, default=5e-5, help="not of norms and biases")
    group.add_argument("--trust", type=float, default=0.001, help="the trust coefficient of LARS")
    group.add_argument("--label-smoothing", type=float, default=0.1)
    group.add_argument(
        "--clip-norm", type=float, default=0, help="limit of the norm of all gradients together; 0: none"
    )
    group.add_argument(
        "--ema", type=float, default=0, help="decay of averaged weights, for evaluation; 0: none"
    )


def _device(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("device and communication")
    group.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    group.add_argument("--amp", default="off", choices=sorted(AMP))
    group.add_argument("--channels-last", action="store_true")
    compiling = ["off", "default", "reduce-overhead", "max-autotune"]
    group.add_argument(
        "--compile", default="off", choices=compiling, help="reduce-overhead: with CUDA graphs"
    )
    group.add_argument(
        "--communication", default="fp32", choices=COMMUNICATION, help="of gradients; see comm.py"
    )
    # Named as in MoXing, which counts the epochs of the warm-up in samples, too.
    group.add_argument(
        "--dgc-sparsity-strategy",
        type=shares,
        default=SPARSITY_STRATEGY,
        metavar="S,S,...",
        help="shares of the gradients that are not sent, by epoch; the last one holds from then on",
    )
    group.add_argument(
        "--dgc-total-samples", type=int, help="that such an epoch has; default: those of the dataset"
    )
    group.add_argument("--dgc-momentum-factor-masking", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument(
        "--bucket-mb", type=int, default=25, help="size of a bucket of gradients, which are sent together"
    )
    group.add_argument("--first-bucket-mb", type=int, default=1)


def _run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--epochs", type=int, default=90)
    group.add_argument("--target", type=float, help="accuracy, 0 to 1, at which the run ends")
    group.add_argument("--out", type=Path, help="directory of the run: checkpoint, epochs.jsonl, chart")
    group.add_argument("--checkpoint-steps", type=int, default=500, help="updates between two checkpoints")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--synthetic", action="store_true", help="one batch that stays on the device: the ceiling"
    )
    group.add_argument(
        "--simulate-gpu-rate", type=float, help="train on a simulated device of that many images/s"
    )
    group.add_argument(
        "--ceiling-steps", type=int, default=20, help="updates in the measurement of the ceiling"
    )
    group.add_argument("--tensorboard", action="store_true")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in ("epochs", "batch_size", "checkpoint_steps", "ceiling_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, found {getattr(args, name)}")
    try:
        resolutions(args.resolution)
    except ValueError as error:
        parser.error(f"--resolution: {error}")
