"""The argument `exporter=` of `fastload.watch`: loaders as metrics of Prometheus or OpenTelemetry.

    Export ─▶ ExportedLoaders, one for each registry or meter ─▶ a collector, or instruments, of that client

Values are read when a scrape asks for them. A client is imported only where it is used.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import fastload
from fastload.errors import ArgumentError
from fastload.metrics.bottleneck import BOTTLENECKS, find_bottleneck
from fastload.metrics.metric_names import BOTTLENECK, INFO, METRICS, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    _Family = CounterMetricFamily | GaugeMetricFamily

Labels = dict[str, str | int]

_registries: WeakKeyDictionary[CollectorRegistry, ExportedLoaders] = WeakKeyDictionary()
_meters: WeakKeyDictionary[Meter | MeterProvider, ExportedLoaders] = WeakKeyDictionary()


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
        """A block or an iteration begins, at whose end the export ends."""
        if self._entered:
            raise ArgumentError("loader is watched already: end that watch first")
        if self._end is None:
            self._end = self._loaders.add(self._loader, self._name)
        self._entered = True

    def stop(self) -> None:
        if self._end is not None:
            self._end()
        self._end, self._entered = None, False


def _find(given: Any) -> ExportedLoaders:
    """The loaders that an exporter shows: "prometheus", "opentelemetry", or an object of their clients.

    A client is imported if it is named, or if the object shows that it was imported.

    Raises:
        ArgumentError: it is something else, or its client is not installed.
    """
    try:
        if _is(given, "prometheus", "prometheus_client", "CollectorRegistry"):
            return _of_registry(None if isinstance(given, str) else given)
        if _is(given, "opentelemetry", "opentelemetry.metrics", "Meter", "MeterProvider"):
            return _of_meter(None if isinstance(given, str) else given)
    except ImportError as error:
        raise ArgumentError(
            f"exporter={given!r} needs a package that is not installed: pip install "
            f"'torch-fastload[metrics]' ({error})"
        ) from None
    found = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
    raise ArgumentError(
        "exporter must be 'prometheus', 'opentelemetry', a CollectorRegistry of prometheus_client, or a "
        f"Meter or MeterProvider of OpenTelemetry, found {found}"
    )


def _is(given: Any, name: str, module: str, *classes: str) -> bool:
    if isinstance(given, str):
        return given == name
    client = sys.modules.get(module)
    return client is not None and any(isinstance(given, getattr(client, one)) for one in classes)


class ExportedLoader:
    """The values of one loader's metrics, for any thread of its process.

    It holds no reference to the loader, not even for a moment. Otherwise a loader could be freed in the
    thread of a scrape, which would then wait for workers to end.
    """

    def __init__(self, loader: Any, name: str) -> None:
        self.name = name
        self._counters = loader.loader_context.counters
        self._meter = loader.loader_context.meter
        # At a scrape, the process group may be gone already.
        self._labels: Labels = {"rank": loader.loader_context.rank()} | ({"loader": name} if name else {})
        self._dataset = type(loader.dataset).__name__
        self._process = os.getpid()

    def shows(self, loader: Any) -> bool:
        return self._counters is loader.loader_context.counters

    @property
    def inherited(self) -> bool:
        """Whether a process shows this loader that this one was forked from."""
        return self._process != os.getpid()

    def read(self, metric: Metric) -> Iterator[tuple[Labels, float]]:
        """(labels, value) of a metric; none for a rate whose counter was not counted yet."""
        if metric.kind == "counter":
            yield self._labels, self._counters[metric.source]
        elif metric is BOTTLENECK:
            stage = find_bottleneck(self._meter.counters())
            for one in BOTTLENECKS:
                yield self._labels | {"stage": one}, float(one == stage)
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
        if any(one.shows(loader) for one in self._here()):
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
        """(labels, value) of a metric, of all loaders."""
        for loader in self._here():
            yield from loader.read(metric)

    def _has(self, name: str) -> bool:
        return any(one.name == name for one in self._here())

    def _here(self) -> list[ExportedLoader]:
        """Those of this process: a forked worker inherits the others, and would count their work again."""
        return [loader for loader in list(self._loaders) if not loader.inherited]


# --- Prometheus


class _Collector:
    """All exported loaders of one registry: a metric may be described only once in a scrape."""

    def __init__(self, loaders: ExportedLoaders) -> None:
        self._loaders = loaders

    def describe(self) -> list[_Family]:
        """For the registry, which finds metrics of one name by it, and answers `?name[]=`."""
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterator[_Family]:
        """Called by each scrape, in a thread of its server."""
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

    if source is None or source is metrics.get_meter_provider():
        return _of_global_provider()
    if source not in _meters:
        meter = source if isinstance(source, metrics.Meter) else _meter(source.get_meter)
        _meters[source] = _instrumented(meter)
    return _meters[source]


@cache
def _of_global_provider() -> ExportedLoaders:
    from opentelemetry import metrics

    return _instrumented(_meter(metrics.get_meter))


def _meter(get: Callable[[str, str], Meter]) -> Meter:
    return get("fastload", fastload.__version__)


def _instrumented(meter: Meter) -> ExportedLoaders:
    """Loaders that are read by the instruments of a meter. It keeps them: they cannot be removed from it."""
    loaders = ExportedLoaders()
    for metric in METRICS:
        create = (
            meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        )
        create(metric.opentelemetry, [_callback(loaders, metric)], metric.unit, metric.help)
    return loaders


def _callback(loaders: ExportedLoaders, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
    """What a collection calls, in a thread of its reader."""

    from opentelemetry.metrics import Observation

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        for labels, value in loaders.read(metric):
            yield Observation(value, {f"fastload.{name}": label for name, label in labels.items()})

    return observe
