"""`fastload demo`: photos, an S3 server behind a round trip, and the rate of each loader on this machine.

    make photos ─▶ serve_s3 ─▶ delay_proxy ─▶ torch + s3fs (a sample) ─▶ fastload epoch 1 ─▶ fastload epoch 2

Everything is bounded in time, and the server and the proxy end with the command.
"""

from __future__ import annotations

import io
import math
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from fastload.checks import format_size
from fastload.cli.bench import measure_epoch
from fastload.cli.report import Bars, Lines, MeasuredEpoch, MeasuredReport, Output, dimmed, figures
from fastload.errors import ArgumentError

BATCH_SIZE = 64
SIZE = 224
CLASSES = 20
BASELINE_SECONDS = 20.0
MARKER = "made-by-fastload-demo"


# The reference of MoXing's table: (GPUs, images/s of ResNet-50 on them, MB/s at 124 KB per image).
NEEDED = (("8xP100", 1500, 185.49), ("8xV100", 3100, 383.35))


@dataclass(kw_only=True)
class Settings:
    """What was measured."""

    images: int
    num_workers: int
    latency_ms: float
    image_bytes: Annotated[int, "mean size of a photo"] = 0
    batch_size: Annotated[int, "photos of a batch"] = BATCH_SIZE
    size: Annotated[int, "pixels of each side of the crop"] = SIZE


@dataclass(kw_only=True)
class ServedEpoch(MeasuredEpoch):
    """An epoch, and what the server saw of it."""

    gets: Annotated[int, "requests for objects that reached the server"]


@dataclass(kw_only=True)
class Epochs:
    epoch_1: ServedEpoch
    epoch_2: ServedEpoch


@dataclass(kw_only=True)
class Ratio:
    """fastload's images/s over those of torch + s3fs."""

    epoch_1: Annotated[float, "fastload's images/s in epoch 1 over those of torch + s3fs"]
    epoch_2: Annotated[float, "the same of epoch 2"]


@dataclass(kw_only=True)
class DemoReport(MeasuredReport):
    """The rates of both loaders."""

    command = "demo"
    settings: Settings
    torch_s3fs: Annotated[ServedEpoch, "of torch + s3fs, where `counters` and `verdict` are null"]
    fastload: Epochs
    ratio: Ratio
    needed: Annotated[dict[str, int], "images/s that MoXing's table of 2018 names for eight GPUs"]
    chart: Annotated[Path | None, "the path of the chart, or null"] = None

    def text(self) -> Lines:
        """Yield a table in the shape of MoXing's, with sentences below it."""
        settings, machine = self.settings, self.machine
        first, second = self.fastload.epoch_1, self.fastload.epoch_2
        yield ""
        yield dimmed(
            f"{settings.images:,} photos of {format_size(settings.image_bytes)} · {settings.num_workers} "
            f"workers · {settings.latency_ms:g} ms round trip · RandomResizedCrop {settings.size}, flip, "
            "uint8"
        )
        yield dimmed(f"{machine.cores} cores of {machine.cpu}; server and proxy run on the same cores")
        yield self._table()
        yield (
            f"first batch   torch + s3fs {self.torch_s3fs.first_batch_seconds:.2f} s · "
            f"epoch 1 {first.first_batch_seconds:.2f} s · epoch 2 {second.first_batch_seconds:.2f} s"
        )
        yield f"GETs seen     epoch 1 {first.gets:,} for {first.images:,} images · epoch 2 {second.gets:,}"
        for name, epoch in (("epoch 1", first), ("epoch 2", second)):
            yield f"{name:<13} {epoch.verdict}"
        if self.chart is not None:
            yield f"chart         {self.chart}"
        yield "your data     fastload bench s3://bucket/prefix --cache DIR"

    def _table(self) -> Table:
        epochs, ratio = self.fastload, self.ratio
        heads = [
            Text(f"{epoch}\n{unit}")
            for epoch in ("epoch 1, from S3", "epoch 2, from the cache")
            for unit in ("images/s", "MB/s")
        ]
        table = figures("", *heads)
        table.add_row("torch + s3fs + PIL", *_rate(self.torch_s3fs), "–", "–")
        table.add_row("fastload", *_rate(epochs.epoch_1), *_rate(epochs.epoch_2), style="bold green")
        table.add_row("ratio", f"{ratio.epoch_1:.1f}x", "", f"{ratio.epoch_2:.1f}x", "", end_section=True)
        for name, images, megabytes in NEEDED:
            table.add_row(f"{name} need (ResNet-50)", *[f"{images:,}", f"{megabytes:.2f}"] * 2, style="dim")
        return table


def _rate(epoch: MeasuredEpoch) -> tuple[str, str]:
    return f"{epoch.images_per_second:,.0f}", f"{epoch.megabytes_per_second:.2f}"


class Bucket(NamedTuple):
    """The photos, and the access to them."""

    name: str
    photos: Path
    image_bytes: float
    proxy: Any
    credentials: dict[str, str]


