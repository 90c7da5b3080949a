"""The probe of `fastload plan`: a few hundred GETs, some decoding, the disk; bounded in number and time."""

from __future__ import annotations

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
from fastload.cache.codecs import CODECS, CacheCodec, Images
from fastload.cache.maintenance import Disk, measure_disk
from fastload.cli.plan.model import Data, Mode
from fastload.errors import ArgumentError, DecodeError, StoreError
from fastload.formats.sample import dump, load
from fastload.metrics.machine import Cores
from fastload.store.manifest import Manifest

ALONE = 8  # objects read one after the other
DECODED = 48  # objects decoded in each mode
SECONDS = 15.0
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


def probe_store(
    url: str, options: dict[str, Any], *, objects: int, size: int, cache: dict[str, Any]
) -> Probe:
    """List `url` and read up to `objects` images of it, for at most 15 s.

    Args:
        size: pixels of each side of the crop.
        cache: short_side and quality of the modes.
    """
    store = fastload.open_store(url, **options)
    with tempfile.TemporaryDirectory(prefix="fastload-plan-") as folder:
        raw = fastload.Cache(Path(folder) / "cache", "raw")
        dataset = fastload.ImageFolder(url, cache=raw, storage_options=options)
        manifest = dataset.listing()
        if dataset.cache is None:
            raise ArgumentError(f"{dataset.url!r} cannot be cached: the warning above says why")
        deadline = time.monotonic() + SECONDS
        chosen = np.random.default_rng(0).permutation(len(manifest))[: objects + ALONE + 1].tolist()
        alone = _read_alone(store, manifest, chosen[: ALONE + 1], deadline)
        here, others = is_here(options), busy_cores(0.5)
        first, rest = chosen[: ALONE + 1], chosen[ALONE + 1 :]
        list(dataset.warm(first))  # the client's start is not part of the cost of a GET
        get = _read_together(dataset, rest or chosen, deadline, others if here else None)
        kept = [index for index in chosen if dataset.contains(index)][:DECODED]
        keys = [dataset.cache_key(index) for index in kept]
        payloads, read_cpu = timed(lambda key: bytes(raw.read(key) or b""), keys)
        dataset.close()
    mean = manifest.total_bytes / len(manifest)
    network = get.bytes / get.seconds if _met_a_ceiling(get, alone) else None
    data = Data(len(manifest), mean, alone, get.cpu / max(1, get.objects), network)
    scale = mean * len(payloads) / max(1, sum(map(len, payloads)))  # from the chosen objects to all
    modes = probe_modes(payloads, size, cache, read_cpu, scale)
    return Probe(store.url, data, modes, len(chosen), here, others)


def _read_alone(store: Any, manifest: Manifest, indices: list[int], deadline: float) -> float:
    """Seconds of a GET without others; the first, which opens the connection, does not count."""
    seconds = []
    for index in indices:
        start = time.perf_counter()
        store.read(manifest.key(index))
        seconds.append(time.perf_counter() - start)
        if time.monotonic() > deadline:
            break
    return median(seconds[1:] or seconds)


class _Together(NamedTuple):
    objects: int
    bytes: int
    seconds: float
    cpu: float
    own_cpu: float


def _read_together(dataset: Any, indices: list[int], deadline: float, others: float | None) -> _Together:
    """Read through the prefetcher and into a cache, as training does.

    With `others`, the cores that other processes keep busy, all other CPU use is the store's, and counts too.
    """
    machine, own, start = _CORES.busy_seconds(), time.process_time(), time.perf_counter()
    done = read = 0
    for warmed in dataset.warm(indices):
        done += warmed.outcome in ("stored", "present")
        read += warmed.size
        if time.monotonic() > deadline:
            break
    if not done:
        raise StoreError("none of the objects of the probe could be read", stage="get")
    seconds, own_cpu = time.perf_counter() - start, time.process_time() - own
    cpu = own_cpu if others is None else max(own_cpu, _CORES.busy_seconds() - machine - others * seconds)
    return _Together(done, read, seconds, cpu, own_cpu)


def _met_a_ceiling(get: _Together, alone: float) -> bool:
    """Whether 32 requests in flight were much slower than expected, although this process was not busy."""
    expected = 32 / alone
    return get.objects / get.seconds < expected / 3 and get.cpu / get.seconds < BUSY


def probe_modes(
    payloads: list[bytes], size: int, cache: dict[str, Any], read_cpu: float, scale: float
) -> dict[str, Mode]:
    """Bytes and core-seconds of a sample in each mode; `scale` corrects its bytes to the mean."""
    crop = fastload.RandomResizedCrop(size, flip=0.5)
    out = np.empty((DECODED, *crop.sample_shape), np.uint8)
    modes = {}
    for kind in CODECS.values():
        codec = kind(cache["short_side"], cache["quality"]).for_images(Images.CROPPED)
        if codec.chooses or not isinstance(codec, kind):  # not available here
            continue
        records, encode_cpu = timed(partial(_record, codec), payloads)
        samples = [codec.open(load(one) if codec.packs else one) for one in records]
        if not samples:
            _record(codec, payloads[0])  # raises the reason: damage, or a format that needs Pillow
            raise StoreError(f"none of {len(payloads)} objects could be decoded: are they images?")
        stored = sum(map(len, records)) / len(records)
        batches = [samples[i : i + 8] for i in range(0, len(samples), 8)]
        _, fill_cpu = timed(lambda some: crop.fill(out[: len(some)], some, list(range(len(some)))), batches)
        # Reading from the cache is checksum and copy, proportional to the bytes.
        read = read_cpu * max(0.2, stored / max(1.0, sum(map(len, payloads)) / len(payloads)))
        grown = stored * scale if codec.lossless else stored
        prepare_cpu = 0.0 if codec.keeps_bytes else encode_cpu
        modes[codec.mode] = Mode(grown, prepare_cpu, read, fill_cpu * len(batches) / len(samples))
    return modes


def _record(codec: CacheCodec, image: bytes) -> Any:
    """Return the record of an image in a cache."""
    kept = codec.encode(image)
    return dump(kept) if codec.packs else kept


def timed(work: Callable[[Any], Any], items: list[Any]) -> tuple[list[Any], float]:
    """The results of `work` for the items, without bad images, and the core-seconds of each."""
    results = []
    start = time.thread_time()
    for item in items:
        try:
            results.append(work(item))
        except DecodeError:
            continue
    seconds = max(time.thread_time() - start, LEAST_SECONDS)
    return results, seconds / max(1, len(results))


def probe_disk(directory: Path) -> Disk:
    """Write 64 MiB to a file in `directory`, made if absent, and read it back.

    Raises:
        ArgumentError: the directory is not writable.
    """
    try:
        return measure_disk(directory)
    except OSError as error:
        raise ArgumentError(f"--cache-dir {str(directory)!r}: {error.strerror or error}") from None


def is_here(options: dict[str, Any]) -> bool:
    """Whether the store runs on this machine, and takes its CPU from the loader."""
    host = urlsplit(str(options.get("endpoint_url", ""))).hostname or ""
    return host == "localhost" or host.startswith("127.")


def busy_cores(seconds: float) -> float:
    """The number of cores that other processes keep busy now."""
    before, start = _CORES.busy_seconds(), time.perf_counter()
    time.sleep(seconds)
    return (_CORES.busy_seconds() - before) / (time.perf_counter() - start)
