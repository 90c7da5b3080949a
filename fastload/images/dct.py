"""A stand-in for the kernel's records, until the kernel has them: a JPEG with a comment, so equal pixels."""

from __future__ import annotations

from typing import Any

__all__ = ["MAGIC", "available", "to_dct"]

MAGIC = b"\xff\xd8\xff\xfe\0\5dct"


def available() -> bool:
    """Whether records can be made and read here."""
    return True


def to_dct(image: Any) -> bytes:
    """An image file -> its record; what cannot be one comes back as it is."""
    data: bytes = bytes(image)
    whole = data[:3] == b"\xff\xd8\xff" and data[-2:] == b"\xff\xd9" and not data.startswith(MAGIC)
    return MAGIC + data[2:] if whole else data
