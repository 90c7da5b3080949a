"""The chart of `fastload demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastload.checks import format_size

GREY, BLUE, GREEN, INK, FAINT = "#a8b0ba", "#4c8bf5", "#12a150", "#1f2933", "#7b8794"
BAR_HEIGHT = 64
_CONFIG = {
    "font": "Inter, Helvetica Neue, Helvetica, Arial, DejaVu Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {"titleFontWeight": "normal", "labelColor": INK, "titleColor": FAINT, "titleFontSize": 12},
    "axisX": {"labelFontSize": 12, "labelColor": FAINT, "domain": False, "tickColor": "#d9dee4"},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 12, "labelFontSize": 14},
}


def draw_chart(document: dict[str, Any], path: Path) -> str:
    """Draw the images/s of each loader as a PNG at `path`. Return why there is no chart, or ""."""
    try:
        png = chart_png(document)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)
    except ImportError:
        return "no chart: it needs vl-convert-python: pip install 'torch-fastload[demo]'"
    except OSError as error:
        return f"no chart: {path} cannot be written: {error}"
    return ""


def chart_png(document: dict[str, Any]) -> bytes:
    """Return the document of `fastload demo` as a PNG."""
    import vl_convert

    png: bytes = vl_convert.vegalite_to_png(_specification(document), scale=2)
    return png


def _specification(document: dict[str, Any]) -> dict[str, Any]:
    """Return the chart in Vega-Lite."""
    bars = _bars(document)
    lines = [
        {"images_per_second": rate, "label": f"{name} need {rate:,}"}
        for name, rate in document["needed"].items()
    ]
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
    """Return the x axis."""
    return {
        "field": "images_per_second",
        "type": "quantitative",
        "scale": {"domain": [0, top], "nice": False},
        "axis": {"title": "images per second", "grid": False, "tickCount": 6, "format": ",d"},
    }


def _names(names: list[str]) -> dict[str, Any]:
    """Return the y axis."""
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
    """Draw dashed lines for the needs of GPUs, each with its label above the bars."""
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
    """Write the figure beside each bar, twice: a white edge keeps it readable above a line."""
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
    """Return a row of data for each loader."""
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
            f"{settings['latency_ms']:g} ms round trip, {settings['num_workers']} workers; "
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
