"""The trainer on two nodes: two torchrun agents, each with a cache directory of its own, and one S3 server.

An agent is all that a node is to torchrun and to `partition="node"`: a group of ranks that share a disk. The
agents and their ranks are forked from one process, which has imported torch for all of them. The proxy before
the server counts what the nodes ask of it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload import Cache
from tests.bucketdata import Bucket, serve_photos
from tests.forked import run_program
from tests.patience import PATIENCE
from tests.ports import free_port

ROOT = Path(fastload.__file__).parents[1]
EXAMPLE = ROOT / "examples" / "resnet50"
IMAGES = 48
RANKS = 2  # of each node

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without torch.distributed"
)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with serve_photos(tmp_path_factory.mktemp("s3"), IMAGES, 0.0, folder="photos/train") as served:
        yield served


def train(directory: Path, bucket: Bucket, *options: str) -> list[dict[str, Any]]:
    """Two epochs on two nodes; what rank 0 reported of each."""
    environment = {"AWS_ACCESS_KEY_ID": bucket.server.key, "AWS_SECRET_ACCESS_KEY": bucket.server.secret}
    environment |= {"AWS_ENDPOINT_URL": bucket.proxy.url, "AWS_REGION": "us-east-1"}
    environment |= {"OMP_NUM_THREADS": "1"}
    context = multiprocessing.get_context("forkserver")
    arguments = (directory, os.environ | environment, options)
    agents = context.Process(target=run_apart, args=arguments)
    agents.start()
    try:
        agents.join(PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(agents.pid or 0, signal.SIGKILL)
    assert agents.exitcode == 0, (directory / "log").read_text()
    return [json.loads(line) for line in (directory / "out-0" / "epochs.jsonl").read_text().splitlines()]


def run_apart(directory: Path, environment: dict[str, str], options: tuple[str, ...]) -> None:
    """Run the trainer in a session of its own, with a log in `directory`."""
    os.setsid()
    with (directory / "log").open("w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    run_program(lambda: sys.exit(run_agents(directory, options)), ["train.py"], environment, None)


def run_agents(directory: Path, options: tuple[str, ...]) -> int:
    """Run the trainer under the agents of both nodes; the number of those that failed."""
    from torch.distributed.run import config_from_args, elastic_launch, parse_args

    sys.path.insert(0, str(EXAMPLE))
    import train as trainer  # type: ignore[import-not-found]

    def rank(arguments: list[str]) -> None:
        trainer.run(trainer.images, trainer.resnet, add_options=trainer.options, arguments=arguments)

    port, agents = free_port(), []
    for node in range(2):
        agents.append(os.fork())
        if agents[-1] == 0:
            torchrun = ["--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={RANKS}"]
            torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}", "--local-addr=127.0.0.1"]
            arguments = ["s3://photos", "--cache", str(directory / f"ssd-{node}")]
            arguments += ["--out", str(directory / f"out-{node}"), "--epochs", "2", "--no-eval"]
            arguments += ["--model", "resnet18", "--simulate-gpu-rate", "100000", "--batch-size", "4"]
            arguments += ["--resolution", "32", "--num-workers", "1", *options]
            config, _, _ = config_from_args(parse_args([*torchrun, "train.py"]))
            config.start_method = "fork"
            elastic_launch(config, rank)(arguments)
            return 0
    return sum(os.waitpid(agent, 0)[1] != 0 for agent in agents)


def entries(directory: Path) -> list[int]:
    """The number of images in each node's cache."""
    return [Cache(directory / f"ssd-{node}").info()["entries"] for node in range(2)]


def test_partition_reads_each_object_once(bucket: Bucket, tmp_path: Path) -> None:
    """Two epochs, four ranks on two nodes: one GET per object, all in the first epoch, half from each node.

    No image is in both caches: that would take two reads from the store.
    """
    before = bucket.gets()
    epochs = train(tmp_path, bucket, "--partition", "node")
    assert len(epochs) == 2
    assert bucket.gets() - before == IMAGES
    assert entries(tmp_path) == [IMAGES // 2, IMAGES // 2]


@pytest.mark.stress
def test_guard_removed_without_partition_objects_are_read_twice(bucket: Bucket, tmp_path: Path) -> None:
    """With one order for all ranks, the second epoch brings images to a node that are new to it."""
    before = bucket.gets()
    train(tmp_path, bucket)
    assert bucket.gets() - before > IMAGES * 1.2
    assert sum(entries(tmp_path)) == bucket.gets() - before


def test_missing_ray_is_named_with_its_install_line(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray')")
    command = [sys.executable, str(EXAMPLE / "ray_train.py"), "--ranks", "2", "--", "s3://bucket"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "pip install 'ray[train]'" in done.stderr
