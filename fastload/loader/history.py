"""What the orders of past epochs were made from."""

from __future__ import annotations

from typing import Any

__all__ = ["History"]


class History:
    """The epochs of one loader's run, over its resumes."""

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave; {}: the state is of a version without it."""
