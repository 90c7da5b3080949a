"""Running statistics of batch normalisation for the current weights, before they are evaluated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ranks import Ranks

__all__ = ["average", "recompute"]


@torch.no_grad()
def recompute(module: nn.Module, batches: list[Any], predict: Callable[[Any], Any], ranks: Ranks) -> None:
    """Recompute the running statistics for the current weights.

    Each rank has seen different samples, and its running averages lag behind the weights. The statistics of
    `batches` are averaged with equal weight, then over the ranks; without batches, over the ranks only.

    Args:
        predict: runs `module` on the inputs of a batch.
    """
    if batches:
        with _cumulative(_norms(module)):
            module.train()
            for inputs in batches:
                predict(inputs)
    average(module, ranks)


@torch.no_grad()
def average(module: nn.Module, ranks: Ranks) -> None:
    """Average the running statistics over the ranks, in one message. All ranks call it."""
    statistics = [value for norm in _norms(module) for value in (norm.running_mean, norm.running_var)]
    if ranks.size > 1 and statistics:
        together = torch.cat(statistics)
        dist.all_reduce(together)
        for own, averaged in zip(
            statistics, (together / ranks.size).split([len(s) for s in statistics]), strict=True
        ):
            own.copy_(averaged)


def _norms(module: nn.Module) -> list[Any]:
    norms = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    return [norm for norm in norms if norm.track_running_stats]


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
