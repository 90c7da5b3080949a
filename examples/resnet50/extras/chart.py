"""The report of a run as a chart, and for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["Board", "chart", "draw"]


class Board:
    """Writes the line of each epoch for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SystemExit(
                "--tensorboard needs the package tensorboard: pip install tensorboard, or omit the option"
            ) from error
        self._writer = SummaryWriter(str(directory / "tensorboard"))

    def __call__(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name.replace(" ", "_"), value, line["epoch"])
        self._writer.flush()


def draw(epochs: list[dict[str, Any]], path: Path) -> str:
    """Write the chart, where the package that draws it is installed; returns what was done."""
    try:
        import vl_convert
    except ImportError:
        return "no chart: it needs vl-convert-python; type: pip install 'torch-fastload[demo]'"
    path.write_bytes(vl_convert.vegalite_to_png(chart(epochs), scale=2))
    return f"chart: {path}"


def chart(epochs: list[dict[str, Any]]) -> dict[str, Any]:
    """The chart in Vega-Lite: images/s under their ceiling, and the accuracy."""
    x = {"field": "epoch", "type": "ordinal", "axis": {"labelAngle": 0, "title": "epoch"}}
    known = [line for line in epochs if "ceiling per GPU" in line]
    ceiling = [{"epoch": line["epoch"], "rate": line["ceiling per GPU"] * line["GPUs"]} for line in known]
    rates = {
        "width": 420,
        "height": 240,
        "title": "images/s (line: the ceiling, without a loader)",
        "layer": [
            {
                "data": {"values": [{"epoch": line["epoch"], "rate": line["FPS"]} for line in epochs]},
                "mark": {"type": "bar", "color": "#4c8bf5", "cornerRadiusEnd": 3},
                "encoding": {"x": x, "y": {"field": "rate", "type": "quantitative", "title": None}},
            },
            {
                "data": {"values": ceiling},
                "mark": {"type": "line", "color": "#7b8794", "strokeDash": [5, 4], "point": True},
                "encoding": {"x": x, "y": {"field": "rate", "type": "quantitative", "title": None}},
            },
        ],
    }
    measured = [line for line in epochs if line.get("accuracy") is not None]
    accuracy = {
        "width": 420,
        "height": 240,
        "title": "accuracy",
        "data": {"values": [{"epoch": line["epoch"], "accuracy": line["accuracy"]} for line in measured]},
        "mark": {"type": "line", "color": "#12a150", "point": True},
        "encoding": {
            "x": x,
            "y": {"field": "accuracy", "type": "quantitative", "scale": {"domain": [0, 1]}, "title": None},
        },
    }
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "background": "white",
        "padding": 20,
        "hconcat": [rates, accuracy] if measured else [rates],
    }
