"""The result of `fastload demo` as a table and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fastload.metrics.console import Console
from fastload.metrics.units import format_size

# The reference of MoXing's table: (GPUs, images/s of ResNet-50 on them, MB/s at 124 KB an image).
NEEDED = (("8xP100", 1500, 185.49), ("8xV100", 3100, 383.35))
GREY, BLUE, GREEN, INK, FAINT = "#a8b0ba", "#4c8bf5", "#12a150", "#1f2933", "#7b8794"
BAR_HEIGHT = 64
_CONFIG = {
    "font": "Inter, Helvetica Neue, Helvetica, Arial, DejaVu Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {"titleFontWeight": "normal", "labelColor": INK, "titleColor": FAINT, "titleFontSize": 12},
    "axisX": {"labelFontSize": 12, "labelColor": FAINT, "domain": False, "tickColor": "#d9dee4"},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 12, "labelFontSize": 14},
}


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


def chart_png(document: dict[str, Any], needed: Sequence[tuple[str, int, float]]) -> bytes:
    """The document of `fastload demo` as a PNG; `needed`: (GPUs, images/s, MB/s) of the reference lines."""
    import vl_convert

    png: bytes = vl_convert.vegalite_to_png(_specification(document, needed), scale=2)
    return png


def _specification(document: dict[str, Any], needed: Sequence[tuple[str, int, float]]) -> dict[str, Any]:
    """The chart in Vega-Lite."""
    bars = _bars(document)
    lines = [{"images_per_second": rate, "label": f"{name} need {rate:,}"} for name, rate, _ in needed]
    x = _rates(1.12 * max(row["images_per_second"] for row in bars + lines))
    y = _names([bar["name"] for bar in bars])
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": 640,
        "height": BAR_HEIGHT * len(bars),
        "padding": 24,
        "background": "white",
        "title": _title(document),
        "layer": [  # from the back to the front
            _bar_layer(bars, x, y),
            *_line_layers(lines, x),
            *_label_layers(bars, x, y),
        ],
        "config": _CONFIG,
    }


def _rates(top: float) -> dict[str, Any]:
    """The x axis."""
    return {
        "field": "images_per_second",
        "type": "quantitative",
        "scale": {"domain": [0, top], "nice": False},
        "axis": {"title": "images per second", "grid": False, "tickCount": 6, "format": ",d"},
    }


def _names(names: list[str]) -> dict[str, Any]:
    """The y axis."""
    return {
        "field": "name",
        "type": "nominal",
        "sort": names,
        "title": None,
        "axis": {"labelLimit": 260},
        "scale": {"paddingInner": 0.38, "paddingOuter": 0.3},
    }


def _bar_layer(bars: list[dict[str, Any]], x: dict[str, Any], y: dict[str, Any]) -> dict[str, Any]:
    color = {"field": "color", "type": "nominal", "scale": None}
    return {
        "data": {"values": bars},
        "mark": {"type": "bar", "cornerRadiusEnd": 4},
        "encoding": {"x": x, "y": y, "color": color},
    }


def _line_layers(lines: list[dict[str, Any]], x: dict[str, Any]) -> list[dict[str, Any]]:
    """The dashed lines for the needs of GPUs, each with its label above the bars."""
    above = {"y": {"value": -9}, "text": {"field": "label"}}
    return [
        {
            "data": {"values": lines},
            "mark": {"type": "rule", "strokeDash": [5, 4], "color": FAINT, "strokeWidth": 1.2},
            "encoding": {"x": x},
        },
        {
            "data": {"values": lines},
            "mark": {"type": "text", "color": FAINT, "fontSize": 12, "baseline": "bottom"},
            "encoding": {"x": x, **above},
        },
    ]


def _label_layers(bars: list[dict[str, Any]], x: dict[str, Any], y: dict[str, Any]) -> list[dict[str, Any]]:
    """The figure beside each bar, twice: a white edge keeps it readable where a line runs through it."""
    mark = {"type": "text", "align": "left", "dx": 8, "fontSize": 14, "fontWeight": "bold"}
    return [
        {
            "data": {"values": bars},
            "mark": mark | paint,
            "encoding": {"x": x, "y": y, "text": {"field": "label"}},
        }
        for paint in ({"stroke": "white", "strokeWidth": 5}, {"color": INK})
    ]


def _bars(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of data for each loader."""
    first, second = document["fastload"].values()
    ratio = document["ratio"]
    return [
        _bar("torch + s3fs + PIL", document["torch_s3fs"], GREY),
        _bar("fastload, epoch 1 from S3", first, BLUE, ratio["epoch_1"]),
        _bar("fastload, epoch 2 from cache", second, GREEN, ratio["epoch_2"]),
    ]


def _bar(name: str, epoch: dict[str, Any], color: str, ratio: float | None = None) -> dict[str, Any]:
    rate = epoch["images_per_second"]
    label = f"{rate:,.0f}" if ratio is None else f"{rate:,.0f}  ({ratio:.0f}x)"
    return {"name": name, "images_per_second": rate, "label": label, "color": color}


def _title(document: dict[str, Any]) -> dict[str, Any]:
    settings, machine = document["settings"], document["machine"]
    return {
        "text": "JPEGs from an object store to training batches",
        "subtitle": [
            f"{settings['images']:,} photos of {format_size(settings['image_bytes'])}, "
            f"{settings['latency_ms']:g} ms round trip, {settings['workers']} workers; "
            f"decode, RandomResizedCrop {settings['size']}, flip",
            f"{machine['cores']} cores of {machine['cpu']}, S3 server on the same cores; "
            "dashed: the need of ResNet-50",
        ],
        "anchor": "start",
        "frame": "bounds",
        "color": INK,
        "fontSize": 20,
        "subtitleColor": FAINT,
        "subtitleFontSize": 12.5,
        "subtitlePadding": 6,
        "offset": 34,
    }
