"""What runs on this system, and what a build of Python may lack."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile

from fastload.errors import PlatformError

__all__ = ["ANYWHERE", "importable", "memory_file", "need_linux", "why_not_linux"]

# Public names that need nothing of POSIX.
ANYWHERE = (
    "ByEpoch",
    "CenterCrop",
    "DistributedSampler",
    "Normalize",
    "RandomResizedCrop",
    "ShardSampler",
    "fuse",
)

_MFD_CLOEXEC = 1


def why_not_linux() -> str:
    """One sentence if this is not Linux; else ""."""
    found = f"this is {sys.platform}"
    if str(sys.platform) == "linux":
        return ""
    if str(sys.platform) == "darwin":
        return (
            f"fastload's loader, datasets and cache run on Linux, and {found}: here datasets read local "
            "files with num_workers=0 and without a cache; for the rest use a Linux container"
        )
    return (
        f"fastload's loader, datasets and cache run on Linux, and {found}: here only its transforms and "
        f"samplers can be imported ({', '.join(ANYWHERE)}); for the rest use a Linux container, or WSL 2"
    )


def need_linux() -> None:
    """Raise `PlatformError` where this is no Linux."""
    why = why_not_linux()
    if why:
        raise PlatformError(why)


def importable(name: str) -> bool:
    """Whether a public name can be imported. On macOS all can; what needs Linux raises when it is used."""
    return name in ANYWHERE or str(sys.platform) in ("linux", "darwin")


def memory_file(name: str) -> int:
    """A descriptor of a new file in memory, which has no path that could stay behind.

    Pythons that were built for an old glibc, as conda's are, lack `os.memfd_create`, and then glibc itself is
    asked. macOS has nothing like it: there the file is a deleted one on disk.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    if str(sys.platform) == "linux":
        descriptor: int = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC)
        if descriptor < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return descriptor
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())
