"""`memory_limit=` holds: large objects, a slow consumer, and the PSS of every process, sampled all the time.

python -m pytest -m stress tests/stress/test_memory.py

The limit is on what comes beside the trainer's own process, so its PSS before the first epoch is subtracted.
The tolerance is four objects a worker, and one more of this process: the one that is waited for and the one
that is read ahead alone, each twice while it arrives. The trainer freezes its garbage collector, because a
full collection writes to all pages that it shares with its forked workers: 45 MB that no worker can see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastload.cli.demo.s3_server import S3Server, delay_proxy, find_rclone, serve_s3
from tests.patience import PATIENCE, of_session

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(find_rclone() is None, reason="needs rclone"),
]

ROOT = Path(__file__).parent.parent.parent
MB = 1_000_000
SIZE, COUNT = 2 * MB, 120

TRAINER = """
import gc, json, sys, time
import numpy as np
import torch
from fastload import DataLoader, ObjectDataset

def decode(data):
    values = np.frombuffer(data, np.uint8)
    return np.concatenate([values[:2], values[-200_000:]])

if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    dataset = ObjectDataset(case["url"], decode=decode, storage_options=case["options"])
    loader = DataLoader(dataset, batch_size=8, shuffle=True, **case["arguments"])
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    sys.stdin.readline()
    for epoch in range(2):
        seen = []
        for batch in loader:
            seen += [int(low) + 256 * int(high) for low, high in batch[:, :2]]
            time.sleep(case["step"])
        assert sorted(seen) == list(range(case["count"])), seen
    print(json.dumps(loader.stats()["memory"]), flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    root = tmp_path_factory.mktemp("buckets")
    (root / "large").mkdir()
    for number in range(COUNT):
        body = number.to_bytes(2, "little") + os.urandom(1 << 16) * (SIZE >> 16)
        (root / "large" / f"{number:03}.bin").write_bytes(body)
    with serve_s3(root) as server:
        yield server


def pss_of(session: int) -> int:
    """PSS of a trainer and all processes that it started: its store's client is no child of it."""
    total = 0
    for process in of_session(session):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def peak(server: S3Server, step: float = 0.15, **arguments: Any) -> tuple[int, dict[str, int]]:
    """The highest PSS beside that of the trainer before, and the loader's own figures."""
    with delay_proxy(server.endpoint_url, 0.01) as proxy, tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "trainer.py")  # spawned workers import it
        script.write_text(TRAINER)
        case = {
            "url": "s3://large/",
            "options": server.options | {"endpoint_url": proxy.url},
            "arguments": arguments,
            "count": COUNT,
            "step": step,
        }
        trainer = subprocess.Popen(
            [sys.executable, str(script), json.dumps(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        assert trainer.stdin is not None and trainer.stdout is not None
        try:
            assert trainer.stdout.readline() == "ready\n"
            before = psutil.Process(trainer.pid).memory_full_info().pss
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            highest, deadline = 0, time.monotonic() + PATIENCE
            while trainer.poll() is None:
                assert time.monotonic() < deadline, "it hangs"
                highest = max(highest, pss_of(trainer.pid) - before)
                time.sleep(0.05)
            assert trainer.returncode == 0
            memory: dict[str, int] = json.loads(trainer.stdout.readline())
            return highest, memory
        finally:
            trainer.kill()
            trainer.communicate()


CASES = {
    "fork, 2 workers": ("150MB", 2, {"multiprocessing_context": "fork"}),
    "fork, 4 workers": ("300MB", 4, {"multiprocessing_context": "fork"}),
    "fork, workers that stay": ("150MB", 2, {"multiprocessing_context": "fork", "persistent_workers": True}),
    "fork, the loader chooses": ("200MB", "auto", {"multiprocessing_context": "fork"}),
    "fork server": ("450MB", 2, {"multiprocessing_context": "forkserver"}),
    "spawn": ("600MB", 2, {"multiprocessing_context": "spawn"}),
    "no workers": ("200MB", 0, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_all_processes_stay_within_the_limit(server: S3Server, case: str) -> None:
    limit, workers, more = CASES[case]
    found, memory = peak(server, memory_limit=limit, num_workers=workers, **more)
    several = 2 if workers == "auto" else int(workers)
    assert found <= memory["limit"] + 4 * SIZE * (several + 1), f"{found / MB:.0f} MB, {memory}"
    if workers:
        assert memory["used"] <= memory["peak"] <= memory["limit"] * 1.05


def test_without_the_limit_the_same_epochs_take_more(server: S3Server) -> None:
    found, memory = peak(server, num_workers=2, multiprocessing_context="fork")
    assert not memory
    assert found > 150 * MB + 4 * SIZE * 3
