"""`fastload bench URL`: the demo's measurement on your own images, by epoch and stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fastload.checks import format_size
from fastload.cli.command_options import CORES, CacheOptions, CropSize, NumWorkers, StoreOptions
from fastload.cli.data_source import DataUrl, SourceOptions, find_kind, open_images
from fastload.cli.report import Bars, Lines, MeasuredEpoch, MeasuredReport, Output, dimmed, figures
from fastload.metrics.bottleneck import explain_bottleneck

# The parts of the time of the workers and of the trainer.
STAGES = {
    "get": "workers: get",
    "cache": "workers: cache",
    "decode": "workers: decode",
    "collate": "workers: collate",
    "idle": "workers: idle",
    "wait": "trainer: wait",
}


@dataclass(kw_only=True)
class Settings:
    """What was measured, and with what."""

    url: str
    kind: Annotated[str, "what lies there: the name of a [kind of data](cli.md#kinds-of-data)"]
    images: Annotated[int, "images of an epoch"]
    image_bytes: Annotated[int, "their mean size, encoded"]
    cache: str | None
    mode: Annotated[str | None, "of the cache, or null"]
    num_workers: int
    batch_size: int
    size: int


@dataclass(kw_only=True)
class BenchReport(MeasuredReport):
    """Rates and bottleneck of each epoch."""

    command = "bench"
    settings: Settings
    listing_seconds: Annotated[float, "time of the listing"]
    epochs: list[MeasuredEpoch]

    def text(self) -> Lines:
        """Yield a column for each epoch, then a sentence for each."""
        settings = self.settings
        table = figures("", *(f"epoch {number}" for number in range(1, len(self.epochs) + 1)))
        for name, cells in self._rows():
            table.add_row(name, *cells, end_section=name == "from the cache")
        yield table
        yield dimmed(
            f"{settings.images:,} images of {format_size(settings.image_bytes)}, {settings.num_workers} "
            f"workers, batches of {settings.batch_size}. The seconds of workers are sums over all of them; "
            "idle workers had no batch to make."
        )
        if settings.images <= settings.batch_size:
            yield (
                f"an epoch is one batch: {settings.images:,} images, --batch-size {settings.batch_size:,}; "
                "pass a smaller --batch-size"
            )
        for number, epoch in enumerate(self.epochs, 1):
            yield f"epoch {number}  {epoch.verdict}"

    def _rows(self) -> Iterator[tuple[str, list[str]]]:
        """Yield (name, one cell per epoch) of each row."""
        counters = [epoch.counters or {} for epoch in self.epochs]
        yield "images/s", [f"{epoch.images_per_second:,.0f}" for epoch in self.epochs]
        yield "MB/s", [f"{epoch.megabytes_per_second:,.1f}" for epoch in self.epochs]
        yield "first batch", [f"{epoch.first_batch_seconds:.2f} s" for epoch in self.epochs]
        yield "GETs", [f"{counts.get('get.requests', 0):,.0f}" for counts in counters]
        yield "from the cache", [f"{counts.get('cache.hits', 0):,.0f}" for counts in counters]
        for stage, name in STAGES.items():
            yield name, [f"{counts.get(f'{stage}.seconds', 0):.2f} s" for counts in counters]


def bench(
    url: DataUrl,
    source: SourceOptions,
    cached: CacheOptions,
    store: StoreOptions,
    output: Output,
    cache: Annotated[
        str | None, typer.Option(metavar="DIR", help="A cache directory. Epoch 1 fills it.")
    ] = None,
    num_workers: NumWorkers = CORES,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Images in a batch.")] = 64,
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="Number of passes over all images.")] = 2,
    size: CropSize = 224,
) -> BenchReport:
    """Measure fastload on your own data, and find the slowest stage."""
    kept, options = None if cache is None else cached.open(cache), store.parse()
    import fastload  # it imports torch, which takes seconds

    start = time.perf_counter()
    kind = find_kind(url, options, source.kind)
    crop = fastload.RandomResizedCrop(size, flip=0.5)
    opened = open_images(url, kind, source, crop, cache=kept, storage_options=options)
    seconds = time.perf_counter() - start
    output.console.print(f"{opened.words}, listed in {seconds:.1f} s", soft_wrap=True)
    loader = fastload.DataLoader(opened.dataset, batch_size, shuffle=True, num_workers=num_workers)
    with Bars(output.console) as bars:
        measured = [
            measure_epoch(loader, bars.add(f"epoch {number}", opened.length).update)
            for number in range(1, epochs + 1)
        ]
    images = measured[0].images
    return BenchReport(
        settings=Settings(
            url=url,
            kind=kind,
            images=images,
            image_bytes=round(measured[0].bytes / images),
            cache=cache,
            mode=None if kept is None else str(cached.mode),
            num_workers=num_workers,
            batch_size=batch_size,
            size=size,
        ),
        listing_seconds=round(seconds, 3),
        epochs=measured,
    )


def measure_epoch(
    loader: Any,
    progress: Callable[[int, float], None],
    *,
    image_bytes: float | None = None,
    seconds_at_most: float = float("inf"),
) -> MeasuredEpoch:
    """Iterate over `loader` once and time it, start of the workers included.

    Args:
        loader: of batches of samples; torch's has no counters.
        progress: called after each batch with the images and the seconds so far.
        image_bytes: mean size of an encoded image; None: as the counters say.
        seconds_at_most: stop after the first batch that ends later.
    """
    images, first_batch, elapsed = 0, 0.0, 0.0
    before = _counters(loader)
    start = time.perf_counter()
    for batch in loader:
        elapsed = time.perf_counter() - start
        first_batch = first_batch or elapsed
        images += count_samples(batch)
        progress(images, elapsed)
        if elapsed > seconds_at_most:
            break
    after = _counters(loader).items()
    counters = {name: round(value - before.get(name, 0), 6) for name, value in sorted(after)}
    if image_bytes is None:
        read = counters.get("get.samples", 0) + counters.get("cache.hits", 0)
        image_bytes = (counters.get("get.bytes", 0) + counters.get("cache.bytes", 0)) / max(read, 1)
    total_bytes = images * image_bytes
    return MeasuredEpoch(
        images=images,
        bytes=round(total_bytes),
        seconds=round(elapsed, 4),
        first_batch_seconds=round(first_batch, 4),
        images_per_second=round(images / elapsed, 1),
        megabytes_per_second=round(total_bytes / elapsed / 1e6, 2),
        counters=counters or None,
        verdict=explain_bottleneck(counters) if counters else None,
    )


def _counters(loader: Any) -> dict[str, float]:
    return dict(loader.stats()["counters"]) if hasattr(loader, "stats") else {}


def count_samples(batch: Any) -> int:
    """Return how many samples a batch has: the length of its first column."""
    while isinstance(batch, dict | tuple | list) and batch:
        inner = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        if isinstance(inner, str | bytes | int | float):  # a column that is a list
            break
        batch = inner
    return len(batch)
