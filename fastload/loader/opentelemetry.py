"""Loaders as metrics of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from weakref import WeakKeyDictionary

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

import fastload
from fastload.loader.exported import ExportedLoaders
from fastload.metrics.metric_names import METRICS, Metric

__all__ = ["loaders_of"]

_exported: WeakKeyDictionary[Meter | MeterProvider, ExportedLoaders] = WeakKeyDictionary()


def loaders_of(source: Meter | MeterProvider | None = None) -> ExportedLoaders:
    """The exported loaders of a meter or provider; None: the global provider, which may be set later."""
    if source is None or source is metrics.get_meter_provider():
        return _global()
    if source not in _exported:
        meter = source if isinstance(source, Meter) else _meter(source.get_meter)
        _exported[source] = _instrumented(meter)
    return _exported[source]


@cache
def _global() -> ExportedLoaders:
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

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        for labels, value in loaders.read(metric):
            yield Observation(value, {f"fastload.{name}": label for name, label in labels.items()})

    return observe
