"""`fastload.watch(loader)`: a live view on the terminal of a loader that is in use, or its export as metrics.

    for batch in fastload.watch(loader): ...            with fastload.watch(loader): for batch in loader: ...

There is no thread: the loader calls the view with every batch, and now and then while it waits for one.
Metrics are read by the threads of the client that exports them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import rich.console
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fastload.errors import ArgumentError, printable
from fastload.metrics.bottleneck import explain_bottleneck
from fastload.metrics.counters import rates, samples_per_batch
from fastload.metrics.exporters import Export

if TYPE_CHECKING:
    import torch.utils.data


class Console(rich.console.Console):
    """Rich's console, for text that others may have chosen: keys, names of shards, a state's notes.

    A character that is not printable appears as its escape, in tables and progress bars too, so a text is one
    line. Markup is understood only where `markup=True` says so, emoji codes never.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text of `text`: all that is printed as a str, and the cells and titles of tables."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render anything, and of a `Text` only what is printable: a progress bar makes its own."""
        if isinstance(renderable, Text):
            shown = printable(renderable.plain, keep="\n")
            if shown != renderable.plain:
                renderable = Text(shown, renderable.style, end=renderable.end)  # without styles of its parts
        return super().render(renderable, options)


_LIVE, _LINES = 0.5, 10.0  # seconds between updates, by default
# stage, what it counts, its share of the workers' time (of the trainer's, in the last two)
_ROWS = (
    ("get", "the store is read", "get.share"),
    ("cache", "the cache is read", "cache.share"),
    ("decode", "decode and transform", "decode.share"),
    ("collate", "collate", "collate.share"),
    ("idle", "workers wait", "idle.share"),
    ("copy", "copy to the device", ""),
    ("wait", "the training step waits", "wait.share"),
    ("consumer", "the training step works", "consumer.share"),
)


