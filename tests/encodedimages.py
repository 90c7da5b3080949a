"""Batches of encoded images for tests of decoders."""

from __future__ import annotations

from typing import Any

import torch

from fastload.formats.jpeg import is_dct
from fastload.images.encoded import EncodedBatch, EncodedImages
from fastload.images.transforms import Crop


def ordinary(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def encode(crop: Crop, files: dict[str, bytes], seed: int = 0) -> EncodedImages:
    """A batch of these files, by key; image k has the randomness of `seed + k`."""
    batch = EncodedBatch(crop, len(files), ordinary, records=any(map(is_dct, files.values())))
    seeds = [seed + k for k in range(len(files))]
    assert batch.fill(range(len(files)), list(files.values()), seeds, list(files)) == []
    return batch.finish()


def undecodable(data: bytes) -> bytes:
    """A JPEG whose header is read without complaint and which no decoder can decode: it names a quantisation
    table that is not there."""
    frame = data.index(b"\xff\xc0")
    table = frame + 4 + 6 + 2
    assert data[table] == 0
    return data[:table] + b"\x03" + data[table + 1 :]


def psnr(image: torch.Tensor, other: torch.Tensor) -> float:
    """In dB, of uint8 images."""
    error = (image.double() - other.double()).square().mean()
    return 99.0 if error == 0 else float(10 * torch.log10(255**2 / error))
