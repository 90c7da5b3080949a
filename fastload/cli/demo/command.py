"""`fastload demo`: photos, an S3 server behind a round trip, and the rate of each loader on this machine.

    make photos ─▶ serve_s3 ─▶ delay_proxy ─▶ torch + s3fs (a sample) ─▶ fastload epoch 1 ─▶ fastload epoch 2

Everything is bounded in time, and the server and the proxy end with the command. The JSON document:

    {"command": "demo", "date", "machine": {...}, "versions": {...},
     "settings": {"images", "image_bytes", "workers", "batch_size", "latency_ms", "size"},
     "torch_s3fs": EPOCH, "fastload": {"epoch_1": EPOCH, "epoch_2": EPOCH},
     "ratio": {"epoch_1", "epoch_2"}, "needed": {"8xP100": 1500, "8xV100": 3100}, "chart": path or null}

    EPOCH = {"images", "bytes", "seconds", "first_batch_seconds", "images_per_second", "megabytes_per_second",
             "gets" (GET requests for objects that reached the server), and for fastload
             "counters" (of `DataLoader.stats()`, this epoch alone), "verdict"}
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from fastload.cli.measurement import Bars
from fastload.cli.output import JsonOption, Output, answering
from fastload.errors import ArgumentError

BATCH_SIZE = 64
SIZE = 224
CLASSES = 20
BASELINE_SECONDS = 20.0
MARKER = "made-by-fastload-demo"


class Settings(NamedTuple):
    """The settings of the measurement."""

    images: int
    workers: int
    latency_ms: float


class Bucket(NamedTuple):
    """The photos, and the access to them."""

    name: str
    photos: Path
    total_bytes: int
    proxy: Any
    credentials: dict[str, str]


def demo(
    images: Annotated[int, typer.Option(metavar="N", min=1, help="Number of photos.")] = 2000,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Worker processes of each loader.")] = 2,
    latency_ms: Annotated[
        float, typer.Option(metavar="N", min=0, help="Round trip to the server, in ms.")
    ] = 20,
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Directory for data and chart.")
    ] = Path("fastload-demo"),
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The chart, a PNG.", show_default="DIR/demo.png")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the photos for the next run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare fastload with torch + s3fs on this machine, over a real S3 server behind a round trip."""
    settings = Settings(images, workers, latency_ms)
    with answering(as_json) as output:
        _need_packages()
        with (
            _workspace(directory, keep) as workspace,
            Bars(output.console) as bars,
            _bucket(workspace / "s3", settings, bars) as bucket,
        ):
            document = _measure(bucket, settings, workspace / "cache", bars)
        _show(document, chart or directory / "demo.png", output)


def _need_packages() -> None:
    """Import the packages of the demo, before anything is timed: no loader pays for an import."""
    try:
        import PIL.Image
        import s3fs  # noqa: F401
        import uvloop  # noqa: F401
    except ImportError as error:
        raise ArgumentError(
            f"the demo needs {error.name}; type: pip install 'torch-fastload[demo]'"
        ) from error
    PIL.Image.init()


@contextmanager
def _workspace(directory: Path, keep: bool) -> Iterator[Path]:
    """A folder in `directory`, deleted at the end unless `keep`."""
    workspace = directory / "data"
    if workspace.exists() and not (workspace / MARKER).exists():
        raise ArgumentError(f"--dir {directory}: {workspace} is not from a previous demo; give another --dir")
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        (workspace / MARKER).touch()
    except OSError as error:
        raise ArgumentError(f"--dir {directory}: cannot write there ({error}); give another --dir") from error
    try:
        shutil.rmtree(workspace / "cache", ignore_errors=True)  # from --keep; epoch 1 needs an empty cache
        yield workspace
    finally:
        if not keep:
            shutil.rmtree(workspace, ignore_errors=True)


@contextmanager
def _bucket(root: Path, settings: Settings, bars: Bars) -> Iterator[Bucket]:
    """Photos behind an S3 server behind a round trip."""
    from fastload.cli.demo.photos import make_dataset
    from fastload.cli.demo.s3_server import delay_proxy, serve_s3

    name = f"photos-{settings.images}"
    bar = bars.add("making photos", settings.images)
    total_bytes = make_dataset(root / name, settings.images, CLASSES, lambda done, _: bar.update(done))
    with serve_s3(root) as server, delay_proxy(server.endpoint_url, settings.latency_ms / 1000) as proxy:
        credentials = {"key": server.key, "secret": server.secret}
        yield Bucket(name, root / name, total_bytes, proxy, credentials)


