"""`fastload bench URL`: the demo's measurement on your own images, by epoch and stage. The JSON document:

{"command": "bench", "date", "machine": {...}, "versions": {...},
 "settings": {"url", "images", "image_bytes", "cache", "num_workers", "batch_size", "size"},
 "listing_seconds", "epochs": [{"images", "bytes", "seconds", "first_batch_seconds", "images_per_second",
 "megabytes_per_second", "counters" (of `DataLoader.stats()`, this epoch alone), "verdict"}, ...]}
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastload.cli.measurement import Bars
from fastload.cli.output import JsonOption, Output, answering
from fastload.cli.store_options import (
    CORES,
    Anon,
    CropSize,
    EndpointUrl,
    FolderUrl,
    NumWorkers,
    StorageOption,
    storage_options,
)
from fastload.metrics.units import format_size

__all__ = ["bench"]

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
        dataset, seconds = _list(url, size, cache, options, output)
        settings = {
            "url": url,
            "images": len(dataset),
            "cache": None if cache is None else str(cache),
            "num_workers": num_workers,
            "batch_size": batch_size,
            "size": size,
        }
        document = _measure(dataset, settings, epochs, output)
        document["listing_seconds"] = round(seconds, 3)
        _print_report(document, output)
        output.document(document)


def _list(
    url: str, size: int, cache: Path | None, options: dict[str, Any], output: Output
) -> tuple[Any, float]:
    """The images under `url`, and the seconds of the listing."""
    from fastload import Cache, ImageFolder, RandomResizedCrop  # they import torch, which takes seconds

    start = time.perf_counter()
    dataset = ImageFolder(
        url,
        RandomResizedCrop(size, flip=0.5),
        cache=None if cache is None else Cache(cache),
        storage_options=options,
    )
    seconds = time.perf_counter() - start
    output.console.print(
        f"{len(dataset):,} images in {len(dataset.classes):,} classes, listed in {seconds:.1f} s",
        markup=False,
    )
    return dataset, seconds


def _measure(dataset: Any, settings: dict[str, Any], epochs: int, output: Output) -> dict[str, Any]:
    """Run the epochs one after the other."""
    import fastload
    from fastload.cli.measurement import describe_machine, measure_epoch, stage_counters
    from fastload.metrics.bottleneck import explain_bottleneck

    loader: Any = fastload.DataLoader(
        dataset, settings["batch_size"], shuffle=True, num_workers=settings["num_workers"]
    )
    results = []
    with Bars(output.console) as bars:
        for number in range(1, epochs + 1):
            before = loader.stats()["counters"]
            bar = bars.add(f"epoch {number}", len(dataset))
            epoch = measure_epoch(loader, bar.update)
            counters = stage_counters(before, loader.stats()["counters"])
            measured = epoch.as_dict(_image_bytes(counters) * epoch.images)
            results.append({**measured, "counters": counters, "verdict": explain_bottleneck(counters)})
    return {
        "command": "bench",
        **describe_machine(),
        "settings": {**settings, "image_bytes": round(results[0]["bytes"] / len(dataset))},
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
