"""The first epoch, from an S3 server behind a round trip, beside obstore alone.

`python -m bench cold [--images 2000] [--repeats 5] [--photos photographs] [--quick]` prints a table; the last
line is JSON.

Server, round trip and loaders share the machine, so the rates show its limit and not a network's. All
contenders take turns; ratios are taken within one turn, and medians are shown. `cpu_ms` is the CPU time per
image of a contender's own processes: workers included, server and round trip excluded.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.command import add_photos, make_parser
from bench.data import BATCH, ROOT, SIZE, WORKERS, photo_folder
from bench.measure.bare import decode_objects, read_objects
from bench.measure.epochs import count, cpu_seconds, epoch, filling_and_cached, median_ratio, shuffled
from bench.peers.peer import Run
from fastload import Cache, ImageFolder, ObjectDataset, RandomResizedCrop
from fastload.cli.demo.s3_server import S3Server, delay_proxy, serve_s3

LATENCIES = (0, 20, 50, 100)  # ms


class Place(NamedTuple):
    """The bucket, seen over one latency."""

    bucket: str
    options: dict[str, str]
    keys: list[str]

    def crops(self, cache: Cache | None = None) -> Any:
        crop = RandomResizedCrop(SIZE, flip=0.5)
        return ImageFolder(f"s3://{self.bucket}/", crop, cache=cache, storage_options=self.options)


def cold(place: Place) -> Callable[[], Run]:
    dataset = place.crops()
    return lambda: epoch(shuffled(dataset))


def bytes_only(place: Place) -> Callable[[], Run]:
    dataset = ObjectDataset(f"s3://{place.bucket}/", storage_options=place.options)
    return lambda: epoch(shuffled(dataset, collate_fn=count))


def bare(place: Place, crop: RandomResizedCrop | None = None) -> Callable[[], Run]:
    """obstore alone; with `crop`, the kernel decodes what arrives."""

    def run() -> Run:
        cpu, source = cpu_seconds(), (place.bucket, place.options, place.keys)
        seconds = read_objects(*source) if crop is None else decode_objects(*source, crop)
        return Run(len(place.keys), seconds, 0.0, cpu_seconds() - cpu)

    return run


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
        arguments = json.dumps([f"s3://{place.bucket}/", place.options])
        said = subprocess.check_output(
            [sys.executable, str(script), arguments], text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    return float(said)


@contextmanager
def places(images: int, photos: str = "dense") -> Iterator[dict[int, Place]]:
    """The bucket over every latency."""
    folder = photo_folder(images, photos=photos)
    keys = [f"{path.parent.name}/{path.name}" for path in sorted(folder.glob("*/*.jpg"))]
    with ExitStack() as stack:
        server: S3Server = stack.enter_context(serve_s3(folder.parent))
        proxies = {ms: stack.enter_context(delay_proxy(server.endpoint_url, ms / 1000)) for ms in LATENCIES}
        yield {
            ms: Place(folder.name, server.options | {"endpoint_url": proxy.url}, keys)
            for ms, proxy in proxies.items()
        }


def contenders(at: dict[int, Place]) -> dict[str, Callable[[], Run]]:
    filling, cached = filling_and_cached(at[20].crops)
    found = {f"crops, {ms} ms": cold(at[ms]) for ms in LATENCIES}
    found |= {"crops, 20 ms, filling": filling, "crops, cached": cached}
    found |= {"bytes, 20 ms": bytes_only(at[20]), "bare obstore, 20 ms": bare(at[20])}
    return found | {"bare + kernel, 20 ms": bare(at[20], RandomResizedCrop(SIZE, flip=0.5))}


def ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the ratios within one turn."""

    def of(one: str, other: str) -> float:
        return median_ratio(rates[one], rates[other])

    return {
        **{f"{ms} ms / 20 ms": of(f"crops, {ms} ms", "crops, 20 ms") for ms in LATENCIES if ms != 20},
        "filling / not filling": of("crops, 20 ms, filling", "crops, 20 ms"),
        "cold / cached": of("crops, 20 ms, filling", "crops, cached"),
        "bytes / bare obstore": of("bytes, 20 ms", "bare obstore, 20 ms"),
        "crops / bare + kernel": of("crops, 20 ms", "bare + kernel, 20 ms"),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two turns")
    add_photos(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, list[Run]] = {}
    after_a_sample: list[float] = []
    with places(given.images, given.photos) as at:
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
        "photos": given.photos,
        "rates": {name: round(statistics.median(made), 1) for name, made in rates.items()},
        "all_rates": {name: [round(rate, 1) for rate in made] for name, made in rates.items()},
        "ratios": found,
        "first_batch_seconds": {name: round(value, 3) for name, value in first.items()}
        | {"after dataset[0]": round(statistics.median(after_a_sample), 3)},
        "cpu_ms": {name: round(value, 3) for name, value in cpu.items()},
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(document))
