"""MoXing's table of 2018 with its own meaning, measured here: `python -m bench moxing`.

3,671 photos of 60 KB (222 MB), as MoXing's, in three forms: bytes (objects, not decoded), images (a JPEG an
object) and TFRecord (the same JPEGs as records). Images and TFRecord are decoded, cropped and batched,
without a cache (every epoch reads the store) and with one (later epochs): a cache of pixels, as MoXing's was,
and beside it a raw one. The S3 server is 20 ms away on the same cores; 2 workers.

    python -m bench moxing [--images 3671] [--repeats 5]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.command import begin, finish, make_parser
from bench.data import ROUND_TRIP, SIZE, WORKPLACE, make_shards, photo_folder
from bench.measure.epochs import count, epoch, over_a_full_cache, shuffled
from bench.peers.peer import Run
from fastload import Cache, ImageFolder, ObjectDataset, RandomResizedCrop, TFRecordDataset
from fastload.cli.demo.s3_server import delay_proxy, serve_s3

IMAGES, QUALITY = 3671, 86  # 60.5 KB each
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


def report(images: int, repeats: int) -> dict[str, Any]:
    """Measures, and returns what there is to save."""
    document = begin("moxing")
    runs, size = measure(images, repeats)
    rates = {name: [round(one.images / one.seconds, 1) for one in made] for name, made in runs.items()}
    megabytes = {name: round(statistics.median(made) * size / 1e6, 2) for name, made in rates.items()}
    return document | {"images": images, "image_bytes": round(size), "rates": rates, "megabytes": megabytes}


def main() -> None:
    parser = make_parser(__doc__, results=True)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    finish(report(given.images, given.repeats), given.results)
