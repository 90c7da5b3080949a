"""The ranks of a run: joining, stopping together, equal weights at the start; their report and checkpoint.

A checkpoint is one file, which is whole at any moment: either the new state or the previous one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn

from fastload.distributed.launcher import find_launched, find_rank

__all__ = ["Clock", "Ranks", "Report", "StopVote", "check_identical", "load", "replace", "save"]


@dataclass(frozen=True)
class Ranks:
    """This rank, and the number of ranks.

    Attributes:
        rank, size: this rank and the number of all; 0 and 1 without a launcher.
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
        """Join the other ranks, if a launcher started this process.

        A launcher is torchrun, srun, mpirun, horovodrun or Ray Train: fastload's table of their variables
        tells the rank.
        """
        rank, size = find_rank()
        local, nodes = _place(rank, size)
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        chosen = torch.device("cpu")
        if cuda and not torch.cuda.is_available():
            raise SystemExit("--device cuda: torch finds no GPU here; omit the option to train on the CPU")
        if cuda:  # SLURM may show each rank a single device
            chosen = torch.device("cuda", local % torch.cuda.device_count())
            torch.cuda.set_device(chosen)
        if size == 1 and "RANK" not in os.environ and not dist.is_initialized():
            return cls(0, 1, 1, chosen)
        limit = timedelta(seconds=timeout)
        if not dist.is_initialized():  # else Ray Train has initialised it
            backend = "nccl" if cuda else "gloo"
            meeting = _meeting(rank, size, nodes, timeout)
            dist.init_process_group(backend, timeout=limit, **meeting)
        control = dist.new_group(backend="gloo", timeout=limit) if cuda else dist.group.WORLD
        return cls(rank, size, nodes, chosen, control)

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

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank, on every rank. Waits for all ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

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


def _place(rank: int, size: int) -> tuple[int, int]:
    """(this rank's number on its node, the number of nodes); 0 and 1 where no launcher tells."""
    known = list(find_launched(rank, size))
    local = next((launched.local for launched in known if launched.local is not None), 0)
    return local, next((launched.nodes for launched in known if launched.nodes), 1)


def _meeting(rank: int, size: int, nodes: int, timeout: float) -> dict[str, Any]:
    """The arguments of init_process_group by which the ranks find each other.

    torchrun's agents keep one store for all restarts (seen in torch 2.13), so restarted ranks may find the
    addresses of dead ones. Therefore each start has its own prefix in it. Several agents count restarts
    differently, so they also need a new store each time: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    address, port = _address(rank, size, nodes)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {"init_method": f"tcp://{address}:{port}", "rank": rank, "world_size": size}
    store = dist.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=timeout))
    prefix = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-of-{size}"
    return {"store": dist.PrefixStore(prefix, store), "rank": rank, "world_size": size}


def _address(rank: int, size: int, nodes: int) -> tuple[str, int]:
    """The host of rank 0, and a port there: MASTER_ADDR and MASTER_PORT, or what stands for them.

    srun: the first host of its list of nodes. mpirun and horovodrun do not tell the host of rank 0, so it
    is known on a single node only. The port is made from the job's number, which its ranks have in common.
    """
    variables = os.environ
    address, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    under_srun = (variables.get("SLURM_PROCID"), variables.get("SLURM_NTASKS")) == (str(rank), str(size))
    if address is None and under_srun:
        address = first_host(variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", ""))
    if not address and nodes == 1:
        address = "127.0.0.1"
    jobs = ("PMIX_NAMESPACE", "HOROVOD_GLOO_RENDEZVOUS_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    job = "/".join(variables[name] for name in jobs if name in variables)
    if port is None and job:
        port = str(10_000 + zlib.crc32(job.encode()) % 20_000)
    if not address or port is None:
        raise SystemExit(
            f"this is rank {rank} of {size} on {nodes} nodes, and nothing tells where rank 0 is: set "
            "MASTER_ADDR to its host and MASTER_PORT to a free port there, on every rank (mpirun -x "
            "MASTER_ADDR=HOST -x MASTER_PORT=29500 ...; horovodrun passes on its own variables)"
        )
    if rank == 0 and under_srun:  # a port that was derived may be in use, or closed between the nodes
        print(f"rank 0 of {size} waits at {address}:{port}", flush=True)
    return address, int(port)


def first_host(nodes: str) -> str:
    """The first host of SLURM's list: "gpu[07-09,12],login" -> "gpu07"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\]\-,]+)[^\]]*\]", r"\1", first[0]) if first else ""


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


