"""From gradients to weights: SGD, LARS, averaged weights; the exchange of gradients; the schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    *("DECAYS", "AllReduce", "Batches", "Ema", "ForeachOptimizer", "Lars", "LearningRate", "Traffic"),
    *("by_epoch", "make_optimizer", "parameter_groups", "register", "value_at"),
]


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights with decay; norms and biases (all parameters of one dimension) without decay or adaption."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay, "adapt": True},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(module: nn.Module, args: Any) -> torch.optim.Optimizer:
    """`args` has optimizer, momentum, weight_decay and trust. The rate is 1, a factor for the schedule's."""
    groups = parameter_groups(module, args.weight_decay)
    if args.optimizer == "lars":
        return Lars(groups, lr=1.0, momentum=args.momentum, trust=args.trust)
    return torch.optim.SGD(groups, lr=1.0, momentum=args.momentum, nesterov=args.nesterov)


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


# --- the average of the gradients of all ranks, and its cost in bytes


@dataclass
class Traffic:
    """Bytes that this rank has sent, for ranks in a ring.

    In a ring, an all-reduce of S bytes makes each of N ranks send 2 (N - 1) / N * S, and an all-gather of S
    bytes from each makes it send (N - 1) * S: the former hardly grows with N, the latter grows with it. So
    a sparse exchange saves less than its sparsity suggests, and less the more ranks there are.

    Attributes:
        ranks: N.
        steps: updates counted.
        sent: bytes.
        dense: bytes that an all-reduce in fp32 would have sent.
    """

    ranks: int
    steps: int = 0
    sent: float = 0.0
    dense: float = 0.0

    def all_reduced(self, size: int) -> None:
        """`size` bytes were all-reduced."""
        self.sent += 2 * (self.ranks - 1) / self.ranks * size

    def all_gathered(self, size: int) -> None:
        """`size` bytes of each rank were all-gathered."""
        self.sent += (self.ranks - 1) * size

    def averaged(self, elements: int) -> None:
        """The gradients of `elements` weights were averaged, in any way."""
        self.dense += 2 * (self.ranks - 1) / self.ranks * 4 * elements

    def take(self) -> dict[str, float]:
        """The counts since the last call, per step and in total, for a line of a report."""
        report = {
            "communication MB per step": self.sent / max(1, self.steps) / 1e6,
            "communication MB": self.sent / 1e6,
            "communication MB dense": self.dense / 1e6,
            "compression": self.dense / self.sent if self.sent else 1.0,
        }
        self.steps, self.sent, self.dense = 0, 0.0, 0.0
        return report


class AllReduce:
    """Gradients averaged as they are, or rounded to `dtype` on the wire.

    Args:
        dtype: torch.float16 or torch.bfloat16; None: that of the gradients.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.traffic = Traffic(dist.get_world_size())
        self._dtype = dtype
        self._hook = {
            None: default_hooks.allreduce_hook,
            torch.float16: default_hooks.fp16_compress_hook,
            torch.bfloat16: default_hooks.bf16_compress_hook,
        }[dtype]

    def begin(self, samples: int) -> None:
        """An update begins, after `samples` samples of all ranks since the start of training."""
        self.traffic.steps += 1

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook."""
        buffer = bucket.buffer()
        self.traffic.averaged(buffer.numel())
        self.traffic.all_reduced(buffer.numel() * (self._dtype or buffer.dtype).itemsize)
        return self._hook(dist.group.WORLD, bucket)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank."""
        return {"traffic": asdict(self.traffic)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of this rank of this run."""
        self.traffic = Traffic(**state["traffic"])

    def gather_state(self, group: Any = None) -> list[dict[str, Any]]:
        """The states of all ranks for a checkpoint: none."""
        return []

    def load_gathered(self, states: list[dict[str, Any]]) -> None:
        """Restore the result of gather_state, on any number of ranks."""


