"""Whether fastload runs on this system."""

from __future__ import annotations

import os
import sys

from fastload.errors import PlatformError

__all__ = ["ANYWHERE", "need_linux", "why_not_linux"]

# Public names that need nothing of Linux.
ANYWHERE = ("ByEpoch", "CenterCrop", "DistributedSampler", "Normalize", "RandomResizedCrop", "ShardSampler")


def why_not_linux() -> str:
    """One sentence if this is not Linux, or if this Python has no `memfd_create`; else ""."""
    if str(sys.platform) != "linux":
        found = f"this is {sys.platform}"
    elif not hasattr(os, "memfd_create"):
        found = "this Python is built without memfd_create"
    else:
        return ""
    return (
        f"fastload's loader, datasets and cache run on Linux, and {found}: here only its transforms and "
        f"samplers can be imported ({', '.join(ANYWHERE)}); for the rest use a Linux container, or WSL 2"
    )


def need_linux() -> None:
    """Raise `PlatformError` where this is no Linux."""
    why = why_not_linux()
    if why:
        raise PlatformError(why)