class Report:
    """A line per epoch and a summary: rank 0 prints them, and writes them into the directory of the run.

    Args:
        directory: gets epochs.jsonl, one JSON object per epoch, and summary.json; None: nothing is written.
    """

    COLUMNS = ("epoch", "node", "GPUs", "batch/s", "batch size", "FPS", "utilisation")

    def __init__(self, directory: Path | None, ranks: Ranks) -> None:
        self.epochs: list[dict[str, Any]] = []
        self._directory = directory if ranks.first else None
        self._ranks = ranks
        self.listeners: list[Callable[[dict[str, Any]], None]] = []  # each gets the line of an epoch
        self._shown = False
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        if self._ranks.first:
            print(text, flush=True)

    def epoch(self, line: dict[str, Any], metrics: Iterable[str]) -> None:
        """Add the line of an epoch. One that is repeated after a resume replaces the former."""
        self.epochs.append(line)
        self._write("epochs.jsonl", "".join(json.dumps(line) + "\n" for line in self.epochs))
        for listener in self.listeners:
            listener(line)
        columns = [*(name for name in self.COLUMNS if name in line), "data wait per step", "loss", *metrics]
        widths = [max(10, len(name)) for name in columns]
        if not self._shown:
            self.say("  ".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True)))
            self._shown = True
        self.say("  ".join(f"{line[name]:>{width}.6g}" for name, width in zip(columns, widths, strict=True)))

    def finish(self, more: dict[str, Any]) -> dict[str, Any]:
        """The run in a few numbers; epoch 1, which fills the cache, apart from the others."""
        summary: dict[str, Any] = {"epochs": len(self.epochs), **more}
        for name in ("accuracy", "top-5"):
            summary[name] = max((line[name] for line in self.epochs if name in line), default=None)
        for name in ("utilisation", "FPS"):
            values = [line.get(name) for line in self.epochs]
            summary[f"{name} of epoch 1"] = values[0] if values else None
            later = [value for value in values[1:] if value is not None]
            summary[f"{name} of later epochs"] = round(sum(later) / len(later), 4) if later else None
        summary["limit"] = self.epochs[-1].get("limit") if self.epochs else None
        self._write("summary.json", json.dumps(summary, indent=2) + "\n")
        self.say(json.dumps(summary))
        return summary

    def _write(self, name: str, text: str) -> None:
        if self._directory is not None:
            replace(self._directory / name, lambda file: file.write(text.encode()))


class Clock:
    """The time to the target, from the call of `run`: with the start of ranks, loader and network.

    It is wall time, and part of the checkpoint, so it also counts the time in which a run is down.

    Args:
        targets: by the name of a metric; all have to be reached.
    """

    def __init__(self, begun: float, targets: dict[str, float]) -> None:
        self.begun, self.targets = begun, targets
        self.reached: float | None = None

    @classmethod
    def of_run(cls, args: Any, metrics: Iterable[str], begun: float) -> Clock:
        given = {"accuracy": args.target, "top-5": getattr(args, "target_top5", None)}
        targets = {name: value for name, value in given.items() if value is not None}
        if missing := targets.keys() - set(metrics):
            raise SystemExit(f"there is a target for {', '.join(missing)}, and the task has no such metric")
        return cls(begun, targets)

    def evaluated(self, metrics: dict[str, float]) -> bool:
        """Whether all targets are reached."""
        reached = bool(self.targets) and all(metrics[name] >= goal for name, goal in self.targets.items())
        if reached and self.reached is None:
            self.reached = time.time()
        return reached

    @property
    def time_to_target(self) -> float | None:
        """Seconds; None before the target is reached."""
        return None if self.reached is None else self.reached - self.begun

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, "reached": self.reached, "targets": self.targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun = state["begun"]
        # Another target is reached at the first evaluation from now on.
        self.reached = state["reached"] if state["targets"] == self.targets else None


# --- checkpoints


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings, and lists and dicts of these) to `path`. For rank 0."""
    replace(path, lambda file: torch.save(state, file))


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file at `path` as a whole.

    `write` fills a file beside it, which is forced to disk and then renamed. So `path` is either the new file
    or the previous one, even after a power failure.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename too
    finally:
        os.close(directory)
    for left in path.parent.glob(f"{path.name}.*.tmp"):  # from a run that was killed during a write
        with suppress(OSError):
            left.unlink()


def load(path: Path, ranks: Ranks) -> dict[str, Any] | None:
    """The state in `path`, on every rank; None if there is no file. Nothing is unpickled.

    Rank 0 reads the file and sends its bytes to the others: they need no access to its disk, and all ranks
    have the same version of the file.

    Raises:
        SystemExit: the file is not a checkpoint.
    """
    data = None
    if ranks.first:
        with suppress(FileNotFoundError):
            data = path.read_bytes()
    data = ranks.broadcast(data)
    if data is None:
        return None
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise SystemExit(f"{path} is not a checkpoint ({error}): move it away to start a new run") from error
    return state
