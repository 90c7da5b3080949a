"""Warnings before a framework makes torch's loader of fastload's."""

from __future__ import annotations

import sys

import torch.utils.data
from torch.utils.data import RandomSampler

from fastload.distributed import find_rank
from fastload.errors import address
from fastload.printable import warn

# The attribute that Accelerate looks for on each loader that it is about to prepare.
ASKED_BY_PREPARE = "_is_accelerate_prepared"


def warn_of_prepare() -> None:
    """Warn of Accelerate, which makes a new loader in the place of the one that it is given."""
    _warn_of_replacement(
        "accelerator.prepare", "device=accelerator.device and sampler=fastload.DistributedSampler(dataset)"
    )


def warn_of_ray(loader: torch.utils.data.DataLoader[object]) -> None:
    """Warn of Ray Train, which makes a new loader of one that shuffles, where there are several ranks."""
    if "ray.train.torch" in sys.modules and isinstance(loader.sampler, RandomSampler) and find_rank()[1] > 1:
        _warn_of_replacement("prepare_data_loader of Ray", "sampler=fastload.DistributedSampler(dataset)")


def _warn_of_replacement(function: str, arguments: str) -> None:
    warn(
        f"{function} would make a torch.utils.data.DataLoader of this loader, without reading ahead, "
        f"device=, batch_transform=, seed= and stats(). Write {arguments}, and use the loader as it is. See "
        f"{address('a-loader-that-a-framework-replaces')}"
    )
