"""Photo-like JPEGs, generated instead of downloaded: noise with the 1/f spectrum of natural images.

To a loader, a photo is its size on disk, its size in pixels, and its cost of decoding. An image whose
amplitudes fall as 1/f, with chroma that follows luma, has those of a photo; white noise does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from fastload.metrics.machine import usable_cores

Plane = NDArray[np.uint8]
Real = NDArray[np.floating[Any]]

QUALITY = 95
# The (width, height) of each of 20 photos: mostly 500x375, some portrait, as in ImageNet.
SHAPES = [(500, 375)] * 10 + [(500, 333)] * 3 + [(375, 500)] * 3 + [(480, 360)] * 2 + [(500, 400), (640, 480)]
SPARE_ROWS = 2
# Amplitude falls as 1/f**slope: the gentlest slope gives about twice the bytes of the steepest.
SLOPES = tuple(1.08 + 0.045 * step for step in range(12))


def make_photo(seed: int, width: int = 500, height: int = 375, quality: int = QUALITY) -> bytes:
    """Make a JPEG (4:2:0) of `width` x `height` pixels, the same for the same seed; about 110 KB."""
    rng = np.random.default_rng(seed)
    # The amount of fine detail varies much between photos, and so does the size on disk.
    slope = SLOPES[rng.integers(len(SLOPES))]
    contrast = rng.uniform(34, 64)
    luma = np.fft.irfft2(
        _noise(rng, height, width // 2 + 1) * _falloff(height, width, slope, True), (height, width)
    )
    half_height, half_width = (height + 1) // 2, (width + 1) // 2
    # One complex field is two real ones: blue and red difference for the price of one transform.
    chroma = np.fft.ifft2(
        _noise(rng, half_height, half_width) * _falloff(half_height, half_width, slope, False)
    )
    shared = luma[::2, ::2] / luma.std() * rng.uniform(-0.6, 0.6, (2, 1, 1)).astype(np.float32)
    tint = rng.uniform(-14, 14, 2)
    jpeg: bytes = simplejpeg.encode_jpeg_yuv_planes(
        _plane(luma, contrast, rng.uniform(95, 150)),
        _plane(chroma.real / chroma.std() + shared[0], 12, 128 + tint[0]),
        _plane(chroma.imag / chroma.std() + shared[1], 12, 128 + tint[1]),
        quality=quality,
    )
    return jpeg


def _noise(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.complex64]:
    """Return white complex noise."""
    return rng.standard_normal((rows, 2 * columns), dtype=np.float32).view(np.complex64)


@lru_cache(maxsize=128)
def _falloff(height: int, width: int, slope: float, half: bool) -> Real:
    """Return 1/f**slope over the frequencies of an image; the right half of them only when `half`."""
    down = np.fft.fftfreq(height)[:, None]
    across = np.fft.rfftfreq(width) if half else np.fft.fftfreq(width)
    frequency = np.hypot(down, across)
    frequency[0, 0] = np.inf  # zero mean: the caller adds one
    falloff: Real = (frequency**-slope).astype(np.float32)
    return falloff


def _plane(values: Real, spread: float, mean: float) -> Plane:
    """Return `values` scaled to standard deviation `spread` around `mean`, as bytes."""
    height, width = values.shape
    # Spare rows: for odd sizes simplejpeg 1.9 reads beyond the end of its planes, and the file would depend
    # on the memory there.
    plane = np.zeros((height + SPARE_ROWS, width), np.uint8)
    plane[:height] = np.clip(values * (spread / values.std()) + mean, 0, 255)
    return plane[:height]


def make_dataset(
    directory: Path,
    count: int,
    classes: int = 20,
    progress: Callable[[int, int], None] | None = None,
    *,
    quality: int = QUALITY,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> int:
    """Write photo 0 to `count` - 1 to `directory`/class_XX/img_XXXXX.jpg, photo i in class i % `classes`.

    Photos that exist already are kept, so an interrupted call can be repeated.

    Args:
        progress: called with the numbers of photos done and wanted.
        shapes: (width, height) in turn.

    Returns:
        The bytes of all photos together.
    """
    for label in range(min(classes, count)):
        (directory / f"class_{label:02d}").mkdir(parents=True, exist_ok=True)
    # Threads suffice: numpy's transforms and generators and the JPEG encoder work without the GIL.
    pool = ThreadPoolExecutor(usable_cores())

    def write(i: int) -> int:
        path = directory / f"class_{i % classes:02d}" / f"img_{i:05d}.jpg"
        return _write_photo(path, i, shapes[i * 7 % len(shapes)], quality)

    total = 0
    try:
        for done, size in enumerate(pool.map(write, range(count)), 1):
            total += size
            if progress is not None:
                progress(done, count)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return total


def _write_photo(path: Path, seed: int, shape: tuple[int, int], quality: int) -> int:
    """Make the photo of `seed` at `path` unless it exists; return its size in bytes."""
    if path.exists():
        return path.stat().st_size
    photo = make_photo(seed, *shape, quality)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(photo)
    unfinished.replace(path)  # so a killed run leaves no partial photo under the final name
    return len(photo)
