"""Encoded images to RGB uint8, and the transforms that run fused with decoding."""

from __future__ import annotations

from fastload.images.decode import MAX_PIXELS, decode_image, decode_pil, decode_resized, shrink
from fastload.images.kernel import backend
from fastload.images.rng import SampleRng, sample_seed
from fastload.images.transforms import CenterCrop, RandomResizedCrop

__all__ = [
    "MAX_PIXELS",
    "CenterCrop",
    "RandomResizedCrop",
    "SampleRng",
    "backend",
    "decode_image",
    "decode_pil",
    "decode_resized",
    "sample_seed",
    "shrink",
]
