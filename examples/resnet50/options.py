"""The options of a run, in the order in which it uses them. model.py adds those of images."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optim import DECAYS, by_epoch
from step import AMP, COMMUNICATION, CUDA_GRAPHS

__all__ = ["kept", "parse", "refuse_changes"]

# A resumed run must have these options of the run in its checkpoint, whose state depends on them.
KEPT = (
    *("optimizer", "momentum", "nesterov", "weight_decay", "trust"),
    *("communication", "batch_by_epoch"),
)


def parse(
    arguments: list[str] | None,
    description: str | None = None,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    own_optimizer: bool = False,
) -> argparse.Namespace:
    """The command line, sys.argv's by default.

    Args:
        add_options: adds the options of the task.
        own_optimizer: without the options of an optimizer.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _data(parser)
    if add_options is not None:
        add_options(parser)
    if not own_optimizer:
        _optimizer(parser)
        _dgc(parser)
    for add in (_schedule, _device, _run, _extras):
        add(parser)
    args = parser.parse_args(arguments)
    _check(parser, args, own_optimizer)
    return args


def kept(args: argparse.Namespace, record: dict[str, Any]) -> dict[str, Any]:
    """What a resumed run must have again; `record`: of its network, see Task."""
    return {**record, **{name: getattr(args, name, None) for name in KEPT}}


def refuse_changes(before: dict[str, Any], now: dict[str, Any], args: argparse.Namespace) -> None:
    """Compare two results of `kept`.

    Raises:
        SystemExit: they differ.
    """
    for name, value in now.items():
        if before.get(name) == value:
            continue
        if name not in args:
            raise SystemExit(f"the checkpoint is of a run with other {name}: give another --out")
        option = f"--{name.replace('_', '-')}"
        raise SystemExit(
            f"the checkpoint is of a run with {option} {_shown(before.get(name))}, and here it is "
            f"{_shown(value)}: give the same, or another --out"
        )


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{epoch}:{size}" for epoch, size in value.items()) or "not given"
    return str(value)


def _data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("url", help="the folders of the samples: s3://, gs://, az://, a path, ...")
    group.add_argument("--cache", help="a directory on a local SSD")
    group.add_argument("--num-workers", type=int, default=2, help="per rank")
    group.add_argument("--on-error", default="replace", choices=["raise", "repeat", "replace"])
    group.add_argument("--partition", choices=["node"], help="each node keeps to its share of the samples")
    group.add_argument("--no-eval", action="store_true", help="train only")
    group.add_argument("--eval-batch", type=int, help="per rank; default: --batch-size")


def _optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", default="sgd", choices=["sgd", "lars"])
    group.add_argument("--base-lr", type=float, default=0.1, help="per 256 samples of the global batch")
    group.add_argument("--momentum", type=float, default=0.9)
    group.add_argument("--nesterov", action="store_true")
    group.add_argument("--weight-decay", type=float, default=5e-5, help="not of norms and biases")
    group.add_argument("--trust", type=float, default=0.001, help="the trust coefficient of LARS")


def _schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schedule")
    group.add_argument("--epochs", type=int, default=90)
    group.add_argument(
        "--batch-size", type=int, default=256, help="largest number of samples in one pass of a rank"
    )
    group.add_argument("--global-batch", type=int, help="of all ranks; default: --batch-size x ranks")
    group.add_argument(
        "--batch-by-epoch",
        type=by_epoch,
        default={},
        metavar="EPOCH:SIZE,...",
        help="another global batch from an epoch on, with its learning rate",
    )
    group.add_argument("--warmup", type=float, default=5, help="epochs")
    group.add_argument("--decay", default="cosine", choices=sorted(DECAYS))
    group.add_argument("--power", type=float, default=2, help="of the polynomial decay")
    group.add_argument(
        "--clip-norm", type=float, default=0, help="limit of the norm of all gradients together; 0: none"
    )
    group.add_argument(
        "--ema", type=float, default=0, help="decay of averaged weights, for evaluation; 0: none"
    )
    group.add_argument(
        "--bn-batches",
        type=int,
        help="batches for batch norm's statistics before evaluation; 0: running averages. Default: 8 where "
        "these lag behind (--ema, a global batch of at least 4,096, more than 8 ranks), else 0",
    )


