"""The first epoch, from an S3 server behind a round trip, beside obstore alone.

`python -m bench.cold [--images 2000] [--repeats 5] [--quick]`: prints a table; the last line is JSON.

Server, round trip and loaders share the machine, so rates are its limit, not a network's. All contenders take
turns, ratios are those of one turn, and medians are shown. `cpu_ms` is the CPU time of a contender's own
processes per image (workers included, server and round trip not).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.peer import Run
from bench.photos import BATCH, SIZE, WORKPLACE, photo_folder
from fastload import Cache, DataLoader, ImageFolder, ObjectDataset, RandomResizedCrop
from fastload.demo.s3_server import S3Server, delay_proxy, serve_s3

WORKERS = 2
LATENCIES = (0, 20, 50, 100)  # ms
BARE_THREADS = 32  # in each of two processes


class Place(NamedTuple):
    """The bucket, seen over one latency."""

    url: str
    bucket: str
    options: dict[str, Any]
    paths: list[Path]


def epoch(loader: Any) -> Run:
    """Iterate once, start and end of the workers included."""
    count, first = 0, 0.0
    cpu, start = cpu_seconds(), time.perf_counter()
    for batch in loader:
        first = first or time.perf_counter() - start
        count += images_of(batch)
    took = time.perf_counter() - start
    return Run(count, took, first, cpu_seconds() - cpu)


def images_of(batch: Any) -> int:
    """How many samples a batch has: a count of them, a dict of fields, or (images, labels)."""
    if isinstance(batch, int):
        return batch
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def cold(place: Place) -> Callable[[], Run]:
    dataset = ImageFolder(place.url, RandomResizedCrop(SIZE, flip=0.5), storage_options=place.options)
    return lambda: epoch(DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS))


def filling_and_cached(make: Callable[[Cache], Any]) -> tuple[Callable[[], Run], Callable[[], Run]]:
    """(an epoch that fills a new cache, an epoch from that cache) of the dataset that `make` makes."""
    folders: list[tempfile.TemporaryDirectory[str]] = []

    def loader(folder: str) -> Any:
        return DataLoader(make(Cache(folder)), BATCH, shuffle=True, num_workers=WORKERS)

    def fill() -> Run:
        if folders:
            folders.pop().cleanup()
        folders.append(tempfile.TemporaryDirectory(dir=WORKPLACE))
        return epoch(loader(folders[-1].name))

    return fill, lambda: epoch(loader(folders[-1].name))


def count(samples: Sequence[Any]) -> int:
    return sum(len(sample) > 0 for sample in samples)


def bytes_only(place: Place) -> Callable[[], Run]:
    dataset = ObjectDataset(place.url, storage_options=place.options)
    return lambda: epoch(DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=count))


def bare(place: Place) -> Callable[[], Run]:
    """obstore alone: two processes, each with threads that take keys from one list."""
    keys = [f"{path.parent.name}/{path.name}" for path in place.paths]

    def run() -> Run:
        random.shuffle(keys)
        return side_by_side(_bare_reads, place, [keys[i::WORKERS] for i in range(WORKERS)], len(keys))

    return run


def side_by_side(read: Callable[[Any, Any], None], place: Any, parts: Sequence[Any], count: int) -> Run:
    """`read(place, part)` for each part in a process of its own; all of them read `count` images."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=read, args=(place, part)) for part in parts]
    cpu, start = cpu_seconds(), time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("the bare loop failed")
    return Run(count, time.perf_counter() - start, 0.0, cpu_seconds() - cpu)


