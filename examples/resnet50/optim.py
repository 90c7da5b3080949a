"""The optimizer: parameter groups, SGD or LARS, and an average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Ema", "ForeachOptimizer", "Lars", "make_optimizer", "parameter_groups"]


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights with decay; norms and biases (all parameters of one dimension) without decay or adaption."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay, "adapt": True},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(module: nn.Module, args: Any) -> torch.optim.Optimizer:
    """`args` has optimizer, momentum, weight_decay and trust; the learning rate is set before each step."""
    groups = parameter_groups(module, args.weight_decay)
    if args.optimizer == "lars":
        return Lars(groups, lr=0.0, momentum=args.momentum, trust=args.trust)
    return torch.optim.SGD(groups, lr=0.0, momentum=args.momentum, nesterov=args.nesterov)


class ForeachOptimizer(torch.optim.Optimizer):
    """The base of `Lars` and `DgcSgd`: a group is updated at once; each weight has a momentum buffer."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            if value < 0:
                raise ValueError(f"{name} must not be negative, found {value}")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of all parameters that have a gradient."""
        if closure is not None:
            raise ValueError(f"{type(self).__name__} takes no closure: compute the gradients before step()")
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._update(group, weights)

    def _update(self, group: dict[str, Any], weights: list[torch.Tensor]) -> None:
        raise NotImplementedError

    def _buffer(self, weight: torch.Tensor) -> torch.Tensor:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        return state["momentum_buffer"]


class Lars(ForeachOptimizer):
    """Layer-wise adaptive rate scaling: You, Gitman, Ginsburg 2017, arXiv 1708.03888, algorithm 1.

    For each layer with weights w, gradient g, momentum buffer v, with global rate lr, momentum m, decay b:

        local = trust * |w| / (|g| + b * |w|)
        v = m * v + lr * local * (g + b * w)
        w = w - v

    As in the paper, the rate is inside the momentum buffer: a change of the rate does not affect the contents
    of the buffer. `local` is 1 where |w| or |g| is 0 (the paper does not define it there), and in groups with
    `adapt=False`. All norms are taken at once, and nothing waits for the device.

    Args:
        params: parameters, or groups of them; each group may have weight_decay and adapt of its own.
        lr: global rate.
        momentum: m.
        weight_decay: b.
        trust: the trust coefficient, called eta in the paper.
        adapt: scale by layer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], weights: list[torch.Tensor]) -> None:
        gradients = [weight.grad for weight in weights]
        decay, momentum = group["weight_decay"], group["momentum"]
        updates = torch._foreach_add(gradients, weights, alpha=decay) if decay else gradients
        if group["adapt"]:
            rates = group["lr"] * self._local_rates(weights, gradients, decay, group["trust"])
            updates = torch._foreach_mul(updates, list(rates.unbind()))
        else:
            updates = torch._foreach_mul(updates, group["lr"])
        buffers = [self._buffer(weight) for weight in weights]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, updates)
        torch._foreach_sub_(weights, buffers)

    @staticmethod
    def _local_rates(
        weights: list[torch.Tensor], gradients: list[Any], decay: float, trust: float
    ) -> torch.Tensor:
        """One rate per layer, on the device."""
        weight_norms = torch.stack(torch._foreach_norm(weights))
        gradient_norms = torch.stack(torch._foreach_norm(gradients))
        local = trust * weight_norms / (gradient_norms + decay * weight_norms)
        return torch.where((weight_norms > 0) & (gradient_norms > 0), local, 1.0)


class Ema:
    """An exponential moving average of a module's weights, for evaluation.

    Args:
        module: whose parameters are averaged; its buffers are not.
        decay: of the previous average, per step.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"the decay of an average must be from 0 to below 1, found {decay}")
        self.decay = decay
        self._weights = list(module.parameters())
        self._average = [weight.detach().clone() for weight in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self._average, self._weights, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which the module has the averaged weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, average in zip(self._weights, self._average, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self._average}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for average, saved in zip(self._average, state["average"], strict=True):
            average.copy_(saved)