class _Console(Console):
    """Rich's own ends the process when the reader of its pipe has closed it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class watch:  # a verb for users, who write it like a function
    """A live view of a loader: rates per stage, hit rate of the cache, and the bottleneck.

    Iterate over it in place of the loader, or use it as a context manager around any number of epochs. On a
    terminal it is a table that is updated in place; in a file or a notebook, it is a line per interval. All
    figures are of the time since the last update. When the view ends, its last state stays visible. A closed
    terminal ends the view, not the training.

    Example::

        from fastload import DataLoader, ImageFolder, RandomResizedCrop, watch

        dataset = ImageFolder("s3://bucket/train", RandomResizedCrop(224))
        loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8)
        for images, labels in watch(loader):
            ...

        with watch(loader, interval=2):  # around any number of epochs
            for images, labels in loader:
                ...

    With `exporter=` there is no view: the counters, the rates and the bottleneck become metrics of Prometheus
    or OpenTelemetry, which the page "Counters and rates" lists. They are read when they are scraped or
    collected. The export begins at once, and ends with the `with` block or the iteration; without either, it
    ends when the loader is garbage collected. The metrics are of this rank, as `stats()` is: start the export
    after `torch.distributed.init_process_group`.

    Example (not run: it serves a port)::

        from prometheus_client import start_http_server

        start_http_server(9400)
        with watch(loader, exporter="prometheus"):
            for images, labels in loader:
                ...

    Args:
        loader: a `fastload.DataLoader`.
        interval: seconds between two updates; by default 0.5 on a terminal and 10 elsewhere.
        console: the output of the view; by default stderr.
        exporter: "prometheus" (the registry `prometheus_client.REGISTRY`) or "opentelemetry" (the global
            MeterProvider); or a `CollectorRegistry`, a `MeterProvider` or a `Meter` of yours. It needs
            `torch-fastload[metrics]`. No port is opened: your program serves the registry, or has a reader.
        name: of the loader, the label `loader` of its metrics, where a process exports several.

    Raises:
        ArgumentError: the loader is not a fastload.DataLoader, or is watched already; interval is not
            positive; exporter has an invalid value, or its package is not installed; another loader is
            exported under this name; or an argument belongs to the view and another one to the export.
    """

    def __init__(
        self,
        loader: torch.utils.data.DataLoader[Any],
        *,
        interval: float | None = None,
        console: rich.console.Console | None = None,
        exporter: Any = None,  # its types belong to packages that may be missing
        name: str = "",
    ) -> None:
        if not hasattr(loader, "_context"):
            kind = type(loader)
            raise ArgumentError(
                f"loader must be a fastload.DataLoader, found {kind.__module__}.{kind.__qualname__}: "
                "it takes torch's arguments, so import that one instead"
            )
        if interval is not None and not interval > 0:
            raise ArgumentError(f"interval must be a number of seconds above 0, found {interval!r}")
        if not isinstance(name, str):
            raise ArgumentError(f"name must be a str, found {name!r}")
        if exporter is None and name:
            raise ArgumentError(f"name={name!r} is a label of metrics: give exporter= too")
        if exporter is not None and not (interval is None and console is None):
            raise ArgumentError(
                "interval and console are for the view, which exporter= replaces: leave them out"
            )
        self._loader: Any = loader
        self._shown = _View(loader, interval, console) if exporter is None else Export(loader, exporter, name)

    def __enter__(self) -> watch:
        self._shown.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.stop()

    def __iter__(self) -> Iterator[Any]:
        with self:
            yield from self._loader

    def __len__(self) -> int:
        return len(self._loader)


class _View:
    """The table or the lines of one loader."""

    def __init__(self, loader: Any, interval: float | None, console: rich.console.Console | None) -> None:
        self._loader = loader
        self._console: rich.console.Console = _Console(file=sys.stderr) if console is None else console
        self._in_place = self._console.is_terminal and not self._console.is_jupyter
        self._interval = interval or (_LIVE if self._in_place else _LINES)
        self._live: Live | None = None
        self._seen: tuple[float, Mapping[str, float]] = (0.0, {})

    def start(self) -> None:
        meter = self._loader._context.meter
        if meter.tick is not None:
            raise ArgumentError("loader is watched already: end that watch first")
        self._seen = time.monotonic(), self._loader._context.counters.as_dict()
        if self._in_place:
            self._live = Live(console=self._console, auto_refresh=False)
            with contextlib.suppress(OSError, ValueError):
                self._live.start()
        meter.tick = self._tick

    def stop(self) -> None:
        self._loader._context.meter.tick = None
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError, ValueError):
                live.stop()

    def _tick(self) -> None:
        now, (then, before) = time.monotonic(), self._seen
        if now - then < self._interval:
            return
        counters = self._loader._context.counters.as_dict()
        self._seen = now, counters
        added = {name: value - before.get(name, 0.0) for name, value in counters.items()}
        meter = self._loader._context.meter
        batch_size = samples_per_batch(meter.counters())
        gauges = meter.gauges() | rates(added, now - then, batch_size)
        sentence = (
            explain_bottleneck(added, gauges, live=True)
            if added.get("wait.batches")
            else "waiting for a batch"
        )
        try:
            if self._live is not None:
                self._live.update(_table(gauges, sentence), refresh=True)
            else:
                self._console.print(_line(gauges, sentence), soft_wrap=True, markup=False, highlight=False)
        except (OSError, ValueError):  # the terminal went away, or was closed
            meter.tick = None


def _line(gauges: Mapping[str, float], sentence: str) -> str:
    return (
        f"fastload: {gauges['loader.samples_per_second']:,.0f} samples/s, "
        f"{gauges['workers']:.0f} workers, cache hits {gauges['cache.hit_share']:.0%}, "
        f"waiting {gauges['wait.share']:.0%} of the time; {sentence}"
    )


def _table(gauges: Mapping[str, float], sentence: str) -> Table:
    table = Table(
        title=f"{gauges['loader.samples_per_second']:,.0f} samples/s, {gauges['workers']:.0f} workers, "
        f"{gauges['node.idle_cores']:.1f} of {gauges['node.cores']:.0f} cores idle",
        caption=sentence,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("stage")
    for name in ("samples/s", "MB/s", "share"):
        table.add_column(name, justify="right")
    for stage, text, share in _ROWS:
        samples = gauges.get(f"{stage}.samples_per_second")
        mb = gauges.get(f"{stage}.bytes_per_second")
        part = gauges.get(share)
        if not (samples or mb or part):
            continue
        table.add_row(
            text,
            "" if samples is None else f"{samples:,.0f}",
            "" if mb is None else f"{mb / 1e6:,.1f}",
            "" if part is None else f"{part:.0%}",
        )
    if gauges["cache.hit_share"]:
        table.add_row("cache hits", "", "", f"{gauges['cache.hit_share']:.0%}")
    if "device.idle_share" in gauges:
        table.add_row("the device idles", "", "", f"{gauges['device.idle_share']:.0%}")
    return table
