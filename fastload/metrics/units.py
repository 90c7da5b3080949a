"""Sizes in bytes, times and money, from text and to text."""

from __future__ import annotations

import math
import re

from fastload.errors import ArgumentError

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE | re.ASCII)

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)\s*", re.IGNORECASE | re.ASCII)


def parse_duration(value: float | str, name: str) -> float:
    """Return seconds, from a number or text such as "30m", "12h" or "7d"; text without a unit is seconds."""
    seconds = math.nan
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        seconds = float(match[1]) * _SECONDS[match[2].lower() or "s"] if match else math.nan
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ArgumentError(f'{name}={value!r}; give seconds, or text such as "30m", "12h" or "7d"')
    return seconds


def parse_size(value: int | str, name: str = "size_limit") -> int:
    """Return bytes, from an int or from text such as "500GB" or "200MiB"."""
    size = None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        number = float(match[1]) * _UNITS[match[2].lower()] if match else math.inf
        size = int(number) if math.isfinite(number) else None
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    if size is None or size < 1:
        raise ArgumentError(
            f'{name}={value!r}; give bytes as a positive int, or text such as "500GB" or "200MiB"'
        )
    return size


def format_size(count: float) -> str:
    """Return `count` bytes for people: "110 KB", "1.2 GB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def format_money(amount: float, currency: str) -> str:
    """Return `amount` for people: "USD 12.30"; two digits of less than a cent, such as "USD 0.0042"."""
    return f"{currency} {amount:,.2f}" if amount == 0 or amount >= 0.01 else f"{currency} {amount:.2g}"
