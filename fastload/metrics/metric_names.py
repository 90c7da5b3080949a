"""The counters and rates of a loader as metrics: their names in Prometheus and OpenTelemetry, units and help.

Prometheus wants base units in the name, and `_total` behind counters. OpenTelemetry wants the unit beside the
name, `time` for seconds and `io` for bytes. Each name follows from that in `stats()`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# counter: (unit by UCUM, which writes what is counted in braces; what it counts)
COUNTERS = {
    "sampler.seconds": ("s", "The trainer's process drew index batches"),
    "get.samples": ("{sample}", "Objects or records that came from the store"),
    "get.bytes": ("By", "Bytes of objects or records that came from the store"),
    "get.requests": ("{request}", "Requests to the store"),
    "get.seconds": ("s", "Workers waited for the store, summed over workers and their threads"),
    "get.retries": ("{request}", "Requests that were made again after a failure"),
    "get.hedged": ("{request}", "Late requests that were made a second time"),
    "get.refreshed": (
        "{sample}",
        "Objects that changed since the listing and were read in their new version",
    ),
    "get.ahead": ("{sample}", "Samples used that had been read ahead"),
    "get.alone": ("{sample}", "Samples that were not read ahead, because a dataset wraps one of fastload's"),
    "store.gets": ("{request}", "GETs, by all processes since the dataset was opened"),
    "store.heads": ("{request}", "HEADs, by all processes since the dataset was opened"),
    "store.lists": ("{request}", "LISTs of 1,000 objects, by all processes since the dataset was opened"),
    "store.egress_bytes": ("By", "Bytes that the GETs asked for"),
    "cache.hits": ("{record}", "Records read from the cache and verified"),
    "cache.misses": ("{record}", "Records that the cache did not have"),
    "cache.bytes": ("By", "Bytes of the hits"),
    "cache.seconds": ("s", "Workers waited for the cache, summed over workers"),
    "cache.writes": ("{record}", "Records written to the cache"),
    "cache.write_bytes": ("By", "Bytes written to the cache"),
    "cache.dropped": ("{record}", "Records not kept, because the disk was too slow or the cache is full"),
    "cache.corrupt": ("{record}", "Records that did not verify, and were read from the store again"),
    "cache.failures": ("{failure}", "Failures of the cache's directory"),
    "cache.pulled": ("{record}", "Records that a background pull has brought from the cache's remote"),
    "cache.pushed": ("{record}", "Records that were published at the cache's remote"),
    "cache.remote_failures": ("{failure}", "Background pulls and pushes of the cache's remote that failed"),
    "cache.chose_file": ("{process}", "Processes in which a cache in mode auto chose files"),
    "cache.chose_dct": ("{process}", "Processes in which a cache in mode auto chose dct"),
    "decode.samples": ("{sample}", "Samples decoded and transformed"),
    "decode.by_libjpeg": ("{image}", "JPEGs whose Huffman codes libjpeg decoded, and not the faster kernel"),
    "decode.seconds": (
        "s",
        "Workers decoded and transformed, without the reading inside, summed over workers",
    ),
    "collate.samples": ("{sample}", "Samples in finished batches"),
    "collate.batches": ("{batch}", "Finished batches"),
    "collate.seconds": ("s", "Workers collated, with the copy into shared memory, summed over workers"),
    "idle.seconds": ("s", "A worker had no batch to make, although the epoch had more, summed over workers"),
    "slot.seconds": ("s", "The part of the idle time in which finished batches waited for the consumer"),
    "wait.batches": ("{batch}", "Batches handed to the consumer"),
    "wait.seconds": ("s", "The consumer waited for a batch"),
    "wait.first_seconds": ("s", "The consumer waited for the first batch of an epoch"),
    "consumer.seconds": ("s", "The training step: from one batch to the call for the next"),
    "decoder.batches": ("{batch}", "Batches decoded in the trainer's process"),
    "decoder.samples": ("{sample}", "Images decoded in the trainer's process"),
    "decoder.seconds": ("s", "The trainer's process was busy with decoding"),
    "decoder.fallbacks": ("{batch}", "Batches that the kernel decoded after the decoder failed"),
    "decoder.rebuilt": ("{pipeline}", "Decoder pipelines replaced after a failure"),
    "copy.batches": ("{batch}", "Batches copied to the device"),
    "copy.bytes": ("By", "Bytes copied to the device"),
    "copy.seconds": ("s", "Copies on the copy stream, by its events"),
    "copy.wait_seconds": ("s", "The trainer's process waited for copies to end"),
    "copy.unregistered": ("{slot}", "Slots that could not be registered with CUDA"),
    "device.seconds": ("s", "Time measured on the device, by events"),
    "device.idle.seconds": ("s", "The part of the device's time without a batch to work on"),
    "bad.samples": ("{sample}", "Samples skipped or replaced under on_error"),
    "bad.bytes": ("By", "Bytes of shards that could not be read"),
    "left_out.samples": ("{sample}", "Excluded samples, in whose place another one was handed out"),
    "left_out.steps": ("{step}", "Steps skipped by skip()"),
    "log.bytes": ("By", "Bytes written to the sample log"),
    "log.errors": ("{error}", "Failures of the sample log"),
}

# The rates that are no counter a second: as COUNTERS.
_GAUGES = {
    "loader.samples_per_second": ("{sample}/s", "Samples handed to the consumer"),
    "loader.batches_per_second": ("{batch}/s", "Batches handed to the consumer"),
    "get.share": ("1", "Share of the workers' time: waiting for the store"),
    "cache.share": ("1", "Share of the workers' time: waiting for the cache"),
    "decode.share": ("1", "Share of the workers' time: decoding and transforming"),
    "collate.share": ("1", "Share of the workers' time: collating"),
    "idle.share": ("1", "Share of the workers' time: no batch to make"),
    "wait.share": ("1", "Share of the epoch's time: the consumer waited for a batch"),
    "consumer.share": ("1", "Share of the epoch's time: the training step"),
    "cache.hit_share": ("1", "Hits among the lookups of the cache"),
    "device.idle_share": ("1", "Share of the device's measured time without a batch to work on"),
    "workers": ("{process}", "Processes that make batches; 0: the trainer's process does"),
    "node.cores": ("{core}", "Cores that this process may use, by affinity and control group"),
    "node.idle_cores": ("{core}", "The idle ones of these cores"),
}


class Metric(NamedTuple):
    """A metric of one loader.

    Attributes:
        source: the name of the counter or rate in `stats()`; "bottleneck" and "info" are none.
        kind: a counter never goes down; a gauge is of the epoch that runs, or of the last one.
        unit: by UCUM, as OpenTelemetry writes it.
        help: one line.
    """

    source: str
    kind: Literal["counter", "gauge"]
    unit: str
    help: str

    @property
    def prometheus(self) -> str:
        name = "fastload_" + self.source.replace(".", "_")
        return f"{name}_total" if self.kind == "counter" else name.replace("share", "ratio")

    @property
    def opentelemetry(self) -> str:
        name = "fastload." + self.source
        if self.kind == "counter":
            return name.replace("seconds", "time").replace("bytes", "io")
        for plural, singular in (("samples", "sample"), ("batches", "batch"), ("bytes", "io")):
            name = name.replace(f"{plural}_per_second", f"{singular}_rate")
        return name.replace("share", "ratio")


def _per_second(counter: str) -> Metric:
    unit, text = COUNTERS[counter]
    return Metric(f"{counter}_per_second", "gauge", f"{unit}/s", f"{text}, per second of the epoch")


BOTTLENECK = Metric("bottleneck", "gauge", "1", "1 for the slowest stage of the epoch, 0 for the others")
INFO = Metric(
    "info", "gauge", "1", "Always 1; its labels are the version of fastload and the dataset's class"
)
METRICS = (
    *(Metric(name, "counter", *told) for name, told in COUNTERS.items()),
    *(_per_second(name) for name in COUNTERS if name.endswith((".samples", ".bytes"))),
    *(Metric(name, "gauge", *told) for name, told in _GAUGES.items()),
    BOTTLENECK,
    INFO,
)
