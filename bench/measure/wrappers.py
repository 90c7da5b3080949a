"""Wrappers: the first epoch of an ImageFolder beside the same photos through wrappers of it.

`python -m bench wrappers [--images 400] [--repeats 5] [--quick]`. Photos of 138 KB on an S3 server 20 ms away
that runs on the same cores; 2 workers; RandomResizedCrop(224) and flip to uint8 in batches of 64; no cache.
All contenders take turns.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

import fastload
from bench.command import begin, finish, make_parser
from bench.data import ROUND_TRIP, SIZE, photo_folder
from bench.measure.epochs import epoch, shuffled
from bench.peers.peer import Run
from fastload import ImageFolder, RandomResizedCrop
from fastload.cli.demo.s3_server import delay_proxy, serve_s3

BARE, ALONE = "ImageFolder", "wrapper"


class Wrapper(Dataset[Any]):
    """As everybody writes it."""

    def __init__(self, photos: Any) -> None:
        self.photos = photos

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> Any:
        return self.photos[index]


class Announcing(Wrapper):
    def prefetch(self, indices: list[int]) -> None:
        self.photos.prefetch(indices)


def same(sample: Any) -> Any:
    return sample


def contenders(url: str, options: dict[str, str]) -> dict[str, Callable[[], Run]]:
    def photos() -> Any:
        return ImageFolder(url, RandomResizedCrop(SIZE, flip=0.5), storage_options=options)

    def halves() -> list[Any]:
        half = len(photos()) // 2
        return [Subset(photos(), range(half)), Subset(photos(), range(half, len(photos())))]

    def run(make: Callable[[], Any], **settings: Any) -> Callable[[], Run]:
        return lambda: epoch(shuffled(make(), **settings))

    return {
        BARE: run(photos),
        "ConcatDataset of two halves": run(lambda: ConcatDataset(halves())),
        "StackDataset with labels": run(lambda: StackDataset(photos(), range(len(photos())))),
        "fastload.map": run(lambda: fastload.map(photos(), same)),
        "wrapper with prefetch": run(lambda: Announcing(photos())),
        ALONE: run(lambda: Wrapper(photos())),
        "wrapper, threads=16": run(lambda: Wrapper(photos()), threads=16),
        "wrapper, threads=16, seed=1": run(lambda: Wrapper(photos()), threads=16, seed=1),
    }


def main() -> None:
    parser = make_parser(__doc__, results=True)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two turns")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Wrapper asks the ImageFolder")
    rates: dict[str, list[float]] = {}
    document = begin("wrappers")
    photos = photo_folder(given.images)
    with serve_s3(photos.parent) as server, delay_proxy(server.endpoint_url, ROUND_TRIP) as proxy:
        turns = list(contenders(f"s3://{photos.name}/", server.options | {"endpoint_url": proxy.url}).items())
        for turn in range(2 if given.quick else given.repeats):
            for name, run in turns if turn % 2 == 0 else reversed(turns):
                rates.setdefault(name, []).append(given.images / run().seconds)
    document |= {
        "images": given.images,
        "rates": {name: round(statistics.median(made), 1) for name, made in rates.items()},
        "all_rates": {name: [round(rate, 1) for rate in made] for name, made in rates.items()},
    }
    finish(document, given.results)
