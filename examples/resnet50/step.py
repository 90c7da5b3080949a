"""One update of the weights: forward, backward, average of the gradients over the ranks, optimizer."""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm import AllReduce, register
from dgc import DeepGradientCompression, DgcSgd
from optim import Ema, make_optimizer, parameter_groups
from ranks import Ranks, check_identical

__all__ = ["AMP", "COMMUNICATION", "Ceiling", "Step", "Task"]

COMMUNICATION = ["fp32", "fp16", "bf16", "dgc"]
AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def top1(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The number of samples whose highest output is their target."""
    return (outputs.argmax(1) == targets).sum()


@dataclass
class Task:
    """The network and its loss: the result of `model_fn`.

    Attributes:
        module: inputs -> outputs.
        loss: (outputs, targets) -> the mean over the batch.
        correct: (outputs, targets) -> the number of correct samples.
        batch_transform: for the DataLoader; runs on the device, after the copy.
        record: what the checkpoint has to tell about the network (strings, numbers, and lists of them).
    """

    module: nn.Module
    loss: Callable[[Any, Any], torch.Tensor] = nn.functional.cross_entropy
    correct: Callable[[Any, Any], torch.Tensor] = top1
    batch_transform: Callable[[Any], Any] | None = None
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ceiling:
    """The rates of this rank without a loader, on one batch that stays on the device.

    Attributes:
        rate: samples/s of one rank, with all ranks in step.
        alone: samples/s of one rank without communication.
        exposed: seconds per update that the all-reduce adds.
        bare: seconds of an all-reduce of the same bytes alone.
    """

    rate: float
    alone: float
    exposed: float = 0.0
    bare: float = 0.0

    @property
    def overlap(self) -> float | None:
        """The share of the communication that overlaps with the backward pass."""
        return max(0.0, 1 - self.exposed / self.bare) if self.bare else None


class Step:
    """Trains a module on this rank's device, in step with the other ranks.

    Args:
        task: made with the same seed on every rank.
        args: see train.py.
        ranks: this rank and the others.
        samples: of an epoch.
    """

    def __init__(self, task: Task, args: Any, ranks: Ranks, samples: int) -> None:
        self.task, self.ranks = task, ranks
        self.checksum = check_identical(task.module, ranks)
        self._layout = torch.channels_last if args.channels_last else torch.contiguous_format
        self.module = task.module.to(ranks.device, memory_format=self._layout)
        self.communication = _communication(self.module, args, ranks, samples)
        compressed = isinstance(self.communication, DeepGradientCompression)
        self.optimizer = _dgc_sgd(self.module, args) if compressed else make_optimizer(self.module, args)
        self.ema = Ema(self.module, args.ema) if args.ema else None
        self._type = ranks.device.type
        self._amp = AMP[args.amp]
        self._scaler = torch.amp.GradScaler(self._type, enabled=args.amp == "fp16")
        self._clip = 0 if compressed else args.clip_norm
        self._seed = args.seed
        network: nn.Module = self.module
        if args.compile != "off":  # "reduce-overhead" records CUDA graphs
            network = torch.compile(network, mode=None if args.compile == "default" else args.compile)
        self._mark = args.compile == "reduce-overhead" and self._type == "cuda"
        if self.communication is not None:
            network = _distributed(network, args, ranks)
            register(network, self.communication)
        self._network = network
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)

    def begin(self, number: int, samples: int, rate: float) -> None:
        """Before the first pass of update `number`, after `samples` samples of all ranks, at this rate."""
        # So random layers draw the same numbers after a resume.
        torch.manual_seed(self._seed * 1_000_003 + number * self.ranks.size + self.ranks.rank)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.communication is not None:
            self.communication.begin(samples)

    def add(self, inputs: Any, targets: Any, share: float, last: bool) -> None:
        """Forward and backward of one batch, which is `share` of this rank's part of the update.

        The gradients add up. Only those of the last batch are exchanged between the ranks, while the backward
        pass still runs.
        """
        if self._mark:
            torch.compiler.cudagraph_mark_step_begin()
        with self._silent(not last):
            with self._precision():
                loss = self.task.loss(self._network(self._placed(inputs)), targets)
            self._scaler.scale(loss * share).backward()
        self.loss_sum += loss.detach().double() * len(targets)

    def update(self) -> None:
        """The optimizer's step."""
        if self._clip:
            self._scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), self._clip, foreach=True)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()

    def predict(self, inputs: Any) -> Any:
        """The outputs; no communication."""
        with torch.no_grad(), self._precision():
            return self.module(self._placed(inputs))

    def averaged(self) -> Any:
        """A block in which the module has its averaged weights, if an average is kept."""
        return self.ema.in_place() if self.ema is not None else contextlib.nullcontext()

    def synchronize(self) -> float:
        """Wait until the device has finished its work; returns the time, in perf_counter's seconds."""
        if self._type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        if self.ema is not None and state["ema"] is not None:
            self.ema.load_state_dict(state["ema"])

    def traffic(self) -> dict[str, float]:
        """The bytes of the gradients since the last call."""
        return self.communication.traffic.take() if self.communication is not None else {}

    def gather_communication(self) -> list[Any]:
        """The compression's state of all ranks, on rank 0, for a checkpoint; all ranks call it."""
        if self.communication is None:
            return []
        return self.communication.gather_state(self.ranks.control)

    def load_communication(self, states: list[Any]) -> None:
        if self.communication is not None:
            self.communication.load_gathered(states)

    def measure(self, inputs: Any, targets: Any, passes: int, updates: int) -> Ceiling:
        """The ceiling of this rank with this batch. It leaves the state unchanged."""
        talk = self.communication
        kept = copy.deepcopy((self.state_dict(), talk.state_dict() if talk is not None else None))
        loss_sum = self.loss_sum.clone()
        samples = len(targets) * passes

        def seconds(talking: bool) -> float:
            for number in range(-2, updates):
                if number == 0:
                    start = self.synchronize()
                self.begin(0, 0, 0.0)
                for index in range(passes):
                    self.add(inputs, targets, 1 / passes, last=talking and index == passes - 1)
                self.update()
            return self.ranks.maxima((self.synchronize() - start) / updates)[0]

        together = seconds(True)
        alone = seconds(False) if self.ranks.size > 1 else together
        bare = self._bare_all_reduce(updates) if self.ranks.size > 1 else 0.0
        self.load_state_dict(kept[0])
        if talk is not None:
            talk.load_state_dict(kept[1])
        self.loss_sum.copy_(loss_sum)
        return Ceiling(samples / together, samples / alone, max(0.0, together - alone), bare)

    def _bare_all_reduce(self, updates: int) -> float:
        buffer = torch.zeros(
            sum(weight.numel() for weight in self.module.parameters()), device=self.ranks.device
        )
        for number in range(-1, updates):
            if number == 0:
                start = self.synchronize()
            dist.all_reduce(buffer)
        return self.ranks.maxima((self.synchronize() - start) / updates)[0]

    def _placed(self, inputs: Any) -> Any:
        if torch.is_tensor(inputs) and inputs.ndim == 4:
            return inputs.contiguous(memory_format=self._layout)
        return inputs

    def _precision(self) -> Any:
        return torch.autocast(self._type, self._amp, enabled=self._amp is not None)

    def _silent(self, silent: bool) -> Any:
        if silent and isinstance(self._network, DistributedDataParallel):
            return self._network.no_sync()
        return contextlib.nullcontext()


