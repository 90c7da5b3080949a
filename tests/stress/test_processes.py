"""Every way a training process or its workers can end, at random moments: nothing hangs, nothing is left.

python -m pytest tests/stress/test_processes.py             # one seed
python -m pytest -m stress tests/stress/test_processes.py   # FASTLOAD_SEEDS of them, 20 by default
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE
from tests.scripts import Script, Scripts, serve_scripts

TRAINER = """
import json, os, random, signal, sys
import torch
from fastload import DataLoader
from tests.loaderdata import Numbers, numbered

def main(case):
    rng = random.Random(case["seed"])
    loader = DataLoader(
        Numbers(60, numbered), batch_size=2, num_workers=2, pin_memory=case["pin"], in_order=case["in_order"],
        persistent_workers=case["persistent"], multiprocessing_context=case["context"],
    )
    moment = rng.randrange(2 * len(loader))
    held = []
    for epoch in range(2):
        iterator = iter(loader)
        print(*[process.pid for process in iterator._workers], flush=True)
        seen = []
        for step, batch in enumerate(iterator):
            seen += batch[:, 0].int().tolist()
            if rng.random() < 0.3:
                held.append(batch)
            if epoch * len(loader) + step == moment:
                act(case["end"], iterator, rng)
        assert sorted(seen) == list(range(60)), seen
    raise SystemExit("nothing ended it")

def act(end, iterator, rng):
    if end == "kill worker":
        os.kill(rng.choice(iterator._workers).pid, signal.SIGKILL)
    elif end == "exception":
        raise ZeroDivisionError("training step")
    else:
        print("now", flush=True)
        if rng.random() < 0.5:
            for _ in range(rng.randrange(5)):
                next(iterator, None)
        signal.pause()

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
"""

EXPECTED = {
    "kill worker": (1, "is killed by signal: Killed (SIGKILL)"),
    "exception": (1, "ZeroDivisionError: training step"),
    "terminate": (-signal.SIGTERM, ""),
    "kill": (-signal.SIGKILL, ""),
    "ctrl-c": (-signal.SIGINT, "KeyboardInterrupt"),
}
SIGNALS = {"terminate": signal.SIGTERM, "kill": signal.SIGKILL, "ctrl-c": signal.SIGINT}
CASES = [
    {"end": end, "pin": pin, "persistent": persistent, "in_order": in_order}
    for end, pin, persistent, in_order in itertools.product(EXPECTED, *[(False, True)] * 3)
]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    with serve_scripts("import torch\nfrom fastload import DataLoader") as scripts:
        yield scripts


def check(case: dict[str, object], scripts: Scripts, tmp_path: Path) -> None:
    shared_before = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names are what is compared
    started = time.monotonic()
    trainer = scripts.start(TRAINER, json.dumps(case), path=tmp_path / "train.py")
    workers = _follow(trainer, str(case["end"]))
    _, text = trainer.communicate()
    left = psutil.wait_procs(workers, timeout=PATIENCE)[1]
    assert not left, f"workers outlived their trainer: {left}"
    code, message = EXPECTED[str(case["end"])]
    assert (trainer.returncode, text.count("Traceback")) == (code, 1 if message else 0), text
    assert message in text
    assert time.monotonic() - started < PATIENCE
    ours = {name for name in set(os.listdir("/dev/shm")) - shared_before if str(trainer.pid) in name}  # noqa: PTH208
    assert not ours, f"left in /dev/shm: {ours}"


def _follow(trainer: Script, end: str) -> list[psutil.Process]:
    """All workers it had, and what else it started; sends the signal when the trainer says so."""
    family: dict[int, psutil.Process] = {}
    for line in trainer.stdout:
        with suppress(psutil.NoSuchProcess):
            family |= {child.pid: child for child in psutil.Process(trainer.pid).children(recursive=True)}
        if line.strip() == "now":
            send = os.killpg if end == "ctrl-c" else os.kill
            send(trainer.pid, SIGNALS[end])
            break
    return list(family.values())


def _case(number: int) -> dict[str, object]:
    return {**CASES[number % len(CASES)], "seed": number}


@pytest.mark.parametrize("end", EXPECTED)
def test_each_end_once(end: str, scripts: Scripts, tmp_path: Path) -> None:
    rng = random.Random(end)
    case = {"end": end, "seed": rng.randrange(1000), "context": "fork"}
    check(case | {name: rng.random() < 0.5 for name in ("pin", "persistent", "in_order")}, scripts, tmp_path)


SEEDS = int(os.environ.get("FASTLOAD_SEEDS", "20"))


@pytest.mark.stress
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("number", range(SEEDS * 2))
def test_all_ends(number: int, context: str, scripts: Scripts, tmp_path: Path) -> None:
    check({**_case(random.Random(number).randrange(10**6)), "context": context}, scripts, tmp_path)
