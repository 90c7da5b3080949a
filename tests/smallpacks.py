"""A cache whose packs hold few records. Apart from tests, so that its processes start without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastload.cache import Cache, exchange
from fastload.store import open_store
from fastload.store.client_process import keep_clients_here


class SmallPacks(Cache):
    """Packs of 20 KB, and ranges of 5 KB, in the processes that it is sent to."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        exchange.PACK_BYTES, exchange.BESIDE_TRAINING = 20_000, exchange.Pace(3, 5_000)
        super().__setstate__(state)


def exchange_in_small_packs(command: str, path: Path, url: str, options: dict[str, Any]) -> None:
    """What `fastload cache push` and `pull` do, in packs of 400 KB."""
    exchange.PACK_BYTES = 400_000
    keep_clients_here()
    cache = Cache(path)
    (exchange.push if command == "push" else exchange.pull)(cache, open_store(url, **options))
    cache.close()
