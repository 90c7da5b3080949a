"""One rank of a run: `python -m tests.soak.trainer JOB`, where JOB is a file of JSON.

For each batch it appends a line to its log, and rank 0 writes a state, as a trainer writes its checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import fastload
from tests.soak.world import SIDE, rows_of


def open_dataset(job: dict[str, Any]) -> fastload.ImageFolder:
    cache = job["cache"] and fastload.Cache(
        job["cache"]["path"],
        job["cache"]["mode"],
        size_limit=job["cache"]["size_limit"],
        remote=job["cache"]["remote"] and fastload.open_store(job["cache"]["remote"], **job["options"]),
        push=bool(job["cache"]["remote"]),
    )
    return fastload.ImageFolder(
        job["url"], fastload.CenterCrop(SIDE), cache=cache, storage_options=job["options"]
    )


def train(job: dict[str, Any]) -> None:
    dataset = open_dataset(job)
    sampler = fastload.DistributedSampler(dataset, job["ranks"], job["rank"], seed=job["seed"], mode="eval")
    loader = fastload.DataLoader(
        dataset,
        job["batch_size"],
        sampler=sampler,
        num_workers=job["workers"],
        processes=job["processes"],
        memory_limit=job["memory_limit"],
        persistent_workers=job["workers"] > 0 and job["persistent"],
        seed=job["seed"],
    )
    step, epoch = 0, 0
    if job["state"]:
        saved = json.loads(Path(job["state"]).read_text())
        loader.load_state_dict(saved["loader"])
        epoch, step = saved["epoch"], saved["step"]
    elif job["excluded"]:
        loader.exclude(job["excluded"])
    states = Path(job["states"])
    with Path(job["log"]).open("a") as log:
        while epoch < job["epochs"]:
            for batch in loader:
                step += 1
                if job["rank"] == 0:
                    state = {"loader": loader.state_dict(), "epoch": epoch, "step": step}
                    new = states / "new"
                    new.write_text(json.dumps(state))
                    new.rename(states / f"{epoch}-{step:05}.json")
                print(
                    json.dumps({"epoch": epoch, "step": step, "rows": rows_of(batch)}), file=log, flush=True
                )
            print(json.dumps({"epoch": epoch, "end": step}), file=log, flush=True)
            step, epoch = 0, epoch + 1
        print(json.dumps({"digest": loader.digest().hex()}), file=log, flush=True)


if __name__ == "__main__":
    os.environ["PYTHONFAULTHANDLER"] = "1"
    train(json.loads(Path(sys.argv[1]).read_text()))
