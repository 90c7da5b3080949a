"""Pictures of eight shapes, for the demo."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

__all__ = ["SHAPES", "make_pictures"]

SIDE = 96  # pixels

Plane = np.ndarray[Any, Any]
# Each maps coordinates, in units of the shape's radius, to a mask of its inside. All are symmetric.
SHAPES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "bars": lambda x, y: (abs(x) < 1) & (abs(y) < 1) & (np.floor(y * 2.5) % 2 == 0),
    "checks": lambda x, y: (abs(x) < 1) & (abs(y) < 1) & ((np.floor(x * 2) + np.floor(y * 2)) % 2 == 0),
    "columns": lambda x, y: (abs(x) < 1) & (abs(y) < 1) & (np.floor(x * 2.5) % 2 == 0),
    "cross": lambda x, y: ((abs(x) < 0.3) & (abs(y) < 1)) | ((abs(y) < 0.3) & (abs(x) < 1)),
    "disc": lambda x, y: np.hypot(x, y) < 1,
    "frame": lambda x, y: (np.maximum(abs(x), abs(y)) < 1) & (np.maximum(abs(x), abs(y)) > 0.6),
    "ring": lambda x, y: (np.hypot(x, y) < 1) & (np.hypot(x, y) > 0.6),
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 1,
}


def picture(shape: str, seed: int) -> bytes:
    """A JPEG of `shape`, bright on dark noise; the seed determines its size, place and colours."""
    rng = np.random.default_rng([seed, sorted(SHAPES).index(shape)])
    radius = rng.uniform(0.28, 0.4) * SIDE
    x0, y0 = rng.uniform(0.42, 0.58, 2) * SIDE
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    inside = SHAPES[shape]((x - x0) / radius, (y - y0) / radius)
    ground = rng.uniform(20, 110, 3)
    ink = ground + rng.uniform(70, 140, 3)
    pixels = np.where(inside[..., None], ink, ground) + rng.normal(0, 10, (SIDE, SIDE, 3))
    data: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels.clip(0, 255).astype(np.uint8)), quality=90
    )
    return data


def make_pictures(directory: Path, count: int, first_seed: int) -> None:
    """`count` pictures in `directory`/SHAPE/NUMBER.jpg, equally many of each shape."""

    def make(number: int) -> None:
        shape = sorted(SHAPES)[number % len(SHAPES)]
        (directory / shape / f"{number:05d}.jpg").write_bytes(picture(shape, first_seed + number))

    for shape in SHAPES:
        (directory / shape).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(make, range(count)))
