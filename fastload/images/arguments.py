"""What the arguments of the fused transforms may be."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from fastload.errors import ArgumentError

_LARGEST = 8192  # side of a result


def check_size(size: int | Sequence[int]) -> tuple[int, int]:
    sides = [_whole(side) for side in size] if isinstance(size, Sequence) else [_whole(size)]
    height, width = sides if len(sides) == 2 else sides * 2 if len(sides) == 1 else (None, None)
    if height is None or width is None or not (1 <= height <= _LARGEST and 1 <= width <= _LARGEST):
        raise ArgumentError(
            f"size must be an int or (height, width), each from 1 to {_LARGEST}, not {size!r}"
        )
    return height, width


def _whole(number: Any) -> int | None:
    """Return an int, also for one of numpy's; None for all else."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None


def check_range(name: str, bounds: Sequence[float]) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 < low <= high < math.inf:
        raise ArgumentError(f"{name} must be (smallest, largest), both above 0, not {bounds!r}")
    return low, high


def check_resize(resize: Any) -> int | tuple[int, int] | None:
    if resize is None:
        return None
    if isinstance(resize, Sequence) and len(resize) == 2:
        return check_size(resize)
    short = _whole(resize)
    if not (short and 1 <= short <= _LARGEST):
        raise ArgumentError(
            f"resize is the length of the shorter side, an int from 1 to {_LARGEST}, or (height, width), not "
            f"{resize!r}"
        )
    return short


def check_interpolation(interpolation: Any) -> str:
    """Check torchvision's argument about the resize, as far as it asks for one that is done here."""
    wanted = getattr(interpolation, "value", interpolation)  # InterpolationMode.BILINEAR, PIL's BILINEAR
    known = {"bilinear": "bilinear", 2: "bilinear", "nearest": "nearest", 0: "nearest"}
    if isinstance(wanted, bool) or not isinstance(wanted, int | str) or wanted not in known:
        raise ArgumentError(
            f"interpolation must be 'bilinear' or 'nearest', found {interpolation!r}. For another one give "
            "a transform that is not fused: any callable on a PIL image, such as torchvision's "
            "RandomResizedCrop"
        )
    return known[wanted]


def check_channels(channels: Any) -> int:
    if isinstance(channels, bool) or channels not in (1, 3):
        raise ArgumentError(
            f"channels must be 3 (RGB) or 1 (the image's own single channel), found {channels!r}"
        )
    return int(channels)


def check_flip(flip: Any) -> float:
    if isinstance(flip, bool) or not isinstance(flip, int | float) or not 0 <= flip <= 1:
        raise ArgumentError(f"flip is a probability between 0 and 1, not {flip!r}")
    return float(flip)
