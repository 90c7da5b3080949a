"""Which code decodes: the compiled kernel where it was built, else its slower Python fallback.

The choice is made once, at import, and `backend()` shows it. Both offer the functions of `Kernel`, and their
pixels agree within the tolerance that the tests state. The first decode without the kernel warns.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

import fastload.images.fallback as fallback
from fastload.errors import address

Pixels: TypeAlias = NDArray[np.uint8]
# A JPEG file or a record of one, in anything with the buffer protocol, or decoded HWC uint8 pixels.
Source: TypeAlias = Any
# (row of `out`, source, x0, y0, x1, y1, flip): the box is in pixels of the full-resolution image. The kernel
# takes one more: memory for the index of the source's rows, see `images.decode.Unindexed`.
Item: TypeAlias = (
    tuple[int, Source, float, float, float, float, bool]
    | tuple[int, Source, float, float, float, float, bool, bytearray]
)
# ("random", scale, scale, ratio, ratio, flip) of RandomResizedCrop; ("centre", height, width) of CenterCrop's
# resize: the shorter side and 0, or 0 and 0 without one.
BoxLaw: TypeAlias = (
    tuple[Literal["random"], float, float, float, float, float] | tuple[Literal["centre"], float, float]
)


class Kernel(Protocol):
    """The functions of the kernel and of its fallback. They raise ValueError for bytes that are no JPEG."""

    def jpeg_size(self, data: Source, max_pixels: int, strict: bool) -> tuple[int, int]:
        """Return (width, height) from a JPEG's header.

        Raises:
            ValueError: the image has more than `max_pixels`, or the file was cut (only with `strict`).
        """

    def decode(self, data: Source, out: Pixels, denominator: int, max_pixels: int, strict: bool) -> None:
        """Decode a JPEG at 1/`denominator` (1, 2, 4, 8) of its size, rounded up, into `out` (H, W, 3)."""

    def crop_resize(
        self,
        out: Pixels,
        items: Sequence[Item],
        channels_last: bool,
        clamp: bool,
        max_pixels: int,
        strict: bool,
    ) -> list[tuple[int, str]]:
        """Resize each item's box into its row of `out`; returns (row, reason) of those that failed.

        The threads of `set_threads` share the items, the heavier ones first. Pixels do not depend on them.

        clamp: True leaves pixels outside the box out of the filter (crop, then resize). False includes them,
        as far as the filter reaches (resize, then crop).
        """

    def set_threads(self, count: int) -> int:
        """Have `count` threads (0 to 256) make all rows of this process from now on; returns how many do.

        With 0, at first and in a forked child, the calling thread makes them. Threads that are too many have
        ended when this returns; what was begun is finished by those that are left, or by who waits for it.
        """

    def begin_rows(
        self,
        out: Pixels,
        places: NDArray[np.void],
        rows: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        law: BoxLaw,
        pixels: bool,
        channels_last: bool,
        clamp: bool,
        max_pixels: int,
        strict: bool,
        owner: object,
    ) -> Any:
        """Begin to make rows of `out` from records of a cache: read, verify, choose the box, decode, resize.

        Python may go on meanwhile; `finish_rows` waits for the rows. Of a job that is dropped no more rows
        are begun, and those at work are waited for. Without threads, `finish_rows` makes the rows.

        places: where the records lie (`fastload.cache.segment.PLACE`).
        law: how the boxes are chosen, each by the seed and the size of its image.
        pixels: the records are those of cache mode "decoded", not files.
        owner: kept alive as long as the file descriptors of `places` are used.
        """

    def finish_rows(self, job: Any) -> tuple[list[tuple[int, str]], float, float]:
        """Wait for the rows of a job; return [(row, reason)] of those that were not made, and seconds.

        The seconds are those of reading and those of decoding, of all threads together.

        Raises:
            RuntimeError: the job was begun by this process's parent.
        """

    def read_ahead(self, places: NDArray[np.void]) -> None:
        """Let the system read records that are not in memory. Does not wait for them."""


_threads = 0
kernel: Kernel | None
try:
    import fastload.images.compiled as compiled

    kernel = compiled
except ImportError:
    kernel = None

# Whether the warning about the missing kernel was given. In shared memory, so that it appears once for a
# process and its forked workers, and once for all workers of one fork server.
_warned = mmap.mmap(-1, 1) if kernel is None else None


def active() -> Kernel:
    """Return the kernel, or its fallback where `kernel` is None. Tests set that to test the fallback."""
    if _warned is not None and not _warned[0]:
        _warn(_warned)
    return fallback if kernel is None else kernel


def set_threads(count: int) -> int:
    """Have `count` threads share the rows of each batch of this process; 0: the calling thread makes them."""
    global _threads
    if count != _threads:
        _threads = active().set_threads(count)
    return _threads


def threads() -> int:
    """Return how many threads share the rows of a batch."""
    return _threads


def _forked() -> None:
    global _threads
    _threads = 0  # they are not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def record_writer() -> Callable[[Source, int, int], bytes] | None:
    """Return the kernel's function that makes records: (JPEG, EXIF orientation, max_pixels) -> record.

    It raises ValueError where there is no record of a file. None without the kernel, and where its libjpeg is
    built in a way that records do not fit.
    """
    records: Any = kernel
    return records.dct_record if getattr(records, "RECORDS", False) else None


def row_index(file: Source, max_pixels: int) -> bytes | None:
    """Return the index of the rows of a JPEG, which its bytes follow; None without one, or without a kernel.

    There is none for damaged files, and for those whose Huffman codes libjpeg decodes.
    """
    indexer: Any = kernel
    # libjpeg accepts other bytes after the first two. Behind an index they would be taken for a JPEG.
    if not getattr(indexer, "HUFFMAN", False) or bytes(memoryview(file)[:3]) != b"\xff\xd8\xff":
        return None
    try:
        index: bytes = indexer.row_index(file, max_pixels)
    except ValueError:
        return None
    return index


def take_by_libjpeg() -> int:
    """Return the images since the last call, in this process, whose Huffman codes libjpeg decoded.

    They are progressive, arithmetic, damaged, or so small that tables of their own would not pay.
    """
    counts: Any = kernel
    taken: int = 0 if kernel is None else counts.take_by_libjpeg()
    return taken


def _warn(warned: mmap.mmap) -> None:
    warned[0] = 1
    warnings.warn(
        "fastload's compiled kernel is missing, so images are decoded by the slower Python path. "
        f"`fastload doctor` says what to install. See {address('missing-kernel')}",
        RuntimeWarning,
        stacklevel=2,
    )


def backend() -> dict[str, str | None]:
    """Return what decodes JPEGs in this process.

    Returns:
        "jpeg": "kernel" or "fallback". "simd": "avx2", "neon" or "scalar", the kernel's resize.
        "huffman": "own" or "libjpeg", who decodes Huffman codes. "libjpeg_turbo": the version the kernel was
        built with. The last three are None for the fallback.
    """
    return {
        "jpeg": "fallback" if kernel is None else "kernel",
        "simd": getattr(kernel, "SIMD", None),
        "huffman": None if kernel is None else "own" if getattr(kernel, "HUFFMAN", 0) else "libjpeg",
        "libjpeg_turbo": getattr(kernel, "LIBJPEG_TURBO", None),
    }
