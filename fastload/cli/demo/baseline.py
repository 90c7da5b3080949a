"""The baseline of `fastload demo`: torch's DataLoader over s3fs and PIL, as a user of s3fs writes it.

The work is the same as fastload's: GET, decode, RandomResizedCrop to 224 x 224, flip, uint8 CHW.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class S3fsImages(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """(image, label) of `keys`, each "bucket/class/name", read by s3fs and decoded by PIL.

    Each worker makes its client at its first sample: a client from before the fork would hang.
    """

    def __init__(self, keys: Sequence[str], labels: Sequence[int], size: int, **s3fs_options: Any) -> None:
        self.keys = keys
        self.labels = labels
        self.size = size
        self._options = s3fs_options
        self._client: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        if self._client is None:
            from s3fs import S3FileSystem

            self._client = S3FileSystem(**self._options)
        encoded = self._client.cat_file(self.keys[index])
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        left, top, width, height = _random_crop(*image.size)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image).transpose(2, 0, 1).copy()), self.labels[index]


def _random_crop(width: int, height: int) -> tuple[int, int, int, int]:
    """(left, top, width, height) by torchvision's rule: 8 to 100 % of the area, aspect ratio 3/4 to 4/3."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side
