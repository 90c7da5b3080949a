"""One update of the weights: forward, backward, average of the gradients over the ranks, optimizer; its time.

The gradients are averaged as `--communication` tells:

    fp32    all-reduce, the default of DistributedDataParallel
    fp16    all-reduce of half the bytes; gradients below 6e-8 become 0
    bf16    all-reduce of half the bytes; eight bits of precision
    dgc     Deep Gradient Compression: a thousandth of the values, with their indices; see extras/dgc.py
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from optim import AllReduce, Ema, make_optimizer, register
from ranks import Ranks, check_identical

__all__ = ["AMP", "COMMUNICATION", "CUDA_GRAPHS", "Meter", "Step", "Task", "prepare_norms", "top1", "top5"]

COMMUNICATION = ["fp32", "fp16", "bf16", "dgc"]
AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CUDA_GRAPHS = ["reduce-overhead", "max-autotune"]  # of --compile


def top1(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The number of samples whose highest output is their target."""
    return (outputs.argmax(1) == targets).sum()


def top5(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The number of samples whose target is among the five highest outputs."""
    return (outputs.topk(min(5, outputs.shape[1])).indices == targets[:, None]).sum()


@dataclass
class Task:
    """The network and its loss: the result of `model_fn`.

    Attributes:
        module: inputs -> outputs.
        loss: (outputs, targets) -> the mean over the batch.
        metrics: what evaluation reports, by name: (outputs, targets) -> the sum over the samples of a batch.
            --target is the goal of "accuracy".
        batch_transform: for the DataLoader; runs on the device, after the copy.
        record: what the checkpoint has to tell about the network (strings, numbers, and lists of them).
    """

    module: nn.Module
    loss: Callable[[Any, Any], torch.Tensor] = nn.functional.cross_entropy
    metrics: dict[str, Callable[[Any, Any], torch.Tensor]] = field(default_factory=lambda: {"accuracy": top1})
    batch_transform: Callable[[Any], Any] | None = None
    record: dict[str, Any] = field(default_factory=dict)


class Step:
    """Trains a module on this rank's device, in step with the other ranks.

    Args:
        task: made with the same seed on every rank.
        args: see options.py.
        ranks: this rank and the others.
        samples: of an epoch.
        optimizer: of the module's parameters; default: that of the options. The run's schedule is a factor of
            the rates that its groups have here.
    """

    def __init__(
        self,
        task: Task,
        args: Any,
        ranks: Ranks,
        samples: int,
        optimizer: Callable[..., Any] = make_optimizer,
    ) -> None:
        self.task, self.ranks = task, ranks
        self.checksum = check_identical(task.module, ranks)
        self._layout = torch.channels_last if args.channels_last else torch.contiguous_format
        self.module = task.module.to(ranks.device, memory_format=self._layout)
        self.communication = _communication(self.module, args, ranks, samples)
        compressed = args.communication == "dgc"  # it has taken over momentum and clipping
        self.optimizer = self.communication.make_sgd(args) if compressed else optimizer(self.module, args)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.ema = Ema(self.module, args.ema) if args.ema else None
        self._type = ranks.device.type
        self._amp = AMP[args.amp]
        self._scaler = torch.amp.GradScaler(self._type, enabled=args.amp == "fp16")
        self._clip = 0 if compressed else args.clip_norm
        self._seed = args.seed
        network: nn.Module = self.module
        if args.compile != "off":
            network = torch.compile(network, mode=None if args.compile == "default" else args.compile)
        self._graphs = args.compile in CUDA_GRAPHS
        if self._graphs:
            # The next run of a graph overwrites what it has made: gradients add up in memory of their own.
            for weight in self.module.parameters():
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        if self.communication is not None:
            network = _distributed(network, args, ranks)
            register(network, self.communication)
        self._network = network
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)

    def begin(self, number: int, samples: int, factor: float) -> None:
        """Before the first pass of update `number`, after `samples` samples of all ranks.

        `factor`: of the optimizer's learning rates.
        """
        self.begun = number, samples
        # So random layers draw the same numbers after a resume.
        torch.manual_seed(self._seed * 1_000_003 + number * self.ranks.size + self.ranks.rank)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        if self.communication is not None:
            self.communication.begin(samples)

    def add(self, inputs: Any, targets: Any, share: float, last: bool) -> None:
        """Forward and backward of one batch, which is `share` of this rank's part of the update.

        The gradients add up. Only those of the last batch are exchanged between the ranks, while the backward
        pass still runs.
        """
        if self._graphs:
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
        self.optimizer.zero_grad(set_to_none=not self._graphs)
        if self.ema is not None:
            self.ema.update()

    def predict(self, inputs: Any) -> Any:
        """The outputs; no communication."""
        with torch.no_grad(), self._precision():
            return self.module(self._placed(inputs))

    def evaluate(self, loader: Any, recent: list[Any]) -> dict[str, float]:
        """The task's metrics over a loader of this rank's part; of the averaged weights, if there are any.

        Args:
            recent: inputs of batches for the statistics of batch norms; see `prepare_norms`.
        """
        sums = {
            name: torch.zeros((), dtype=torch.float64, device=self.ranks.device) for name in self.task.metrics
        }
        seen = 0
        with self.averaged(recent):
            self.module.eval()
            for inputs, targets in loader:
                outputs = self.predict(inputs)
                for name, metric in self.task.metrics.items():
                    sums[name] += metric(outputs, targets)
                seen += len(targets)
            self.module.train()
        *totals, seen_by_all = self.ranks.sums(*map(float, sums.values()), seen)
        return {name: total / seen_by_all for name, total in zip(sums, totals, strict=True)}

    @contextlib.contextmanager
    def averaged(self, recent: list[Any]) -> Iterator[None]:
        """A block in which the module has its averaged weights, if any, and their statistics."""
        with self.ema.in_place() if self.ema is not None else contextlib.nullcontext():
            self.prepare_norms(recent)
            yield

    def prepare_norms(self, recent: list[Any]) -> None:
        """See the function."""
        prepare_norms(self.module, recent, self.predict, self.ranks)

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
        try:
            self.module.load_state_dict(state["model"])
        except RuntimeError as error:
            raise SystemExit(
                "the checkpoint is of another network: give the options of its run, or another --out"
            ) from error
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:  # empty without fp16: a new scale is found in a few updates
            self._scaler.load_state_dict(state["scaler"])
        if self.ema is not None:  # without a saved average it begins with the weights
            self.ema.load_state_dict(state["ema"] or {"average": list(self.module.parameters())})

    @property
    def rate(self) -> float:
        """The learning rate of the last update."""
        return self.optimizer.param_groups[0]["lr"]

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


@torch.no_grad()
def prepare_norms(module: nn.Module, recent: list[Any], predict: Callable[[Any], Any], ranks: Ranks) -> None:
    """Make the running statistics of batch norms those of all ranks. All ranks call it.

    Each rank has seen different samples, and its running averages lag behind the weights. The statistics
    of the batches `recent` are averaged with equal weight, then over the ranks; without batches, the
    running averages over the ranks only.

    Args:
        predict: runs `module` on the inputs of a batch.
    """
    norms: list[Any] = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    norms = [norm for norm in norms if norm.track_running_stats]
    if recent:
        with _plain_averages(norms):
            module.train()
            for inputs in recent:
                predict(inputs)
    statistics = [value for norm in norms for value in (norm.running_mean, norm.running_var)]
    if ranks.size > 1 and statistics:
        together = torch.cat(statistics)
        dist.all_reduce(together)
        together /= ranks.size
        for own, of_all in zip(statistics, together.split([len(s) for s in statistics]), strict=True):
            own.copy_(of_all)


@contextlib.contextmanager
def _plain_averages(norms: list[Any]) -> Iterator[None]:
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


def _communication(module: nn.Module, args: Any, ranks: Ranks, samples: int) -> Any:
    """The exchange of gradients between ranks; None for a single rank."""
    if args.communication == "dgc":
        from extras.dgc import DeepGradientCompression

        return DeepGradientCompression.of_run(module, args, ranks, samples)
    dtype = None if args.communication == "fp32" else AMP[args.communication]
    return AllReduce(dtype) if ranks.size > 1 else None


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


class Meter:
    """Times one epoch of one rank.

    Args:
        synchronize: waits for the device, and returns the time at which it was done.

    Attributes:
        waited: seconds without a batch, of all steps but the first, which is in `first_wait`.
    """

    def __init__(self, synchronize: Any) -> None:
        self._synchronize = synchronize
        self.steps = self.samples = 0
        self.waited = self.first_wait = self._outside = 0.0
        self._begun = time.perf_counter()
        self._first_end = self._last_end = self._begun
        self._first_samples = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A block that fetches a batch."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        if self.steps:
            self.waited += seconds
        else:
            self.first_wait += seconds

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """A block that is not training, such as a checkpoint."""
        self._synchronize()
        start = time.perf_counter()
        yield
        self._outside += time.perf_counter() - start

    def step(self, samples: int) -> None:
        """An update of `samples` samples was handed to the device."""
        self.steps += 1
        self.samples += samples
        if self.steps == 1:
            self._first_end, self._first_samples = self._synchronize(), samples

    def end(self) -> None:
        self._last_end = self._synchronize()

    @property
    def seconds(self) -> float:
        """Seconds of training, from the first request for data."""
        return self._last_end - self._begun - self._outside

    @property
    def after_first(self) -> tuple[int, float]:
        """(samples, seconds) without the first step."""
        return self.samples - self._first_samples, self._last_end - self._first_end - self._outside

    def columns(self, ranks: Ranks, batch: int) -> dict[str, Any]:
        """The epoch of all ranks, with `batch` samples in an update, for a line of the report."""
        samples, seconds = self.after_first
        total, waited, steady = ranks.sums(
            self.samples, self.waited, samples / seconds if seconds > 0 else 0.0
        )
        longest, first_wait = ranks.maxima(self.seconds, self.first_wait)
        rate = total / longest
        return {
            "node": ranks.nodes,
            "GPUs": ranks.size,
            "batch/s": round(rate / batch, 3),
            "FPS": round(rate, 1),
            "FPS per GPU": round(rate / ranks.size, 1),
            "FPS after the first step": round(steady, 1),
            "data wait per step": round(waited / (max(1, self.steps - 1) * ranks.size), 6),
            "first batch": round(first_wait, 3),
            "seconds": round(longest, 3),
        }
