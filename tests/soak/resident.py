"""A trainer that lives as long as the soak: `python -m tests.soak.resident JOB`.

After each epoch it says what it holds. It ends when its standard input does.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import fastload
from tests.soak.world import SIDE, rows_of

SETTLE = 20.0  # seconds: how long what has ended may take to go


def held(cache: Path) -> dict[str, float]:
    """Return the resources of this process and of those that it started."""
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    memory = [own_memory(process.pid) for process in family]
    return {
        "memory": sum(memory) / 1e6,
        "alive": sum(map(bool, memory)),  # without the client's process, if it has ended
        "descriptors": me.num_fds(),
        "threads": me.num_threads(),
        "processes": len(family),
        "shared": sum(b"memfd:" in line for line in Path("/proc/self/maps").read_bytes().splitlines()),
        "files": sum(1 for path in cache.rglob("*") if path.is_file()),
    }


def has_workers() -> bool:
    """Return whether a child lives; not the client's process, which stays for the next epoch."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended
            if child.name() != "fastload-client":
                return True
    return False


def own_memory(pid: int) -> int:
    """Return a process's part of the memory that is no file, in bytes.

    Not all of its PSS: its part of the libraries grows where other processes with the same ones end.
    """
    with suppress(OSError):  # it has ended
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        parts = (line.split() for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
        return sum(1024 * int(kilobytes) for _, kilobytes, _ in parts)
    return 0


def train(job: dict[str, Any]) -> None:
    rng, cache, epoch = random.Random(job["seed"]), Path(job["cache"]), 0
    began, dataset = time.monotonic(), None
    while not select.select([sys.stdin], [], [], 0)[0]:
        if dataset is None or rng.random() < 0.1:
            if rng.random() < 0.5:
                shutil.rmtree(cache, ignore_errors=True)
            dataset = fastload.ImageFolder(
                job["url"],
                fastload.CenterCrop(SIDE),
                cache=fastload.Cache(cache, rng.choice(["auto", "raw", "decoded"]), size_limit="20MB"),
                storage_options=job["options"],
            )
        workers = rng.choice([0, 1, 2, 4])
        loader = fastload.DataLoader(
            dataset, 16, shuffle=True, num_workers=workers, seed=1, processes=rng.random() < 0.3
        )
        start, rows = time.monotonic(), []
        most = rng.choice([None, None, None, 3])
        for number, batch in enumerate(loader):
            rows += rows_of(batch)
            if number == most:
                break
        seconds, count = time.monotonic() - start, len(rows)
        numbers = [row[0] for row in rows]
        assert len(set(numbers)) == len(numbers), sorted(numbers)
        assert most is not None or sorted(numbers) == job["numbers"], sorted(numbers)
        assert all(version == 0 for _, version, _ in rows), rows
        del loader, batch, rows
        gc.collect()
        settled = time.monotonic() + SETTLE
        while has_workers() and time.monotonic() < settled:
            time.sleep(0.1)
        line = {"hours": (time.monotonic() - began) / 3600, "epoch": epoch, "rate": count / seconds}
        print(json.dumps(line | {"workers": workers} | held(cache)), flush=True)
        epoch += 1


if __name__ == "__main__":
    os.environ["PYTHONFAULTHANDLER"] = "1"
    train(json.loads(Path(sys.argv[1]).read_text()))
