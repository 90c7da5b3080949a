"""Cache mode "auto": files with an index of their rows, or "dct" records, whichever suits this machine.

Both keep every pixel. The index costs next to nothing, and spares a crop the rows above it. A record of
mode "dct" is decoded faster still; to make it takes time, and it takes more bytes. The first samples of each
process are kept as "dct", and tell all costs; then `choose` decides. `mode="dct"` is for whoever knows that
many epochs will repay a slower first one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from fastload.cache import Cache
from fastload.datasets.cache_forecast import RECORD_OVERHEAD, Room, room_in
from fastload.errors import CacheError, DecodeError
from fastload.images import dct
from fastload.images.decode import MAX_PIXELS, open_image
from fastload.images.kernel import active
from fastload.metrics.machine import memory_for_pages
from fastload.metrics.units import format_size
from fastload.store.process import speaks

_log = logging.getLogger("fastload")

_TRIED = 8  # images
_ENOUGH = 0.5  # core-seconds, after which no more of them are tried
# How much faster "dct" must be in later epochs. The times are of few samples; and fewer bytes are better.
_CLEARLY = 1.1
_FIRST_EPOCH = 0.85  # how fast the first epoch must be beside one that keeps nothing
_ERROR = 1.05  # by which the forecast of bytes may be too low
_FOR_PAGES = 0.8  # of the free memory; the training takes its part later
_OUT = np.empty((1, 3, 224, 224), np.uint8)  # of the crops that are timed, which nobody sees


class Costs(NamedTuple):
    """The costs of a dataset in both forms, and the room for them.

    Attributes:
        total_bytes: of all samples on disk, as files.
        ratio: bytes as "dct" to those as files.
        file: core-seconds to cut a crop out of a file.
        indexed: out of a file with an index.
        record: out of a "dct" record.
        making: to make that record.
        missing: the share of the samples that the cache does not have.
        left: bytes of room for them.
        memory: of the machine; bytes that can hold pages.
    """

    total_bytes: int
    ratio: float
    file: float
    indexed: float
    record: float
    making: float
    missing: float
    left: int
    memory: int


class Choice(NamedTuple):
    """What is kept, and the reason in words. `bytes`: of all samples."""

    form: Literal["file", "dct"]
    why: str
    bytes: int


def choose(costs: Costs) -> Choice:
    """The rule of mode "auto"."""
    larger = int(costs.total_bytes * costs.ratio)
    times = (
        f"a crop takes {costs.record * 1e3:.2f} ms of a core out of a 'dct' record, of {costs.ratio:.2f} "
        f"times the bytes, and {costs.indexed * 1e3:.2f} ms out of a file"
    )
    if larger * costs.missing * _ERROR > costs.left:
        why = f"'dct' records would take {format_size(larger)}, which do not fit"
    elif larger > costs.memory * _FOR_PAGES:
        why = f"'dct' records would take {format_size(larger)}, more than memory holds"
    elif costs.record * _CLEARLY >= costs.indexed:
        why = times
    elif costs.file < _FIRST_EPOCH * (costs.making + costs.record):
        why = (
            f"{times}, but to make the record takes {costs.making * 1e3:.2f} ms: too long for the first epoch"
        )
    else:
        return Choice("dct", times, larger)
    return Choice("file", why, costs.total_bytes)


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
        self._chosen: Literal["file", "dct"] | None = None
        self._lock = threading.Lock()
        self._said = False
        self._begun = self._tried = 0
        self._complete = False
        self._file_bytes = self._dct_bytes = 0
        self._seconds = np.zeros(4)  # of file, indexed, record, making: as in `Costs`

    def keep(self, image: Any) -> Any:
        """The bytes of an image -> what the cache keeps of it, or from what its first decode makes that."""
        with self._lock:
            tries = self._begun < _TRIED and not self._complete
            self._begun += tries
        if tries:
            return self._try(image)
        return to_kept(image, self._cache, dct.to_dct if self._chosen == "dct" else dct.Unindexed.of)

    def _try(self, image: Any) -> Any:
        """The record of an image; the last of the first ones makes the choice."""
        self._announce()
        start = time.thread_time()
        record = dct.to_dct(image)
        making = time.thread_time() - start
        try:
            seconds = [crop_seconds(form) for form in (image, dct.with_rows(image), record)]
        except DecodeError:  # it is the sample's error, once that is made
            seconds = [0.0] * 3
        with self._lock:
            self._tried += 1
            self._file_bytes += memoryview(image).nbytes
            self._dct_bytes += len(record)
            if self._tried > 1:  # the first one also loads code and fills caches
                self._seconds += (*seconds, making)
            last = not self._complete and (self._tried == _TRIED or self._seconds.sum() > _ENOUGH)
            self._complete |= last
        if last:
            self._choose()
        return record

    def _choose(self) -> None:
        try:
            choice = None if self._cache.has_failed else self._decide()
        except (CacheError, OSError):
            choice = None
        if choice is None:  # the cache says itself what is wrong with it, once
            self._chosen = "file"
            return
        self._chosen = choice.form
        if choice.form == "dct":
            self._cache.counters.add("cache.chose_dct")
        else:
            self._cache.counters.add("cache.chose_file")

    def _decide(self) -> Choice:
        room = room_in(self._cache)
        missing = 1 - self._share_kept()  # after room_in, which waits for what is being written
        overhead = self._tried * RECORD_OVERHEAD
        samples = self._total_bytes / max(1, self._file_bytes)  # times those that were tried
        file, indexed, record, making = self._seconds / max(1, self._tried - 1)
        choice = choose(
            Costs(
                total_bytes=int(samples * (self._file_bytes + overhead)),
                ratio=(self._dct_bytes + overhead) / (self._file_bytes + overhead),
                file=file,
                indexed=indexed,
                record=record,
                making=making,
                missing=missing,
                left=room.left,
                memory=memory_for_pages(),
            )
        )
        if speaks():
            fits, words = _outlook(choice.bytes, missing, room)
            _log.log(
                logging.INFO if fits else logging.WARNING,
                "cache %s, mode 'auto': it keeps %s, for %s; %s",
                self._cache.path,
                "'dct' records" if choice.form == "dct" else "files with an index of their rows",
                choice.why,
                words,
            )
        return choice

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
            "cache %s, mode 'auto': all samples take %s as files (%s); the first %d decide between these and "
            "'dct' records",
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


def to_kept(image: Any, cache: Cache, form: Callable[[Any], Any]) -> Any:
    """The form of an image that is kept; the image itself, of the same pixels, where none would be kept."""
    return form(image) if cache.keeps(memoryview(image).nbytes) else image


def crop_seconds(image: Any) -> float:
    """Of a core, to cut half of an image out of its middle."""
    source, width, height = open_image(image, MAX_PIXELS, True)
    item = (0, source, 0.15 * width, 0.15 * height, 0.85 * width, 0.85 * height, False)
    start = time.thread_time()
    for _, reason in active().crop_resize(_OUT, [item], False, True, MAX_PIXELS, True):
        raise DecodeError(reason)
    return time.thread_time() - start
