"""The argument `exporter=` of `fastload.watch`: loaders as metrics of Prometheus or OpenTelemetry.

    Export ─▶ ExportedLoaders, one for each registry or meter ─▶ a collector, or instruments, of that client

Values are read when a scrape asks for them. A client is imported only where it is used.

Each name follows from that in `stats()`. Prometheus wants base units in the name, and `_total` behind
counters.
OpenTelemetry wants the unit beside the name, `time` for seconds and `io` for bytes.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import fastload
from fastload.errors import ArgumentError
from fastload.metrics.bottleneck import BOTTLENECKS, find_bottleneck

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    _Family = CounterMetricFamily | GaugeMetricFamily

Labels = dict[str, str | int]

# counter: (unit by UCUM, which writes what is counted in braces; what it counts)
COUNTERS = {
    "sampler.seconds": ("s", "The trainer's process drew index batches"),
    "get.samples": ("{sample}", "Objects or records that came from the store"),
    "get.bytes": ("By", "Bytes of objects or records that came from the store"),
    "get.requests": ("{request}", "Requests to the store"),
    "get.seconds": ("s", "Workers waited for the store, summed over workers and their threads"),
    "get.retries": ("{request}", "Requests that were repeated after a failure"),
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
    "bad.samples": ("{sample}", "Bad samples that on_error replaced"),
    "bad.bytes": ("By", "Bytes of shards that could not be read"),
    "left_out.samples": ("{sample}", "Excluded samples, in whose place another one was delivered"),
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
    "workers": ("{worker}", "Threads or processes that make batches; 0: the trainer's process does"),
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


# --- the clients

_registries: WeakKeyDictionary[CollectorRegistry, ExportedLoaders] = WeakKeyDictionary()
_meters: WeakKeyDictionary[Any, ExportedLoaders] = WeakKeyDictionary()  # also by the module, the global one


class Export:
    """The export of one loader. It begins here, so that a call without `with` exports too.

    Args:
        loader, exporter, name: see `fastload.watch`.
    """

    def __init__(self, loader: Any, exporter: Any, name: str) -> None:
        self._loader = loader
        self._name = name
        self._loaders = _find(exporter)
        self._end: Callable[[], object] | None = self._loaders.add(loader, name)
        self._entered = False

    def start(self) -> None:
        """Begin a block or an iteration, at whose end the export ends."""
        if self._entered:
            raise ArgumentError("loader is watched already: end that watch first")
        if self._end is None:
            self._end = self._loaders.add(self._loader, self._name)
        self._entered = True

    def stop(self) -> None:
        if self._end is not None:
            self._end()
        self._end, self._entered = None, False


def _find(exporter: Any) -> ExportedLoaders:
    """Return the loaders that an exporter shows: "prometheus", "opentelemetry" or a client's object.

    A client is imported if it is named, or if the object shows that it was imported.

    Raises:
        ArgumentError: it is something else, or its client is not installed.
    """
    try:
        if _is(exporter, "prometheus", "prometheus_client", "CollectorRegistry"):
            return _of_registry(None if isinstance(exporter, str) else exporter)
        if _is(exporter, "opentelemetry", "opentelemetry.metrics", "Meter", "MeterProvider"):
            return _of_meter(None if isinstance(exporter, str) else exporter)
    except ImportError as error:
        raise ArgumentError(
            f"exporter={exporter!r} needs a package that is not installed: pip install "
            f"'torch-fastload[metrics]' ({error})"
        ) from None
    shown = repr(exporter) if isinstance(exporter, str) else f"a {type(exporter).__name__}"
    raise ArgumentError(
        "exporter must be 'prometheus', 'opentelemetry', a CollectorRegistry of prometheus_client, or a "
        f"Meter or MeterProvider of OpenTelemetry, found {shown}"
    )


def _is(exporter: Any, name: str, module: str, *classes: str) -> bool:
    if isinstance(exporter, str):
        return exporter == name
    client = sys.modules.get(module)
    return client is not None and any(isinstance(exporter, getattr(client, known)) for known in classes)


class ExportedLoader:
    """The values of one loader's metrics, for any thread of its process.

    It holds no reference to the loader, not even for a moment. Otherwise a loader could be freed in the
    thread of a scrape, which would then wait for workers to end.
    """

    def __init__(self, loader: Any, name: str) -> None:
        self.name = name
        self._counters = loader._context.counters
        self._meter = loader._context.meter
        # At a scrape, the process group may be gone already.
        self._labels: Labels = {"rank": loader._context.rank()} | ({"loader": name} if name else {})
        self._dataset = type(loader.dataset).__name__
        self._process = os.getpid()

    def shows(self, loader: Any) -> bool:
        return self._counters is loader._context.counters

    @property
    def inherited(self) -> bool:
        """Return whether a process shows this loader that this one was forked from."""
        return self._process != os.getpid()

    def read(self, metric: Metric) -> Iterator[tuple[Labels, float]]:
        """Yield (labels, value) of a metric; none for a rate whose counter was not counted yet."""
        if metric.kind == "counter":
            yield self._labels, self._counters[metric.source]
        elif metric is BOTTLENECK:
            stage = find_bottleneck(self._meter.counters())
            for name in BOTTLENECKS:
                yield self._labels | {"stage": name}, float(name == stage)
        elif metric is INFO:
            yield self._labels | {"version": fastload.__version__, "dataset": self._dataset}, 1.0
        else:
            value = self._meter.gauges().get(metric.source)
            if value is not None:
                yield self._labels, value


class ExportedLoaders:
    """The loaders of one registry or meter."""

    def __init__(self) -> None:
        self._loaders: set[ExportedLoader] = set()

    def add(self, loader: Any, name: str) -> Callable[[], object]:
        """Show a loader, until the result is called or the loader is garbage collected.

        Raises:
            ArgumentError: it is shown already, or another one under this name.
        """
        if any(other.shows(loader) for other in self._here()):
            raise ArgumentError("loader is watched already: end that watch first")
        if self._has(name):
            gc.collect()  # it may belong to a loader of before that nobody uses
        if self._has(name):
            raise ArgumentError(
                f"another loader is exported with name={name!r}: give each one a name, such as "
                "name='train' and name='val'"
            )
        added = ExportedLoader(loader, name)
        self._loaders.add(added)
        # It takes no lock: garbage collection may run in a scrape, which holds those of its client.
        end = weakref.finalize(loader, self._loaders.discard, added)
        end.atexit = False
        return end

    def read(self, metric: Metric) -> Iterator[tuple[Labels, float]]:
        """Yield (labels, value) of a metric, of all loaders."""
        for loader in self._here():
            yield from loader.read(metric)

    def _has(self, name: str) -> bool:
        return any(loader.name == name for loader in self._here())

    def _here(self) -> list[ExportedLoader]:
        """Return those of this process: a forked worker inherits others, and would count their work again."""
        return [loader for loader in list(self._loaders) if not loader.inherited]


# --- Prometheus


class _Collector:
    """All exported loaders of one registry: a metric may be described only once in a scrape."""

    def __init__(self, loaders: ExportedLoaders) -> None:
        self._loaders = loaders

    def describe(self) -> list[_Family]:
        """Return the metrics for the registry, which finds them by name, and answers `?name[]=`."""
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterator[_Family]:
        """Yield the metrics, for each scrape, in a thread of its server."""
        for metric in METRICS:
            family = _family(metric)
            for labels, value in self._loaders.read(metric):
                texts = {name: str(label) for name, label in labels.items()}
                family.add_sample(metric.prometheus, texts, value)
            if family.samples:
                yield family


def _of_registry(registry: CollectorRegistry | None) -> ExportedLoaders:
    """Return the exported loaders of a registry; None: the registry of `prometheus_client` itself."""
    from prometheus_client import REGISTRY

    registry = REGISTRY if registry is None else registry
    if registry not in _registries:
        loaders = ExportedLoaders()
        # It stays registered when its last loader has gone, and then yields nothing. To unregister it was
        # rejected: a loader may be garbage collected while this thread holds the registry's lock.
        registry.register(_Collector(loaders))
        _registries[registry] = loaders
    return _registries[registry]


def _family(metric: Metric) -> _Family:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.prometheus, metric.help)


# --- OpenTelemetry


def _of_meter(source: Meter | MeterProvider | None) -> ExportedLoaders:
    """Return the exported loaders of a meter or provider.

    None: those of the global provider, which may be set later.
    """
    from opentelemetry import metrics

    known: Any = metrics if source in (None, metrics.get_meter_provider()) else source
    if known in _meters:
        return _meters[known]
    meter = known if isinstance(known, metrics.Meter) else known.get_meter("fastload", fastload.__version__)
    loaders = ExportedLoaders()
    for metric in METRICS:  # the instruments cannot be removed from the meter
        create = (
            meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        )
        create(metric.opentelemetry, [_callback(loaders, metric)], metric.unit, metric.help)
    _meters[known] = loaders
    return loaders


def _callback(loaders: ExportedLoaders, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
    """Return what a collection calls, in a thread of its reader."""

    from opentelemetry.metrics import Observation

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        for labels, value in loaders.read(metric):
            yield Observation(value, {f"fastload.{name}": label for name, label in labels.items()})

    return observe
