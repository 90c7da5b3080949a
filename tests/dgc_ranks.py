"""Ranks for tests/trainer/test_dgc.py: `run` writes the results of a rank.

A module whose loss is the product of its weights with given numbers has these numbers as its gradient, so a
scenario knows what goes into the hook, bit for bit.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "resnet50")]

from extras.dgc import SPARSITY_STRATEGY, DeepGradientCompression, DgcSgd  # noqa: E402
from optim import AllReduce, register  # noqa: E402

SHAPES = {"conv": (8, 4, 3, 3), "matrix": (24, 16), "bias": (16,), "tiny": (3, 4)}
STEPS = 6
STEP_SAMPLES = 100
OPTIONS: dict[str, Any] = {
    "total_samples": 2 * STEP_SAMPLES,  # so that STEPS go through three of these
    "sparsity_strategy": (0.5, 0.75, 0.95),  # the first has as many bytes as dense, so it is dense
    "dense_below": 100,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "nesterov": {"momentum_type": "nesterov"},
    "clipped": {"clip_norm": 5.0},
    "unmasked": {"momentum_factor_masking": False},
    "dense": {"momentum_factor_masking": False, "sparsity_strategy": (0.0,)},
    "dense nesterov": {
        "momentum_factor_masking": False,
        "sparsity_strategy": (0.0,),
        "momentum_type": "nesterov",
    },
}


class Given(nn.Module):
    """Weights, and a loss whose gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in SHAPES.items():
            weight = torch.randn(shape, generator=generator)
            if len(shape) == 4:
                weight = weight.to(memory_format=torch.channels_last)
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack(
            [(weight * gradients[name]).sum() for name, weight in self.named_parameters()]
        ).sum()


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Uncorrected(DeepGradientCompression):
    """The mutant without momentum correction: gradients add up, not velocities."""

    def _accelerate(self, name: str, gradient: torch.Tensor) -> None:
        if name not in self.residual:
            super()._accelerate(name, gradient)


class Forgetful(DeepGradientCompression):
    """The mutant that drops what it does not send."""

    def _select(self, name: str, gradient: torch.Tensor, sparsity: float) -> Any:
        chosen = super()._select(name, gradient, sparsity)
        self.residual[name].zero_()
        return chosen


class Unshared(DeepGradientCompression):
    """The mutant that clips at the limit for all ranks."""

    def _clip(self) -> None:
        self.clip_norm *= self.ranks**0.5  # type: ignore[operator]
        super()._clip()
        self.clip_norm /= self.ranks**0.5  # type: ignore[operator]


MUTANTS = {
    "uncorrected": (Uncorrected, {}),
    "forgetful": (Forgetful, {"momentum_factor_masking": False}),
    "unshared": (Unshared, {"clip_norm": 5.0}),
}


