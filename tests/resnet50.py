"""examples/resnet50 for tests: its folder on sys.path, as when a script of it runs; and ranks to run it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

RESNET50 = Path(__file__).parents[1] / "examples" / "resnet50"
if str(RESNET50) not in sys.path:
    sys.path.insert(0, str(RESNET50))

import step  # noqa: E402
import train  # noqa: E402
from extras import ceiling  # noqa: E402
from fastload.distributed.launcher import find_rank  # noqa: E402
from tests.patience import PATIENCE  # noqa: E402
from tests.ports import free_port  # noqa: E402

SAMPLES = 120
BATCH = 12
QUICK = f"--epochs 3 --global-batch {BATCH} --batch-size 6 --warmup 1 --num-workers 1 --base-lr 2".split()
QUICK += ["--ceiling-steps", "1", "--on-error", "raise", "--bucket-mb", "1"]


class Points(torch.utils.data.Dataset[Any]):
    """Sample i: eight numbers made from i, and i itself, so that a test can see who was trained on."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        x[index % 4] += 2
        return x, index


class Watched:
    """input_fn and model_fn whose loss writes down what it sees, and kills this process where that is asked.

    Args:
        directory: gets a file for each start of each rank: a line per batch, its samples.
        kill: (rank, update): that rank is killed in that backward pass; None: nobody.
    """

    def __init__(self, directory: Path, kill: tuple[int, int] | None = None) -> None:
        self.rank, _ = find_rank()
        self.log = directory / f"{time.time_ns()}-{self.rank}.jsonl"
        self.kill_at = kill[1] if kill is not None and kill[0] == self.rank else None
        self.seen = 0
        self.measuring = False

    def input_fn(self, args: Any, mode: str) -> Points:
        return Points(SAMPLES if mode == "train" else 37)

    def model_fn(self, args: Any, dataset: Any) -> step.Task:
        hidden = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1)]
        module = torch.nn.Sequential(*hidden, torch.nn.ReLU(), torch.nn.Linear(16, 4))
        return step.Task(
            module, self.loss, {"accuracy": lambda outputs, ids: (outputs.argmax(1) == ids % 4).sum()}
        )

    def loss(self, outputs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if not self.measuring:
            with self.log.open("a") as file:
                file.write(json.dumps(ids.tolist()) + "\n")
            if self.seen == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen += 1
        return torch.nn.functional.cross_entropy(outputs, ids % 4)

    def run(self, arguments: list[str]) -> Any:
        measure = ceiling.measure

        def unseen(*args: Any) -> Any:
            self.measuring = True
            try:
                return measure(*args)
            finally:
                self.measuring = False

        ceiling.measure = unseen
        return train.run(self.input_fn, self.model_fn, arguments=arguments)


def variables(launcher: str, rank: int, size: int, port: int) -> dict[str, Any]:
    """What a launcher tells a rank on the only node."""
    return {
        "torchrun": {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        },
        "srun": {
            "SLURM_PROCID": rank,
            "SLURM_NTASKS": size,
            "SLURM_LOCALID": rank,
            "SLURM_NODEID": 0,
            "SLURM_NNODES": 1,
            "SLURM_STEP_TASKS_PER_NODE": size,
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_JOB_ID": port,
            "SLURM_STEP_ID": 0,
        },
        "mpirun": {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": size,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": size,
            "PMIX_NAMESPACE": f"prterun-here-{port}@1",
        },
        "horovodrun": {
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": rank,
            "HOROVOD_LOCAL_SIZE": size,
            "HOROVOD_CROSS_RANK": 0,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        },
    }[launcher]


def rank_main(
    rank: int,
    size: int,
    port: int,
    directory: Path,
    kill: tuple[int, int] | None,
    arguments: list[str],
    launcher: str = "torchrun",
) -> None:
    """One rank, as its launcher would start it."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # for the loader's workers, as in a rank of torchrun
    if size > 1:
        os.environ |= {name: str(value) for name, value in variables(launcher, rank, size, port).items()}
    Watched(directory, kill).run(arguments)


class Ranks:
    """`size` processes that train; forked from a server that has torch, so that a start takes no seconds."""

    def __init__(
        self,
        size: int,
        directory: Path,
        arguments: list[str],
        kill: tuple[int, int] | None = None,
        launcher: str = "torchrun",
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        port = free_port()
        directory.mkdir(parents=True, exist_ok=True)
        self.processes = [
            context.Process(target=rank_main, args=(rank, size, port, directory, kill, arguments, launcher))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = PATIENCE) -> list[int | None]:
        """The exit codes; whoever still runs after the first failure is killed, as torchrun does it."""
        deadline = time.monotonic() + seconds
        while any(process.is_alive() for process in self.processes) and time.monotonic() < deadline:
            multiprocessing.connection.wait([p.sentinel for p in self.processes if p.is_alive()], timeout=1)
            if any(process.exitcode for process in self.processes):
                break
        for process in self.processes:
            if process.exitcode is None and any(other.exitcode for other in self.processes):
                process.join(5)
                process.kill()
            process.join(max(1.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, "a rank hangs"
        return codes


def once(directory: Path, rank: int, update: int) -> tuple[int, int] | None:
    """Whom to kill: nobody if it has happened."""
    marker = directory / "killed"
    if marker.exists():
        return None
    if int(os.environ["RANK"]) == rank:
        marker.touch()
    return rank, update


def updates_seen(directory: Path, size: int, passes: int) -> list[list[int]]:
    """The samples of each update, all ranks together, in order, of the only or last start in `directory`."""
    starts: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(directory.glob("*.jsonl")):
        starts[int(path.stem.split("-")[1])].append(path)
    ranks = []
    for rank in range(size):
        lines = [json.loads(line) for line in starts[rank][-1].read_text().splitlines()]
        ranks.append([list(chain(*lines[i : i + passes])) for i in range(0, len(lines), passes)])
    return [sorted(chain(*parts)) for parts in zip(*ranks, strict=False)]


if __name__ == "__main__":  # a rank of a real torchrun; one is killed in the first start
    Watched(Path(sys.argv[1]), once(Path(sys.argv[1]), 1, 5)).run(sys.argv[1:])