def register(network: DistributedDataParallel, communication: Any) -> None:
    """Let `network` average its gradients by `communication` (AllReduce, DeepGradientCompression)."""

    # Without annotations: DDP compares them with types, and in this module they are strings.
    def average(communication, bucket):
        return communication.average(bucket)

    network.register_comm_hook(communication, average)


# --- schedules

# Each maps the finished share of the run after the warm-up (0 to 1) to a factor of the peak.
DECAYS = {
    "polynomial": lambda t, power: (1 - t) ** power,
    "cosine": lambda t, power: 0.5 * (1 + math.cos(math.pi * t)),
    # A cosine times a falling line: it spends longer at small rates than the cosine (Bello et al. 2017).
    "linear-cosine": lambda t, power: (1 - t) * 0.5 * (1 + math.cos(math.pi * t)) + 0.001,
    "constant": lambda t, power: 1.0,
}


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then a decay to the end of the run.

    Attributes:
        peak: after the warm-up.
        warmup: steps; the first has peak / warmup, the last of them peak.
        total: steps of the whole run. Where the batch changes, a step is that of the first epoch.
        decay: a name in DECAYS.
        power: of "polynomial".
    """

    peak: float
    warmup: int
    total: int
    decay: str = "cosine"
    power: float = 2.0

    def at(self, step: float) -> float:
        """The rate of a step, counted from 0."""
        if step < self.warmup:  # a step of another batch is a fraction
            return self.peak * min(1.0, (step + 1) / self.warmup)
        over = (step - self.warmup) / max(1, self.total - self.warmup)
        return self.peak * DECAYS[self.decay](min(1.0, over), self.power)


@dataclass(frozen=True)
class Batches:
    """The division of a global batch among ranks and backward passes.

    Attributes:
        of_all: samples of one update of the weights, all ranks together.
        ranks: the number of ranks.
        micro: samples of one forward and backward pass of a rank.
    """

    of_all: int
    ranks: int
    micro: int

    @property
    def per_rank(self) -> int:
        """Samples of one update, of each rank."""
        return self.of_all // self.ranks

    @property
    def passes(self) -> int:
        """Forward and backward passes of one update, the gradients summed up between them."""
        return self.per_rank // self.micro

    @classmethod
    def split(cls, of_all: int, ranks: int, limit: int) -> Batches:
        """The fewest passes of equal size, and of at most `limit` samples.

        A global batch has the same samples on any number of ranks that divides it, so a resumed run sees no
        difference.

        Raises:
            SystemExit: the number of ranks does not divide the batch, or passes would be less than half full.
        """
        if of_all % ranks:
            raise SystemExit(
                f"{ranks} ranks cannot share a global batch of {of_all} evenly: "
                f"use a number of ranks that divides it or, for a new run, "
                f"--global-batch {of_all - of_all % ranks or ranks}"
            )
        share = of_all // ranks
        passes = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= limit)
        if 2 * (share // passes) < min(limit, share):
            fitting = [size * ranks for size in (share - share % limit, share - share % limit + limit)]
            raise SystemExit(
                f"the {share:,} samples of a rank divide only into passes of {share // passes:,}, where "
                f"--batch-size allows {limit:,}: give a --global-batch of {fitting[0]:,} or {fitting[1]:,}, "
                "or another --batch-size"
            )
        return cls(of_all, ranks, share // passes)


def by_epoch(text: str) -> dict[int, int]:
    """ "0:128,18:224,30:288" -> {0: 128, 18: 224, 30: 288}, by the first epoch of each; "224" -> {0: 224}.

    Raises:
        ValueError: the text has neither form, or a number is below 1.
    """
    pairs = [part.split(":") for part in text.split(",")] if ":" in text else [["0", text]]
    values = {int(epoch): int(value) for epoch, value in pairs}
    if min(values) < 0 or min(values.values()) < 1:
        raise ValueError(f"expected a number, or EPOCH:NUMBER,..., found {text!r}")
    return values


def value_at(values: dict[int, Any], epoch: int) -> Any:
    """The value of an epoch: the last one by its first epoch."""
    return values[max(first for first in values if first <= epoch)]
