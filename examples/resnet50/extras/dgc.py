"""Deep Gradient Compression: Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv 1712.01887.

Of each layer's gradients only the largest 0.1 % are sent; the others stay on the rank and add up until they
are among the largest. For rank k of N, with its gradient g (the mean over its batch), per layer:

    g = clip(g / N)       local gradient clipping, at N**-0.5 of the limit for the sum of all ranks
    u = m u + g           momentum correction: velocities add up,
    v = v + u                 not gradients
    send v where |v| is among the largest, as values and indices; every rank adds those of all ranks
    v = 0 there           the rest of v stays
    u = 0 there           momentum factor masking: sent values leave no stale momentum

The result is the sum over the ranks. It is a velocity already, so the optimizer must not add momentum:
`DgcSgd` does the rest of SGD's work. Biases, norms and small layers are all-reduced uncompressed, with
ordinary momentum. Sparsity grows from 75 % to 99.9 % over the first epochs, counted in samples.

While a sparse exchange would send more bytes than a dense one, every v is all-reduced as a whole, without
masking: that is momentum SGD. A value with its index has 8 bytes and every rank receives those of all
others, so with N ranks this is so until less than 1/N of the values are sent.

It does not work with a loss scaler (fp16): a skipped step would lose the values sent in it. A NaN counts as
the largest gradient, so it is sent at once, as in a dense exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from optim import ForeachOptimizer, Traffic, parameter_groups
from ranks import Ranks

__all__ = ["SPARSITY_STRATEGY", "DeepGradientCompression", "DgcSgd", "largest"]

SPARSITY_STRATEGY = (0.75, 0.9375, 0.984375, 0.996, 0.999)
MOMENTUM_TYPES = ("vanilla", "nesterov")
_STRIDE = 100  # a sample of 1 %, as in the paper
_EXPECTED = 64  # values of a sample above the threshold; with fewer, the threshold is unreliable
_MARGIN = 1.3  # enough for 49 of 50 samples


class _Bucket(NamedTuple):
    """DDP's arguments to the hook: flat gradients, and their parameters."""

    buffer: torch.Tensor
    gradients: list[torch.Tensor]
    parameters: list[torch.Tensor]


