"""What a first epoch pays for the cache that it fills, by mode, beside the same work without a loader.

`python -m bench filling [--images 2000] [--repeats 5] [--photos photographs]` prints a table; the last line
is JSON.

Every epoch is a whole one, from an S3 server 20 ms away, with two workers and an empty cache. Its CPU time
is that of the loader's processes, in milliseconds an image, as user and system time. "Bare" is the user time
of one core over photos in memory: to make the payload, and to cut the sample from it. "Added" is what an
epoch takes beyond one without a cache; of its user time, the difference of the bare loops is taken off.
System time is mostly the copy of the payload to the page cache, and the pages for that.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.command import add_photos, make_parser
from bench.data import KEPT_QUALITY, KEPT_SIDE, SIZE, WORKPLACE, photo_folder
from bench.measure.cold import Place, places
from bench.measure.epochs import epoch, shuffled
from bench.peers.peer import Run
from fastload import Cache, RandomResizedCrop
from fastload.cache.codecs import Images
from fastload.datasets.payloads import ObjectPayloads
from fastload.images.decode import with_rows

MODES = ("none", "auto", "raw", "dct", "shrunk", "decoded")
MOST = 256  # photos of a bare loop
ROWS = 8  # crops of one call of the kernel, as in a loader


class Turn(NamedTuple):
    """An epoch of one mode and its bare loops; times but those of `run` in CPU milliseconds an image."""

    run: Run
    user: float
    system: float
    prepare: float
    sample: float

    @property
    def bare(self) -> float:
        return self.prepare + self.sample


def take(place: Place, photos: list[bytes], mode: str) -> Turn:
    with ExitStack() as stack:
        cache = None
        if mode != "none":
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=WORKPLACE))
            cache = Cache(folder, mode, short_side=KEPT_SIDE, quality=KEPT_QUALITY)  # type: ignore[arg-type]
        before = _cpu()
        run = epoch(shuffled(place.crops(cache)))
        user, system = (1e3 * (b - a) / run.images for a, b in zip(before, _cpu(), strict=True))
        return Turn(run, user, system, *bare(photos, ObjectPayloads(cache, None, images=Images.CROPPED)))


def bare(photos: list[bytes], way: ObjectPayloads) -> tuple[float, float]:
    """(to make the payloads, to cut a sample from each): user milliseconds an image, on one core."""
    prepare = with_rows if way.codec.chooses else way.encode or (lambda photo: photo)
    crop = RandomResizedCrop(SIZE, flip=0.5)
    out = np.empty((ROWS, *crop.sample_shape), np.uint8)
    payloads: list[Any] = []

    def cut() -> None:
        for at in range(0, len(photos), ROWS):
            images = [way.open(payload, readonly=True) for payload in payloads[at : at + ROWS]]
            failed = crop.fill(out[: len(images)], images, [random.getrandbits(64) for _ in images])
            assert not failed, failed

    parts: tuple[Callable[[], Any], ...] = lambda: payloads.extend(map(prepare, photos)), cut
    first, second = (_user_ms(part) / len(photos) for part in parts)
    return first, second


def _user_ms(work: Callable[[], Any]) -> float:
    start = resource.getrusage(resource.RUSAGE_THREAD).ru_utime
    work()
    return 1e3 * (resource.getrusage(resource.RUSAGE_THREAD).ru_utime - start)


def _cpu() -> tuple[float, float]:
    """(user, system) seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime for usage in usages), sum(usage.ru_stime for usage in usages)


def row(turns: list[Turn], without: list[Turn]) -> dict[str, float]:
    """The medians of a mode. `without`: the turns without a cache; differences are taken within a turn."""
    pairs = list(zip(turns, without, strict=True))
    values = {
        "images/s": [turn.run.images / turn.run.seconds for turn in turns],
        "first batch, s": [turn.run.first_batch for turn in turns],
        "CPU": [turn.user + turn.system for turn in turns],
        "user": [turn.user for turn in turns],
        "system": [turn.system for turn in turns],
        "bare: prepare": [turn.prepare for turn in turns],
        "bare: sample": [turn.sample for turn in turns],
        "added: user": [one.user - one.bare - (other.user - other.bare) for one, other in pairs],
        "added: system": [one.system - other.system for one, other in pairs],
    }
    return {name: statistics.median(found) for name, found in values.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    add_photos(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    paths = sorted(photo_folder(given.images, photos=given.photos).glob("*/*.jpg"))[:MOST]
    photos = [path.read_bytes() for path in paths]
    turns: dict[str, list[Turn]] = {mode: [] for mode in MODES}
    with places(given.images, given.photos) as at:
        for number in range(given.repeats):
            for mode in MODES[:: -1 if number % 2 else 1]:
                turns[mode].append(take(at[20], photos, mode))
    rows = {mode: row(turns[mode], turns["none"]) for mode in MODES}
    print(f"{'':8}" + "".join(f"{name:>15}" for name in rows["none"]))
    for mode, values in rows.items():
        print(f"{mode:8}" + "".join(f"{value:15.3g}" for value in values.values()))
    rounded = {mode: {name: round(value, 3) for name, value in one.items()} for mode, one in rows.items()}
    load = round(os.getloadavg()[0], 1)
    print(
        json.dumps(
            {
                "benchmark": "filling",
                "images": given.images,
                "photos": given.photos,
                "rows": rounded,
                "load": load,
            }
        )
    )
