"""Deep Gradient Compression: Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv 1712.01887.

Of each layer's gradients only the largest 0.1 % are sent; the others stay here and add up until they are
among the largest. For rank k of N, with its gradient g (the mean over its batch), per layer:

    g = clip(g / N)       local gradient clipping, at N**-0.5 of the limit for the sum of all ranks
    u = m u + g           momentum correction: what adds up is the velocity,
    v = v + u                 not the gradient
    send v where |v| is among the largest, as values and indices; every rank adds up those of all ranks
    v = 0 there           and what was not sent stays
    u = 0 there           momentum factor masking: what was sent leaves no stale momentum behind

What comes back is the sum over the ranks, a velocity already, so the optimizer must not add a momentum of its
own: `DgcSgd` does the rest of SGD's work. Biases, norms and small layers are all-reduced as they are, with
ordinary momentum. Sparsity grows from 75 % to 99.9 % over the first epochs, counted in samples.

Not with a loss scaler (fp16): a step that it skips loses what was sent in it. A NaN among the gradients is
among the largest, so it is sent at once, as in a dense exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from comm import Traffic
from optim import ForeachOptimizer

__all__ = ["SPARSITY_STRATEGY", "DeepGradientCompression", "DgcSgd", "largest"]

SPARSITY_STRATEGY = (0.75, 0.9375, 0.984375, 0.996, 0.999)
MOMENTUM_TYPES = ("vanilla", "nesterov")
_STRIDE = 100  # a sample of 1 %, as in the paper
_EXPECTED = 64  # values of a sample that are above the threshold: with fewer of them it is a matter of luck
_MARGIN = 1.3  # enough for 49 samples of 50


class _Bucket(NamedTuple):
    """What DDP handed to the hook: flat gradients, and whose they are."""

    buffer: torch.Tensor
    gradients: list[torch.Tensor]
    parameters: list[torch.Tensor]


class DeepGradientCompression:
    """The hook: `register(network, DeepGradientCompression(module, ...))`.

    Args:
        module: whose gradients are exchanged; float32.
        total_samples: of an epoch. The first entry of `sparsity_strategy` holds for the first epoch, and so
            on; the last one for all that follow.
        sparsity_strategy: shares of a layer's gradients that are not sent.
        momentum: m.
        momentum_type: "vanilla", or "nesterov", which is as torch's SGD has it.
        momentum_factor_masking: see above.
        clip_norm: limit of the norm of the whole averaged gradient. The norm is known only when the last
            bucket is there, so with it nothing is sent before.
        dense_below: layers of fewer weights are not compressed.

    Attributes:
        traffic: bytes sent, see comm.Traffic.
        velocity, residual: u and v by the parameter's name, in its shape. Small layers have a velocity only,
            which is the same on all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        total_samples: int,
        *,
        sparsity_strategy: Sequence[float] = SPARSITY_STRATEGY,
        momentum: float = 0.9,
        momentum_type: str = "vanilla",
        momentum_factor_masking: bool = True,
        clip_norm: float | None = None,
        dense_below: int = 1024,
    ) -> None:
        _check(total_samples, sparsity_strategy, momentum, momentum_type, clip_norm)
        self.ranks = dist.get_world_size()
        self.traffic = Traffic(self.ranks)
        self.total_samples = total_samples
        self.sparsity_strategy = tuple(sparsity_strategy)
        self.momentum = momentum
        self.nesterov = momentum_type == "nesterov"
        self.momentum_factor_masking = momentum_factor_masking
        self.clip_norm = clip_norm
        for name, weight in module.named_parameters():
            if weight.dtype != torch.float32:
                raise TypeError(f"Deep Gradient Compression sends float32, and {name} is {weight.dtype}")
        self._names = {weight: name for name, weight in module.named_parameters() if weight.requires_grad}
        # In the layout of the weights, for their memory is gone through in its own order: channels_last or
        # not.
        self.velocity = {name: torch.zeros_like(weight) for weight, name in self._names.items()}
        self.residual = {
            name: torch.zeros_like(weight)
            for weight, name in self._names.items()
            if weight.ndim > 1 and weight.numel() >= dense_below
        }
        self._samples = self._number = 0
        self._waiting: list[tuple[_Bucket, Future[torch.Tensor]]] = []

    @property
    def sparsity(self) -> float:
        """The share of a layer's gradients that is not sent in this update."""
        return self.sparsity_strategy[
            min(self._samples // self.total_samples, len(self.sparsity_strategy) - 1)
        ]

    def begin(self, samples: int) -> None:
        """An update begins, after so many samples of all ranks since training began."""
        self._samples = samples
        self._number += 1
        self.traffic.steps += 1
        self._waiting.clear()  # of a backward pass that failed

    def average(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """The hook: a future of the velocity that all ranks add to the weights, in the bucket's memory."""
        last = bucket.is_last()
        held = _Bucket(bucket.buffer(), bucket.gradients(), bucket.parameters())
        self.traffic.averaged(held.buffer.numel())
        held.buffer.div_(self.ranks)
        if self.clip_norm is None:
            return self._exchange(held)
        future: Future[torch.Tensor] = Future(devices=[held.buffer.device] if held.buffer.is_cuda else None)
        self._waiting.append((held, future))
        if last:
            self._clip()
            for waiting, promised in self._waiting:
                _pass_on(self._exchange(waiting), promised)
            self._waiting.clear()
        return future

    def _clip(self) -> None:
        """Scale this rank's whole gradient down to its part of the limit.

        N independent gradients of norm c have a sum of norm N**0.5 c, so each gets N**-0.5 of the limit of
        the sum.
        """
        assert self.clip_norm is not None
        buffers = [held.buffer for held, _ in self._waiting]
        norm = torch.stack(torch._foreach_norm(buffers)).norm()
        scale = (self.clip_norm * self.ranks**-0.5 / norm).clamp(max=1.0)
        torch._foreach_mul_(buffers, scale)

    def _exchange(self, held: _Bucket) -> Future[torch.Tensor]:
        """Send the largest of large layers and all of small ones; a future of the sums over the ranks."""
        buffer = held.buffer
        values, indices, small = [], [], []
        for weight, gradient in zip(held.parameters, held.gradients, strict=True):
            name = self._names[weight]
            begin = gradient.storage_offset() - buffer.storage_offset()
            part = buffer[begin : begin + gradient.numel()]
            if name in self.residual:
                found, places = self._select(name, part)
                values.append(found)
                indices.append((places + begin).int())
            else:
                small.append((name, part))
        works, messages = [], []
        if small:
            dense = torch.cat([part for _, part in small])
            works.append(dist.all_reduce(dense, async_op=True))
            self.traffic.all_reduced(dense.nbytes)
        if values:
            # One message of 32-bit words, half of them floats.
            message = torch.cat([*(found.view(torch.int32) for found in values), *indices])
            messages = list(message.new_empty((self.ranks, len(message))))
            works.append(dist.all_gather(messages, message, async_op=True))
            self.traffic.all_gathered(message.nbytes)

        def finish(done: Any) -> torch.Tensor:
            done.value()  # raises what a rank's death has raised
            buffer.zero_()
            for message in messages:  # rank by rank: all ranks add up in the same order, to the same bits
                found, places = message.chunk(2)
                buffer.index_add_(0, places, found.view(torch.float32))
            if small:
                parts = dense.split([part.numel() for _, part in small])
                for (name, part), gradient in zip(small, parts, strict=True):
                    part.copy_(gradient)
                    self._accelerate(name, part)
            return buffer

        return torch.futures.collect_all([work.get_future() for work in works]).then(finish)

    def _select(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a gradient to what has not been sent; take out what now is, as values and indices."""
        velocity, residual = _flat(self.velocity[name]), _flat(self.residual[name])
        self._accelerate(name, gradient)
        residual.add_(gradient)
        places = largest(residual.abs(), _kept(residual.numel(), self.sparsity), self._number)
        values = residual[places]
        residual[places] = 0
        if self.momentum_factor_masking:
            velocity[places] = 0
        return values, places

    def _accelerate(self, name: str, gradient: torch.Tensor) -> None:
        """Turn a gradient (flat) into a velocity, in its place."""
        velocity = _flat(self.velocity[name])
        velocity.mul_(self.momentum).add_(gradient)
        if self.nesterov:
            gradient.add_(velocity, alpha=self.momentum)
        else:
            gradient.copy_(velocity)

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: its own residuals. Tensors are not copied."""
        return {
            "velocity": dict(self.velocity),
            "residual": dict(self.residual),
            "samples": self._samples,
            "number": self._number,
            "traffic": asdict(self.traffic),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What state_dict returned on this rank of this run."""
        for kind in ("velocity", "residual"):
            own, saved = getattr(self, kind), state[kind]
            if own.keys() != saved.keys():
                raise ValueError(
                    f"the saved {kind} of Deep Gradient Compression is of other layers than this module's "
                    f"({sorted(own.keys() ^ saved.keys())[:5]}): resume with that run's model and dense_below"
                )
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        self._samples, self._number = state["samples"], state["number"]
        self.traffic = Traffic(**state["traffic"])

    def gather_state(self, group: Any = None) -> list[dict[str, Any]]:
        """For a checkpoint: the states of all ranks, on rank 0; an empty list on the others. All ranks call
        it.

        Each rank's has twice the size of the module, so 8 ranks of a ResNet-50 make 1.6 GB. What was gathered
        but not sent is a part of the training: without it a resumed run is another run.

        Args:
            group: a process group for CPU tensors.
        """
        mine = self.state_dict()
        for kind in ("velocity", "residual"):
            mine[kind] = {name: tensor.cpu() for name, tensor in mine[kind].items()}
        first = dist.get_rank() == 0
        states: list[Any] | None = [None] * self.ranks if first else None
        dist.gather_object(mine, states, dst=0, group=group)
        return states or []

    def load_gathered(self, states: list[dict[str, Any]]) -> None:
        """Take up a checkpoint of any number of ranks.

        The same number: each rank goes on with its own, and the run is the one that was broken off. Another
        one: all ranks get equal parts of the sum. No gradient is lost, since what all ranks together have not
        sent is what it was; only which of it is among the largest of a rank, and so goes first, is another
        choice.
        """
        if not states:
            return
        if len(states) == self.ranks:
            self.load_state_dict(states[dist.get_rank()])
            return
        merged = {**states[0], "traffic": asdict(Traffic(self.ranks))}
        for kind in ("velocity", "residual"):
            merged[kind] = {
                name: sum(state[kind][name] for state in states) / self.ranks
                if name in self.residual
                else tensor
                for name, tensor in states[0][kind].items()
            }
        self.load_state_dict(merged)


def largest(magnitudes: torch.Tensor, count: int, number: int = 0) -> torch.Tensor:
    """Indices (int64) of the `count` largest of `magnitudes` (flat), without sorting them all.

    A threshold is estimated from a sample, a little lower than it should be. What lies above it is a little
    more than is wanted, and the largest are chosen among these alone: the paper's hierarchical selection.
    Where the sample has misled, or would be most of the whole, all are looked at. So the choice is exact, NaN
    being the largest.

    Args:
        number: of the update; the sample is another one each time, and the same on a resume.
    """
    size = magnitudes.numel()
    stride = min(_STRIDE, count // _EXPECTED)
    if stride >= 2 and count <= size // 2:
        sample = magnitudes[number % stride :: stride]
        threshold = sample.topk(round(_MARGIN * len(sample) * count / size)).values[-1]
        candidates = (~(magnitudes < threshold)).nonzero()[:, 0]
        if len(candidates) >= count:
            return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices


def _kept(size: int, sparsity: float) -> int:
    return max(1, round(size * (1 - sparsity)))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, whatever the order of its dimensions."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _pass_on(source: Future[torch.Tensor], target: Future[torch.Tensor]) -> None:
    def finish(done: Future[torch.Tensor]) -> None:
        try:
            target.set_result(done.value())
        except Exception as error:  # else DDP would wait for ever
            target.set_exception(error)

    source.then(finish)


def _check(
    total_samples: int,
    strategy: Sequence[float],
    momentum: float,
    momentum_type: str,
    clip_norm: float | None,
) -> None:
    if total_samples < 1:
        raise ValueError(f"total_samples must be the samples of an epoch, found {total_samples}")
    if not strategy or not all(0 <= share < 1 for share in strategy):
        raise ValueError(f"sparsity_strategy must be shares from 0 to below 1, found {strategy!r}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be from 0 to below 1, found {momentum}")
    if momentum_type not in MOMENTUM_TYPES:
        raise ValueError(f"momentum_type must be one of {MOMENTUM_TYPES}, found {momentum_type!r}")
    if clip_norm is not None and clip_norm <= 0:
        raise ValueError(f"clip_norm must be positive, or None, found {clip_norm}")


class DgcSgd(ForeachOptimizer):
    """SGD for gradients that are velocities already: it adds the learning rate and the weight decay.

    Weight decay is the same on all ranks and is not sent. It has a velocity of its own, so that with nothing
    compressed this is torch.optim.SGD with momentum: the velocity of a sum is the sum of the velocities.

        d = m d + decay w;  w = w - lr (g + d)

    Args:
        params: parameters, or groups of them; each group may have a weight_decay of its own.
        momentum, nesterov: those of DeepGradientCompression.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], weights: list[torch.Tensor]) -> None:
        updates = [weight.grad for weight in weights]
        if decay := group["weight_decay"]:
            velocities = [self._buffer(weight) for weight in weights]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, weights, alpha=decay)
            updates = torch._foreach_add(
                updates, velocities, alpha=group["momentum"] if group["nesterov"] else 1.0
            )
            if group["nesterov"]:
                torch._foreach_add_(updates, weights, alpha=decay)
        torch._foreach_add_(weights, updates, alpha=-group["lr"])