def demo(
    output: Output,
    images: Annotated[int, typer.Option(metavar="N", min=1, help="Number of photos.")] = 2000,
    num_workers: Annotated[int, typer.Option(metavar="N", min=1, help="Workers of each loader.")] = 2,
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
) -> DemoReport:
    """Compare fastload with torch + s3fs on this machine, over a real S3 server behind a round trip."""
    from fastload.cli.demo.chart import draw_chart

    _need_packages()
    settings = Settings(images=images, num_workers=num_workers, latency_ms=latency_ms)
    with (
        _workspace(directory, keep) as workspace,
        Bars(output.console) as bars,
        _bucket(workspace / "s3", settings, bars) as bucket,
    ):
        report = _measure(bucket, settings, workspace / "cache", bars)
    report.chart = chart or directory / "demo.png"
    if why_not := draw_chart(report, report.chart):
        report.chart = None
        output.console.print(why_not, soft_wrap=True)
    return report


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
    """Make a folder in `directory`, deleted at the end unless `keep`."""
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
    """Serve photos behind an S3 server behind a round trip."""
    from fastload.cli.demo.photos import make_dataset
    from fastload.cli.demo.s3_server import delay_proxy, serve_s3

    name = f"photos-{settings.images}"
    bar = bars.add("making photos", settings.images)
    total_bytes = make_dataset(root / name, settings.images, CLASSES, lambda done, _: bar.update(done))
    with serve_s3(root) as server, delay_proxy(server.endpoint_url, settings.latency_ms / 1000) as proxy:
        credentials = {"key": server.key, "secret": server.secret}
        yield Bucket(name, root / name, total_bytes / settings.images, proxy, credentials)


def _measure(bucket: Bucket, settings: Settings, cache: Path, bars: Bars) -> DemoReport:
    """Run the loaders, one after the other."""
    torch_s3fs = _torch_s3fs(bucket, settings, bars)
    first, second = _fastload(bucket, settings, cache, bars)
    settings.image_bytes = round(bucket.image_bytes)
    baseline = torch_s3fs.images_per_second
    return DemoReport(
        settings=settings,
        torch_s3fs=torch_s3fs,
        fastload=Epochs(epoch_1=first, epoch_2=second),
        ratio=Ratio(
            epoch_1=round(first.images_per_second / baseline, 2),
            epoch_2=round(second.images_per_second / baseline, 2),
        ),
        needed={name: rate for name, rate, _ in NEEDED},
    )


def _torch_s3fs(bucket: Bucket, settings: Settings, bars: Bars) -> ServedEpoch:
    """Measure torch's DataLoader over s3fs, on a random sample, because all photos would take minutes."""
    import torch

    # It gets the keys, and need not list. Each worker has at least two batches, and all batches are full.
    paths = sorted(bucket.photos.glob("*/*.jpg"))
    paths = random.Random(0).sample(
        paths, min(settings.images, max(4, 2 * settings.num_workers) * BATCH_SIZE)
    )
    dataset: Any = S3fsImages(
        [f"{bucket.name}/{path.parent.name}/{path.name}" for path in paths],
        [int(path.parent.name.removeprefix("class_")) for path in paths],
        SIZE,
        **bucket.credentials,
        endpoint_url=bucket.proxy.url,
    )
    loader = torch.utils.data.DataLoader(dataset, BATCH_SIZE, num_workers=settings.num_workers)
    bar = bars.add("torch + s3fs, a sample", len(paths))
    return _timed(loader, bucket, bar.update, BASELINE_SECONDS)


def _fastload(bucket: Bucket, settings: Settings, cache: Path, bars: Bars) -> list[ServedEpoch]:
    """Measure fastload: epoch 1 from the store, filling the cache, and epoch 2 from the cache."""
    import fastload

    dataset = fastload.ImageFolder(
        f"s3://{bucket.name}/",
        fastload.RandomResizedCrop(SIZE, flip=0.5),
        cache=fastload.Cache(cache),
        storage_options={**bucket.credentials, "endpoint_url": bucket.proxy.url},
    )
    loader = fastload.DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=settings.num_workers)
    epochs = []
    for number, source in ((1, "from the store"), (2, "from the cache")):
        bar = bars.add(f"fastload epoch {number}, {source}", settings.images)
        epochs.append(_timed(loader, bucket, bar.update))
    return epochs


def _timed(
    loader: Iterable[Any], bucket: Bucket, progress: Any, seconds: float = float("inf")
) -> ServedEpoch:
    """Time one epoch, and count the GETs at the server during it."""
    before = bucket.proxy.counts().object_gets
    epoch = measure_epoch(loader, progress, image_bytes=bucket.image_bytes, seconds_at_most=seconds)
    return ServedEpoch(**vars(epoch), gets=bucket.proxy.counts().object_gets - before)


class S3fsImages:
    """(image, label) of `keys`, each "bucket/class/name", for torch's DataLoader, as users of s3fs write it.

    The work is the same as fastload's: GET, decode, RandomResizedCrop to 224 x 224, flip, uint8 CHW.

    Each worker makes its client at its first sample: a client from before the fork would hang.
    """

    def __init__(self, keys: Sequence[str], labels: Sequence[int], size: int, **s3fs_options: Any) -> None:
        self.keys = keys
        self.labels = labels
        self.size = size
        self._options = s3fs_options
        self._client: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import numpy as np
        import torch
        from PIL import Image

        if self._client is None:
            from s3fs import S3FileSystem

            self._client = S3FileSystem(**self._options)
        encoded = self._client.cat_file(self.keys[index])
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        left, top, width, height = _random_crop(*image.size)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image).transpose(2, 0, 1).copy()), self.labels[index]


def _random_crop(width: int, height: int) -> tuple[int, int, int, int]:
    """Draw (left, top, width, height) by torchvision's rule: 8 to 100 % of the area, ratio 3/4 to 4/3."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side
