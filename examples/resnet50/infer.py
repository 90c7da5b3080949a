"""Make a trained network smaller, by int8 and by fewer channels: its accuracy and its rate.

    python examples/resnet50/infer.py runs/a/checkpoint.pt s3://bucket/imagenet --cache /ssd/cache --prune 0.3

    fp32           as trained
    fp32 folded    batch norms folded into the convolutions, channels last: the baseline for int8
    int8           weights and activations quantised after training (torchao); ranges from --calibrate batches
    pruned         --prune of the channels inside each block removed, then --finetune steps; folded
    pruned int8    both

Every row is evaluated on the images of val/, through the same DataLoader as in training; "alone" is the rate
of the network on one batch in memory, the median of rounds in which all networks take turns. For CPUs:
torchao's int8 convolutions are those of oneDNN.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from fastload import CenterCrop, DataLoader, ImageFolder, Normalize, RandomResizedCrop
from model import IMAGENET, MODELS, BlurPool, ResNet, check_classes
from ranks import Ranks
from step import prepare_norms

__all__ = ["prune", "quantize", "run"]

FLOATS = Normalize(*IMAGENET)
ROUNDS, ROUND_SECONDS = 9, 0.5  # of the rate alone
MULTIPLE = 8  # the number of kept channels is a multiple: int8 kernels work on at least so many at once

Network = Callable[[torch.Tensor], torch.Tensor]


# --- pruning


def prune(network: ResNet, share: float, by: str = "l1") -> ResNet:
    """A copy without `share` of the channels between the convolutions of each block, and of the stem.

    They are removed, not masked. Channels between blocks stay: every block adds to them.

    Args:
        share: from 0 to below 1; the number of channels that stay is a multiple of 8, and at least 8.
        by: the first to go: "l1", filters with the smallest sum of magnitudes (Li et al. 2017, arXiv
            1608.08710); "gamma", those with the smallest scale in the following batch norm (network slimming,
            Liu et al. 2017, arXiv 1708.06519).
    """
    if not 0 <= share < 1:
        raise ValueError(f"the share of channels to prune must be from 0 to below 1, found {share}")
    pruned = copy.deepcopy(network)
    for chain in (pruned.stem, *(block.branch for block in pruned.stages)):
        convolutions = [index for index, layer in enumerate(chain) if isinstance(layer, nn.Conv2d)]
        for here, following in pairwise(convolutions):
            weight, gamma = chain[here].weight, chain[here + 1].weight
            scores = gamma.abs() if by == "gamma" else weight.abs().sum((1, 2, 3))
            kept = max(1, round(len(scores) * (1 - share) / MULTIPLE)) * MULTIPLE
            channels = scores.topk(min(kept, len(scores))).indices.sort().values
            chain[here] = _convolution(chain[here], weight[channels])
            for index in range(here + 1, following):
                chain[index] = _with_channels(chain[index], channels)
            chain[following] = _convolution(chain[following], chain[following].weight[:, channels])
    return pruned


def _convolution(layer: nn.Conv2d, weight: torch.Tensor) -> nn.Conv2d:
    """A convolution like `layer`, with other weights."""
    assert layer.groups == 1 and layer.bias is None
    new = nn.Conv2d(
        weight.shape[1], weight.shape[0], layer.kernel_size, layer.stride, layer.padding, bias=False
    )
    new.weight = nn.Parameter(weight.detach().clone())
    return new


def _with_channels(layer: nn.Module, channels: torch.Tensor) -> nn.Module:
    """A layer between two convolutions, with these channels only."""
    if isinstance(layer, BlurPool):
        return BlurPool(len(channels))
    if isinstance(layer, nn.BatchNorm2d):
        new = nn.BatchNorm2d(len(channels), layer.eps, layer.momentum)
        new.load_state_dict(
            {name: value[channels] if value.ndim else value for name, value in layer.state_dict().items()}
        )
        return new.train(layer.training)
    return layer


def finetune(network: nn.Module, loader: Any, steps: int, rate: float) -> None:
    """Train for `steps` steps, at a rate that falls to 0."""
    optimizer = torch.optim.SGD(network.parameters(), rate, momentum=0.9, weight_decay=5e-5)
    network.train()
    for step, (inputs, targets) in enumerate(endless(loader, steps)):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        nn.functional.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    network.eval()


# --- quantisation


def quantize(network: nn.Module, batches: list[torch.Tensor]) -> Network:
    """int8 weights (by channel) and activations (by tensor), for this CPU and the shape of these batches.

    Args:
        batches: float images, all of one shape; they determine the ranges of all activations.
    """
    from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    example = (batches[0],)
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao and torch's exporter warn about each other
        prepared = prepare_pt2e(torch.export.export(network.eval(), example).module(), quantizer)
        for batch in batches:
            prepared(batch)
        return lower_pt2e_quantized_to_x86(convert_pt2e(prepared), example)


def folded(network: nn.Module) -> Network:
    """A copy for inference, with each batch norm folded into the convolution before it."""
    network = copy.deepcopy(network).eval()
    for chain in network.modules():
        if isinstance(chain, nn.Sequential):
            for index, (layer, norm) in enumerate(pairwise(chain)):
                if isinstance(layer, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                    chain[index], chain[index + 1] = fuse_conv_bn_eval(layer, norm), nn.Identity()
    return network.to(memory_format=torch.channels_last)


# --- evaluation


def evaluate(network: Network, loader: Any, size: int) -> dict[str, float]:
    """Accuracy, and images/s with the loader. A first batch, not counted, warms both up."""
    right = seen = 0
    with torch.no_grad():
        first, _ = next(iter(loader))
        padded(network, first, size)
        start = time.perf_counter()
        for inputs, targets in loader:
            right += int((padded(network, inputs, size).argmax(1) == targets).sum())
            seen += len(targets)
        seconds = time.perf_counter() - start
        return {
            "accuracy": right / seen,
            "images_per_second": seen / seconds,
        }


def padded(network: Network, inputs: torch.Tensor, size: int) -> torch.Tensor:
    """The outputs for a batch of at most `size` samples: an exported network accepts one shape only."""
    if len(inputs) == size:
        return network(inputs)
    filled = torch.zeros((size, *inputs.shape[1:]), dtype=inputs.dtype)
    filled[: len(inputs)] = inputs
    return network(filled)[: len(inputs)]


def alone(networks: list[Network], batch: torch.Tensor) -> list[float]:
    """Images/s of each network on one batch in memory; in turns, so a busy machine slows all equally."""
    rates: list[list[float]] = [[] for _ in networks]
    with torch.no_grad():
        for _ in range(ROUNDS):
            for network, own in zip(networks, rates, strict=True):
                start, count = time.perf_counter(), 0
                while (seconds := time.perf_counter() - start) < ROUND_SECONDS:
                    network(batch)
                    count += len(batch)
                own.append(count / seconds)
    return [statistics.median(own) for own in rates]


def endless(loader: Any, count: int) -> Iterator[Any]:
    """`count` batches, of as many epochs as necessary."""
    return islice((batch for _ in cycle([0]) for batch in loader), count)


# --- the run


def run(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the command line; returns the JSON document."""
    args = parse(arguments)
    for name in (
        "torchao",
        "torch.utils._pytree",
    ):  # they warn about missing CUDA kernels, and about each other
        logging.getLogger(name).setLevel(logging.ERROR)
    evaluation = make_loader(args, "val", CenterCrop(args.size, resize=round(args.size * 256 / 224)), False)
    training = make_loader(args, "train", RandomResizedCrop(args.size, flip=0.5), True)
    check_classes(training.dataset, evaluation.dataset)
    network = load(args, list(training.dataset.classes))
    calibration = [
        inputs for inputs, _ in endless(training, args.calibrate) if len(inputs) == args.batch_size
    ]
    if not calibration:
        raise SystemExit(
            f"train/ has fewer images than a batch of {args.batch_size}: give a smaller --batch-size"
        )

    rows: list[dict[str, Any]] = []
    networks: list[Network] = []

    def row(name: str, made: Network, weights: nn.Module, width: int) -> None:
        size = sum(weight.numel() for weight in weights.parameters())
        measured = evaluate(made, evaluation, args.batch_size)
        rows.append({"network": name, **measured, "weights": size, "megabytes": size * width / 1e6})
        networks.append(made)

    row("fp32", network.eval(), network, 4)
    row("fp32 folded", folded(network), network, 4)
    row("int8", quantize(network, calibration), network, 1)
    if args.prune:
        smaller = prune(network, args.prune, args.prune_by)
        finetune(smaller, training, args.finetune, args.finetune_rate)
        prepare_norms(smaller, calibration, smaller, Ranks(0, 1, 1, torch.device("cpu")))
        row("pruned", folded(smaller), smaller, 4)
        row("pruned int8", quantize(smaller, calibration), smaller, 1)
    print(HEADER)
    for made, rate in zip(rows, alone(networks, calibration[0]), strict=True):
        made["alone"] = rate
        print(line(made), flush=True)
    document = {
        "command": "infer",
        "checkpoint": str(args.checkpoint),
        "settings": {name: value for name, value in vars(args).items() if name not in ("checkpoint", "json")},
        "cores": torch.get_num_threads(),
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "loader": evaluation.stats()["verdict"],
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return document


def make_loader(args: argparse.Namespace, part: str, transform: Any, shuffle: bool) -> Any:
    """Float images of val/ or train/."""
    return DataLoader(
        ImageFolder(f"{args.url}/{part}", transform, cache=args.cache),
        args.batch_size,
        shuffle=shuffle,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        on_error="replace",
        seed=0,
        device="cpu",
        batch_transform=lambda batch: (FLOATS(batch[0]), batch[1]),
    )


def load(args: argparse.Namespace, classes: list[str]) -> ResNet:
    """The network of a checkpoint of train.py, with averaged weights where it has them.

    Raises:
        SystemExit: it is another file, or of a network for other classes.
    """
    try:
        saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        record = saved["record"]
        made, trained = MODELS[record["model"]], record["classes"]
    except Exception as error:
        raise SystemExit(f"{args.checkpoint} is not a checkpoint of train.py's images: {error!r}") from error
    if trained != classes:
        raise SystemExit(
            f"{args.checkpoint} is of a network for {len(trained)} classes ({', '.join(trained[:5])} ...), "
            f"and {args.url}/train has {len(classes)} ({', '.join(classes[:5])} ...)"
        )
    network = made(classes=len(classes), variant=record["variant"], blur=record["blur"])
    network.load_state_dict(saved["model"])
    if saved["ema"] is not None:
        with torch.no_grad():
            for weight, average in zip(network.parameters(), saved["ema"]["average"], strict=True):
                weight.copy_(average)
    return network


HEADER = f"{'':18} {'accuracy':>9} {'images/s':>9} {'alone':>9} {'weights':>11} {'MB':>7}"


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['network']:18} {row['accuracy']:9.2%} {row['images_per_second']:9,.0f} {row['alone']:9,.0f} "
        f"{row['weights']:11,} {row['megabytes']:7.2f}"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="checkpoint.pt of train.py")
    parser.add_argument("url", help="train/ and val/ with a folder per class, as in training")
    parser.add_argument("--cache", help="a directory on a local SSD")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument("--calibrate", type=int, default=8, help="batches")
    parser.add_argument("--prune", type=float, default=0.0, help="share of the channels; 0: none")
    parser.add_argument("--prune-by", default="l1", choices=["l1", "gamma"])
    parser.add_argument("--finetune", type=int, default=200, help="steps after pruning")
    parser.add_argument("--finetune-rate", type=float, default=0.01, help="learning rate at their beginning")
    parser.add_argument("--json", type=Path, help="where to write the table as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run()
