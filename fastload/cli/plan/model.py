"""The model of `fastload plan`: arithmetic on the figures of a probe, without I/O.

A sample passes through stages, each with a highest rate. The slowest stage is the limit, and determines the
rate of all. With h, the share of samples in the cache (it fills, then stops, so h = capacity / dataset):

    connections   requests in flight / seconds per request / (1 - h)         Little's law
    network       bytes per second / object bytes / (1 - h)                  where the probe reached a ceiling
    cores         cores / core-seconds of all work on a sample
    workers       workers / core-seconds of the one decoding thread of a worker
    disk read     bytes per second / stored bytes / h
    disk write    bytes per second / stored bytes / (the share that fits)    while the cache fills

Shards are streamed in epoch 1: a request brings a range with many samples. Later epochs read at random what
the cache lacks, a request per sample; where that does not pay, as for small samples, they stream everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

RECORD_BYTES = 200  # header and padding of a record, and its place in the index
WORKER_REQUESTS = 128
NODE_REQUESTS = 1024
MOSTLY_CACHED = 0.9  # of the samples: then shards are read at random, whatever the size of the others


@dataclass(frozen=True)
class Streaming:
    """Shards read as streams."""

    per_request: Annotated[float, "samples of a request"]
    request_seconds: Annotated[float, "time of a request"]
    get_cpu: Annotated[float, "core-seconds per sample"]
    in_flight: Annotated[int, "requests in flight"]
    at_random: Annotated[bool, "whether later epochs may read a sample by a request of its own"]


@dataclass(frozen=True)
class Data:
    """The samples, and the cost of one GET."""

    objects: Annotated[
        int, "objects below the URL; of shards: their samples, by the mean size of those that were read"
    ]
    object_bytes: Annotated[float, "their mean size"]
    request_seconds: Annotated[float, "time of one GET without other requests"]
    get_cpu: Annotated[float, "core-seconds of one GET"]
    network: Annotated[float | None, "bytes/s where the probe reached a ceiling, else null"] = None
    streaming: Annotated[Streaming | None, "how shards are streamed, else null"] = None


@dataclass(frozen=True)
class Mode:
    """A sample in the cache."""

    stored_bytes: Annotated[float, "bytes of a sample in the cache"]
    prepare_cpu: Annotated[float, "core-seconds to prepare a sample"]
    read_cpu: Annotated[float, "core-seconds to read a sample"]
    transform_cpu: Annotated[float, "core-seconds to transform a sample"]


@dataclass(frozen=True)
class Node:
    """One machine: cores, worker processes, bytes for the cache, bytes per second of its disk if known.

    `cores` are those that other processes leave free.
    """

    cores: float
    workers: int
    cache_bytes: float
    disk_write: float | None = None
    disk_read: float | None = None


@dataclass(frozen=True)
class Demand:
    """Samples per second of all GPUs together, and the number of epochs."""

    rate: float
    epochs: int = 1


@dataclass(frozen=True)
class Epoch:
    stages: Annotated[dict[str, float], "stage: images/s that it could do"]
    rate: Annotated[float, "images/s of the loader"]
    limit: Annotated[
        str,
        'what limits it: `"GPUs"`, `"cores"`, `"workers"`, `"connections"`, `"network"`, `"disk read"` or '
        '`"disk write"`',
    ]
    requests: Annotated[float, "GETs of the epoch"]
    egress_bytes: Annotated[float, "bytes from the store"]
    connections: Annotated[int, "requests in flight that the GPUs need"]
    seconds: Annotated[float, "time of the epoch"]


@dataclass(frozen=True)
class Prediction:
    """A whole run in one cache mode."""

    disk_bytes: Annotated[float, "disk for all samples"]
    hit_rate: Annotated[float, "share of the samples that fits"]
    first: Annotated[Epoch, "the first epoch"]
    later: Annotated[Epoch, "each later epoch"]
    total_seconds: Annotated[float, "time of all epochs"]


def cores_left(cores: int, others: float) -> float:
    """Return the cores for a loader where others keep some busy: at least half, for the kernel is fair."""
    return max(cores - others, cores / 2)


def hit_rate(cache_bytes: float, objects: int, stored_bytes: float) -> float:
    """Return the share of the samples in a cache of that size, from the second epoch on."""
    return min(1.0, cache_bytes / (objects * (stored_bytes + RECORD_BYTES)))


def connections_needed(rate: float, misses: float, request_seconds: float) -> int:
    """Return the requests in flight for `rate` samples/s, where the share `misses` comes from the store."""
    return math.ceil(rate * misses * request_seconds)


def predict(data: Data, mode: Mode, node: Node, demand: Demand) -> Prediction:
    """Predict a whole run in one cache mode."""
    hits = hit_rate(node.cache_bytes, data.objects, mode.stored_bytes)
    streamed = data.streaming is not None
    first = predict_epoch(data, mode, node, demand, hits=0.0, filling=hits, streamed=streamed)
    # A shard of which the cache lacks a record is streamed as a whole.
    again = data.streaming is not None and not data.streaming.at_random and hits < MOSTLY_CACHED
    later = predict_epoch(data, mode, node, demand, hits=0.0 if again else hits, streamed=again)
    total = first.seconds + (demand.epochs - 1) * later.seconds
    return Prediction(data.objects * (mode.stored_bytes + RECORD_BYTES), hits, first, later, total)


def predict_epoch(
    data: Data,
    mode: Mode,
    node: Node,
    demand: Demand,
    *,
    hits: float,
    filling: float = 0.0,
    streamed: bool = False,
) -> Epoch:
    """Predict an epoch in which the share `hits` of samples comes from the cache, and `filling` goes into it.

    Args:
        streamed: whether shards are read as streams.
    """
    reading = data.streaming if streamed and data.streaming is not None else _at_random(data, node)
    stages = _stages(data, mode, node, hits, filling, reading)
    limit = min(stages, key=lambda name: stages[name])
    rate = stages[limit]
    misses = 1 - hits
    used = min(rate, demand.rate)
    return Epoch(
        stages=stages,
        rate=rate,
        limit="GPUs" if demand.rate <= rate else limit,
        requests=data.objects * misses / reading.per_request,
        egress_bytes=data.objects * misses * data.object_bytes,
        connections=connections_needed(demand.rate / reading.per_request, misses, reading.request_seconds),
        seconds=data.objects / used,
    )


def _at_random(data: Data, node: Node) -> Streaming:
    """Return how a request per sample reads, in the same terms."""
    in_flight = min(NODE_REQUESTS, WORKER_REQUESTS * node.workers)
    return Streaming(1.0, data.request_seconds, data.get_cpu, in_flight, True)


def _stages(
    data: Data, mode: Mode, node: Node, hits: float, filling: float, reading: Streaming
) -> dict[str, float]:
    misses = 1 - hits
    decoding = mode.transform_cpu + hits * mode.read_cpu
    stages = {
        "cores": node.cores / (decoding + misses * (reading.get_cpu + mode.prepare_cpu)),
        "workers": node.workers / decoding,
    }
    if misses:
        stages["connections"] = reading.in_flight / reading.request_seconds * reading.per_request / misses
        if data.network is not None:
            stages["network"] = data.network / data.object_bytes / misses
    if hits and node.disk_read is not None:
        stages["disk read"] = node.disk_read / mode.stored_bytes / hits
    if filling and node.disk_write is not None:
        stages["disk write"] = node.disk_write / mode.stored_bytes / filling
    return stages
