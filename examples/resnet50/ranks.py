"""This process among the others: joining them, agreeing with them, and proof that all start alike."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Ranks", "StopVote", "check_identical"]


@dataclass(frozen=True)
class Ranks:
    """This rank, and how many there are.

    Attributes:
        rank, size: of all ranks; 0 and 1 without torchrun.
        nodes: machines, or torchrun agents.
        device: this rank's.
        control: a group on the CPU for small things, so that they never wait for a device's queue.
    """

    rank: int
    size: int
    nodes: int
    device: torch.device
    control: Any = None

    @classmethod
    def join(cls, device: str = "auto", timeout: float = 600) -> Ranks:
        """Join the other ranks, if torchrun (or SLURM or Ray with torchrun's variables) started us."""
        local = int(os.environ.get("LOCAL_RANK", 0))
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        chosen = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(chosen)
        if "RANK" not in os.environ and not dist.is_initialized():
            return cls(0, 1, 1, chosen)
        if not dist.is_initialized():  # Ray Train has done it
            backend = "nccl" if cuda else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **_meeting_point(timeout))
        size = dist.get_world_size()
        control = dist.new_group(backend="gloo") if cuda else dist.group.WORLD
        nodes = max(1, size // int(os.environ.get("LOCAL_WORLD_SIZE", size)))
        return cls(dist.get_rank(), size, nodes, chosen, control)

    @property
    def first(self) -> bool:
        """Is this the rank that prints and writes?"""
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """Each value summed over all ranks. Waits for all ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def maxima(self, *values: float) -> list[float]:
        """Each value's largest over all ranks. Waits for all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Iterable[float], operation: Any) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(tensor, operation, group=self.control)
        return tensor.tolist()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (bytes, or what JSON knows), on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _meeting_point(timeout: float) -> dict[str, Any]:
    """Where ranks find each other, for init_process_group.

    torchrun's agents keep one store for all its restarts (seen in torch 2.13), and ranks that start again may
    find the addresses of those that died. So each start has a corner of its own in it. With several agents,
    whose counts of restarts differ, the store has to be a new one too: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=timeout))
    corner = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-of-{size}"
    return {"store": dist.PrefixStore(corner, store), "rank": rank, "world_size": size}


class StopVote:
    """SIGTERM (or Ctrl-C) on any rank lets all ranks end after the same step.

    A signal reaches the ranks at different moments, and a rank that stops alone leaves the others waiting in
    an all-reduce. So every step each rank casts a vote, and reads what came of the vote of the step before:
    the same on all ranks, without waiting for it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asked = False
        self._pending: tuple[Any, torch.Tensor] | None = None
        # Only the main thread may; Ray runs a training function in another one, and ends it in its own way.
        numbers = (signal.SIGTERM, signal.SIGINT) if _in_main_thread() else ()
        self._before = {number: signal.signal(number, self._ask) for number in numbers}

    def _ask(self, number: int, frame: Any) -> None:
        if self._asked and number == signal.SIGINT:  # the second Ctrl-C means it
            raise KeyboardInterrupt
        self._asked = True

    def agreed(self) -> bool:
        """Once a step, on all ranks alike."""
        if self._ranks.size == 1:
            return self._asked
        stop = self._result()
        ballot = torch.tensor([int(self._asked)])
        work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self._ranks.control, async_op=True)
        self._pending = (work, ballot)
        return stop

    def close(self) -> None:
        """Wait for the last vote, so that no rank leaves while another one counts on it."""
        self._result()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _result(self) -> bool:
        if self._pending is None:
            return False
        work, ballot = self._pending
        self._pending = None
        work.wait()
        return bool(ballot.item())


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def check_identical(module: nn.Module, ranks: Ranks) -> str:
    """Prove that all ranks have made the same module; returns its checksum.

    Every rank makes its weights from the same seed, so nothing has to be broadcast: eight bytes of checksum
    go around instead of the weights.

    Raises:
        RuntimeError: two ranks differ.
    """
    digest = hashlib.blake2b(digest_size=6)  # 48 bits are exact in a float64
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    number = float(int.from_bytes(digest.digest(), "big"))
    highest, lowest = ranks.maxima(number, -number)
    if highest != -lowest:
        raise RuntimeError(
            f"rank {ranks.rank} on {socket.gethostname()} has other initial weights (checksum "
            f"{digest.hexdigest()}) than another rank: model_fn has to draw from torch's generator only, and "
            "needs the same arguments, library versions and data on every rank"
        )
    return digest.hexdigest()
