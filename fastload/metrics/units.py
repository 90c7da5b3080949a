"""Sizes in bytes, from text and to text."""

from __future__ import annotations

import math
import re

from fastload.errors import ArgumentError

__all__ = ["format_money", "format_size", "parse_size"]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE | re.ASCII)


def parse_size(value: int | str, name: str = "size_limit") -> int:
    """Bytes, from an int or from text such as "500GB" or "200MiB"."""
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
    """`count` bytes for people: "110 KB", "1.2 GB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def format_money(amount: float, currency: str) -> str:
    """`amount` for people: "USD 12.30"; two digits of less than a cent, such as "USD 0.0042"."""
    return f"{currency} {amount:,.2f}" if amount == 0 or amount >= 0.01 else f"{currency} {amount:.2g}"