class DeepGradientCompression:
    """The hook: `optim.register(network, DeepGradientCompression(module, ...))`.

    Args:
        module: its gradients are exchanged; float32.
        total_samples: of an epoch. Each entry of `sparsity_strategy` holds for one epoch, the last one for
            all later epochs.
        sparsity_strategy: shares of a layer's gradients that are not sent.
        momentum: m.
        momentum_type: "vanilla", or "nesterov" as in torch's SGD.
        momentum_factor_masking: see above.
        clip_norm: limit of the norm of the whole averaged gradient. The norm is known only with the last
            bucket, so nothing is sent before that.
        dense_below: layers with fewer weights are not compressed.

    Attributes:
        traffic: bytes sent, see optim.Traffic.
        velocity, residual: u and v by the parameter's name, in its shape. Small layers have a velocity only,
            equal on all ranks.
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
        self._module = module
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
                raise TypeError(f"Deep Gradient Compression needs float32, but {name} is {weight.dtype}")
        self._names = {weight: name for name, weight in module.named_parameters() if weight.requires_grad}
        # In the layout of the weights (channels_last or not), because their memory is read in its own order.
        self.velocity = {name: torch.zeros_like(weight) for weight, name in self._names.items()}
        self.residual = {
            name: torch.zeros_like(weight)
            for weight, name in self._names.items()
            if weight.ndim > 1 and weight.numel() >= dense_below
        }
        self._samples = self._number = 0
        self._waiting: list[tuple[_Bucket, Future[torch.Tensor]]] = []

    @classmethod
    def of_run(cls, module: nn.Module, args: Any, ranks: Ranks, samples: int) -> DeepGradientCompression:
        """That of the options of a run, with epochs of `samples` samples."""
        if ranks.size == 1 or args.amp == "fp16" or args.optimizer != "sgd":
            raise SystemExit(
                "--communication dgc needs several ranks, --optimizer sgd, and --amp off or bf16"
            )
        return cls(
            module,
            args.dgc_total_samples or samples,
            sparsity_strategy=args.dgc_sparsity_strategy,
            momentum_factor_masking=args.dgc_momentum_factor_masking,
            momentum=args.momentum,
            momentum_type="nesterov" if args.nesterov else "vanilla",
            clip_norm=args.clip_norm or None,
        )

    def make_sgd(self, args: Any) -> DgcSgd:
        """The optimizer for the results, with a rate of 1."""
        groups = [
            {"params": group["params"], "weight_decay": group["weight_decay"]}
            for group in parameter_groups(self._module, args.weight_decay)
        ]
        return DgcSgd(groups, 1.0, self.momentum, nesterov=self.nesterov)

    @property
    def sparsity(self) -> float:
        """The share of a layer's gradients that this update does not send; 0 where it is dense."""
        epoch = min(self._samples // self.total_samples, len(self.sparsity_strategy) - 1)
        planned = self.sparsity_strategy[epoch]
        return planned if self._is_smaller(planned) else 0.0

    def _is_smaller(self, sparsity: float) -> bool:
        """Whether the sparse exchange of the large layers sends fewer bytes than the dense one."""
        sizes = [residual.numel() for residual in self.residual.values()]
        sparse, dense = Traffic(self.ranks), Traffic(self.ranks)
        sparse.all_gathered(8 * sum(_kept(size, sparsity) for size in sizes))
        dense.all_reduced(4 * sum(sizes))
        return sparse.sent < dense.sent

    def begin(self, samples: int) -> None:
        """An update begins, after `samples` samples of all ranks since the start of training."""
        self._samples = samples
        self._number += 1
        self.traffic.steps += 1
        self._waiting.clear()  # from a failed backward pass

    def average(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """The hook: a future of the velocity for the weights of all ranks, in the bucket's memory."""
        last = bucket.is_last()
        own = _Bucket(bucket.buffer(), bucket.gradients(), bucket.parameters())
        self.traffic.averaged(own.buffer.numel())
        own.buffer.div_(self.ranks)
        if self.clip_norm is None:
            return self._exchange(own)
        future: Future[torch.Tensor] = Future(devices=[own.buffer.device] if own.buffer.is_cuda else None)
        self._waiting.append((own, future))
        if last:
            self._clip()
            for waiting, promised in self._waiting:
                _pass_on(self._exchange(waiting), promised)
            self._waiting.clear()
        return future

    def _clip(self) -> None:
        """Scale this rank's whole gradient down to its share of the limit.

        N independent gradients of norm c have a sum of norm N**0.5 c, so each gets N**-0.5 of the limit of
        the sum.
        """
        assert self.clip_norm is not None
        buffers = [own.buffer for own, _ in self._waiting]
        norm = torch.stack(torch._foreach_norm(buffers)).norm()
        scale = (self.clip_norm * self.ranks**-0.5 / norm).clamp(max=1.0)
        torch._foreach_mul_(buffers, scale)

    def _exchange(self, own: _Bucket) -> Future[torch.Tensor]:
        """Send the largest values of large layers, and all of small ones; a future of the sums."""
        buffer, sparsity = own.buffer, self.sparsity
        values, indices, whole = [], [], []
        for weight, gradient in zip(own.parameters, own.gradients, strict=True):
            name = self._names[weight]
            begin = gradient.storage_offset() - buffer.storage_offset()
            part = buffer[begin : begin + gradient.numel()]
            if name in self.residual and sparsity:
                found, places = self._select(name, part, sparsity)
                values.append(found)
                indices.append((places + begin).int())
                continue
            if name in self.residual:
                self._select_all(name, part)
            whole.append((name, part))
        works, messages = [], []
        if whole:
            dense = torch.cat([part for _, part in whole])
            works.append(dist.all_reduce(dense, async_op=True))
            self.traffic.all_reduced(dense.nbytes)
        if values:
            # One message of 32-bit words, half of them floats.
            message = torch.cat([*(found.view(torch.int32) for found in values), *indices])
            messages = list(message.new_empty((self.ranks, len(message))))
            works.append(dist.all_gather(messages, message, async_op=True))
            self.traffic.all_gathered(message.nbytes)

        def finish(done: Any) -> torch.Tensor:
            for future in done.value():  # which raises the error of a rank that died
                future.wait()  # NCCL's is complete at once; this makes the GPU wait for what it stands for
            buffer.zero_()
            for message in messages:  # all ranks add in the same order, to the same bits
                found, places = message.chunk(2)
                buffer.index_add_(0, places, found.view(torch.float32))
            if whole:
                parts = dense.split([part.numel() for _, part in whole])
                for (name, part), gradient in zip(whole, parts, strict=True):
                    part.copy_(gradient)
                    if name not in self.residual:
                        self._accelerate(name, part)
            return buffer

        return torch.futures.collect_all([work.get_future() for work in works]).then(finish)

    def _select(
        self, name: str, gradient: torch.Tensor, sparsity: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a gradient to the residual, and remove the values to send; returns values and indices."""
        velocity, residual = _flat(self.velocity[name]), _flat(self.residual[name])
        self._accelerate(name, gradient)
        residual.add_(gradient)
        places = largest(residual.abs(), _kept(residual.numel(), sparsity), self._number)
        values = residual[places]
        residual[places] = 0
        if self.momentum_factor_masking:
            velocity[places] = 0
        return values, places

    def _select_all(self, name: str, gradient: torch.Tensor) -> None:
        """Turn a gradient into all that this rank has not sent, in its place."""
        residual = _flat(self.residual[name])
        self._accelerate(name, gradient)
        gradient.add_(residual)
        residual.zero_()

    def _accelerate(self, name: str, gradient: torch.Tensor) -> None:
        """Turn a gradient (flat) into a velocity, in its place."""
        velocity = _flat(self.velocity[name])
        velocity.mul_(self.momentum).add_(gradient)
        if self.nesterov:
            gradient.add_(velocity, alpha=self.momentum)
        else:
            gradient.copy_(velocity)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, with its own residuals. Tensors are not copied."""
        return {
            "velocity": dict(self.velocity),
            "residual": dict(self.residual),
            "samples": self._samples,
            "number": self._number,
            "traffic": asdict(self.traffic),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of this rank of this run."""
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
        """The states of all ranks on rank 0, for a checkpoint; an empty list on the others. All ranks call
        it.

        The state of a rank has twice the size of the module, so 8 ranks of a ResNet-50 make 1.6 GB. Unsent
        gradients are part of the training: without them a resumed run would be a different run.

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
        """Restore a checkpoint of any number of ranks.

        With the same number, each rank continues with its own state, and the run is the interrupted one. With
        another number, all ranks get equal parts of the sum. No gradient is lost, because the sum over all
        ranks is unchanged; only the order in which gradients are sent differs.
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

    A threshold is estimated from a sample, a little too low. A few more values than necessary lie above it,
    and the largest are chosen among these alone: the paper's hierarchical selection. Where too few lie above
    it, or the sample would be most of the whole, all values are compared. So the choice is exact; NaN is the
    largest.

    Args:
        number: of the update; it determines the sample, which is the same after a resume.
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
        except Exception as error:  # else DDP would never return
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
    """SGD for gradients that are already velocities: it applies the learning rate and the weight decay.

    Weight decay is equal on all ranks and is not sent. It has its own velocity, so without compression this
    is torch.optim.SGD with momentum: the velocity of a sum is the sum of the velocities.

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