def _device(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("device and communication")
    group.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    group.add_argument("--amp", default="off", choices=sorted(AMP))
    group.add_argument("--channels-last", action="store_true")
    compiling = ["off", "default", *CUDA_GRAPHS]
    with_graphs = "reduce-overhead, max-autotune: with CUDA graphs"
    group.add_argument("--compile", default="off", choices=compiling, help=with_graphs)
    group.add_argument(
        "--communication", default="fp32", choices=COMMUNICATION, help="of gradients; see step.py"
    )
    group.add_argument(
        "--bucket-mb", type=int, default=25, help="size of a bucket of gradients, which are sent together"
    )
    group.add_argument("--first-bucket-mb", type=int, default=1)


def _run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--target", type=float, help="accuracy, 0 to 1, at which the run ends")
    group.add_argument("--out", type=Path, help="directory of the run: checkpoint, epochs.jsonl, summary")
    group.add_argument("--checkpoint-steps", type=int, default=500, help="updates between two checkpoints")
    group.add_argument(
        "--init-from", type=Path, help="begin with the weights of a checkpoint, or of torchvision's resnet50"
    )
    group.add_argument("--seed", type=int, default=0)


def _dgc(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--communication dgc, with the folder extras/")
    # Named as in MoXing, which counts the epochs of the warm-up in samples, too.
    group.add_argument(
        "--dgc-sparsity-strategy",
        type=shares,
        default="0.75,0.9375,0.984375,0.996,0.999",
        metavar="S,S,...",
        help="shares of the gradients that are not sent, by epoch; the last one holds from then on",
    )
    group.add_argument(
        "--dgc-total-samples", type=int, help="that such an epoch has; default: those of the dataset"
    )
    group.add_argument("--dgc-momentum-factor-masking", action=argparse.BooleanOptionalAction, default=True)


def _extras(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with the folder extras/")
    group.add_argument(
        "--synthetic", action="store_true", help="one batch that stays on the device: the ceiling"
    )
    group.add_argument(
        "--simulate-gpu-rate", type=float, help="train on a simulated device of that many images/s"
    )
    group.add_argument(
        "--ceiling-steps",
        type=int,
        help="passes in each measurement of the ceiling, for the utilisation; 0: none. Default: 20, but 0 "
        "with a target and with --mllog, as the measurement takes time",
    )
    group.add_argument("--mllog", type=Path, help="file for MLPerf's log lines")
    group.add_argument("--chart", action="store_true", help="draw chart.png in --out")
    group.add_argument("--tensorboard", action="store_true", help="write TensorBoard's files in --out")


def shares(text: str) -> tuple[float, ...]:
    return tuple(float(share) for share in text.split(","))


def _has_extras() -> bool:
    return Path(__file__).with_name("extras").is_dir()


def _has_target(args: argparse.Namespace) -> bool:
    return args.target is not None or getattr(args, "target_top5", None) is not None


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace, own_optimizer: bool) -> None:
    for name in ("epochs", "batch_size", "checkpoint_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, found {getattr(args, name)}")
    if own_optimizer and args.communication == "dgc":
        parser.error("--communication dgc has its own optimizer, and this task has another one")
    if 0 in args.batch_by_epoch:
        parser.error("--batch-by-epoch is for later epochs: the batch of epoch 0 is --global-batch")
    if (args.no_eval or args.simulate_gpu_rate) and _has_target(args):
        parser.error("a target needs an evaluation: omit --no-eval and --simulate-gpu-rate, or the target")
    if getattr(args, "nesterov", False) and args.optimizer == "lars":
        parser.error("--nesterov is for --optimizer sgd: LARS has no such momentum")
    if args.ceiling_steps is None:
        timed = _has_target(args) or args.mllog is not None
        args.ceiling_steps = 20 if _has_extras() and not timed else 0
    asked = [
        name
        for name in ("synthetic", "simulate_gpu_rate", "mllog", "chart", "tensorboard")
        if vars(args)[name]
    ]
    asked += ["ceiling_steps"] * (args.ceiling_steps > 0)
    if args.communication == "dgc":
        asked.append("communication dgc")
    if args.out is None and (args.chart or args.tensorboard):
        parser.error("--chart and --tensorboard write into --out, which is not given")
    if asked and not _has_extras():
        parser.error(f"--{asked[0].replace('_', '-')} needs the folder extras/ beside train.py")
