"""Random jobs on both sides.

python -m tests.oracle --jobs 100000 --seed 1 --start 0     # goes on after the last job that is printed
python -m tests.oracle --jobs 10000 --kind parts             # of one kind of data
python -m tests.oracle --job '{"kind": "tar", ...}'          # one job
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from tests.oracle.jobs import random_job, settled, shrink, told
from tests.oracle.judge import Difference, judge
from tests.oracle.known import name_of
from tests.oracle.worlds import KINDS, Job


def differences(job: Job) -> list[Difference]:
    """Those of a job; a crash of either side is one too."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="oracle-", dir=memory if memory.is_dir() else None))
    try:
        return judge(job, folder)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return [
            Difference(
                "crash", f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            )
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unknown(job: Job) -> list[Difference]:
    return [one for one in differences(job) if not name_of(job, one)]


def report(job: Job, found: list[Difference]) -> str:
    """How to repeat a job, and what differs."""
    lines = [f"  {one.what}: {one.text}" for one in found[:4]]
    return "\n".join([f"python -m tests.oracle --job '{json.dumps(told(job))}'", *lines])


def smallest(job: Job, found: Difference) -> Job:
    return shrink(job, lambda one: any(other.what == found.what for other in unknown(one)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS), help="of the data of all jobs; any")
    parser.add_argument("--job", type=json.loads, help="one job, as JSON")
    parser.add_argument("--no-known", action="store_true", help="tell known faults like others")
    parser.add_argument("--shrink", action="store_true", help="shrink each failing job")
    parser.add_argument("--failures", type=int, default=20, help="stop after as many")
    given = parser.parse_args()
    if given.no_known:
        from tests.oracle import known

        known.KNOWN.clear()
    if given.job is not None:
        found = differences(settled(given.job))
        for one in found:
            print(f"{one.what}: {one.text}  [{name_of(settled(given.job), one)}]")
        return int(bool(found))
    torch.set_num_threads(1)  # batches are tiny: more threads only wait for each other
    gc.freeze()  # what is imported stays
    names: Counter[str] = Counter()
    failed, begun = 0, time.monotonic()
    for number in range(given.start, given.start + given.jobs):
        job = random_job(number, given.seed, given.kind)
        found = differences(job)
        names.update({name_of(job, one) for one in found} - {""})
        new = [one for one in found if not name_of(job, one)]
        if new:
            failed += 1
            if given.shrink:
                job = smallest(job, new[0])
                new = unknown(job)
            print(f"job {number} of seed {given.seed}:\n{report(job, new)}", flush=True)
            if failed >= given.failures:
                break
        if number % 500 == 499:
            print(
                f"{number + 1} jobs, {time.monotonic() - begun:.0f} s, {dict(names)}",
                file=sys.stderr,
                flush=True,
            )
    seconds = time.monotonic() - begun
    print(f"{number + 1 - given.start} jobs, {failed} failed, {seconds:.0f} s, known: {dict(names)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
