"""The probe of `fastload plan`: some GETs or ranges of shards, some decoding, the disk; bounded in time."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

import fastload
from fastload.cache import Cache
from fastload.cache.cache import absolute
from fastload.cache.codecs import CODECS, CacheCodec, Images
from fastload.cache.maintenance import Disk, measure_disk
from fastload.cli.data_source import (
    FOLDER,
    SourceOptions,
    encoded_image,
    first_records,
    list_shards,
    open_encoded,
)
from fastload.cli.plan.model import Data, Mode, Streaming
from fastload.errors import ArgumentError, DecodeError, NotFoundError, StoreError
from fastload.fetch.threads import SETTINGS, ReadPool
from fastload.formats.sample import dump, load
from fastload.images.decode import with_rows
from fastload.metrics.counters import Counters
from fastload.metrics.machine import Cores
from fastload.shards.dataset import SMALL_RECORD
from fastload.shards.formats import FORMATS, ShardFormat
from fastload.shards.reader import ReadAhead, Shard, ShardReader
from fastload.store import Store

ALONE = 8  # objects read one after the other
DECODED = 48  # objects decoded in each mode
SECONDS = 15.0
ON_THE_WAY = 0.25  # of the time of an index by itself: mode auto leaves it to the first crop
BUSY = 0.85  # of a core, from which on a reading process is limited by itself and not by the network

LEAST_SECONDS = 1e-6  # that a measurement takes, also by a clock that stood still

_CORES = Cores()


class Probe(NamedTuple):
    """The figures for the model, and the number of objects read."""

    url: str
    data: Data
    modes: dict[str, Mode]
    objects: int
    server_here: bool  # then its CPU use counts
    others: float  # cores that other processes kept busy meanwhile


def probe_samples(
    url: str,
    kind: str,
    options: dict[str, Any],
    objects: int,
    size: int,
    cache: dict[str, Any],
    *,
    source: SourceOptions,
) -> Probe:
    """List `url` and read up to `objects` samples of it, for at most 15 s.

    Args:
        kind, options, source: as of `open_dataset`.
        size: pixels of each side of the crop.
        cache: short_side and quality of the modes.

    Raises:
        ArgumentError: the samples have no image.
    """
    with tempfile.TemporaryDirectory(prefix="fastload-plan-") as folder:
        raw = fastload.Cache(Path(folder) / "cache", "raw")
        dataset = open_encoded(url, kind, source, cache=raw, storage_options=options)
        if dataset.cache is None:
            raise ArgumentError(f"{dataset.url!r} cannot be cached: the warning above says why")
        deadline = time.monotonic() + SECONDS
        chosen = np.random.default_rng(0).permutation(len(dataset))[: objects + ALONE + 1].tolist()
        first, rest = chosen[: ALONE + 1], chosen[ALONE + 1 :]
        alone = seconds_alone(dataset._payload, first, deadline)
        here, others = is_here(options), busy_cores()
        get = _read_together(dataset, rest or chosen, deadline, others if here else None)
        kept = [index for index in chosen if dataset.contains(index)][:DECODED]
        keys = [key for index in kept for key in dataset._cache_keys(index)]
        payloads, read_cpu = timed(lambda key: bytes(raw.read(key) or b""), keys)
        images = [image for index in kept if (image := encoded_image(dataset, index)) is not None]
        dataset.close()
    if not images:
        raise ArgumentError(
            f"{dataset.url!r}: no image in {len(kept):,} samples, and plan predicts images: measure with "
            "fastload bench"
        )
    # Rows have no size before they are read.
    mean = get.bytes / get.objects or sum(map(len, payloads)) / len(kept)
    if kind == FOLDER:
        mean = dataset.listing().total_bytes / len(dataset)
    # 32 requests in flight were much slower than expected, though there was CPU left.
    ceiling = get.objects / get.seconds < 32 / alone / 3 and get.cpu / get.seconds < BUSY
    network = get.objects * mean / get.seconds if ceiling else None
    data = Data(len(dataset), mean, alone, get.cpu / get.objects, network)
    read_cpu *= len(payloads) / max(1, len(kept))
    scale = mean * len(images) / sum(map(len, images))  # from the images of some samples to all samples
    modes = probe_modes(images, size, cache, read_cpu, scale)
    return Probe(dataset.url, data, modes, len(chosen), here, others)


def seconds_alone(read: Callable[[Any], Any], items: list[Any], deadline: float) -> float:
    """Return the seconds of a read without others; the first, which opens the connection, does not count."""
    seconds = []
    for item in items:
        start = time.perf_counter()
        read(item)
        seconds.append(time.perf_counter() - start)
        if time.monotonic() > deadline:
            break
    return median(seconds[1:] or seconds)


class _Use:
    """The time and the CPU that pass from now on.

    Args:
        others: cores that other processes keep busy. With it all other CPU use is the store's, and counts
            too; None: the store runs elsewhere.
    """

    def __init__(self, others: float | None) -> None:
        self._others = others
        self._begin = _CORES.busy_seconds(), time.process_time(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Return (seconds, core-seconds)."""
        machine, own, start = self._begin
        seconds, cpu = time.perf_counter() - start, time.process_time() - own
        if self._others is not None:
            cpu = max(cpu, _CORES.busy_seconds() - machine - self._others * seconds)
        return seconds, cpu


