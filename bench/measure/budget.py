"""Batches by a budget of the same lengths: padding, steps and CPU time of fastload and others.

    python -m bench budget [--samples 100000] [--large 10000000] [--rounds 3]

Speech has durations up to 30 s, and batches of at most 600 s when padded. Text has documents of up to 8,192
tokens, which are padded, or packed into rows of 8,192. The lengths are drawn from log-normal laws with a
fixed seed. lhotse and Hugging Face run in environments of their own; "greedy" fills each row with the next
documents of a shuffled order, as torchtitan does. Nothing is read: this measures the choice of the batches
alone, in the process that makes it, for one rank.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.peers.environment import SCRIPTS, Unavailable, python_of
from fastload import BudgetSampler

SPEECH, TEXT = 600, 8192  # budgets: seconds, tokens
PEERS = ("budget_lhotse", "budget_datasets")


class Chosen(NamedTuple):
    """The batches of an epoch: batch b has samples[bounds[b] : bounds[b + 1]]."""

    samples: Any
    bounds: Any
    seconds: float
    first: float  # seconds until the first batch


def lengths(kind: str, count: int) -> Any:
    rng = np.random.default_rng(0)
    if kind == "speech":
        return rng.lognormal(2, 0.6, count).clip(0.5, 30)
    return rng.lognormal(6, 1.2, count).clip(1, TEXT).astype(np.int64)


def ours(sizes: Any, budget: int, **options: Any) -> Chosen:
    begin = time.process_time()
    batches = iter(BudgetSampler(sizes, budget, num_replicas=1, rank=0, **options))
    chosen = [next(batches)]
    first = time.process_time() - begin
    chosen += batches
    return _joined(chosen, time.process_time() - begin, first)


def greedy(sizes: Any, budget: int) -> Chosen:
    """The next documents of a shuffled order, until one does not fit."""
    begin = time.process_time()
    rows: list[list[int]] = [[]]
    used = 0
    for index in torch.randperm(len(sizes), generator=torch.Generator().manual_seed(0)).tolist():
        size = int(sizes[index])
        if used + size > budget:
            rows.append([])
            used = 0
        rows[-1].append(index)
        used += size
    return _joined(rows, time.process_time() - begin, 0)


def peer(name: str, sizes: Any, budget: int) -> Chosen:
    python = python_of(name)
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "sizes.npy", Path(folder) / "batches.npz"
        np.save(given, sizes)
        command = [str(python), str(SCRIPTS / f"{name}.py"), str(given), str(budget), str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
        with np.load(made) as found:
            return Chosen(found["samples"], found["bounds"], *found["seconds"].tolist())


def _joined(batches: list[list[int]], seconds: float, first: float) -> Chosen:
    bounds = np.cumsum([0, *map(len, batches)])
    return Chosen(np.array([index for batch in batches for index in batch]), bounds, seconds, first)


def judged(sizes: Any, budget: int, chosen: Chosen, *, packed: bool) -> dict[str, Any]:
    """What the batches of an epoch are, by the lengths alone."""
    counts = np.diff(chosen.bounds)
    held = np.maximum.reduceat(sizes[chosen.samples], chosen.bounds[:-1]) * counts
    filled = sizes[chosen.samples].sum()
    return {
        "samples": len(chosen.samples),
        "once": len(np.unique(chosen.samples)) == len(chosen.samples) == len(sizes),
        "steps": len(counts),
        "padding": 1 - float(filled / (budget * len(counts) if packed else held.sum())),
        "largest": float(np.add.reduceat(sizes[chosen.samples], chosen.bounds[:-1]).max())
        if packed
        else float(held.max()),
        "seconds": chosen.seconds,
        "first": chosen.first,
    }


def measured(make: Callable[[], Chosen], rounds: int, *judge: Any, packed: bool) -> dict[str, Any]:
    runs = [judged(*judge, make(), packed=packed) for _ in range(rounds)]
    times = {name: statistics.median(run[name] for run in runs) for name in ("seconds", "first")}
    return runs[0] | times


def measure(samples: int, large: int, rounds: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for kind, budget in (("speech", SPEECH), ("text", TEXT)):
        sizes = lengths(kind, samples)
        rows: dict[str, Any] = {"fastload": lambda: ours(sizes, budget, tolerance=0.1)}  # noqa: B023
        for name in PEERS:
            rows[name] = lambda name=name: peer(name, sizes, budget)  # noqa: B023
        for name, make in rows.items():
            try:
                found[f"{kind}, {name}"] = measured(make, rounds, sizes, budget, packed=False)
            except Unavailable as why:
                print(f"{kind}, {name}: {why}", file=sys.stderr)
    sizes = lengths("text", samples)
    packs = {"fastload": lambda: ours(sizes, TEXT, pack=True), "greedy": lambda: greedy(sizes, TEXT)}
    for name, make in packs.items():
        found[f"packed text, {name}"] = measured(make, rounds, sizes, TEXT, packed=True)
    if large:
        for kind, budget, options in (("speech", SPEECH, {}), ("text", TEXT, {"pack": True})):
            sizes, packed = lengths(kind, large), "pack" in options
            label = f"{'packed ' if packed else ''}{kind} of {large:,}, fastload"
            found[label] = measured(lambda: ours(sizes, budget, **options), 1, sizes, budget, packed=packed)  # noqa: B023
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = measure(options.samples, options.large, options.rounds)
    table = Table("", "steps", "padding", "largest batch", "each once", "CPU s", "CPU s to the first")
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['steps']:,}",
            f"{row['padding']:.2%}",
            f"{row['largest']:,.0f}",
            "yes" if row["once"] else f"no: {row['samples']:,}",
            f"{row['seconds']:.2f}",
            f"{row['first']:.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
