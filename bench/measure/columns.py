"""Rows a second of a table of numbers on one core: columns, rows, and what others make of the same file.

    python -m bench columns [--rows 2000000] [--columns 20] [--batch 4096 16384 65536] [--rounds 5]

One Parquet file of float32 columns on the local disk, in row groups of 64,000 rows; shuffled where the side
can. Each side runs in a process of its own that is bound to one core, and the sides take turns. A round reads
the file once to warm up (fastload fills its cache), and then once more, which counts: wall time, and the CPU
time of the process and its workers. On a busy machine only the CPU time says something.

    arrow              pyarrow's `iter_batches`: columns of Arrow, no tensors, no shuffle
    arrow, tensors     the same, each column as a tensor; no shuffle
    columns            fastload, batches="columns", from its cache, shuffled
    columns, worker    the same with num_workers=1
    table              `TableDataset(batches="columns")`, shuffled as a whole
    rows               fastload as samples, from its cache, shuffled; of a twentieth of the rows
    datasets           Hugging Face's `with_format("torch")` in torch's loader, shuffled; of a twentieth
    datasets, batched  the same, asked for whole batches (`__getitems__`)

The last two run in an environment of their own, see `bench.peers.environment`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.command import begin, finish, make_parser
from bench.data import ROOT
from bench.peers.environment import Unavailable, python_of

SIDES = (
    "arrow",
    "arrow, tensors",
    "columns",
    "columns, worker",
    "table",
    "rows",
    "datasets",
    "datasets, batched",
)
SLOW = ("rows", "datasets", "datasets, batched")
_SHARE = 20  # the slow sides read a file of so many times fewer rows
_CHILD = r"""
import os, resource, sys, time
side, path, cache, size = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
import torch
torch.set_num_threads(1)

def batches():
    import pyarrow.parquet as pq
    if side.startswith("arrow"):
        for batch in pq.ParquetFile(path).iter_batches(size, use_threads=False):
            if side == "arrow":
                yield batch.num_rows
            else:
                made = {name: torch.from_numpy(column.to_numpy().copy())
                        for name, column in zip(batch.schema.names, batch.columns)}
                yield len(made["f0"])
    else:
        for batch in loader:
            yield len(batch["f0"])

loader = None
if side in ("columns", "columns, worker", "rows", "table"):
    import fastload
    if side == "table":
        import pyarrow.parquet as pq
        table = pq.read_table(path)
        dataset = fastload.TableDataset(table, {n: n for n in table.column_names}, batches="columns")
    else:
        kind = "rows" if side == "rows" else "columns"
        dataset = fastload.ParquetDataset(path, batches=kind, cache=cache)
    workers = int(side.endswith("worker"))
    loader = fastload.DataLoader(dataset, size, shuffle=True, seed=1, num_workers=workers)
elif side.startswith("datasets"):
    import datasets
    dataset = datasets.Dataset.from_parquet(path, cache_dir=cache).with_format("torch")
    options = {}
    if side.endswith("batched"):
        class AtOnce(torch.utils.data.Dataset):
            def __len__(self): return len(dataset)
            def __getitems__(self, indices): return dataset[indices]
        options = {"collate_fn": lambda batch: batch}
        loader = torch.utils.data.DataLoader(AtOnce(), size, shuffle=True, **options)
    else:
        loader = torch.utils.data.DataLoader(dataset, size, shuffle=True)

def used():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

sum(batches())
before, begin = used(), time.perf_counter()
rows = sum(batches())
print(rows, time.perf_counter() - begin, used() - before)
"""


def write(path: Path, rows: int, columns: int) -> None:
    random = np.random.default_rng(0)
    table = {f"f{number}": random.standard_normal(rows, dtype=np.float32) for number in range(columns)}
    pq.write_table(pa.table(table), path, row_group_size=64_000)


def run(side: str, python: str, path: Path, cache: Path, size: int) -> tuple[float, float]:
    """Return (rows per second of wall time, of CPU time)."""
    command = [python, "-c", _CHILD, side, str(path), str(cache), str(size)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    rows, wall, cpu = map(float, done.stdout.split())
    return rows / wall, rows / cpu


def peer_python() -> str | None:
    """A Python that has Hugging Face's datasets, if it can be installed."""
    try:
        return str(python_of("huggingface"))
    except Unavailable as error:
        print(f"left out: datasets: {error}", file=sys.stderr)
        return None


def _medians(found: list[tuple[float, float]]) -> tuple[float, float]:
    wall, cpu = zip(*found, strict=True)
    return statistics.median(wall), statistics.median(cpu)


def main() -> None:
    parser = make_parser(__doc__, results=True)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--batch", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    document, peer = begin("columns"), peer_python()
    sides = [side for side in SIDES if peer or not side.startswith("datasets")]
    results: dict[tuple[int, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        whole, few = Path(scratch, "whole.parquet"), Path(scratch, "few.parquet")
        write(whole, arguments.rows, arguments.columns)
        write(few, max(1, arguments.rows // _SHARE), arguments.columns)
        for _ in range(arguments.rounds):
            for size in arguments.batch:
                for side in sides:
                    python = peer if peer and side.startswith("datasets") else sys.executable
                    path = few if side in SLOW else whole
                    done = run(side, python, path, Path(scratch, f"{side} of {path.stem}"), size)
                    results.setdefault((size, side), []).append(done)
    medians = {case: _medians(found) for case, found in results.items()}
    document |= {"rows": arguments.rows, "rounds": arguments.rounds, "columns": arguments.columns}
    document["results"] = [
        {"batch": size, "side": side, "rows_per_second": wall, "rows_per_cpu_second": cpu}
        for (size, side), (wall, cpu) in medians.items()
    ]
    finish(document, arguments.results)