def _measure(bucket: Bucket, settings: Settings, cache: Path, bars: Bars) -> dict[str, Any]:
    """Run the loaders, one after the other; the JSON document."""
    from fastload.cli.measurement import describe_machine

    torch_s3fs = _torch_s3fs(bucket, settings, bars)
    epochs = _fastload(bucket, settings, cache, bars)
    rates = [epoch["images_per_second"] / torch_s3fs["images_per_second"] for epoch in epochs]
    return {
        "command": "demo",
        **describe_machine(),
        "settings": {
            **settings._asdict(),
            "image_bytes": round(bucket.total_bytes / settings.images),
            "batch_size": BATCH_SIZE,
            "size": SIZE,
        },
        "torch_s3fs": torch_s3fs,
        "fastload": {"epoch_1": epochs[0], "epoch_2": epochs[1]},
        "ratio": {"epoch_1": round(rates[0], 2), "epoch_2": round(rates[1], 2)},
    }


def _torch_s3fs(bucket: Bucket, settings: Settings, bars: Bars) -> dict[str, Any]:
    """torch's DataLoader over s3fs, on a random sample, because all photos would take minutes."""
    import torch

    from fastload.cli.demo.baseline import S3fsImages

    # It gets the keys, and need not list. Each worker has at least two batches, and all batches are full.
    paths = sorted(bucket.photos.glob("*/*.jpg"))
    paths = random.Random(0).sample(paths, min(settings.images, max(4, 2 * settings.workers) * BATCH_SIZE))
    dataset = S3fsImages(
        [f"{bucket.name}/{path.parent.name}/{path.name}" for path in paths],
        [int(path.parent.name.removeprefix("class_")) for path in paths],
        SIZE,
        **bucket.credentials,
        endpoint_url=bucket.proxy.url,
    )
    loader = torch.utils.data.DataLoader(dataset, BATCH_SIZE, num_workers=settings.workers)
    bar = bars.add("torch + s3fs, a sample", len(paths))
    return _timed(loader, bucket, settings, bar.update, BASELINE_SECONDS)


def _fastload(bucket: Bucket, settings: Settings, cache: Path, bars: Bars) -> list[dict[str, Any]]:
    """fastload: epoch 1 from the store, filling the cache, and epoch 2 from the cache."""
    import fastload
    from fastload.cli.measurement import stage_counters
    from fastload.metrics.bottleneck import explain_bottleneck

    dataset = fastload.ImageFolder(
        f"s3://{bucket.name}/",
        fastload.RandomResizedCrop(SIZE, flip=0.5),
        cache=fastload.Cache(cache),
        storage_options={**bucket.credentials, "endpoint_url": bucket.proxy.url},
    )
    loader = fastload.DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=settings.workers)
    epochs = []
    for number, source in ((1, "from the store"), (2, "from the cache")):
        before = loader.stats()["counters"]
        bar = bars.add(f"fastload epoch {number}, {source}", settings.images)
        epoch = _timed(loader, bucket, settings, bar.update)
        counters = stage_counters(before, loader.stats()["counters"])
        epochs.append({**epoch, "counters": counters, "verdict": explain_bottleneck(counters)})
    return epochs


def _timed(
    loader: Iterable[Any], bucket: Bucket, settings: Settings, progress: Any, seconds: float = float("inf")
) -> dict[str, Any]:
    """One epoch, and the GETs at the server during it."""
    from fastload.cli.measurement import measure_epoch

    before = bucket.proxy.counts().object_gets
    epoch = measure_epoch(loader, progress, seconds)
    total_bytes = bucket.total_bytes / settings.images * epoch.images
    return {**epoch.as_dict(total_bytes), "gets": bucket.proxy.counts().object_gets - before}


def _show(document: dict[str, Any], chart: Path, output: Output) -> None:
    """Table, chart and JSON document."""
    from fastload.cli.demo.report import NEEDED, draw_chart, print_report

    document["needed"] = {name: rate for name, rate, _ in NEEDED}
    print_report(document, output.console)
    document["chart"] = str(chart) if draw_chart(document, chart, output.console) else None
    output.document(document)
