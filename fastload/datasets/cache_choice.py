"""Cache mode "auto": "raw" or "dct", whichever makes later epochs faster.

Both keep every pixel. A "dct" record is decoded faster and takes more bytes. The first samples of each
process are kept as "dct", and tell both costs; then `choose` decides by one rule:

    "dct" where its records fit into the cache and make more samples a second than "raw", clearly
    samples a second = min(cores / core-seconds to decode one, disk's bytes a second / bytes of one)

The disk limits only what free memory will not hold: that share of the bytes of each sample is read from it.
Its speed is measured only where it counts, once a day for all processes.

The comparison is of later epochs. Filling with "dct" costs some time of the cores, which one or two of these
repay.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from fastload.cache import Cache
from fastload.cache.disk import known_disk, memory_for_pages
from fastload.cache.keys import Mode
from fastload.datasets.cache_forecast import RECORD_OVERHEAD, Room, room_in
from fastload.distributed.launcher import local_ranks
from fastload.errors import CacheError, DecodeError
from fastload.images import dct
from fastload.images.decode import decode_image
from fastload.metrics.cores import usable_cores
from fastload.metrics.units import format_size
from fastload.store.process import speaks

__all__ = ["AutoChoice", "Choice", "Costs", "choose", "to_kept_dct"]

_log = logging.getLogger("fastload")

_TRIED = 16  # samples
_MEASURING = 0.5  # core-seconds, from which on no more images are decoded to be timed
# How much faster "dct" must be. The times are of few samples; and where it is little, fewer bytes are better.
_CLEARLY = 1.1
_ERROR = 1.05  # by which the forecast of bytes may be too low
_FOR_PAGES = 0.8  # of the free memory; the training takes its part later


class Costs(NamedTuple):
    """The costs of a dataset in both modes, and the resources of the machine.

    Attributes:
        samples, total_bytes: of the dataset; on disk, in mode "raw".
        ratio: bytes in mode "dct" to those in mode "raw".
        raw_seconds, dct_seconds: of a core, to decode a sample.
        missing: the share of the samples that the cache does not have.
        left: bytes of room for them.
        cores: of the machine, that decode.
        memory: of the machine; bytes that can hold pages.
        disk: its speed, bytes a second; called where it counts. None: not known.
    """

    samples: float
    total_bytes: int
    ratio: float
    raw_seconds: float
    dct_seconds: float
    missing: float
    left: int
    cores: float
    memory: int
    disk: Callable[[], float | None]


class Choice(NamedTuple):
    """The mode, and the reason in words. `bytes`: of all samples."""

    mode: Mode
    why: str
    bytes: int


def choose(costs: Costs) -> Choice:
    """The rule of mode "auto"."""
    raw, larger = costs.total_bytes, int(costs.total_bytes * costs.ratio)
    if larger * costs.missing * _ERROR > costs.left:
        return Choice("raw", f"'dct' would take {format_size(larger)}, which do not fit", raw)
    memory = costs.memory * _FOR_PAGES
    disk = costs.disk() if larger > memory else None
    if larger > memory and disk is None:
        return Choice("raw", "memory does not hold the records, and the disk cannot be measured", raw)

    def rate(total: int, seconds: float) -> float:
        of_cores = costs.cores / max(seconds, 1e-9)
        if disk is None or total <= memory:
            return of_cores
        return min(of_cores, disk / ((total - memory) / costs.samples))

    raw_rate, dct_rate = rate(raw, costs.raw_seconds), rate(larger, costs.dct_seconds)
    why = (
        f"decoding takes {costs.dct_seconds * 1e3:.2f} ms of a core in mode 'dct' and "
        f"{costs.raw_seconds * 1e3:.2f} in 'raw', for {costs.ratio:.2f} times the bytes"
    )
    if disk is not None:
        why += (
            f"; with a disk that reads {format_size(disk)} a second, {costs.cores:.0f} cores make at most "
            f"{dct_rate:,.0f} samples a second in 'dct' and {raw_rate:,.0f} in 'raw'"
        )
    return Choice("dct", why, larger) if dct_rate > _CLEARLY * raw_rate else Choice("raw", why, raw)


class AutoChoice:
    """The choice of one process for the samples of one dataset, by its first ones. Threads may share it.

    Args:
        cache: where they will be kept.
        total_bytes: of all samples.
        share_kept: the share of the samples that the cache has; called as the choice is made.
    """

    def __init__(self, cache: Cache, total_bytes: int, share_kept: Callable[[], float]) -> None:
        self._cache = cache
        self._total_bytes = total_bytes
        self._share_kept = share_kept
        self._chosen: Mode | None = None
        self._lock = threading.Lock()
        self._said = False
        self._samples = self._raw_bytes = self._dct_bytes = 0
        self._images, self._raw_seconds, self._dct_seconds = 0, 0.0, 0.0

    def keep(self, image: Any) -> Any:
        """The bytes of an image -> what the cache keeps of it."""
        if self._chosen is not None:
            return to_kept_dct(image, self._cache) if self._chosen == "dct" else image
        self._announce()
        record = dct.to_dct(image)
        if self._raw_seconds < _MEASURING:
            self._time(image, record)
        return record

    def note(self, raw_bytes: int, dct_bytes: int) -> None:
        """Count the bytes of a sample in both modes. The last of the first samples makes the choice."""
        if self._chosen is not None:
            return
        with self._lock:
            self._samples += 1
            self._raw_bytes += raw_bytes
            self._dct_bytes += dct_bytes
            complete = self._samples == _TRIED
        if complete:
            self._choose()

    def _time(self, image: Any, record: Any) -> None:
        try:
            first = _seconds(image)
            second = first if len(record) == len(image) else _seconds(record)
        except DecodeError:  # it is the sample's error, once that is made
            return
        with self._lock:
            self._images += 1
            if self._images > 1:  # the first one also loads code and fills caches
                self._raw_seconds += first
                self._dct_seconds += second

    def _choose(self) -> None:
        try:
            choice = None if self._cache.has_failed else self._decide()
        except (CacheError, OSError):
            choice = None
        if choice is None:  # the cache says itself what is wrong with it, once
            self._chosen = "raw"
            return
        self._chosen = choice.mode
        if choice.mode == "dct":
            self._cache.counters.add("cache.chose_dct")
        else:
            self._cache.counters.add("cache.chose_raw")

    def _decide(self) -> Choice:
        timed, room = max(1, self._images - 1), room_in(self._cache)
        missing = 1 - self._share_kept()  # after room_in, which waits for what is being written
        overhead = _TRIED * RECORD_OVERHEAD
        raw_bytes, dct_bytes = self._raw_bytes + overhead, self._dct_bytes + overhead
        samples = self._total_bytes * _TRIED / max(1, self._raw_bytes)
        choice = choose(
            Costs(
                samples=samples,
                total_bytes=int(samples * raw_bytes / _TRIED),
                ratio=dct_bytes / raw_bytes,
                raw_seconds=self._raw_seconds / timed,
                dct_seconds=self._dct_seconds / timed,
                missing=missing,
                left=room.left,
                cores=_cores(),
                memory=memory_for_pages(),
                disk=self._disk_speed,
            )
        )
        if speaks():
            fits, words = _outlook(choice.bytes, missing, room)
            _log.log(
                logging.INFO if fits else logging.WARNING,
                "cache %s, mode 'auto': %r is chosen, for %s; %s",
                self._cache.path,
                choice.mode,
                choice.why,
                words,
            )
        return choice

    def _disk_speed(self) -> float | None:
        disk = known_disk(self._cache.path)
        return None if disk is None else disk.read

    def _announce(self) -> None:
        with self._lock:
            said, self._said = self._said, True
        if said or self._cache.has_failed or not speaks():
            return
        try:
            room = room_in(self._cache)
        except (CacheError, OSError):
            return
        _log.info(
            "cache %s, mode 'auto': all samples take %s in mode 'raw' (%s); the first %d decide between "
            "this mode and 'dct'",
            self._cache.path,
            format_size(self._total_bytes),
            room.words,
            _TRIED,
        )


def _outlook(nbytes: int, missing: float, room: Room) -> tuple[bool, str]:
    """(whether so many bytes fit, of which a share is missing; the same in words)"""
    needed = nbytes * missing
    words = f"all samples take {format_size(nbytes)}"
    if needed <= room.left:
        return True, f"{words}, and they fit ({room.words})"
    kept = 1 - missing + missing * room.left / needed
    return False, (
        f"{words}, and only {format_size(room.left)} are left ({room.words}): about {kept:.0%} of the "
        "samples will be kept, the others come from the store in every epoch. mode='shrunk' takes less; or "
        "give the cache more room"
    )


def to_kept_dct(image: Any, cache: Cache) -> Any:
    """The "dct" record of an image; the image itself, of the same pixels, where none would be kept."""
    return dct.to_dct(image) if cache.keeps(memoryview(image).nbytes) else image


def _cores() -> float:
    """The cores that decode for the ranks of this node: not more than their workers."""
    worker = get_worker_info()
    return min(usable_cores(), local_ranks() * (1 if worker is None else worker.num_workers))


def _seconds(image: Any) -> float:
    """Of a core, to decode an image."""
    start = time.thread_time()
    decode_image(image)
    return time.thread_time() - start
