"""The limits of a loader on this machine, as bare loops: no loader is faster than the slowest of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.data import BATCH, KEPT_QUALITY, KEPT_SIDE, SIZE
from bench.measure.bare import read_objects
from bench.measure.decode import rate_of
from bench.measure.kernels import Fill, RoiDecode
from bench.measure.sections import Place
from fastload import RandomResizedCrop
from fastload.cli.plan.probe import probe_disk
from fastload.images import decode_resized, shrink
from fastload.images import kernel as native

MEMORY_BYTES = 256 << 20


class Limits:
    """Bare decoding of the photos, at most `most` of them, in `threads` threads."""

    def __init__(self, folder: Path, threads: int, most: int | None = None) -> None:
        self.threads = threads
        self.photos = [path.read_bytes() for path in sorted(folder.rglob("*.jpg"))[:most]]

    def decoding(self, mode: str) -> tuple[str, Callable[[], float]]:
        """The limit's name, and a function that measures it once: images per second."""
        crop, count = RandomResizedCrop(SIZE, flip=0.5), len(self.photos)
        if mode == "decoded":
            pixels = [decode_resized(photo, KEPT_SIDE) for photo in self.photos]
            return "resize in memory", rate_of(Fill(pixels, crop, native.kernel, self.threads), count)
        kept = self.photos
        if mode == "shrunk":
            kept = [shrink(photo, KEPT_SIDE, KEPT_QUALITY) for photo in self.photos]
        return "bare ROI decode in C", rate_of(RoiDecode(kept, crop, self.threads), count)


def bare_get(place: Place) -> Callable[[], float]:
    """GETs of all photos by obstore in two processes with 32 threads each: images per second."""
    keys = [f"{path.parent.name}/{path.name}" for path in place.folder.glob("*/*.jpg")]
    options = place.server.options | {"endpoint_url": place.proxy.url}
    return lambda: len(keys) / read_objects(place.folder.name, options, keys)


def handing_over(itemsize: int) -> Callable[[], float]:
    """Copying a batch in memory, by one core: images per second."""
    batch = np.ones(BATCH * 3 * SIZE * SIZE * itemsize, np.uint8)
    target = np.empty_like(batch)

    def rate() -> float:
        start = time.perf_counter()
        for _ in range(50):
            np.copyto(target, batch)
        return 50 * BATCH / (time.perf_counter() - start)

    return rate


def machine_limits(directory: Path) -> dict[str, float]:
    """Bytes per second of a copy in memory by one core, and of the disk under `directory`."""
    source = np.ones(MEMORY_BYTES, np.uint8)
    target = np.empty_like(source)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    disks = [probe_disk(directory) for _ in range(3)]
    return {
        "memcpy_bytes_per_second": round(MEMORY_BYTES / statistics.median(seconds)),
        "disk_read_bytes_per_second": round(statistics.median(disk.read for disk in disks)),
        "disk_write_bytes_per_second": round(statistics.median(disk.write for disk in disks)),
    }
