"""The photos that every contender reads, and what all make of them.

They are made once, and kept in `.bench/` beside the sources (git ignores it).
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

__all__ = ["BATCH", "KEPT_QUALITY", "KEPT_SIDE", "SIZE", "WORKPLACE", "photo_folder"]

WORKPLACE = Path(__file__).parent.parent / ".bench"
CLASSES = 20
SIZE, BATCH = 224, 64  # of the crops, and how many of them are a batch
KEPT_SIDE, KEPT_QUALITY = 300, 90  # shrunk and decoded images in a cache: 400 x 300


def photo_folder(count: int, quality: int) -> Path:
    """A folder of `count` JPEGs of 500 x 375 pixels in 20 class folders; at quality 97 of 138 KB each."""
    folder = WORKPLACE / f"photos-{count}-q{quality}"
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        for label in range(CLASSES):
            (unfinished / f"class_{label:02d}").mkdir(parents=True, exist_ok=True)
        paths = [unfinished / f"class_{i % CLASSES:02d}" / f"img_{i:05d}.jpg" for i in range(count)]
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(_write_photo, range(count), paths, [quality] * count, chunksize=20))
        unfinished.rename(folder)
    return folder


def _write_photo(seed: int, path: Path, quality: int) -> None:
    # Here, since processes whose start is measured import this module for its numbers.
    from fastload.demo.photos import make_photo

    path.write_bytes(make_photo(seed, quality=quality))
