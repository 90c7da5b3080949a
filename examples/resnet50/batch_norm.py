"""Running statistics of batch normalisation for the current weights, before they are evaluated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ranks import Ranks

__all__ = ["recompute"]


@torch.no_grad()
def recompute(module: nn.Module, batches: list[Any], predict: Callable[[Any], Any], ranks: Ranks) -> None:
    """Recompute the running statistics for the current weights.

    Each rank has seen different samples, and its running averages lag behind the weights. The statistics of
    `batches` are averaged with equal weight, then over the ranks; without batches, over the ranks only.

    Args:
        predict: runs `module` on the inputs of a batch.
    """
    norms = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    norms = [norm for norm in norms if norm.track_running_stats]
    if batches:
        with _cumulative(norms):
            module.train()
            for inputs in batches:
                predict(inputs)
    if ranks.size > 1:
        for norm in norms:
            for statistics in (norm.running_mean, norm.running_var):
                dist.all_reduce(statistics)
                statistics /= ranks.size


@contextlib.contextmanager
def _cumulative(norms: list[Any]) -> Iterator[None]:
    """A block in which running statistics start again, as plain averages."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
