"""Train a small classifier on a bucket of images: the loader, data-parallel ranks, and resuming, in one page.

    python examples/train.py s3://bucket/train --cache /ssd/cache
    torchrun --nproc-per-node 2 examples/train.py s3://bucket/train --cache /ssd/cache --checkpoint run.pt

The URL holds one folder of images per class. Stop it at any moment and start it again with the same
--checkpoint: it continues with the next batch, with any number of workers or ranks.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastload import DataLoader, DistributedSampler, ImageFolder, Normalize, RandomResizedCrop


def main() -> None:
    args = parse_arguments()
    device = start_process_group()
    torch.manual_seed(0)  # the same initial weights on every rank

    dataset = ImageFolder(args.url, RandomResizedCrop(args.size, flip=0.5), cache=args.cache)
    sampler = DistributedSampler(dataset, seed=0)  # it finds rank and world size by itself
    if sampler.num_replicas > 1 and not dist.is_initialized():
        raise SystemExit("this is one of several ranks: start them with torchrun")
    loader = DataLoader(
        dataset,
        args.batch_size,
        sampler=sampler,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        pin_memory=device.type == "cuda",
        on_error="replace",
        seed=0,
    )
    normalize = Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    model: nn.Module = small_network(len(dataset.classes)).to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    epoch, first = resume(args.checkpoint, model, optimizer, loader)

    while epoch < args.epochs:
        for step, (images, labels) in enumerate(loader, first):
            # uint8 is copied; the device makes floats of it.
            images = normalize(images.to(device, non_blocking=True))
            loss = nn.functional.cross_entropy(model(images), labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0 and sampler.rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)
                save(args.checkpoint, model, optimizer, loader, epoch, step + 1)
        epoch, first = epoch + 1, 0
    if sampler.rank == 0:
        save(args.checkpoint, model, optimizer, loader, epoch, 0)
        print(loader.stats()["verdict"])
    if dist.is_initialized():
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="one folder of images per class: s3://, gs://, az://, a path, ...")
    parser.add_argument("--cache", help="a directory on a local SSD")
    parser.add_argument("--checkpoint", type=Path, help="file for the state of the run")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--num-workers", type=int, default=2, help="per rank")
    parser.add_argument("--size", type=int, default=64, help="pixels")
    return parser.parse_args()


def start_process_group() -> torch.device:
    """Join the other ranks, if torchrun started this process; returns this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def small_network(classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 16, classes),
    )


def save(path: Path | None, model: nn.Module, optimizer: Any, loader: Any, epoch: int, step: int) -> None:
    if path is None:
        return
    temporary = path.with_suffix(".tmp")
    state = {
        "model": getattr(model, "module", model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "loader": loader.state_dict(),
        "epoch": epoch,
        "step": step,
    }
    torch.save(state, temporary)
    temporary.replace(path)  # so a checkpoint is whole: the new one or the previous one


def resume(path: Path | None, model: nn.Module, optimizer: Any, loader: Any) -> tuple[int, int]:
    """Restore the run in `path`, if there is one; returns the epoch and the step to continue with."""
    if path is None or not path.exists():
        return 0, 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    getattr(model, "module", model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])
    return int(state["epoch"]), int(state["step"])


if __name__ == "__main__":
    main()
