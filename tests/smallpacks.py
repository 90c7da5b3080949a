"""A cache whose packs hold few records. Apart from tests, so that its processes start without torch."""

from __future__ import annotations

from typing import Any

from fastload.cache import Cache, exchange

__all__ = ["SmallPacks"]


class SmallPacks(Cache):
    """Packs of 20 KB, and ranges of 5 KB, in the processes that it is sent to."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        exchange.PACK_BYTES, exchange.BESIDE_TRAINING = 20_000, exchange.Pace(3, 5_000)
        super().__setstate__(state)
