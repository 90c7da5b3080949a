"""What a loader leaves out: excluded samples, and skipped steps."""

from __future__ import annotations

from typing import Any

__all__ = ["LeftOut"]


class LeftOut:
    """The rules of one loader. Plain data: they outlive its iterators, and pickle with it."""

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave; {}: nothing is left out."""