class _Together(NamedTuple):
    """What was read at the same time."""

    objects: int
    bytes: int
    seconds: float
    cpu: float


def _read_together(dataset: Any, indices: list[int], deadline: float, others: float | None) -> _Together:
    """Read through the prefetcher and into a cache, as training does. `others` as of `_Use`."""
    use, done, read = _Use(others), 0, 0
    for warmed in dataset.warm(indices):
        done += warmed.outcome in ("stored", "present")
        read += warmed.size
        if time.monotonic() > deadline:
            break
    if not done:
        raise StoreError("none of the objects of the probe could be read", stage="get")
    return _Together(done, read, *use.read())


def probe_modes(
    payloads: list[bytes], size: int, cache: dict[str, Any], read_cpu: float, scale: float
) -> dict[str, Mode]:
    """Measure bytes and core-seconds of a sample in each mode; `scale` corrects its bytes to the mean."""
    crop = fastload.RandomResizedCrop(size, flip=0.5)
    out = np.empty((DECODED, *crop.sample_shape), np.uint8)
    modes = {}
    for kind in CODECS.values():
        codec = kind(**cache).for_images(Images.CROPPED)
        if not isinstance(codec, kind):  # not available here
            continue
        records, encode_cpu = timed(partial(_record, codec), payloads)
        samples = [codec.open(load(record) if codec.packs else record) for record in records]
        if not samples:
            _record(codec, payloads[0])  # raises the reason: damage, or a format that is not decoded here
            raise StoreError(f"none of {len(payloads)} objects could be decoded: are they images?")
        stored = sum(map(len, records)) / len(records)
        batches = [samples[i : i + 8] for i in range(0, len(samples), 8)]
        _, fill_cpu = timed(lambda some: crop.fill(out[: len(some)], some, list(range(len(some)))), batches)
        # Reading from the cache is checksum and copy, proportional to the bytes.
        read = read_cpu * max(0.2, stored / max(1.0, sum(map(len, payloads)) / len(payloads)))
        grown = stored * scale if codec.lossless else stored
        prepare_cpu = 0.0 if codec.keeps_bytes else encode_cpu * (ON_THE_WAY if codec.chooses else 1)
        modes[codec.mode] = Mode(grown, prepare_cpu, read, fill_cpu * len(batches) / len(samples))
    return modes


def _record(codec: CacheCodec, image: bytes) -> Any:
    """Return the record of an image in a cache."""
    kept = with_rows(image) if codec.chooses else codec.encode(image)  # what it keeps at least
    return dump(kept) if codec.packs else kept


def timed(work: Callable[[Any], Any], items: list[Any]) -> tuple[list[Any], float]:
    """Return the results of `work` for the items, without bad images, and the core-seconds of each."""
    results = []
    start = time.thread_time()
    for item in items:
        try:
            results.append(work(item))
        except DecodeError:
            continue
    seconds = max(time.thread_time() - start, LEAST_SECONDS)
    return results, seconds / max(1, len(results))


def probe_disk(directory: str | Path) -> Disk:
    """Write 64 MiB to a file in `directory`, made if absent, and read it back.

    Raises:
        ArgumentError: the directory is not writable.
    """
    try:
        return measure_disk(Path(absolute(directory)))
    except OSError as error:
        raise ArgumentError(f"--cache {str(directory)!r}: {error.strerror or error}") from None


def is_here(options: dict[str, Any]) -> bool:
    """Return whether the store runs on this machine, and takes its CPU from the loader."""
    host = urlsplit(str(options.get("endpoint_url", ""))).hostname or ""
    return host == "localhost" or host.startswith("127.")


def busy_cores() -> float:
    """Measure the number of cores that other processes keep busy now."""
    before, start = _CORES.busy_seconds(), time.perf_counter()
    time.sleep(0.5)
    return (_CORES.busy_seconds() - before) / (time.perf_counter() - start)


# --- shards

_RANGES_ALONE = 4  # ranges, and records, read one after the other
_AT_ONCE = 8  # shards
_CYCLE = 32  # `cycle_length`, the default


class _ShardsRead(NamedTuple):
    """What was read of shards at the same time."""

    sizes: list[int]  # of records
    images: list[bytes]
    seconds: float
    cpu: float


