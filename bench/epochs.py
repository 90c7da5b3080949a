"""Whole epochs through loaders: ours in its three modes, and torch's.

A contender is called and returns images per second of one epoch over all photos: batches of 64, shuffled,
RandomResizedCrop(224) and a random flip, uint8, two workers that are already running.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.kernels import BATCH, SIZE, pillow_sample
from bench.photos import WORKPLACE
from fastload import Cache, DataLoader, ImageFolder, RandomResizedCrop
from fastload.cli._s3 import serve_s3
from fastload.images.rng import SampleRng

__all__ = ["WORKERS", "Epoch", "filling", "our_loader", "torch_loader"]

WORKERS = 2


class Epoch:
    """An epoch of a torch or fastload loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __call__(self) -> float:
        start, images = time.perf_counter(), 0
        for batch, _ in self.loader:
            images += len(batch)
        return images / (time.perf_counter() - start)


def our_loader(url: str, cache: Cache | None, **options: Any) -> DataLoader[Any]:
    dataset = ImageFolder(url, RandomResizedCrop(SIZE), cache=cache, **options)
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)


class PillowFolder(torch.utils.data.Dataset[Any]):
    """What torchvision's ImageFolder does, without torchvision: Pillow over local files."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(path.name for path in folder.iterdir())
        self.samples = [(p, i) for i, name in enumerate(classes) for p in sorted((folder / name).iterdir())]
        self.transform = RandomResizedCrop(SIZE)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with path.open("rb") as file:
            pixels = pillow_sample(Image.open(file), self.transform, SampleRng(random.getrandbits(64)))
        return torch.from_numpy(pixels), label


def torch_loader(folder: Path) -> Any:
    return torch.utils.data.DataLoader(
        PillowFolder(folder), BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )


# --- what filling the cache costs


def filling(folder: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """{store: {"without a cache" | "filling raw": images per second of first epochs}}, in turns."""
    rates: dict[str, dict[str, list[float]]] = {}
    with serve_s3(folder.parent) as server:
        options = {"endpoint_url": server.endpoint_url, "key": server.key, "secret": server.secret}
        stores = {"file://": (str(folder), None), "s3:// on loopback": (f"s3://{folder.name}", options)}
        for round_ in range(rounds + 1):
            for store, (url, storage_options) in stores.items():
                found = rates.setdefault(store, {"without a cache": [], "filling raw": []})
                for name, rate in _first_epochs(url, storage_options, turned=bool(round_ % 2)):
                    if round_:
                        found[name].append(rate)
    return rates


def _first_epochs(url: str, storage_options: Any, *, turned: bool) -> Iterator[tuple[str, float]]:
    names = ["without a cache", "filling raw"]
    for name in reversed(names) if turned else names:
        _touch_memory()
        with _fresh_cache() as cache:
            loader = our_loader(
                url, cache if name == "filling raw" else None, storage_options=storage_options
            )
            yield name, _after_start(loader)
            del loader


def _touch_memory() -> None:
    """A virtual machine gets free memory from its host anew, page by page, for several times what the write
    into the page cache costs. Both sides start with memory that it has just had."""
    np.ones(600 << 20, np.uint8)


@contextmanager
def _fresh_cache() -> Iterator[Cache]:
    with tempfile.TemporaryDirectory(dir=WORKPLACE) as directory:
        yield Cache(directory)


def _after_start(loader: Any) -> float:
    """Images per second from the first batch on: starting the workers is not what is measured."""
    images, start = 0, 0.0
    for batch, _ in loader:
        if start:
            images += len(batch)
        else:
            start = time.perf_counter()
    return images / (time.perf_counter() - start)
