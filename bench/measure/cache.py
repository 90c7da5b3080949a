"""The cost of the cache: filling it, and reading a record back from the page cache.

    python -m bench cache [DIR]

DIR (default: the system's temporary directory) is on the disk to measure. Payloads are random bytes. "put" is
the time that the training process waits; "fill" ends when the last entry is in the index.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fastload.cache import Cache


def fill(path: Path, seed: int, count: int, size: int, start: float) -> tuple[float, float]:
    """Seconds in `write`, and seconds until all records are indexed; a full queue is tried again."""
    cache = Cache(path)
    cache.lookup(bytes(16))
    payloads = [random.Random(i).randbytes(size) for i in range(20)]
    time.sleep(max(0.0, start - time.time()))
    begin, put = time.perf_counter(), 0.0
    for i in range(count):
        key, call = cache.key(f"{seed}/{i}"), time.perf_counter()
        while not cache.write(key, payloads[i % 20]):
            time.sleep(0.001)
            call = time.perf_counter()
        put += time.perf_counter() - call
    assert cache.flush(300)
    filled = time.perf_counter() - begin
    cache.close()
    return put, filled


def measure(path: Path, count: int, size: int) -> dict[str, float]:
    context, row = multiprocessing.get_context("spawn"), {"record_kb": size / 1000}
    for processes in (1, 2):
        with context.Pool(processes) as pool:
            start = time.time() + 1.5
            folder = path / f"{processes}-{size}"
            jobs = [(folder, seed, count, size, start) for seed in range(processes)]
            timings = pool.starmap(fill, jobs, chunksize=1)
        row[f"fill_mb_s_{processes}_process"] = processes * count * size / 1e6 / max(t[1] for t in timings)
        row[f"put_us_{processes}_process"] = 1e6 * max(t[0] for t in timings) / count
    cache = Cache(path / f"1-{size}")
    keys = [cache.key(f"0/{i}") for i in range(count)]
    for name in ("warm up", "lookup_us", "read_us"):
        random.shuffle(keys)
        call = cache.lookup if name == "lookup_us" else cache.read
        begin = time.perf_counter()
        for key in keys:
            call(key)
        row[name] = 1e6 * (time.perf_counter() - begin) / count
    assert cache.counters["cache.hits"] == 2 * count
    cache.close()
    return {name: value for name, value in row.items() if name != "warm up"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", default=tempfile.gettempdir())
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder, console.status("filling and reading"):
        sizes = ((10_000, 20_000), (4000, 138_000), (1500, 360_000))
        rows = [measure(Path(folder), count, size) for count, size in sizes]
    table = Table(title=f"cache on {options.directory}, {os.cpu_count()} cores, page cache warm")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:,.1f}" for value in row.values()))
    console.print(table)


if __name__ == "__main__":
    main()
