"""`python -m tests.soak --minutes 60`: see `tests.soak`.

With the same --folder again, a soak goes on: the bucket and the caches are those that it left.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.soak.growth import draw, grown, growth
from tests.soak.run import Run, SoakError
from tests.soak.world import FailingServer, World

OBJECTS, RESIDENT_OBJECTS = 150, 200
CHANCE = 0.04  # of a fault, for each request


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, help="log, caches and what failed; the default is a new one in /tmp"
    )
    parser.add_argument("--chart", type=Path, help="a PNG of memory and rate over time")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="fastload-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "runs.jsonl"
    done = len(log.read_text().splitlines()) if log.exists() else 0
    print(f"soak in {folder}, after {done} runs", flush=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    with FailingServer(arguments.seed + done) as server:
        server.chance = CHANCE
        with resident(server, folder, arguments.seed, done) as process:
            failures = run_until(deadline, server, folder, arguments.seed, done, process)
    lines = [json.loads(line) for line in (folder / f"resident-{done}.jsonl").read_text().splitlines()]
    failures += grown(lines)
    print(f"{len(lines)} epochs of the resident trainer; growth: {growth(lines) or 'too short to tell'}")
    if arguments.chart is not None and lines:
        draw(lines, arguments.chart)
    for failure in failures:
        print(f"FAILED: {failure}")
    return bool(failures)


def run_until(
    deadline: float,
    server: FailingServer,
    folder: Path,
    seed: int,
    done: int,
    process: subprocess.Popen[bytes],
) -> list[str]:
    """Do run after run; return what failed."""
    world, failures = World(server, "photos/", OBJECTS), []
    changes = random.Random(seed)
    for _ in range(done):  # the bucket as earlier parts left it
        world.change(random.Random(changes.random()))
    number = done
    while time.monotonic() < deadline and process.poll() is None:
        start, changed = time.monotonic(), world.change(random.Random(changes.random()))
        run = Run(world, folder / f"run{number}", random.Random(f"{seed} {number}"))
        failure = None
        try:
            run.go()
        except (SoakError, AssertionError) as error:
            failure = f"run {number}: {error}"
            failures.append(failure)
        if failure is None:
            shutil.rmtree(run.folder)
        line = {
            "run": number,
            "seconds": round(time.monotonic() - start, 1),
            "changed": changed,
            "cache": run.cache and run.cache["mode"],
            "epochs": run.epochs,
            "notes": run.notes,
            "faults": server.faults,
            "failure": failure,
        }
        server.requests.clear()
        with (folder / "runs.jsonl").open("a") as log:
            print(json.dumps(line), file=log)
        print(json.dumps(line), flush=True)
        number += 1
    if process.poll() is not None:
        failures.append(f"the resident trainer ended: {(folder / 'resident.out').read_text()[-4000:]}")
    return failures


@contextmanager
def resident(server: FailingServer, folder: Path, seed: int, done: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run the resident trainer for the length of the block."""
    world = World(server, "fixed/", RESIDENT_OBJECTS)
    job = folder / "resident.job"
    job.write_text(
        json.dumps(
            {
                "url": f"s3://bucket/{world.prefix}",
                "options": server.options,
                "cache": str(folder / "cache-resident"),
                "numbers": sorted(world.versions),
                "seed": seed,
            }
        )
    )
    with (folder / f"resident-{done}.jsonl").open("wb") as log, (folder / "resident.out").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.resident", str(job)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=said,
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            yield process
        finally:
            process.stdin.close()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
