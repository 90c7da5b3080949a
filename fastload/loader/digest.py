"""A number over all that a loader has handed out."""

from __future__ import annotations

from typing import Any

__all__ = ["Digest"]


class Digest:
    """The digest of one loader's run, over its epochs and resumes."""

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave; {}: the state is of a version without it."""