def _bare_reads(place: Place, keys: list[str]) -> None:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        place.bucket,
        endpoint=place.options["endpoint_url"],
        access_key_id=place.options["key"],
        secret_access_key=place.options["secret"],
        client_options={"allow_http": True},
    )
    todo = iter(keys)
    lock = threading.Lock()

    def read() -> None:
        while True:
            with lock:
                key = next(todo, None)
            if key is None:
                return
            if not len(obstore.get(store, key).bytes()):
                os._exit(1)

    threads = [threading.Thread(target=read) for _ in range(BARE_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def first_batch_after_a_sample(place: Place) -> float:
    """Seconds to the first batch of a process that has read `dataset[0]` itself before."""
    code = (
        "import sys, json, time\n"
        "from fastload import DataLoader, ImageFolder, RandomResizedCrop\n"
        "if __name__ == '__main__':\n"
        "    url, options = json.loads(sys.argv[1])\n"
        f"    data = ImageFolder(url, RandomResizedCrop({SIZE}, flip=0.5), storage_options=options)\n"
        "    data[0]\n"
        "    start = time.perf_counter()\n"
        f"    next(iter(DataLoader(data, {BATCH}, shuffle=True, num_workers={WORKERS})))\n"
        "    print(time.perf_counter() - start)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first.py"
        script.write_text(code)
        arguments = json.dumps([place.url, place.options])
        said = subprocess.check_output(
            [sys.executable, str(script), arguments], text=True, env=_environment()
        )
    return float(said)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}


@contextmanager
def places(count: int) -> Iterator[dict[int, Place]]:
    """The bucket over every latency."""
    folder = photo_folder(count, 97)
    paths = sorted(folder.glob("*/*.jpg"))
    with ExitStack() as stack:
        server: S3Server = stack.enter_context(serve_s3(folder.parent))
        proxies = {ms: stack.enter_context(delay_proxy(server.endpoint_url, ms / 1000)) for ms in LATENCIES}
        yield {
            ms: Place(
                f"s3://{folder.name}/",
                folder.name,
                {"endpoint_url": proxy.url, "key": server.key, "secret": server.secret},
                paths,
            )
            for ms, proxy in proxies.items()
        }


def contenders(at: dict[int, Place]) -> dict[str, Callable[[], Run]]:
    near = at[20]
    filling, warm = filling_and_cached(
        lambda cache: ImageFolder(
            near.url, RandomResizedCrop(SIZE, flip=0.5), cache=cache, storage_options=near.options
        )
    )
    found = {f"crops, {ms} ms": cold(at[ms]) for ms in LATENCIES}
    found |= {"crops, 20 ms, filling": filling, "crops, cached": warm}
    return found | {"bytes, 20 ms": bytes_only(at[20]), "bare obstore, 20 ms": bare(at[20])}


def ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the ratios within one turn."""

    def of(one: str, other: str) -> float:
        pairs = zip(rates[one], rates[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    return {
        **{f"{ms} ms / 20 ms": of(f"crops, {ms} ms", "crops, 20 ms") for ms in LATENCIES if ms != 20},
        "filling / not filling": of("crops, 20 ms, filling", "crops, 20 ms"),
        "cold / cached": of("crops, 20 ms, filling", "crops, cached"),
        "bytes / bare obstore": of("bytes, 20 ms", "bare obstore, 20 ms"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two turns")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, list[Run]] = {}
    after_a_sample: list[float] = []
    with places(given.images) as at:
        turns = contenders(at)
        for _ in range(2 if given.quick else given.repeats):
            for name, run in turns.items():
                runs.setdefault(name, []).append(run())
            after_a_sample.append(first_batch_after_a_sample(at[20]))
    rates = {name: [one.images / one.seconds for one in made] for name, made in runs.items()}
    first = {name: statistics.median(one.first_batch for one in made) for name, made in runs.items()}
    cpu = {
        name: statistics.median(1e3 * r.cpu_seconds / r.images for r in made) for name, made in runs.items()
    }
    print(f"{'':24}{'img/s':>8}{'first batch, s':>16}{'cpu, ms':>9}")
    for name, made in rates.items():
        print(f"{name:24}{statistics.median(made):8.0f}{first[name]:16.2f}{cpu[name]:9.2f}")
    found = ratios(rates)
    for name, ratio in found.items():
        print(f"{name:24}{ratio:8.2f}")
    print(f"first batch after dataset[0]: {statistics.median(after_a_sample):.2f} s")
    document = {
        "benchmark": "cold",
        "images": given.images,
        "rates": {name: round(statistics.median(made), 1) for name, made in rates.items()},
        "all_rates": {name: [round(rate, 1) for rate in made] for name, made in rates.items()},
        "ratios": found,
        "first_batch_seconds": {name: round(value, 3) for name, value in first.items()}
        | {"after dataset[0]": round(statistics.median(after_a_sample), 3)},
        "cpu_ms": {name: round(value, 3) for name, value in cpu.items()},
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
