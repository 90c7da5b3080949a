"""The trainer on two nodes: two torchrun agents, each with a cache directory of its own, and one S3 server.

An agent is all that a node is to torchrun and to `partition="node"`: a group of ranks that share a disk. The
proxy before the server counts what the nodes ask of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload import Cache
from fastload.cli.demo.photos import make_dataset
from fastload.cli.demo.s3_server import Proxy, delay_proxy, serve_s3
from tests.patience import PATIENCE
from tests.ports import free_port

ROOT = Path(fastload.__file__).parents[1]
EXAMPLE = ROOT / "examples" / "resnet50"
IMAGES = 96
RANKS = 2  # of each node

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without torch.distributed"
)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, dict[str, str]]]:
    """The proxy before the bucket "photos", and the environment that leads to it."""
    root = tmp_path_factory.mktemp("s3")
    make_dataset(root / "photos" / "train", IMAGES, 4)
    with serve_s3(root) as server, delay_proxy(server.endpoint_url, 0.0) as proxy:
        yield (
            proxy,
            {
                "AWS_ENDPOINT_URL": proxy.url,
                "AWS_ACCESS_KEY_ID": server.key,
                "AWS_SECRET_ACCESS_KEY": server.secret,
                "AWS_REGION": "us-east-1",
            },
        )


def train(directory: Path, environment: dict[str, str], *options: str) -> list[dict[str, Any]]:
    """Two epochs on two nodes; what rank 0 reported of each."""
    port = free_port()
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run"),
                *("--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={RANKS}"),
                *("--master-addr=127.0.0.1", f"--master-port={port}", "--local-addr=127.0.0.1"),
                *(str(EXAMPLE / "train.py"), "s3://photos", "--cache", str(directory / f"ssd-{node}")),
                *("--out", str(directory / f"out-{node}"), "--epochs", "2", "--no-eval"),
                *("--simulate-gpu-rate", "100000", "--batch-size", "8", "--resolution", "32"),
                *("--num-workers", "1", *options),
            ],
            env={**os.environ, **environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        said = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(PATIENCE)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    return [json.loads(line) for line in (directory / "out-0" / "epochs.jsonl").read_text().splitlines()]


def entries(directory: Path) -> list[int]:
    """The number of images in each node's cache."""
    return [Cache(directory / f"ssd-{node}").info()["entries"] for node in range(2)]


def test_partition_reads_each_object_once(bucket: tuple[Proxy, dict[str, str]], tmp_path: Path) -> None:
    """Two epochs, four ranks on two nodes: one GET per object, all in the first epoch, half from each node.

    No image is in both caches: that would take two reads from the store.
    """
    proxy, environment = bucket
    before = proxy.counts().object_gets
    epochs = train(tmp_path, environment, "--partition", "node")
    assert len(epochs) == 2
    assert proxy.counts().object_gets - before == IMAGES
    assert entries(tmp_path) == [IMAGES // 2, IMAGES // 2]


@pytest.mark.stress
def test_guard_removed_without_partition_objects_are_read_twice(
    bucket: tuple[Proxy, dict[str, str]], tmp_path: Path
) -> None:
    """With one order for all ranks, the second epoch brings images to a node that are new to it."""
    proxy, environment = bucket
    before = proxy.counts().object_gets
    train(tmp_path, environment)
    assert proxy.counts().object_gets - before > IMAGES * 1.2
    assert sum(entries(tmp_path)) == proxy.counts().object_gets - before


def test_missing_ray_is_named_with_its_install_line(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray')")
    command = [sys.executable, str(EXAMPLE / "ray_train.py"), "--ranks", "2", "--", "s3://bucket"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1
    assert "pip install 'ray[train]'" in done.stderr
