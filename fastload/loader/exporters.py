"""The argument `exporter=` of `fastload.watch`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastload.errors import ArgumentError
from fastload.loader.exported import ExportedLoaders

if TYPE_CHECKING:
    from fastload.loader.dataloader import DataLoader

__all__ = ["Export"]


class Export:
    """The export of one loader. It begins here, so that a call without `with` exports too.

    Args:
        loader, exporter, name: see `fastload.watch`.
    """

    def __init__(self, loader: DataLoader[Any], exporter: Any, name: str) -> None:
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
            from fastload.loader import prometheus

            return prometheus.loaders_of(None if isinstance(given, str) else given)
        if _is(given, "opentelemetry", "opentelemetry.metrics", "Meter", "MeterProvider"):
            from fastload.loader import opentelemetry

            return opentelemetry.loaders_of(None if isinstance(given, str) else given)
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
