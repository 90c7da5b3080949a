"""Loaders as metrics of prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import prometheus_client
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from fastload.loader.exported import ExportedLoaders
from fastload.metrics.metric_names import METRICS, Metric

__all__ = ["loaders_of"]

_Family = CounterMetricFamily | GaugeMetricFamily
_exported: WeakKeyDictionary[prometheus_client.CollectorRegistry, ExportedLoaders] = WeakKeyDictionary()


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


def loaders_of(registry: prometheus_client.CollectorRegistry | None = None) -> ExportedLoaders:
    """The exported loaders of a registry; None: the registry of `prometheus_client` itself."""
    registry = prometheus_client.REGISTRY if registry is None else registry
    if registry not in _exported:
        loaders = ExportedLoaders()
        # It stays registered when its last loader has gone, and then yields nothing. To unregister it was
        # rejected: a loader may be garbage collected while this thread holds the registry's lock.
        registry.register(_Collector(loaders))
        _exported[registry] = loaders
    return _exported[registry]


def _family(metric: Metric) -> _Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.prometheus, metric.help)
