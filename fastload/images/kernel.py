"""Which code decodes: the compiled kernel if it was built, else its Python fallback.

The choice is made once, at import, and shows in `backend()`. Both offer the functions of `Kernel` and agree
within the tolerance that the tests state. A missing kernel is told of at the first decode.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastload.images import fallback as twin

__all__ = ["Item", "Kernel", "Pixels", "Source", "active", "backend"]

Pixels: TypeAlias = NDArray[np.uint8]
# A whole JPEG file in anything with the buffer protocol, or decoded HWC uint8 pixels.
Source: TypeAlias = Any
# (row of `out`, source, x0, y0, x1, y1, flip): the box is in pixels of the full-resolution image.
Item: TypeAlias = tuple[int, Source, float, float, float, float, bool]


class Kernel(Protocol):
    """What the kernel and its twin both do. They raise ValueError for bytes that they cannot decode."""

    def jpeg_size(self, data: Source, max_pixels: int, strict: bool) -> tuple[int, int]:
        """(width, height) from a JPEG header; ValueError when it has more than `max_pixels`, or (strict) was
        cut."""

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

        clamp: pixels outside of the box do not count (crop, then resize) or do, as far as the filter reaches
        (resize, then crop).
        """


kernel: Kernel | None
try:
    from fastload.images import compiled

    kernel = compiled
except ImportError:
    kernel = None

# Whether the missing kernel was told of. Shared memory, so that of a process and its forked workers, and of
# the workers of one fork server, only the first to decode says it.
_told = mmap.mmap(-1, 1) if kernel is None else None


def active() -> Kernel:
    """The kernel if it was built, else the twin. Tests set `kernel` to None to reach the twin."""
    if _told is not None and not _told[0]:
        _tell(_told)
    return twin if kernel is None else kernel


def _tell(told: mmap.mmap) -> None:
    told[0] = 1
    warnings.warn(
        "fastload's compiled kernel is missing, so images are decoded by the slower Python path. "
        "`fastload doctor` says what to install",
        RuntimeWarning,
        stacklevel=2,
    )


def backend() -> dict[str, Any]:
    """What decodes images in this process, and what to do for the fast one.

    Returns:
        "jpeg": "kernel" or "twin"; "simd": "avx2", "neon" or "scalar" (the kernel's resize), None for the
        twin; "libjpeg_turbo", "simplejpeg", "pillow": versions or None; "pillow_distribution": "pillow-simd",
        "pillow" or None; "advice": sentences, empty when there is nothing to gain.
    """
    advice = []
    if kernel is None:
        advice.append(
            "The compiled kernel is missing, so JPEGs take the slower Python path. Install a C compiler and "
            "libjpeg-turbo's headers (Debian, Ubuntu: apt install gcc libjpeg-dev; "
            "Fedora: dnf install gcc libjpeg-turbo-devel; macOS: brew install jpeg-turbo and set CFLAGS and "
            "LDFLAGS to it; conda: conda install libjpeg-turbo), then repeat the pip install of fastload "
            "with --force-reinstall --no-deps"
        )
    pillow, distribution, pillow_advice = _pillow()
    return {
        "jpeg": "twin" if kernel is None else "kernel",
        "simd": getattr(kernel, "SIMD", None),
        "libjpeg_turbo": getattr(kernel, "LIBJPEG_TURBO", None),
        "simplejpeg": _version("simplejpeg"),
        "pillow": pillow,
        "pillow_distribution": distribution,
        "advice": advice + pillow_advice,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pillow() -> tuple[str | None, str | None, list[str]]:
    """(version imported, distribution it came from, advice)."""
    plain, simd = _version("pillow"), _version("pillow-simd")
    try:
        from PIL import __version__ as imported
    except ImportError:
        if plain or simd:
            return None, None, ["Pillow is installed but cannot be imported: reinstall pillow-simd or pillow"]
        return None, None, ["Pillow is missing, so only JPEGs can be read: pip install 'fastload[simd]'"]
    found = "pillow-simd" if imported == simd else "pillow" if imported == plain else None
    if plain and simd:
        # Both put their files into the same PIL/ folder: whichever came last won, file by file.
        return (
            imported,
            found,
            [
                f"pillow {plain} and pillow-simd {simd} are both installed and overwrite each other; "
                f"{found or 'neither of them'} is what runs. pip uninstall -y pillow pillow-simd, then "
                "pip install pillow-simd (fast) or pillow"
            ],
        )
    if found is None:
        return (
            imported,
            None,
            [
                f"PIL says {imported}, the installed distribution says {plain or simd}: another installation "
                "overwrote it. pip install --force-reinstall pillow-simd (fast) or pillow"
            ],
        )
    if found == "pillow":
        return (
            imported,
            found,
            [
                "Pillow without SIMD resizes 4 times slower, which matters for PNG and your own transforms: "
                "pip uninstall -y pillow, then pip install pillow-simd"
            ],
        )
    return imported, found, []