class Training:
    """Steps of one module; `make` is its communication, from the module."""

    def __init__(self, make: Callable[[Given], Any], nesterov: bool | None = None) -> None:
        self.module = Given()
        self.communication = make(self.module)
        # Buckets of 1 KB: several of them, and they are dealt anew after the first step.
        self.network = DistributedDataParallel(self.module, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        register(self.network, self.communication)
        groups = [{"params": [self.module.conv, self.module.matrix], "weight_decay": 0.1}]
        groups += [{"params": [self.module.bias, self.module.tiny]}]
        self.optimizer = DgcSgd(groups, lr=0.05, nesterov=bool(nesterov))
        self.updates: list[dict[str, torch.Tensor]] = []

    def run(self, first: int = 0, last: int = STEPS) -> Training:
        for step in range(first, last):
            self.communication.begin(step * STEP_SAMPLES)
            self.network(gradients(dist.get_rank(), step)).backward()
            self.updates.append(
                {name: weight.grad.clone() for name, weight in self.module.named_parameters()}
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def results(self) -> dict[str, Any]:
        return {
            "updates": self.updates,
            "state": copy.deepcopy(self.communication.state_dict()),
            "weights": self.module.state_dict(),
        }


def compression(cls: Any = DeepGradientCompression, **options: Any) -> Callable[[Given], Any]:
    return lambda module: cls(module, **{**OPTIONS, **options})


def variants() -> dict[str, Any]:
    results = {}
    for name, options in VARIANTS.items():
        results[name] = Training(compression(**options), "nesterov" in name).run().results()
    for name, (mutant, options) in MUTANTS.items():
        results[name] = Training(compression(mutant, **options)).run().results()
    return results


def all_reduces() -> dict[str, Any]:
    dtypes = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
    return {name: Training(lambda _, d=dtype: AllReduce(d)).run().results() for name, dtype in dtypes.items()}


def resume() -> dict[str, Any]:
    """Broken off after half of the steps; taken up on as many ranks, and from a checkpoint of one more."""
    whole = Training(compression()).run(0, STEPS // 2)
    box = [whole.communication.gather_state()]
    dist.broadcast_object_list(box, src=0)
    [saved] = box
    again = Training(compression())
    again.communication.load_gathered(saved)
    merged = compression()(Given())
    merged.load_gathered([*saved, saved[0]])
    return {
        "whole": whole.run(STEPS // 2).results(),
        "again": again.run(STEPS // 2).results(),
        "saved": saved,
        "merged": merged.state_dict(),
    }


# --- a task that can be learnt


CLASSES, SAMPLES, BATCH = 8, 1536, 32  # a batch of each rank


def gratings(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 3 x 24 x 24 under noise; the class is the direction of their stripes."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    angle = (classes * torch.pi / CLASSES)[:, None, None]
    phase = 2 * torch.pi * torch.rand((count, 1, 1), generator=generator)
    down, across = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
    stripes = torch.sin(0.8 * (down * angle.cos() + across * angle.sin()) + phase)
    noise = torch.randn((count, 3, 24, 24), generator=generator)
    return stripes[:, None] + 3.5 * noise, classes


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def learn(kind: str, epochs: int, sparsity: Sequence[float] = SPARSITY_STRATEGY) -> dict[str, Any]:
    """Accuracy on other samples, and the traffic of the last epoch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, targets = gratings(SAMPLES, 0)
    module = network()
    if kind == "dgc":
        communication: Any = DeepGradientCompression(module, SAMPLES, sparsity_strategy=sparsity)
        optimizer: Any = DgcSgd(module.parameters(), lr=0.1, weight_decay=1e-4)
    else:
        communication = AllReduce()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    parallel = DistributedDataParallel(module)
    register(parallel, communication)
    updates, number = epochs * SAMPLES // (BATCH * ranks), 0
    for epoch in range(epochs):
        communication.traffic.take()
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for chosen in order[rank::ranks].split(BATCH):
            communication.begin(number * BATCH * ranks)
            warm = min(1.0, (number + 1) / (updates / 5))
            optimizer.param_groups[0]["lr"] = 0.1 * warm * (1 - number / updates)
            nn.functional.cross_entropy(parallel(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
            number += 1
    module.eval()
    with torch.no_grad():
        inputs, targets = gratings(2000, 1)
        right = int((module(inputs).argmax(1) == targets).sum())
    reached = getattr(communication, "sparsity", 0.0)
    return {"accuracy": right / 2000, "sparsity": reached, "traffic": communication.traffic.take()}


def converge() -> dict[str, Any]:
    return {kind: learn(kind, EPOCHS) for kind in ("dense", "dgc")}


def learns() -> dict[str, Any]:
    return learn("dgc", 3, (0.99,))


EPOCHS = 9  # the sparsity grows over the first four


SCENARIOS = {
    "variants": variants,
    "all_reduces": all_reduces,
    "resume": resume,
    "learns": learns,
    "converge": converge,
}


def run(directory: Path, rank: int, ranks: int, scenarios: Sequence[str]) -> None:
    """Write the results of each scenario to the directory, and to a file there what goes to stderr."""
    os.dup2(os.open(directory / f"{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=PATIENCE),
    )
    for scenario in scenarios:
        torch.save(SCENARIOS[scenario](), directory / f"{scenario}-{rank}.pt")
    dist.destroy_process_group()
    # One of gloo's threads may be about to drop the callback of the last hook, for which it needs the
    # interpreter; if that is ending, the process aborts. The threads live as long as DDP, which nothing ends.
    sys.stderr.flush()
    os._exit(0)
