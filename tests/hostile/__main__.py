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
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from tests.hostile.attacks import Attack, attacks
from tests.hostile.oracle import Outcome, Server
from tests.hostile.readers import Files, readers


class Case(NamedTuple):
    """An attack on a reader."""

    reader: str
    attack: str
    seed: int
    make: Attack

    def __str__(self) -> str:
        command = f"python -m tests.hostile --seed {self.seed} --case {f'{self.reader}: {self.attack}'!r}"
        return f"reader {self.reader!r}, attack {self.attack!r} ({command})"

    def files(self) -> Files:
        reader = readers()[self.reader]
        found = self.make()
        return reader.example() | (found if isinstance(found, dict) else {reader.attacked: found})


def cases(seed: int, few: int) -> Iterator[Case]:
    """The cases of a seed, with so many of each random kind; each reader's examples first."""
    for name, reader in readers().items():
        yield Case(name, "none", seed, dict)
        rng = random.Random(zlib.crc32(f"{seed} {name}".encode()))
        for title, attack in attacks(name, reader, rng, few):
            yield Case(name, title, seed, attack)


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
                done.put((case, server.judge(case.reader, case.files())))
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
    chosen = (
        case
        for seed in rounds
        for case in cases(seed, options.few)
        if (not options.case or options.case in f"{case.reader}: {case.attack}")
    )
    count, faults = 0, 0
    for case, outcome in judged(chosen, None if options.case else options.seconds):
        fault = fault_of(case, outcome)
        count, faults = count + 1, faults + bool(fault)
        if fault:
            print(fault, flush=True)
        elif options.show:
            print(
                f"{case.reader}: {case.attack}: {outcome.seconds:.2f} s, {outcome.memory >> 20} MB, {outcome.said:.300}"
            )
    print(f"hostile: {count} cases from seed {options.seed}, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
