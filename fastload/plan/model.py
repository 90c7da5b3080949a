"""The model of `fastload plan`: arithmetic on the figures of a probe, without I/O.

A sample passes through stages, each with a highest rate. The slowest stage is the limit, and determines the
rate of all. With h, the share of samples in the cache (it fills, then stops, so h = capacity / dataset):

    connections   requests in flight / seconds per request / (1 - h)         Little's law
    network       bytes per second / object bytes / (1 - h)                  where the probe reached a ceiling
    cores         cores / core-seconds of all work on a sample
    workers       workers / core-seconds of the one decoding thread of a worker
    disk read     bytes per second / stored bytes / h
    disk write    bytes per second / stored bytes / (the share that fits)    while the cache fills
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "MODES",
    "Data",
    "Demand",
    "Epoch",
    "Mode",
    "Node",
    "Prediction",
    "connections_needed",
    "cores_left",
    "hit_rate",
    "predict",
    "predict_epoch",
]

MODES = ("raw", "shrunk", "decoded")
RECORD_BYTES = 200  # header and padding of a record, and its place in the index
WORKER_REQUESTS = 128
NODE_REQUESTS = 1024


@dataclass(frozen=True)
class Data:
    """The objects, and the cost of one GET: seconds without other requests, and core-seconds."""

    objects: int
    object_bytes: float
    request_seconds: float
    get_cpu: float
    network: float | None = None  # bytes per second, where the probe reached a ceiling


@dataclass(frozen=True)
class Mode:
    """A sample in the cache: bytes, and core-seconds to prepare, to read and to transform it."""

    stored_bytes: float
    prepare_cpu: float
    read_cpu: float
    transform_cpu: float


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
    """One epoch: samples per second of every stage, and of the loader as a whole."""

    stages: dict[str, float]
    rate: float
    limit: str
    requests: float
    egress_bytes: float
    connections: int
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """A cache mode: bytes on disk for all samples, the share that fits, and the epochs."""

    disk_bytes: float
    hit_rate: float
    first: Epoch
    later: Epoch
    total_seconds: float


def cores_left(cores: int, others: float) -> float:
    """The cores for a loader where other processes keep `others` busy: at least half, because the kernel
    is fair."""
    return max(cores - others, cores / 2)


def hit_rate(cache_bytes: float, objects: int, stored_bytes: float) -> float:
    """The share of the samples in a cache of that size, from the second epoch on."""
    return min(1.0, cache_bytes / (objects * (stored_bytes + RECORD_BYTES)))


def connections_needed(rate: float, misses: float, request_seconds: float) -> int:
    """Requests in flight for `rate` samples per second, where the share `misses` comes from the store."""
    return math.ceil(rate * misses * request_seconds)


def predict(data: Data, mode: Mode, node: Node, demand: Demand) -> Prediction:
    """A whole run in one cache mode."""
    hits = hit_rate(node.cache_bytes, data.objects, mode.stored_bytes)
    first = predict_epoch(data, mode, node, demand, hits=0.0, filling=hits)
    later = predict_epoch(data, mode, node, demand, hits=hits)
    total = first.seconds + (demand.epochs - 1) * later.seconds
    return Prediction(data.objects * (mode.stored_bytes + RECORD_BYTES), hits, first, later, total)


def predict_epoch(
    data: Data, mode: Mode, node: Node, demand: Demand, *, hits: float, filling: float = 0.0
) -> Epoch:
    """One epoch in which the share `hits` of samples comes from the cache, and `filling` goes into it."""
    stages = _stages(data, mode, node, hits, filling)
    limit = min(stages, key=lambda name: stages[name])
    rate = stages[limit]
    misses = 1 - hits
    used = min(rate, demand.rate)
    return Epoch(
        stages=stages,
        rate=rate,
        limit="GPUs" if demand.rate <= rate else limit,
        requests=data.objects * misses,
        egress_bytes=data.objects * misses * data.object_bytes,
        connections=connections_needed(demand.rate, misses, data.request_seconds),
        seconds=data.objects / used,
    )


def _stages(data: Data, mode: Mode, node: Node, hits: float, filling: float) -> dict[str, float]:
    misses = 1 - hits
    decoding = mode.transform_cpu + hits * mode.read_cpu
    stages = {
        "cores": node.cores / (decoding + misses * (data.get_cpu + mode.prepare_cpu)),
        "workers": node.workers / decoding,
    }
    if misses:
        in_flight = min(NODE_REQUESTS, WORKER_REQUESTS * node.workers)
        stages["connections"] = in_flight / data.request_seconds / misses
        if data.network is not None:
            stages["network"] = data.network / data.object_bytes / misses
    if hits and node.disk_read is not None:
        stages["disk read"] = node.disk_read / mode.stored_bytes / hits
    if filling and node.disk_write is not None:
        stages["disk write"] = node.disk_write / mode.stored_bytes / filling
    return stages
