"""The chart of `fastload demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastload.checks import format_size

GREY, BLUE, GREEN, INK, FAINT = "#a8b0ba", "#4c8bf5", "#12a150", "#1f2933", "#7b8794"
_CONFIG = {
    "font": "Inter, Helvetica Neue, Helvetica, Arial, DejaVu Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {"titleFontWeight": "normal", "labelColor": INK, "titleColor": FAINT, "titleFontSize": 12},
    "axisX": {"labelFontSize": 12, "labelColor": FAINT, "domain": False, "tickColor": "#d9dee4"},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 12, "labelFontSize": 14},
}
_TITLE = {
    "anchor": "start",
    "frame": "bounds",
    "color": INK,
    "fontSize": 20,
    "subtitleColor": FAINT,
    "subtitleFontSize": 12.5,
    "subtitlePadding": 6,
    "offset": 34,
}


def draw_chart(report: Any, path: Path) -> str:
    """Draw the images/s of each loader in a `DemoReport` as a PNG. Return why there is no chart, or ""."""
    try:
        import vl_convert

        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(vl_convert.vegalite_to_png(_specification(report), scale=2))
    except ImportError:
        return "no chart: it needs vl-convert-python: pip install 'torch-fastload[demo]'"
    except OSError as error:
        return f"no chart: {path} cannot be written: {error}"
    return ""


def _specification(report: Any) -> dict[str, Any]:
    """Return the chart in Vega-Lite."""
    settings, machine, epochs = report.settings, report.machine, report.fastload
    first, second = epochs.epoch_1.images_per_second, epochs.epoch_2.images_per_second
    bars: list[dict[str, Any]] = [
        _bar("torch + s3fs + PIL", report.torch_s3fs.images_per_second, GREY),
        _bar("fastload, epoch 1 from S3", first, BLUE, f"  ({report.ratio.epoch_1:.0f}x)"),
        _bar("fastload, epoch 2 from cache", second, GREEN, f"  ({report.ratio.epoch_2:.0f}x)"),
    ]
    needs: list[dict[str, Any]] = [
        {"images_per_second": rate, "label": f"{name} need {rate:,}"} for name, rate in report.needed.items()
    ]
    top = 1.12 * max(row["images_per_second"] for row in bars + needs)
    x = {
        "field": "images_per_second",
        "type": "quantitative",
        "scale": {"domain": [0, top], "nice": False},
        "axis": {"title": "images per second", "grid": False, "tickCount": 6, "format": ",d"},
    }
    y = {
        "field": "name",
        "type": "nominal",
        "sort": [bar["name"] for bar in bars],
        "title": None,
        "axis": {"labelLimit": 260},
        "scale": {"paddingInner": 0.38, "paddingOuter": 0.3},
    }
    text = {"field": "label"}
    beside = {"type": "text", "align": "left", "dx": 8, "fontSize": 14, "fontWeight": "bold"}
    above = {"type": "text", "color": FAINT, "fontSize": 12, "baseline": "bottom"}
    color = {"field": "color", "type": "nominal", "scale": None}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": 640,
        "height": 64 * len(bars),
        "padding": 24,
        "background": "white",
        "title": _TITLE
        | {
            "text": "JPEGs from an object store to training batches",
            "subtitle": [
                f"{settings.images:,} photos of {format_size(settings.image_bytes)}, "
                f"{settings.latency_ms:g} ms round trip, {settings.num_workers} workers; "
                f"decode, RandomResizedCrop {settings.size}, flip",
                f"{machine.cores} cores of {machine.cpu}, S3 server on the same cores; "
                "dashed: the need of ResNet-50",
            ],
        },
        "layer": [  # from the back to the front
            _layer(bars, {"type": "bar", "cornerRadiusEnd": 4}, x=x, y=y, color=color),
            # dashed lines for the needs of GPUs, each with its label above the bars
            _layer(needs, {"type": "rule", "strokeDash": [5, 4], "color": FAINT, "strokeWidth": 1.2}, x=x),
            _layer(needs, above, x=x, y={"value": -9}, text=text),
            # the figure beside each bar, twice: a white edge keeps it readable above a line
            _layer(bars, beside | {"stroke": "white", "strokeWidth": 5}, x=x, y=y, text=text),
            _layer(bars, beside | {"color": INK}, x=x, y=y, text=text),
        ],
        "config": _CONFIG,
    }


def _layer(rows: list[dict[str, Any]], mark: dict[str, Any], **encoding: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"values": rows}, "mark": mark, "encoding": encoding}


def _bar(name: str, rate: float, color: str, ratio: str = "") -> dict[str, Any]:
    return {"name": name, "images_per_second": rate, "label": f"{rate:,.0f}{ratio}", "color": color}
