"""MoXing's table of 2018 in its own shape, measured here: `python -m bench moxing [--repeats 5] [--save]`.

3,671 photos of 60 KB (222 MB), as MoXing's: bytes, images (decoded: RandomResizedCrop(224) to uint8) and
TFRecord (records, not decoded), each without a cache (every epoch reads the store) and with one (later
epochs). The S3 server is 20 ms away on the same two cores; 2 workers. MoXing had 64 processes, a file cache
on SSD, and a separate server. The columns stand side by side for their shape; they are not a race.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.data import ROUND_TRIP, SIZE, WORKERS, WORKPLACE, make_shards, photo_folder, write_result
from bench.measure.epochs import count, epoch, over_a_full_cache, shuffled
from bench.peers.peer import Run
from fastload import Cache, ImageFolder, ObjectDataset, RandomResizedCrop, TFRecordDataset
from fastload.cli.measurement import describe_machine
from fastload.demo.s3_server import delay_proxy, serve_s3

IMAGES, QUALITY = 3671, 86  # 60.5 KB each
MOXING = {"bytes": (619.64, 863.76), "images": (375.15, 402.57), "tfrecord": (139.06, 683.51)}  # MB/s

Make = Callable[[Cache | None], Any]


def makers(photos: Path, shards: Path, options: dict[str, str]) -> dict[str, Make]:
    url, records = f"s3://{photos.name}/", f"s3://{shards.name}/"
    return {
        "bytes": lambda cache: ObjectDataset(url, cache=cache, storage_options=options),
        "images": lambda cache: ImageFolder(
            url, RandomResizedCrop(SIZE, flip=0.5), cache=cache, storage_options=options
        ),
        "tfrecord": lambda cache: TFRecordDataset(records, cache=cache, index=False, storage_options=options),
    }


def measure(images: int, repeats: int) -> tuple[dict[str, list[Run]], float]:
    """Runs of "KIND, without" and "KIND, with", in turns; and the mean bytes of a photo."""
    photos = photo_folder(images, QUALITY)
    size = sum(path.stat().st_size for path in photos.glob("*/*.jpg")) / images
    shards = make_shards(photos, images, "tfrecord")
    runs: dict[str, list[Run]] = {}
    with (
        serve_s3(photos.parent) as server,
        delay_proxy(server.endpoint_url, ROUND_TRIP) as proxy,
        tempfile.TemporaryDirectory(dir=WORKPLACE) as folder,
    ):
        made = makers(photos, shards, server.options | {"endpoint_url": proxy.url})
        loaders = {}
        for kind, make in made.items():
            options = {} if kind == "images" else {"collate_fn": count}
            loaders[f"{kind}, without"] = shuffled(make(None), persistent_workers=True, **options)
            loaders[f"{kind}, with"] = over_a_full_cache(make, Path(folder) / kind, images, **options)
        for _ in range(repeats):
            for name, each in loaders.items():
                runs.setdefault(name, []).append(epoch(each))
        del loaders, each
    return runs, size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two turns")
    parser.add_argument("--json", action="store_true", help="one JSON document on the last line")
    parser.add_argument("--save", action="store_true", help="write it to bench/results/ too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    document = report(
        Console(stderr=given.json, width=110), given.images, 2 if given.quick else given.repeats
    )
    if given.save:
        write_result(document)
    if given.json:
        print(json.dumps(document))


def report(console: Console, images: int, repeats: int) -> dict[str, Any]:
    """Measures, prints the table, and returns what there is to save."""
    document: dict[str, Any] = {"bench": "moxing", **describe_machine(), "load_before": os.getloadavg()}
    runs, size = measure(images, repeats)
    rates = {name: [one.images / one.seconds for one in made] for name, made in runs.items()}
    medians = {name: statistics.median(made) for name, made in rates.items()}
    table = Table(title=f"{images:,} photos, {images * size / 1e6:,.0f} MB, {WORKERS} workers, 20 ms")
    for column in ("", "without cache", "with cache", "MoXing 2018, without", "with"):
        table.add_column(column, justify="right" if column else "left")
    for kind, theirs in MOXING.items():
        ours = [medians[f"{kind}, {which}"] for which in ("without", "with")]
        cells = [f"{rate * size / 1e6:,.1f} MB/s\n{rate:,.0f} images/s" for rate in ours]
        there = [f"{rate:,.2f} MB/s\n{rate * 1e6 / (222e6 / IMAGES):,.0f} images/s" for rate in theirs]
        table.add_row(kind, *cells, *there)
    console.print(table)
    document |= {
        "images": images,
        "image_bytes": round(size),
        "rates": {name: round(rate, 1) for name, rate in medians.items()},
        "megabytes": {name: round(rate * size / 1e6, 2) for name, rate in medians.items()},
        "all_rates": {name: [round(rate, 1) for rate in made] for name, made in rates.items()},
        "moxing_2018_megabytes": {kind: list(theirs) for kind, theirs in MOXING.items()},
        "load_after": os.getloadavg(),
    }
    return document


if __name__ == "__main__":
    main()
