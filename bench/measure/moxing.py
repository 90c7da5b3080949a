"""MoXing's table of 2018 with its own meaning, measured here: `python -m bench moxing [--quick]`.

3,671 photos of 60 KB (222 MB), as MoXing's, in three forms: bytes (objects, not decoded), images (a JPEG an
object) and TFRecord (the same JPEGs as records). Images and TFRecord are decoded, cropped and batched,
without a cache (every epoch reads the store) and with one (later epochs): a cache of pixels, as MoXing's was,
and beside it a raw one. The S3 server is 20 ms away on the same cores; 2 workers.

Prints the table, and the same in Markdown; writes moxing-DATE.json and its chart, for light and dark pages,
into bench/results. --quick measures 256 photos in two turns; its files end in -quick.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.command import begin, make_parser, write_result
from bench.data import RESULTS, ROUND_TRIP, SIZE, WORKERS, WORKPLACE, make_shards, photo_folder
from bench.measure.epochs import count, epoch, over_a_full_cache, shuffled
from bench.peers.peer import Run
from bench.show import moxing_table
from fastload import Cache, ImageFolder, ObjectDataset, RandomResizedCrop, TFRecordDataset
from fastload.cli.demo.s3_server import delay_proxy, serve_s3

IMAGES, QUICK_IMAGES, QUALITY = 3671, 256, 86  # 60.5 KB each
WIDTH, HEIGHT = 500, 375  # of all photos; a decoded cache with this short side keeps them whole
MODES = {"bytes": ("raw",), "images": ("raw", "decoded"), "tfrecord": ("raw", "decoded")}

Make = Callable[[Cache | None], Any]


def makers(photos: Path, shards: Path, options: dict[str, str]) -> dict[str, Make]:
    url, records = f"s3://{photos.name}/", f"s3://{shards.name}/"
    features = {"image": bytes, "label": int}
    crop = RandomResizedCrop(SIZE, flip=0.5)
    shared: dict[str, Any] = {"storage_options": options}
    return {
        "bytes": lambda cache: ObjectDataset(url, cache=cache, **shared),
        "images": lambda cache: ImageFolder(url, crop, cache=cache, **shared),
        "tfrecord": lambda cache: TFRecordDataset(
            records, features, transform=crop, cache=cache, index=False, **shared
        ),
    }


def measure(images: int, repeats: int) -> tuple[dict[str, list[Run]], float]:
    """Runs of "KIND, without" and "KIND, MODE OF THE CACHE", in turns; and the mean bytes of a photo."""
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
            options = {"collate_fn": count} if kind == "bytes" else {}
            loaders[f"{kind}, without"] = shuffled(make(None), persistent_workers=True, **options)
            for mode in MODES[kind]:
                place = Path(folder) / f"{kind}-{mode}"
                loaders[f"{kind}, {mode}"] = over_a_full_cache(make, place, images, mode, HEIGHT, **options)
        for _ in range(repeats):
            for name, each in loaders.items():
                runs.setdefault(name, []).append(epoch(each))
                if runs[name][-1].images != images:
                    raise RuntimeError(f"{name}: {runs[name][-1].images} samples of {images}")
        del loaders, each
    return runs, size


def report(console: Console, images: int, repeats: int, quick: bool = False) -> dict[str, Any]:
    """Measures, prints the table, and returns what there is to save."""
    document = begin("moxing") | {"quick": quick}
    runs, size = measure(images, repeats)
    rates = {name: [one.images / one.seconds for one in made] for name, made in runs.items()}
    medians = {name: statistics.median(made) for name, made in rates.items()}
    document |= {
        "images": images,
        "image_bytes": round(size),
        "pixel_bytes": WIDTH * HEIGHT * 3,
        "workers": WORKERS,
        "round_trip_ms": ROUND_TRIP * 1000,
        "rates": {name: round(rate, 1) for name, rate in medians.items()},
        "megabytes": {name: round(rate * size / 1e6, 2) for name, rate in medians.items()},
        "all_rates": {name: [round(rate, 1) for rate in made] for name, made in rates.items()},
        "moxing_2018_megabytes": {kind: list(theirs) for kind, theirs in moxing_table.MOXING.items()},
        "demands": moxing_table.DEMANDS,
        "load_after": os.getloadavg(),
    }
    show(console, document)
    return document


def show(console: Console, document: dict[str, Any]) -> None:
    table = Table(title=moxing_table.caption(document).replace("`", ""), show_lines=True)
    for column in moxing_table.headings():
        table.add_column(column, justify="left" if column in ("", "cache") else "right")
    for cells in moxing_table.cells(document):
        table.add_row(*(cell.replace(", ", "\n") for cell in cells))
    console.print(table)
    for note in moxing_table.footnotes(document):
        console.print(f"* {note}", style="dim", markup=False, highlight=False)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON and the chart")
    given = parser.parse_args()
    torch.set_num_threads(1)
    images = given.images or (QUICK_IMAGES if given.quick else IMAGES)
    console = Console(width=130)
    document = report(console, images, given.repeats or (2 if given.quick else 5), given.quick)
    path = write_result(document, "-quick" * given.quick, given.results)
    print(moxing_table.markdown(document), file=console.file)
    for written in (path, *moxing_table.draw(document, path.with_suffix(".png"))):
        console.print(f"written: {written}", soft_wrap=True)