def _communication(module: nn.Module, args: Any, ranks: Ranks, samples: int) -> Any:
    """The exchange of gradients between ranks; None for a single rank."""
    if args.communication == "dgc":
        if ranks.size == 1 or args.amp == "fp16" or args.optimizer != "sgd":
            raise SystemExit(
                "--communication dgc needs several ranks, --optimizer sgd, and --amp off or bf16"
            )
        return DeepGradientCompression(
            module,
            args.dgc_total_samples or samples,
            sparsity_strategy=args.dgc_sparsity_strategy,
            momentum_factor_masking=args.dgc_momentum_factor_masking,
            momentum=args.momentum,
            momentum_type="nesterov" if args.nesterov else "vanilla",
            clip_norm=args.clip_norm or None,
        )
    dtype = None if args.communication == "fp32" else AMP[args.communication]
    return AllReduce(dtype) if ranks.size > 1 else None


def _dgc_sgd(module: nn.Module, args: Any) -> DgcSgd:
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in parameter_groups(module, args.weight_decay)
    ]
    return DgcSgd(groups, 0.0, args.momentum, nesterov=args.nesterov)


def _distributed(network: nn.Module, args: Any, ranks: Ranks) -> DistributedDataParallel:
    """The network with gradients averaged in buckets, each sent once the backward pass has filled it."""
    known = inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {"bucket_cap_mb": args.bucket_mb}
    if "bucket_cap_mb_list" in known:  # a small first bucket is sent early
        options = {"bucket_cap_mb_list": [args.first_bucket_mb, args.bucket_mb]}
    if "init_sync" in known:  # the checksum has proved that all weights are equal
        options["init_sync"] = False
    # Running statistics are averaged before each use, not in each step.
    options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
    return DistributedDataParallel(
        network,
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **options,
    )
