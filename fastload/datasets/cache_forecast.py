"""Will the cache hold it? Bytes per sample times samples, against `size_limit` and the free disk.

The sizes come from the listing (mode raw) or from the first samples that are prepared anyway (dct, shrunk,
decoded): a forecast costs no read and delays no batch. It is one line of logger "fastload", from one
process: INFO where all fits, WARNING where it does not. Filling then goes as far as there is room. In mode
"auto", `AutoChoice` speaks instead.
"""

from __future__ import annotations

import logging
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastload.cache import Cache
from fastload.cache.keys import Mode
from fastload.errors import CacheError
from fastload.metrics.units import format_size
from fastload.store.files import nearest_existing
from fastload.store.process import speaks

_PROBE = 16  # samples whose sizes stand for all
_SOME = 256  # samples that tell the share of those that the cache has
RECORD_OVERHEAD = 96  # bytes: a header, and padding to a multiple of 64
_log = logging.getLogger("fastload")

Prepare = Callable[[Any, int], Any]


class Room(NamedTuple):
    """The room for records in a cache.

    Attributes:
        left: bytes that can be added.
        free: bytes on the disk.
        words: the two limits.
    """

    left: int
    free: int
    words: str


def room_in(cache: Cache) -> Room:
    """The room for records in a cache.

    Raises:
        CacheError: the cache cannot be opened.
    """
    free = shutil.disk_usage(nearest_existing(cache.path)).free
    words = f"{format_size(free)} of disk are free"
    if cache.size_limit is None:
        return Room(free, free, words)
    left = min(free, max(0, cache.size_limit - cache.info()["bytes"]))
    return Room(left, free, f"{words} within size_limit={format_size(cache.size_limit)}")


class Forecast(NamedTuple):
    """What a full cache of a dataset will take.

    Attributes:
        bytes_per_sample: on disk, in the cache's mode; estimated except for "raw".
        total_bytes: of all samples.
        missing_bytes: of those that are not in the cache yet; estimated.
        free_bytes: on the cache's disk.
        size_limit: the cache's, or None.
        fits: whether `missing_bytes` fit into what is left of both.
        sentence: all that in words, with the mode that would fit where this one does not.
    """

    bytes_per_sample: float
    total_bytes: int
    missing_bytes: int
    free_bytes: int
    size_limit: int | None
    fits: bool
    sentence: str


class Forecaster:
    """Forecasts what the samples of one dataset take in one cache.

    Args:
        cache: where they will be kept.
        count: of the samples, at least 1.
        total_bytes: of all samples, as they are listed.
        contains: whether the cache has a sample; called with a few of range(count).
        mode: of the samples. Default: the cache's.
    """

    def __init__(
        self,
        cache: Cache,
        count: int,
        total_bytes: int,
        contains: Callable[[int], bool],
        mode: Mode | None = None,
    ) -> None:
        self._mode = cache.mode if mode is None else mode
        self._cache = cache
        self._count = count
        self._total_bytes = total_bytes
        self._contains = contains

    def watch(self, prepare: Prepare | None) -> Prepare | None:
        """Log a forecast, now or once a few samples were prepared; returns the `prepare` to use from now on.

        One process speaks for all, and it says nothing where the cache has everything.
        """
        if self._mode == "auto" or not speaks() or not self._missing():
            return prepare
        if prepare is None:
            self._announce([], 0)
            return None
        return _Watched(prepare, min(_PROBE, self._count), self._announce)

    def forecast(self, sizes: Sequence[int] = (), read: int = 0) -> Forecast:
        """The forecast from the payload sizes of some samples; none: from the listing's sizes of all.

        Args:
            read: bytes of the objects of these samples. In mode "dct", payloads are in proportion to them.

        Raises:
            CacheError: the cache cannot be opened.
        """
        cache, n = self._cache, self._count
        raw = self._total_bytes + n * RECORD_OVERHEAD
        per_sample = sum(sizes) / len(sizes) + RECORD_OVERHEAD if sizes else raw / n
        if read and self._mode == "dct":
            per_sample = sum(sizes) / read * self._total_bytes / n + RECORD_OVERHEAD
        room, free, limits = room_in(cache)
        missing = self._missing()  # after info(), which waits for what is being written
        needed = int(per_sample * n * missing)
        words = (
            f"cache {cache.path}, mode {self._mode!r}: {n:,} samples of {format_size(per_sample)} take "
            f"{format_size(per_sample * n)}, of which {format_size(needed)} are missing"
        )
        fits = needed <= room
        if fits:
            words += f"; they fit ({limits})"
        else:
            words += (
                f" and only {format_size(room)} are left ({limits}): about "
                f"{1 - missing + missing * room / needed:.0%} of the samples will be kept, the others come "
                f"from the store in every epoch. {_advice(self._mode, raw, room)}"
            )
        return Forecast(per_sample, int(per_sample * n), needed, free, cache.size_limit, fits, words)

    def _announce(self, sizes: Sequence[int], read: int) -> None:
        if self._cache.has_failed:
            return  # as below
        try:
            found = self.forecast(sizes, read)
        except (CacheError, OSError):
            return  # the cache says itself what is wrong with it, once
        _log.log(logging.INFO if found.fits else logging.WARNING, "%s", found.sentence)

    def _missing(self) -> float:
        """The share of the samples that the cache does not have, estimated from a few: the same each time."""
        some = random.Random(0).sample(range(self._count), min(_SOME, self._count))
        return sum(not self._contains(index) for index in some) / len(some)


class _Watched:
    """Prepares samples, and tells the sizes of the first ones. Called by several threads.

    Args:
        prepare: (bytes, number of the sample) -> payload.
        count: of the sizes to tell.
        tell: called once, with these and the bytes of the samples' objects.
    """

    def __init__(self, prepare: Prepare, count: int, tell: Callable[[list[int], int], None]) -> None:
        self._prepare = prepare
        self._count = count
        self._tell = tell
        self._sizes: list[int] = []
        self._read = 0
        self._lock = threading.Lock()

    def __call__(self, data: Any, record: int) -> Any:
        payload = self._prepare(data, record)
        if len(self._sizes) < self._count:
            with self._lock:
                self._sizes.append(memoryview(payload).nbytes)
                self._read += memoryview(data).nbytes
                found = self._sizes.copy(), self._read
            if len(found[0]) == self._count:
                self._tell(*found)
        return payload


def _advice(mode: Mode, raw: int, room: int) -> str:
    if mode in ("dct", "decoded") and raw <= room:
        return f"mode='raw' takes {format_size(raw)} and fits, mode='shrunk' takes less"
    if mode == "shrunk":
        return "A smaller short_side or quality takes less"
    return f"mode='shrunk' takes less than the {format_size(raw)} of mode='raw'; or give the cache more room"
