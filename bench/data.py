"""The data that every contender reads, its settings, and the folders for data and results.

Photos and shards are made once, and stay in `.bench/` beside the sources (git ignores it).
"""

# Only light imports here: processes whose start is measured import this module for its numbers.
from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKPLACE = ROOT / ".bench"
RESULTS = ROOT / "bench" / "results"
SIZE, BATCH = 224, 64  # pixels of a crop's side, crops of a batch
WORKERS = 2
ROUND_TRIP = 0.02  # seconds
QUALITY = 97  # of the photos: 138 KB each
PHOTOS = ("dense", "photographs")
KEPT_SIDE, KEPT_QUALITY = 300, 90  # shrunk and decoded images in a cache: 400 x 300
PHOTOS_A_SHARD = 250


def photo_folder(count: int, quality: int = QUALITY, photos: str = "dense") -> Path:
    """A folder of `count` JPEGs in 20 class folders.

    Args:
        photos: "dense": noise of 500 x 375 pixels, at quality 97 of 138 KB each; "photographs": see
            `bench.photographs`, of their own qualities.
    """
    real = photos == "photographs"
    folder = WORKPLACE / (f"photographs-{count}" if real else f"photos-{count}-q{quality}")
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        if real:
            from bench.photographs import write_photographs

            write_photographs(unfinished, count, WORKPLACE / "pictures")
        else:
            from fastload.cli.demo.photos import make_dataset

            make_dataset(unfinished, count, quality=quality, shapes=((500, 375),))
        unfinished.rename(folder)
    return folder


def bits_a_pixel(photos: Iterable[bytes]) -> float:
    """Of encoded photos, on average."""
    from fastload.images import kernel

    total = pixels = 0
    for photo in photos:
        width, height = kernel.active().jpeg_size(photo, 1 << 40, True)
        total, pixels = total + 8 * len(photo), pixels + width * height
    return total / pixels


def make_shards(photos: Path, count: int, form: str) -> Path:
    """A folder with the photos in shards, "tar" or "tfrecord", of 250 each; made once."""
    folder = photos.parent / f"{photos.name}-{form}"
    if (folder / "photos.json").exists() and json.loads((folder / "photos.json").read_bytes())["complete"]:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    total = sum(path.stat().st_size + 2048 for path in photos.glob("*/*.jpg"))
    command = [sys.executable, "-m", "fastload", "convert", str(photos), str(folder), "--to", form]
    options = ["--shard-size", str(total * PHOTOS_A_SHARD // count + 1), "--shuffle", "1", "--name", "photos"]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return folder
