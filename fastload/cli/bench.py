"""`fastload bench URL`: the demo's measurement on your own images, by epoch and stage. The JSON document:

{"command": "bench", "date", "machine": {...}, "versions": {...},
 "settings": {"url", "kind", "images", "image_bytes", "cache", "mode", "num_workers", "batch_size", "size"},
 "listing_seconds", "epochs": [{"images", "bytes", "seconds", "first_batch_seconds", "images_per_second",
 "megabytes_per_second", "counters" (of `DataLoader.stats()`, this epoch alone), "verdict"}, ...]}
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from fastload.cli.command_options import (
    CORES,
    Anon,
    CacheMode,
    CropSize,
    EndpointUrl,
    FolderUrl,
    NumWorkers,
    StorageOption,
    storage_options,
)
from fastload.cli.kinds import SHARDS, Kind, find_kind
from fastload.cli.measurement import Bars
from fastload.cli.output import JsonOption, Output, answering
from fastload.cli.shard_source import first_records, image_dataset, list_shards
from fastload.metrics.units import format_size

# The parts of the time of the workers and of the trainer.
STAGES = {
    "get": "workers: get",
    "cache": "workers: cache",
    "decode": "workers: decode",
    "collate": "workers: collate",
    "idle": "workers: idle",
    "wait": "trainer: wait",
}


def bench(
    url: FolderUrl,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A cache directory. Epoch 1 fills it.")
    ] = None,
    mode: Annotated[CacheMode, typer.Option(help="The cache mode of the training.")] = CacheMode.auto,
    num_workers: NumWorkers = CORES,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Images in a batch.")] = 64,
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="Number of passes over all images.")] = 2,
    size: CropSize = 224,
    endpoint_url: EndpointUrl = None,
    anon: Anon = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure fastload on your own images, and find the slowest stage."""
    with answering(as_json) as output:
        options = storage_options(storage_option, endpoint_url, anon)
        source = _open(url, size, cache, mode, options, output)
        settings = {
            "url": url,
            "kind": source.kind.value,
            "cache": None if cache is None else str(cache),
            "mode": None if cache is None else mode.value,
            "num_workers": num_workers,
            "batch_size": batch_size,
            "size": size,
        }
        document = _measure(source, settings, epochs, output)
        document["listing_seconds"] = round(source.seconds, 3)
        _print_report(document, output)
        output.document(document)


class _Source(NamedTuple):
    """What is measured.

    images: in an epoch; an estimate, if the shards are not indexed.
    seconds: of the listing.
    """

    kind: Kind
    dataset: Any
    images: int
    seconds: float


def _open(
    url: str, size: int, cache: Path | None, mode: CacheMode, options: dict[str, Any], output: Output
) -> _Source:
    """The images in folders or shards at `url`."""
    import fastload  # it imports torch, which takes seconds

    start = time.perf_counter()
    kind, transform = find_kind(url, options), fastload.RandomResizedCrop(size, flip=0.5)
    kept = None if cache is None else fastload.Cache(cache, mode.value)
    if kind in SHARDS:
        dataset, images, text = _open_shards(kind, url, transform, cache=kept, storage_options=options)
    else:
        dataset = fastload.ImageFolder(url, transform, cache=kept, storage_options=options)
        images, text = len(dataset), f"{len(dataset):,} images in {len(dataset.classes):,} classes"
    seconds = time.perf_counter() - start
    output.console.print(f"{text}, listed in {seconds:.1f} s")
    return _Source(kind, dataset, images, seconds)


def _open_shards(kind: Kind, url: str, transform: Any, **arguments: Any) -> tuple[Any, int, str]:
    """(the dataset of the images in shards, how many they are, the same in words)"""
    found = list_shards(kind, url, **arguments)
    first = first_records(*found)
    dataset = image_dataset(kind, url, transform, first, **arguments)
    shards = dataset.shards()
    total = sum(shards[number].size for number in range(len(shards)))
    try:
        images, about = dataset.indexed_length(), ""
    except TypeError:
        images, about = max(1, round(total / first.record_bytes)), "about "
    where = f"{len(shards):,} {kind.value} shards of {format_size(total)}"
    return dataset, images, f"{about}{images:,} images ({first.image}) in {where}"


def _measure(source: _Source, settings: dict[str, Any], epochs: int, output: Output) -> dict[str, Any]:
    """Run the epochs one after the other."""
    import fastload
    from fastload.cli.measurement import describe_machine, measure_epoch, stage_counters
    from fastload.metrics.bottleneck import explain_bottleneck

    loader: Any = fastload.DataLoader(
        source.dataset, settings["batch_size"], shuffle=True, num_workers=settings["num_workers"]
    )
    results = []
    with Bars(output.console) as bars:
        for number in range(1, epochs + 1):
            before = loader.stats()["counters"]
            bar = bars.add(f"epoch {number}", source.images)
            epoch = measure_epoch(loader, bar.update)
            counters = stage_counters(before, loader.stats()["counters"])
            measured = epoch.as_dict(_image_bytes(counters) * epoch.images)
            results.append({**measured, "counters": counters, "verdict": explain_bottleneck(counters)})
    return {
        "command": "bench",
        **describe_machine(),
        "settings": {
            **settings,
            "images": results[0]["images"],
            "image_bytes": round(results[0]["bytes"] / results[0]["images"]),
        },
        "epochs": results,
    }


def _image_bytes(counters: dict[str, float]) -> float:
    """The mean size of the encoded images that were read."""
    images = counters.get("get.samples", 0) + counters.get("cache.hits", 0)
    return (counters.get("get.bytes", 0) + counters.get("cache.bytes", 0)) / max(images, 1)


def _print_report(document: dict[str, Any], output: Output) -> None:
    """A column for each epoch, then a sentence for each."""
    epochs, settings, console = document["epochs"], document["settings"], output.console
    table = Table(header_style="bold")
    table.add_column("")
    for number in range(1, len(epochs) + 1):
        table.add_column(f"epoch {number}", justify="right")
    for name, cells in _rows(epochs):
        table.add_row(name, *cells, end_section=name == "from the cache")
    console.print(table)
    console.print(
        f"{settings['images']:,} images of {format_size(settings['image_bytes'])}, "
        f"{settings['num_workers']} workers, batches of {settings['batch_size']}. "
        "The seconds of workers are sums over all of them; idle workers had no batch to make.",
        style="dim",
        soft_wrap=True,
    )
    if settings["images"] <= settings["batch_size"]:
        console.print(
            f"an epoch is one batch: {settings['images']:,} images, --batch-size {settings['batch_size']:,}; "
            "pass a smaller --batch-size",
            soft_wrap=True,
        )
    for number, epoch in enumerate(epochs, 1):
        console.print(f"epoch {number}  {epoch['verdict']}", soft_wrap=True)


def _rows(epochs: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """(name, one cell an epoch) of each row."""
    counters = [epoch["counters"] for epoch in epochs]
    yield "images/s", [f"{epoch['images_per_second']:,.0f}" for epoch in epochs]
    yield "MB/s", [f"{epoch['megabytes_per_second']:,.1f}" for epoch in epochs]
    yield "first batch", [f"{epoch['first_batch_seconds']:.2f} s" for epoch in epochs]
    yield "GETs", [f"{counts.get('get.requests', 0):,.0f}" for counts in counters]
    yield "from the cache", [f"{counts.get('cache.hits', 0):,.0f}" for counts in counters]
    for stage, name in STAGES.items():
        yield name, [f"{counts.get(f'{stage}.seconds', 0):.2f} s" for counts in counters]
