"""Frameworks that make a loader of torch's, out of fastload's or around a dataset alone."""

from __future__ import annotations

import sys
from typing import Any

import torch.utils.data
from torch.utils.data import RandomSampler, get_worker_info

from fastload.distributed.launcher import find_rank
from fastload.errors import address, warn
from fastload.metrics.torch_private import is_fetched_by_torch

# The attribute that Accelerate looks for on each loader that it is about to prepare.
ASKED_BY_PREPARE = "_is_accelerate_prepared"


def is_prepared(loader: torch.utils.data.DataLoader[object], device: torch.device | None) -> bool:
    """Return whether Accelerate may use a loader as it is; warn where not, as it then makes one of torch's.

    Args:
        device: that of the loader's batches; None: host memory.
    """
    accelerate: Any = sys.modules.get("accelerate")
    if accelerate is not None and accelerate.state.is_initialized():
        job = accelerate.PartialState()
        on_device = device is not None or job.device.type == "cpu"
        divided = any(hasattr(each, "num_replicas") for each in (loader.sampler, loader.batch_sampler))
        if on_device and (divided or job.num_processes == 1):
            return True
    _warn_of_replacement(
        "accelerator.prepare", "device=accelerator.device and sampler=fastload.DistributedSampler(dataset)"
    )
    return False


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


def warn_of_trainer(dataset: str) -> None:
    """Warn of the Trainer of transformers in a job without a loader of fastload's: the dataset is all it got.

    Args:
        dataset: the name of its class.
    """
    if "transformers.trainer" not in sys.modules or "fastload.loader.dataloader" in sys.modules:
        return
    worker = get_worker_info()
    if is_fetched_by_torch() and (worker is None or worker.id == 0):
        warn(
            f"Trainer reads this {dataset} through a torch.utils.data.DataLoader, one sample after another. "
            "Start the script by `python -m fastload SCRIPT.py`, or override get_train_dataloader. See "
            f"{address('a-loader-that-a-framework-replaces')}"
        )
