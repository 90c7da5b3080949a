"""Whether two samples of numbers follow one law."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def kolmogorov(a: Any, b: Any) -> float:
    """The largest distance between the distribution functions of two samples."""
    a, b = np.sort(a), np.sort(b)
    points = np.concatenate([a, b])
    return float(
        np.abs(
            np.searchsorted(a, points, "right") / len(a) - np.searchsorted(b, points, "right") / len(b)
        ).max()
    )


def far(draws: int) -> float:
    """Two samples of one law are that far apart once in a thousand times."""
    return 1.95 * math.sqrt(2 / draws)
