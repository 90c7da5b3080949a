"""The result of `fastload demo` as a table and as a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fastload.demo.chart import chart_png
from fastload.metrics.console import Console
from fastload.metrics.units import format_size

__all__ = ["NEEDED", "draw_chart", "print_report"]

# The reference of MoXing's table: (GPUs, images/s of ResNet-50 on them, MB/s at 124 KB an image).
NEEDED = (("8xP100", 1500, 185.49), ("8xV100", 3100, 383.35))


def print_report(document: dict[str, Any], console: Console) -> None:
    """A table in the shape of MoXing's, with sentences below it."""
    settings, machine, baseline = document["settings"], document["machine"], document["torch_s3fs"]
    first, second = document["fastload"].values()
    console.print()
    console.print(
        f"{settings['images']:,} photos of {format_size(settings['image_bytes'])} · "
        f"{settings['workers']} workers · {settings['latency_ms']:g} ms round trip · "
        f"RandomResizedCrop {settings['size']}, flip, uint8",
        style="dim",
        soft_wrap=True,
    )
    console.print(
        f"{machine['cores']} cores of {machine['cpu']}; server and proxy run on the same cores",
        style="dim",
        soft_wrap=True,
    )
    console.print(_table(document))
    console.print(
        f"first batch   torch + s3fs {baseline['first_batch_seconds']:.2f} s · "
        f"epoch 1 {first['first_batch_seconds']:.2f} s · epoch 2 {second['first_batch_seconds']:.2f} s"
    )
    console.print(
        f"GETs seen     epoch 1 {first['gets']:,} for {first['images']:,} images · epoch 2 {second['gets']:,}"
    )
    for name, epoch in (("epoch 1", first), ("epoch 2", second)):
        console.print(f"{name:<13} {epoch['verdict']}", soft_wrap=True)
    console.print("your data     fastload bench s3://bucket/prefix --cache DIR")


def _table(document: dict[str, Any]) -> Table:
    baseline, ratio = document["torch_s3fs"], document["ratio"]
    table = Table(header_style="bold")
    table.add_column("")
    for heading in ("without cache\nimages/s", "(epoch 1)\nMB/s", "with cache\nimages/s", "(epoch 2)\nMB/s"):
        table.add_column(Text(heading), justify="right")
    table.add_row("torch + s3fs + PIL", *_rate(baseline), "–", "–")
    cells = [cell for epoch in document["fastload"].values() for cell in _rate(epoch)]
    table.add_row("fastload", *cells, style="bold green")
    table.add_row("ratio", f"{ratio['epoch_1']:.1f}x", "", f"{ratio['epoch_2']:.1f}x", "", end_section=True)
    for name, images, megabytes in NEEDED:
        table.add_row(f"{name} need (ResNet-50)", *[f"{images:,}", f"{megabytes:.2f}"] * 2, style="dim")
    return table


def _rate(epoch: dict[str, Any]) -> tuple[str, str]:
    return f"{epoch['images_per_second']:,.0f}", f"{epoch['megabytes_per_second']:.2f}"


def draw_chart(document: dict[str, Any], path: Path, console: Console) -> bool:
    """Draw the images/s of each loader as a PNG at `path`; False, with a message, if that fails."""
    try:
        png = chart_png(document, NEEDED)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)
    except ImportError:
        console.print("chart         none: it needs vl-convert-python: pip install 'torch-fastload[demo]'")
    except OSError as error:
        console.print(f"chart         not written to {path}: {error}")
    else:
        console.print(f"chart         {path}")
        return True
    return False
