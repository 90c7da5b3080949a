"""WebDataset over the same tar shards, as its documentation recommends: its own pipeline, batches made in the
workers, torch's DataLoader around it, shards over HTTP by curl (here with presigned URLs).

It needs no environment of its own: the package is small, and the tests use it too.
"""

from __future__ import annotations

import random
from io import BytesIO
from typing import Any

import torch
import webdataset
from PIL import Image

from bench.kernels import SIZE, pillow_sample
from fastload import RandomResizedCrop
from fastload.images.rng import SampleRng

__all__ = ["webdataset_loader"]

SHUFFLE_BUFFER = 1000  # samples, as in its examples


def webdataset_loader(urls: list[str], batch_size: int, workers: int) -> Any:
    """(images, labels) in batches: RandomResizedCrop and flip by Pillow to uint8, shuffled."""
    crop = RandomResizedCrop(SIZE)

    def image(data: bytes) -> torch.Tensor:
        rng = SampleRng(random.getrandbits(64))
        return torch.from_numpy(pillow_sample(Image.open(BytesIO(data)), crop, rng))

    dataset = (
        webdataset.WebDataset(
            [f"pipe:curl -s -f '{url}'" for url in urls],
            shardshuffle=len(urls),
            nodesplitter=webdataset.split_by_node,
        )
        .shuffle(SHUFFLE_BUFFER)
        .to_tuple("jpg", "cls")
        .map_tuple(image, int)
        .batched(batch_size)
    )
    return webdataset.WebLoader(dataset, batch_size=None, num_workers=workers)
