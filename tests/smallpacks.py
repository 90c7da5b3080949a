"""A cache whose packs hold few records. Apart from tests, so that its processes start without torch."""

from __future__ import annotations

from typing import Any

from fastload.cache import Cache, pull, push

__all__ = ["SmallPacks"]


class SmallPacks(Cache):
    """Packs of 20 KB, and ranges of 5 KB, in the processes that it is sent to."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        push.PACK_BYTES, pull.BESIDE_TRAINING = 20_000, pull.Pace(3, 5_000)
        super().__setstate__(state)
