"""Will the cache hold it, and in which form? The first samples that are prepared anyway tell.

Bytes per sample times samples, against `size_limit` and the free disk. The sizes come from the listing (mode
raw) or from the first samples: a forecast costs no read and delays no batch. It is one line of logger
"fastload", from one process: INFO where all fits, WARNING where it does not. Filling then goes as far as
there is room.

In mode "auto" the first samples also choose the form: files with an index of their rows, or "dct" records.
Both keep every pixel. The index costs next to nothing, and spares a crop the rows above it. A record of mode
"dct" is decoded faster still; to make it takes time, and it takes more bytes. The first samples of each
process are kept as "dct", and tell all costs; then `choose` decides. `mode="dct"` is for whoever knows that
many epochs will repay a slower first one.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fastload.cache import Cache
from fastload.cache.codecs import CacheCodec
from fastload.checks import format_size
from fastload.errors import CacheError, DecodeError
from fastload.images import decode
from fastload.images.decode import MAX_PIXELS, open_image
from fastload.images.kernel import active
from fastload.metrics.machine import memory_for_pages
from fastload.store.node import nearest_existing, speaks

_log = logging.getLogger("fastload")

RECORD_OVERHEAD = 96  # bytes: a header, and padding to a multiple of 64
_PROBE = 16  # samples whose sizes stand for all
_TRIED = 8  # images whose forms are timed
_ENOUGH = 0.5  # core-seconds, after which no more of them are tried
# How much faster "dct" must be in later epochs. The times are of few samples; and fewer bytes are better.
_CLEARLY = 1.1
_FIRST_EPOCH = 0.85  # how fast the first epoch must be beside one that keeps nothing
_ERROR = 1.05  # by which the forecast of bytes may be too low
_FOR_PAGES = 0.8  # of the free memory; the training takes its part later
_OUT = np.empty((1, 3, 224, 224), np.uint8)  # of the crops that are timed, which nobody sees

Prepare = Callable[[Any, int], Any]
Form = Literal["file", "record"]
_NAMES = {"file": "files with an index of their rows", "record": "'dct' records"}


class Room(NamedTuple):
    """The room for records in a cache.

    Attributes:
        left: bytes that can be added.
        words: the limits.
        missing: the share of the samples that the cache does not have.
    """

    left: int
    words: str
    missing: float


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
    """The form that is kept, and the reason in words. `bytes`: of all samples."""

    form: Form
    why: str
    bytes: int


def choose(costs: Costs) -> Choice:
    """Return the form that mode "auto" keeps."""
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
        return Choice("record", times, larger)
    return Choice("file", why, costs.total_bytes)


class Forecast(NamedTuple):
    """What a full cache of a dataset will take.

    Attributes:
        total_bytes: of all samples on disk, in the cache's mode; estimated except for "raw".
        missing_bytes: of those that are not in the cache yet; estimated.
        fits: whether there is room for them.
        sentence: all that in words, with the mode that would fit where this one does not.
    """

    total_bytes: int
    missing_bytes: int
    fits: bool
    sentence: str


class Forecaster:
    """Forecasts what the samples of one dataset take in one cache, in one process. Threads may share it.

    Args:
        cache: where they will be kept.
        codec: of their images.
        total_bytes: of all samples, as they are listed.
        share_kept: the share of the samples that the cache has; called when that is needed.
        count: number of the samples; None: there is only a choice to make, and nothing else is said.
    """

    def __init__(
        self,
        cache: Cache,
        codec: CacheCodec,
        total_bytes: int,
        share_kept: Callable[[], float],
        count: int | None = None,
    ) -> None:
        self._cache = cache
        self._codec = codec
        self._total_bytes = total_bytes
        self._share_kept = share_kept
        self._count = count
        self._lock = threading.Lock()
        self._prepare: Prepare | None = None
        self._sizes: list[int] = []  # of the first payloads
        self._read = 0  # bytes of their objects
        # The choice of mode "auto".
        self._form: Form | None = None
        self._said = self._complete = False
        self._begun = self._tried = 0
        self._file_bytes = self._record_bytes = 0
        self._seconds = np.zeros(4)  # of file, indexed, record, making: as in `Costs`

    # --- what all samples take

    def watch(self, prepare: Prepare | None) -> Prepare | None:
        """Log a forecast, now or once a few samples were prepared; returns the `prepare` to use from now on.

        One process speaks for all, and it says nothing where the cache has everything.
        """
        if self._codec.chooses or not self._count or not speaks() or self._share_kept() == 1:
            return prepare
        if prepare is None:
            self._announce([], 0)
            return None
        self._prepare, self._sizes, self._read = prepare, [], 0
        return self._watched

    def room(self) -> Room:
        """Return the room for the samples. It does not wait: an index may be rebuilt for minutes."""
        cache, missing = self._cache, 1 - self._share_kept()
        free = shutil.disk_usage(nearest_existing(cache.path)).free
        words = f"{format_size(free)} of disk are free"
        if cache.size_limit is None:
            return Room(free, words, missing)
        left = min(free, max(0, cache.size_limit - cache._used_bytes()))
        return Room(left, f"{words} within size_limit={format_size(cache.size_limit)}", missing)

    def forecast(self, room: Room, sizes: Sequence[int] = (), read: int = 0) -> Forecast:
        """Return the forecast by the payload sizes of some samples; none: by the listing's sizes of all.

        Args:
            read: bytes of the objects of these samples.
        """
        assert self._count is not None
        cache, n = self._cache, self._count
        raw = self._total_bytes + n * RECORD_OVERHEAD
        per_sample = sum(sizes) / len(sizes) + RECORD_OVERHEAD if sizes else raw / n
        if read and self._codec.follows_size:
            per_sample = sum(sizes) / read * self._total_bytes / n + RECORD_OVERHEAD
        needed = int(per_sample * n * room.missing)
        words = (
            f"cache {cache.path}, mode {self._codec.mode!r}: {n:,} samples of {format_size(per_sample)} take "
            f"{format_size(per_sample * n)}, of which {format_size(needed)} are missing"
        )
        words += self._outlook(int(per_sample * n), room, raw)
        return Forecast(int(per_sample * n), needed, needed <= room.left, words)

    def _watched(self, data: Any, record: int) -> Any:
        assert self._prepare is not None
        payload = self._prepare(data, record)
        wanted = min(_PROBE, self._count or 0)
        if len(self._sizes) < wanted:
            with self._lock:
                self._sizes.append(memoryview(payload).nbytes)
                self._read += memoryview(data).nbytes
                sizes, read = self._sizes.copy(), self._read
            if len(sizes) == wanted:
                self._announce(sizes, read)
        return payload

    def _announce(self, sizes: Sequence[int], read: int) -> None:
        room = self._room_unless_failed()
        if room is not None:
            forecast = self.forecast(room, sizes, read)
            _log.log(logging.INFO if forecast.fits else logging.WARNING, "%s", forecast.sentence)

    def _room_unless_failed(self) -> Room | None:
        """Return the room for records; None: the cache has failed, and says itself what is wrong, once."""
        try:
            return None if self._cache._has_failed else self.room()
        except (CacheError, OSError):
            return None

    def _outlook(self, nbytes: int, room: Room, raw: int) -> str:
        """Say whether so many bytes fit, of which a share is missing; and what to do if not."""
        needed = nbytes * room.missing
        if needed <= room.left:
            return f"; they fit ({room.words})"
        share = 1 - room.missing + room.missing * room.left / needed
        return (
            f" and only {format_size(room.left)} are left ({room.words}): about {share:.0%} of the samples "
            "will be kept, the others come from the store in every epoch. "
            f"{self._codec.advice(raw, room.left)}"
        )

    # --- mode "auto"

    def encode(self, image: Any) -> Any:
        """Return what mode "auto" keeps of an image's file, or what its first decode makes that from."""
        with self._lock:
            tries = self._begun < _TRIED and not self._complete
            self._begun += tries
        if tries:
            return self._try(image)
        form = decode.to_dct if self._form == "record" else decode.Unindexed.of
        return form(image) if self._cache._keeps(memoryview(image).nbytes) else image

    def _try(self, image: Any) -> Any:
        """Return the record of an image; the last of the first ones makes the choice."""
        self._announce_choice()
        start = time.thread_time()
        record = decode.to_dct(image)
        making = time.thread_time() - start
        try:
            seconds = [crop_seconds(form) for form in (image, decode.with_rows(image), record)]
        except DecodeError:  # it is the sample's error, once that is made
            seconds = [0.0] * 3
        with self._lock:
            self._tried += 1
            self._file_bytes += memoryview(image).nbytes
            self._record_bytes += len(record)
            if self._tried > 1:  # the first one also loads code and fills caches
                self._seconds += (*seconds, making)
            last = not self._complete and (self._tried == _TRIED or self._seconds.sum() > _ENOUGH)
            self._complete |= last
        if last:
            self._choose()
        return record

    def _choose(self) -> None:
        room = self._room_unless_failed()
        self._form = "file" if room is None else self._decide(room).form
        if room is not None and self._form == "record":
            self._cache.counters.add("cache.chose_dct")
        elif room is not None:
            self._cache.counters.add("cache.chose_file")

    def _decide(self, room: Room) -> Choice:
        overhead = self._tried * RECORD_OVERHEAD
        samples = self._total_bytes / max(1, self._file_bytes)  # times those that were tried
        file, indexed, record, making = self._seconds / max(1, self._tried - 1)
        choice = choose(
            Costs(
                total_bytes=int(samples * (self._file_bytes + overhead)),
                ratio=(self._record_bytes + overhead) / (self._file_bytes + overhead),
                file=file,
                indexed=indexed,
                record=record,
                making=making,
                missing=room.missing,
                left=room.left,
                memory=memory_for_pages(),
            )
        )
        if speaks():
            raw = int(samples * (self._file_bytes + overhead))
            _log.log(
                logging.INFO if choice.bytes * room.missing <= room.left else logging.WARNING,
                "cache %s, mode 'auto': it keeps %s, for %s; all samples take %s%s",
                self._cache.path,
                _NAMES[choice.form],
                choice.why,
                format_size(choice.bytes),
                self._outlook(choice.bytes, room, raw),
            )
        return choice

    def _announce_choice(self) -> None:
        with self._lock:
            said, self._said = self._said, True
        room = None if said or not speaks() else self._room_unless_failed()
        if room is None:
            return
        _log.info(
            "cache %s, mode 'auto': all samples take %s as files (%s); the first %d decide between these and "
            "'dct' records",
            self._cache.path,
            format_size(self._total_bytes),
            room.words,
            _TRIED,
        )


def crop_seconds(image: Any) -> float:
    """Return the seconds of a core to cut half of an image out of its middle."""
    source, width, height = open_image(image, MAX_PIXELS, True)
    item = (0, source, 0.15 * width, 0.15 * height, 0.85 * width, 0.85 * height, False)
    start = time.thread_time()
    for _, reason in active().crop_resize(_OUT, [item], False, True, MAX_PIXELS, True):
        raise DecodeError(reason)
    return time.thread_time() - start
