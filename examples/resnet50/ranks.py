"""The ranks of a run: joining, agreeing to stop, and a proof that all start with the same weights."""

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
    """This rank, and the number of ranks.

    Attributes:
        rank, size: this rank and the number of all; 0 and 1 without torchrun.
        nodes: machines, or torchrun agents.
        device: of this rank.
        control: a CPU group for small messages, so that they never wait for a device's queue.
    """

    rank: int
    size: int
    nodes: int
    device: torch.device
    control: Any = None

    @classmethod
    def join(cls, device: str = "auto", timeout: float = 600) -> Ranks:
        """Join the other ranks, if torchrun (or SLURM or Ray with its variables) started this process."""
        local = int(os.environ.get("LOCAL_RANK", 0))
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        chosen = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(chosen)
        if "RANK" not in os.environ and not dist.is_initialized():
            return cls(0, 1, 1, chosen)
        if not dist.is_initialized():  # else Ray Train has initialised it
            backend = "nccl" if cuda else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **_store(timeout))
        size = dist.get_world_size()
        control = dist.new_group(backend="gloo") if cuda else dist.group.WORLD
        nodes = max(1, size // int(os.environ.get("LOCAL_WORLD_SIZE", size)))
        return cls(dist.get_rank(), size, nodes, chosen, control)

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
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
        """Rank 0's value (bytes, or anything of JSON), on every rank."""
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


def _store(timeout: float) -> dict[str, Any]:
    """The store of init_process_group, in which ranks find each other.

    torchrun's agents keep one store for all restarts (seen in torch 2.13), so restarted ranks may find the
    addresses of dead ones. Therefore each start has its own prefix in it. Several agents count restarts
    differently, so they also need a new store each time: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=timeout))
    prefix = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-of-{size}"
    return {"store": dist.PrefixStore(prefix, store), "rank": rank, "world_size": size}


class StopVote:
    """After SIGTERM or Ctrl-C on any rank, all ranks end after the same step.

    A signal reaches the ranks at different moments, and a rank that stops alone would leave the others in an
    all-reduce. So each rank votes in every step, and reads the result of the previous vote: it is the same on
    all ranks, and nobody waits for it.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asked = False
        self._pending: tuple[Any, torch.Tensor] | None = None
        # Only the main thread may set handlers; Ray calls the training function in another thread.
        numbers = (signal.SIGTERM, signal.SIGINT) if _in_main_thread() else ()
        self._before = {number: signal.signal(number, self._ask) for number in numbers}

    def _ask(self, number: int, frame: Any) -> None:
        if self._asked and number == signal.SIGINT:  # the second Ctrl-C ends this rank at once
            raise KeyboardInterrupt
        self._asked = True

    def agreed(self) -> bool:
        """Whether to stop now. All ranks call it once a step, and get the same answer."""
        if self._ranks.size == 1:
            return self._asked
        stop = self._result()
        ballot = torch.tensor([int(self._asked)])
        work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self._ranks.control, async_op=True)
        self._pending = (work, ballot)
        return stop

    def close(self) -> None:
        """Wait for the last vote, so that no rank leaves before the others have its vote."""
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
    """Prove that all ranks have the same module; returns its checksum.

    Every rank makes its weights from the same seed, so a checksum of eight bytes is exchanged instead of
    them.

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
            f"the initial weights of rank {ranks.rank} on {socket.gethostname()} (checksum "
            f"{digest.hexdigest()}) differ from those of another rank: model_fn must draw only from torch's "
            "generator, and needs the same arguments, library versions and data on every rank"
        )
    return digest.hexdigest()
