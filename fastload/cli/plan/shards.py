"""The probe of `fastload plan` for shards: ranges of random shards, read as training streams them.

random shards ─▶ a range of each, one after the other ─▶ seconds of a request
              ─▶ the beginning of each, all at once ─▶ core-seconds, a ceiling, images to decode
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from fastload.cache import Cache
from fastload.cli.plan.model import Data, Streaming
from fastload.cli.plan.probe import BUSY, DECODED, SECONDS, Probe, busy_cores, is_here, probe_modes, timed
from fastload.errors import ArgumentError, NotFoundError
from fastload.fetch.limits import SETTINGS
from fastload.fetch.threads import ReadPool
from fastload.metrics.counters import Counters
from fastload.metrics.machine import Cores
from fastload.shards.catalog import ShardList
from fastload.shards.dataset import SMALL_RECORD
from fastload.shards.formats import ShardFormat
from fastload.shards.reader import ReadAhead, Shard, ShardReader
from fastload.store import Store

_ALONE = 4  # ranges, and records, read one after the other
_AT_ONCE = 8  # shards
_CYCLE = 32  # `cycle_length`, the default
_CORES = Cores()


class _Read(NamedTuple):
    """What was read of shards at the same time."""

    sizes: list[int]  # of records
    images: list[bytes]
    seconds: float
    cpu: float
    compressed: bool  # any of the shards


def probe_shards(
    shards: ShardList,
    form: ShardFormat,
    image_of: Callable[[Any], bytes | None],
    options: dict[str, Any],
    *,
    objects: int,
    size: int,
    workers: int,
    cache: dict[str, Any],
) -> Probe:
    """Read some shards from their beginning on, `objects` samples or 15 s of them.

    Args:
        image_of: payload of a record -> its image; None: it has none.
        options: of the store.
        size: pixels of each side of the crop.
        workers: of the training.
        cache: short_side and quality of the modes.

    Raises:
        ArgumentError: the shards are compressed. NotFoundError: there are no images.
    """
    deadline = time.monotonic() + SECONDS
    order = np.random.default_rng(0).permutation(len(shards)).tolist()
    chosen = [shards[number] for number in order if shards[number].size][:_AT_ONCE]
    if not chosen:
        raise NotFoundError(f"{shards.store.url!r}: the shards have no samples", stage="get")
    ahead, in_flight = _read_ahead(workers)
    piece = min(ahead.piece, int(np.mean([shard.size for shard in chosen])))
    range_seconds = _alone(shards.store, chosen, piece)
    here, others = is_here(options), busy_cores(0.5)
    read = _together(shards.store, chosen, form, image_of, objects, deadline, others if here else None)
    if read.compressed:
        raise ArgumentError(
            f"{shards.store.url!r}: the shards are compressed, so that it is not known how many samples they "
            "have and what a request brings: plan the plain ones"
        )
    if not read.images:
        raise NotFoundError(f"{shards.store.url!r}: no image in the first {len(read.sizes):,} samples")
    mean, cpu = float(np.mean(read.sizes)), read.cpu / len(read.sizes)
    speed = sum(read.sizes) / read.seconds
    ceiling = speed < len(chosen) * piece / range_seconds / 3 and read.cpu / read.seconds < BUSY
    total = sum(shards[number].size for number in range(len(shards)))
    streaming = Streaming(
        max(1.0, piece / mean),
        range_seconds,
        cpu,
        in_flight,
        at_random=mean >= SMALL_RECORD,
    )
    data = Data(
        max(1, round(total / mean)),
        mean,
        _alone(shards.store, chosen, round(mean)),
        cpu,
        speed if ceiling else None,
        streaming,
    )
    scale = mean * len(read.images) / max(1, sum(map(len, read.images)))  # from the images to whole records
    modes = probe_modes(read.images, size, cache, _cache_cpu(read.images), scale)
    return Probe(shards.store.url, data, modes, len(read.sizes), here, others)


def _read_ahead(workers: int) -> tuple[ReadAhead, int]:
    """How a training with the default `cycle_length` reads: the pieces, and all requests in flight."""
    readers = max(1, _CYCLE // workers)
    ahead = ReadAhead.of(min(SETTINGS.process_bytes, SETTINGS.node_bytes // workers), readers)
    return ahead, min(SETTINGS.node_requests, workers * readers * ahead.pieces)


def _alone(store: Store, chosen: list[Shard], size: int) -> float:
    """Seconds of a request for so many bytes without others; the first, which connects, does not count."""
    seconds = []
    for shard in (chosen * _ALONE)[: _ALONE + 1]:
        start = time.perf_counter()
        store.read_range(shard.key, 0, min(size, shard.size), shard.version)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def _together(
    store: Store,
    chosen: list[Shard],
    form: ShardFormat,
    image_of: Callable[[Any], bytes | None],
    objects: int,
    deadline: float,
    others: float | None,
) -> _Read:
    """Read the beginnings of the shards at the same time, and cut them into records in turn.

    With `others`, the cores that other processes keep busy, all other CPU use is the store's, and counts too.
    """
    pool = ReadPool(_AT_ONCE, Counters())
    readers = [
        ShardReader(store, shard, form.splitter, ahead=ReadAhead(1 << 20, 2), pool=pool) for shard in chosen
    ]
    machine, own, start = _CORES.busy_seconds(), time.process_time(), time.perf_counter()
    sizes, images, going = list[int](), list[bytes](), list(readers)
    while going and len(sizes) < objects and time.monotonic() < deadline:
        for reader in list(going):
            record = reader.next()
            if record is None or record.error is not None:
                going.remove(reader)
                continue
            sizes.append(record.size)
            image = image_of(record.payload) if len(images) < DECODED else None
            if image is not None:
                images.append(image)
    seconds, own_cpu = time.perf_counter() - start, time.process_time() - own
    compressed = any(reader.compressed for reader in readers)
    for reader in readers:
        reader.close()
    pool.close()
    if not sizes:
        raise NotFoundError(f"{store.url!r}: the shards have no samples that can be read", stage="get")
    cpu = own_cpu if others is None else max(own_cpu, _CORES.busy_seconds() - machine - others * seconds)
    return _Read(sizes, images, seconds, cpu, compressed)


def _cache_cpu(images: list[bytes]) -> float:
    """Core-seconds of reading a record of a cache."""
    with tempfile.TemporaryDirectory(prefix="fastload-plan-") as folder:
        cache = Cache(Path(folder) / "cache", "raw")
        keys = [cache.key(str(number)) for number in range(len(images))]
        for key, image in zip(keys, images, strict=True):
            cache.write(key, image, wait=SECONDS)
        cache.flush()
        _, seconds = timed(lambda key: bytes(cache.read(key) or b""), keys)
        cache.close()
    return seconds
