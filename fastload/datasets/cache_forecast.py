"""Will the cache hold it? Bytes per sample times samples, against `size_limit` and the free disk.

In training the sizes come from the listing (mode raw) or from the first samples that are prepared anyway
(shrunk, decoded): a forecast costs no read and delays no batch. It is one line of logger "fastload", from
one process: INFO where all fits, WARNING where it does not. Filling then goes as far as there is room.
"""

from __future__ import annotations

import logging
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import get_worker_info

from fastload.cache import Cache
from fastload.errors import ArgumentError, CacheError
from fastload.metrics.units import format_size
from fastload.store.files import nearest_existing

if TYPE_CHECKING:
    from fastload.datasets.objects import ObjectDataset

__all__ = ["Forecast", "announcing", "forecast"]

_PROBE = 16
_RECORD_OVERHEAD = 96  # bytes: a header, and padding to a multiple of 64
_log = logging.getLogger("fastload")

Prepare = Callable[[Any], Any]


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


def forecast(dataset: ObjectDataset) -> Forecast:
    """Forecast from the listing, or in the modes "shrunk" and "decoded" from 16 random samples, read now.

    Raises:
        ArgumentError: the dataset has no cache, or no samples. StoreError, DecodeError: a sample of the probe
            cannot be read. CacheError: the cache cannot be opened.
    """
    if dataset.cache is None or len(dataset) == 0:
        raise ArgumentError("a forecast needs a dataset with samples and a cache: give it one with cache=")
    prepare = dataset._prefix.prepare
    sizes = []
    for index in _some(dataset):
        if prepare is None:
            break
        manifest = dataset._manifest
        body = dataset._store.read(manifest.key(index), manifest.version(index), manifest.size(index))
        sizes.append(memoryview(prepare(body)).nbytes)
    return _judge(dataset, dataset.cache, sizes)


def announcing(dataset: ObjectDataset, prepare: Prepare | None) -> Prepare | None:
    """Let the one process that speaks for all log a forecast; returns the `prepare` to use from now on."""
    worker = get_worker_info()
    if dataset.cache is None or (worker is not None and worker.id > 0) or not _missing(dataset):
        return prepare
    if prepare is None:
        _announce(dataset, [])
        return None
    return _Observed(dataset, prepare)


class _Observed:
    """Prepares samples, and forecasts from the first sizes that it sees. Called by several threads."""

    def __init__(self, dataset: ObjectDataset, prepare: Prepare) -> None:
        self._dataset = dataset
        self._prepare = prepare
        self._sizes: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, data: Any) -> Any:
        payload = self._prepare(data)
        if len(self._sizes) < _PROBE:
            with self._lock:
                self._sizes.append(memoryview(payload).nbytes)
                complete = len(self._sizes) == min(_PROBE, len(self._dataset))
            if complete:
                _announce(self._dataset, self._sizes)
        return payload


def _announce(dataset: ObjectDataset, sizes: Sequence[int]) -> None:
    assert dataset.cache is not None
    if dataset.cache.counters["cache.failures"]:
        return  # as below: it cannot be opened, and has said so already
    try:
        found = _judge(dataset, dataset.cache, sizes)
    except (CacheError, OSError):
        return  # the cache says itself what is wrong with it, once
    _log.log(logging.INFO if found.fits else logging.WARNING, "%s", found.sentence)


def _judge(dataset: ObjectDataset, cache: Cache, sizes: Sequence[int]) -> Forecast:
    """The forecast from the payload sizes of some samples; none: from the listing's sizes of all."""
    n = len(dataset)
    raw = dataset._manifest.total_bytes + n * _RECORD_OVERHEAD
    per_sample = sum(sizes) / len(sizes) + _RECORD_OVERHEAD if sizes else raw / n
    free = shutil.disk_usage(nearest_existing(cache.path)).free
    room = free
    if cache.size_limit is not None:
        room = min(room, max(0, cache.size_limit - cache.info()["bytes"]))
    missing = _missing(dataset)  # after info(), which waits for what is being written
    needed = int(per_sample * n * missing)
    left = "" if cache.size_limit is None else f" within size_limit={format_size(cache.size_limit)}"
    words = (
        f"cache {cache.path}, mode {cache.mode!r}: {n:,} samples of {format_size(per_sample)} take "
        f"{format_size(per_sample * n)}, of which {format_size(needed)} are missing"
    )
    fits = needed <= room
    if fits:
        words += f"; they fit ({format_size(free)} of disk are free{left})"
    else:
        words += (
            f" and only {format_size(room)} are left ({format_size(free)} of disk are free{left}): about "
            f"{1 - missing + missing * room / needed:.0%} of the samples will be kept, the others come from "
            f"the store in every epoch. {_advice(cache, raw, room)}"
        )
    return Forecast(per_sample, int(per_sample * n), needed, free, cache.size_limit, fits, words)


def _advice(cache: Cache, raw: int, room: int) -> str:
    if cache.mode == "decoded" and raw <= room:
        return f"mode='raw' takes {format_size(raw)} and fits, mode='shrunk' takes less"
    if cache.mode == "shrunk":
        return "A smaller short_side or quality takes less"
    return f"mode='shrunk' takes less than the {format_size(raw)} of mode='raw'; or give the cache more room"


def _missing(dataset: ObjectDataset) -> float:
    """The share of the samples that the cache does not have, estimated from a few."""
    assert dataset.cache is not None
    some = _some(dataset)
    absent = sum(dataset.cache.lookup(dataset._cache_key(index)) is None for index in some)
    dataset.cache.counters.add("cache.misses", -absent)  # nobody wanted these
    return absent / len(some) if some else 0.0


def _some(dataset: ObjectDataset) -> list[int]:
    """A few random samples; the same at each call."""
    return random.Random(0).sample(range(len(dataset)), min(_PROBE, len(dataset)))
