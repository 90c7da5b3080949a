"""The loaders that one exporter shows. Their values are read when a scrape asks for them."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import fastload
from fastload.distributed import find_rank
from fastload.errors import ArgumentError
from fastload.metrics.bottleneck import BOTTLENECKS, find_bottleneck
from fastload.metrics.metric_names import BOTTLENECK, INFO, Metric

if TYPE_CHECKING:
    from fastload.loader.dataloader import DataLoader

__all__ = ["ExportedLoaders"]

Labels = dict[str, str | int]


class ExportedLoader:
    """The values of one loader's metrics, for any thread of its process.

    It holds no reference to the loader, not even for a moment. Otherwise a loader could be freed in the
    thread of a scrape, which would then wait for workers to end.
    """

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        self.name = name
        self._counters = loader.loader_context.counters
        self._meter = loader.loader_context.meter
        # At a scrape, the process group may be gone already.
        self._labels: Labels = {"rank": find_rank()[0]} | ({"loader": name} if name else {})
        self._dataset = type(loader.dataset).__name__
        self._process = os.getpid()

    def shows(self, loader: DataLoader[Any]) -> bool:
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

    def add(self, loader: DataLoader[Any], name: str) -> Callable[[], object]:
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
