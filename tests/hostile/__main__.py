"""Hostile bytes into every reader: `python -m tests.hostile --seconds 60`.

Runs the attacks that are made for a format, and random ones from a seed until the time is over. A case that
breaks a promise is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import random
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from tests.hostile.attacks import attacks
from tests.hostile.oracle import Outcome, Server
from tests.hostile.readers import Files, readers


class Case(NamedTuple):
    """An attack on a reader: files of the attacker beside those of the example."""

    reader: str
    attack: str
    seed: int
    files: Files

    def __str__(self) -> str:
        name = shlex.quote(f"{self.reader}: {self.attack}")
        return f"{self.reader}: {self.attack} (python -m tests.hostile --seed {self.seed} --case {name})"


def cases(seed: int, few: int, only: str = "") -> Iterator[Case]:
    """The cases of a seed, with so many of each random kind; each reader's example first."""
    for name, reader in readers().items():
        if ": " in only and only.partition(": ")[0] not in name:
            continue
        rng = random.Random(f"{seed} {name}")
        for title, files in itertools.chain([("none", {})], attacks(name, reader, rng, few)):
            if only in f"{name}: {title}":
                yield Case(name, title, seed, reader.example() | files)


def judged(
    chosen: Iterator[Case], seconds: float | None = None, processes: int | None = None
) -> Iterator[tuple[Case, Outcome]]:
    """Each case with its outcome, as they come; no more are begun after so many seconds."""
    end = None if seconds is None else time.monotonic() + seconds
    done: queue.Queue[tuple[Case, Outcome] | BaseException | None] = queue.Queue()
    lock = threading.Lock()

    def work() -> None:
        server = Server()
        try:
            while end is None or time.monotonic() < end:
                with lock:
                    case = next(chosen, None)
                if case is None:
                    break
                done.put((case, server.judge(case.reader, case.files)))
            done.put(None)
        except BaseException as error:
            done.put(error)
        finally:
            server.close()

    workers = [threading.Thread(target=work) for _ in range(processes or os.cpu_count() or 1)]
    for one in workers:
        one.start()
    left = len(workers)
    while left:
        found = done.get()
        if isinstance(found, BaseException):
            raise found
        if found is None:
            left -= 1
        else:
            yield found
    for one in workers:
        one.join()


def fault_of(case: Case, outcome: Outcome) -> str:
    """What is wrong with an outcome; "" for one that is as promised."""
    fault = outcome.fault
    if case.attack == "none" and not fault and not outcome.said.startswith("read"):
        fault = f"the example was not read: {outcome.said}"
    return f"{case}: {fault}\n{outcome.said}" if fault else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--case", help="READER: ATTACK, or a part of it: only these")
    parser.add_argument("--few", type=int, default=20, help="random cases of a kind in a round")
    parser.add_argument("--show", action="store_true", help="print every outcome")
    options = parser.parse_args()
    rounds = [options.seed] if options.case else itertools.count(options.seed)
    chosen = (case for seed in rounds for case in cases(seed, options.few, options.case or ""))
    count, faults = 0, 0
    for case, outcome in judged(chosen, None if options.case else options.seconds):
        fault = fault_of(case, outcome)
        count, faults = count + 1, faults + bool(fault)
        if fault or options.show:
            used = f"{outcome.seconds:.2f} s, {outcome.memory >> 20} MB: {outcome.said:.300}"
            sys.stdout.write((fault or f"{case.reader}: {case.attack}: {used}") + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"hostile: {count} cases from seed {options.seed}, {faults} faults\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
