"""The cost of handing a batch from a worker to the training process: torch and fastload.

    python -m bench handover [--repeats 5] [--batches 100]

The samples are ready (the same tensor each time), so only collating, passing on and taking a batch are
measured. Both sides take turns in the same run. `python -m bench starts` has their start.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from rich.console import Console
from torch.utils.data import Dataset

import fastload
from bench.command import make_parser
from bench.data import BATCH, WORKERS
from fastload.cli.report import figures

LOADERS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "fastload": fastload.DataLoader}


class Ready(Dataset[torch.Tensor]):
    """The same 3x224x224 sample, as often as wanted."""

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        self.sample = torch.ones(3, 224, 224).to(dtype)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def rate(loader_class: Any, dtype: torch.dtype, batches: int) -> float:
    """Samples per second from the tenth batch on, each batch touched once."""
    loader = loader_class(Ready(dtype, BATCH * (batches + 10)), batch_size=BATCH, num_workers=WORKERS)
    begin, total = 0.0, 0.0
    for i, batch in enumerate(loader):
        if i == 10:
            begin = time.perf_counter()
        total += float(batch[:, 0, 0, 0].sum())
    elapsed = time.perf_counter() - begin
    assert total == BATCH * (batches + 10)
    return BATCH * batches / elapsed


def measure(repeats: int, batches: int) -> list[dict[str, Any]]:
    """One row per dtype: every rate of both sides, medians, and how much better fastload is."""
    rows = []
    for dtype in (torch.float32, torch.uint8):
        values: dict[str, list[float]] = {name: [] for name in LOADERS}
        for _ in range(repeats):
            for name, loader_class in LOADERS.items():
                values[name].append(rate(loader_class, dtype, batches))
        medians = {name: statistics.median(found) for name, found in values.items()}
        what = str(dtype).removeprefix("torch.")
        better = medians["fastload"] / medians["torch"]
        rows.append({"what": what, "unit": "img/s", **medians, "ratio": better, "all": values})
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=100)
    arguments = parser.parse_args()
    rows = measure(arguments.repeats, arguments.batches)
    table = figures("", "unit", "torch", "fastload", "times better")
    table.title = f"Handing over ready 3x224x224 samples: batch {BATCH}, {WORKERS} workers, medians"
    for row in rows:
        sides = [f"{row[name]:,.0f}" for name in LOADERS]
        table.add_row(row["what"], row["unit"], *sides, f"{row['ratio']:.1f}")
    Console().print(table)
