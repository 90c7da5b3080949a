"""A listed prefix: made once, in a short-lived process, and shared by all workers as memory-mapped arrays."""

from __future__ import annotations

from fastload.manifest.listing import Selection
from fastload.manifest.manifest import Manifest

__all__ = ["Manifest", "Selection"]
