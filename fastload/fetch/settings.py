"""The limits of reading in one process. Tests replace them; users have the options of `open_store`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SETTINGS", "ReadSettings"]


@dataclass(frozen=True)
class ReadSettings:
    """Limits of reading.

    Attributes:
        large_object: bytes from which on an object is read in ranges, side by side.
        range_size: bytes of such a range at most.
        process_requests: in flight at most from one process. More threads cost more than they bring.
        node_requests: in flight at most from all processes of a node, unless the user gives `max_requests`.
        process_bytes: at most, of samples that were read or are being read and were not handed out.
        node_bytes: the same for all processes of a node.
        inflight_patience: seconds that another run gets for an object that it is reading into our cache.
        hedge_after: reads that are measured before one of them is requested a second time.
        hedge_share: of the reads that may be requested a second time, 0 to 1.
    """

    large_object: int = 16 << 20
    range_size: int = 8 << 20
    process_requests: int = 128
    node_requests: int = 1024
    process_bytes: int = 256 << 20
    node_bytes: int = 4 << 30
    inflight_patience: float = 2.0
    hedge_after: int = 64
    hedge_share: float = 0.03


# The settings of prefetchers that are given none of their own.
SETTINGS = ReadSettings()