def probe_shards(
    url: str,
    kind: str,
    options: dict[str, Any],
    objects: int,
    size: int,
    cache: dict[str, Any],
    *,
    workers: int,
) -> Probe:
    """Read some shards from their beginning on, `objects` samples or 15 s of them.

    Args:
        url, kind, options, objects, size, cache: as of `probe_samples`.
        workers: workers of the training script.

    Raises:
        ArgumentError: the shards are compressed. NotFoundError: there are no images.
    """
    shards = list_shards(kind, url, cache=None, storage_options=options)
    image = first_records(shards, kind).image
    deadline = time.monotonic() + SECONDS
    order = np.random.default_rng(0).permutation(len(shards)).tolist()
    chosen = [shards[number] for number in order if shards[number].size][:_AT_ONCE]
    if not chosen:
        raise NotFoundError(f"{shards.store.url!r}: the shards have no samples", stage="get")
    readers = max(1, _CYCLE // workers)  # as a run with the default `cycle_length` has
    ahead = ReadAhead.of(min(SETTINGS.process_bytes, SETTINGS.node_bytes // workers), readers)
    in_flight = min(SETTINGS.node_requests, workers * readers * ahead.pieces)
    piece = min(ahead.piece, int(np.mean([shard.size for shard in chosen])))
    range_seconds = _range_alone(shards.store, chosen, piece)
    here, others = is_here(options), busy_cores()
    read = _read_shards(
        shards.store, chosen, FORMATS[kind], image, objects, deadline, others if here else None
    )
    mean, cpu = float(np.mean(read.sizes)), read.cpu / len(read.sizes)
    speed = sum(read.sizes) / read.seconds
    ceiling = speed < len(chosen) * piece / range_seconds / 3 and read.cpu / read.seconds < BUSY
    streaming = Streaming(
        max(1.0, piece / mean), range_seconds, cpu, in_flight, at_random=mean >= SMALL_RECORD
    )
    alone = _range_alone(shards.store, chosen, round(mean))
    count = max(1, round(shards.total_bytes() / mean))
    data = Data(count, mean, alone, cpu, speed if ceiling else None, streaming)
    scale = mean * len(read.images) / max(1, sum(map(len, read.images)))  # from the images to whole records
    modes = probe_modes(read.images, size, cache, _cache_cpu(read.images), scale)
    return Probe(shards.store.url, data, modes, len(read.sizes), here, others)


def _range_alone(store: Store, chosen: list[Shard], size: int) -> float:
    """Measure the seconds of a request for so many bytes without others."""

    def read(shard: Shard) -> None:
        store.read_range(shard.key, 0, min(size, shard.size), shard.version)

    return seconds_alone(read, (chosen * _RANGES_ALONE)[: _RANGES_ALONE + 1], math.inf)


def _read_shards(
    store: Store,
    chosen: list[Shard],
    form: ShardFormat,
    image: str,
    objects: int,
    deadline: float,
    others: float | None,
) -> _ShardsRead:
    """Read the beginnings of the shards at the same time, and cut them into records in turn.

    Args:
        image: name of the field that is an image.
        others: see `_Use`.
    """
    pool = ReadPool(_AT_ONCE, Counters())
    readers = [
        ShardReader(store, shard, form.splitter, ahead=ReadAhead(1 << 20, 2), pool=pool) for shard in chosen
    ]
    use, sizes, images, going = _Use(others), list[int](), list[bytes](), list(readers)
    while going and len(sizes) < objects and time.monotonic() < deadline:
        for reader in list(going):
            record = reader.next()
            if record is None or record.payload is None:
                going.remove(reader)
                continue
            sizes.append(record.size)
            if len(images) < DECODED and form.read_fields is not None:
                value = form.read_fields(record.payload).get(image)
                images += [] if value is None else [bytes(value)]
    seconds, cpu = use.read()
    compressed = any(reader.compressed for reader in readers)
    for reader in readers:
        reader.close()
    pool.close()
    if compressed:
        raise ArgumentError(
            f"{store.url!r}: the shards are compressed, so that it is not known how many samples they have "
            "and what a request brings: plan the plain ones"
        )
    if not images:
        raise NotFoundError(f"{store.url!r}: no image in the first {len(sizes):,} samples that can be read")
    return _ShardsRead(sizes, images, seconds, cpu)


def _cache_cpu(images: list[bytes]) -> float:
    """Measure the core-seconds of reading a record of a cache."""
    with tempfile.TemporaryDirectory(prefix="fastload-plan-") as folder:
        cache = Cache(Path(folder) / "cache", "raw")
        keys = [cache.key(str(number)) for number in range(len(images))]
        for key, image in zip(keys, images, strict=True):
            cache.write(key, image, wait=SECONDS)
        cache.flush()
        _, seconds = timed(lambda key: bytes(cache.read(key) or b""), keys)
        cache.close()
    return seconds
