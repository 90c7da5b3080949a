"""The average of the gradients of all ranks, and its cost in bytes.

    fp32    all-reduce, the default of DistributedDataParallel
    fp16    all-reduce of half the bytes; gradients below 6e-8 become 0
    bf16    all-reduce of half the bytes; eight bits of precision
    dgc     Deep Gradient Compression: a thousandth of the values, with their indices; see dgc.py

Each is a communication hook of DistributedDataParallel: it gets a bucket of gradients during the backward
pass, and returns a future of their average.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

__all__ = ["AllReduce", "Traffic", "register"]


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
