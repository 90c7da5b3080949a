"""The table and the chart of `python -m bench scaling`, from its document."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.show.charts import Colours, Specification, headline, write_both
from bench.show.figures import number, table

Document = dict[str, Any]
Row = dict[str, Any]

HEADINGS = ("node", "GPUs", "batch/s", "batch size", "FPS", "speedup", "dist_speedup", "utilisation", "limit")
WIDTH, HEIGHT = 520, 340


def speedups(rows: Sequence[Row], node: int) -> list[Row]:
    """The rows with MoXing's columns node, speedup and dist_speedup; a row of 1 and one of `node` are there.

    Args:
        rows: with "GPUs" and "FPS".
        node: GPUs of a full node. The rows of less have no dist_speedup.
    """
    one = next(row["FPS"] for row in rows if row["GPUs"] == 1)
    shares = {row["GPUs"]: row["FPS"] / (row["GPUs"] * one) for row in rows}
    return [
        {
            "node": -(-row["GPUs"] // node),
            **row,
            "speedup": round(shares[row["GPUs"]], 4),
            "dist_speedup": round(shares[row["GPUs"]] / shares[node], 4) if row["GPUs"] >= node else None,
        }
        for row in rows
    ]


def markdown(document: Document) -> str:
    lines = [[_cell(name, row[name]) for name in HEADINGS] for row in document["rows"]]
    return f"{table(HEADINGS, lines, texts=0)}\n\n{caption(document)}"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name == "limit":
        return str(value).split(":")[0]
    if name == "utilisation":
        return f"{value:.1%}"
    return f"{value:.4f}" if name.endswith("speedup") else f"{value:,g}"


def caption(document: Document) -> str:
    machine = document["machine"]
    load = f"load {document['load_before'][0]:.1f} before, {document['load_after'][0]:.1f} after"
    return (
        f"`{command(document)}`, {document['date'][:10]}: "
        f"{_work(document)}, {machine['cores']} cores of {machine['cpu']}; {load}."
    )


def command(document: Document) -> str:
    """The command that repeats the measurement, with the options for the trainer at its end."""
    given = {
        "ranks": ",".join(str(row["GPUs"]) for row in document["rows"]),
        "node": document["node"],
        "rate": f"{document['device_rate'] or 0:g}",
        "images": document["images"],
        "epochs": document["epochs"],
        "batch-size": document["batch_size"],
        "workers": document["workers"],
    }
    words = ["python", "-m", "bench", "scaling"]
    words += [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return shlex.join([*words, *document["options"]])


def _work(document: Document) -> str:
    rate = document["device_rate"]
    device = f"a simulated device of {rate:,g} images/s" if rate else "its own device"
    return f"{document['images']:,} photos, each rank with {device}; workers of a rank: {document['workers']}"


# --- the chart


def draw(document: Document, light: Path) -> list[Path]:
    """Write the chart of throughput over GPUs with the ideal line, for light and dark pages; the paths."""
    return write_both(lambda colours: _specification(document, colours), light)


def _specification(document: Document, colours: Colours) -> Specification:
    rows = document["rows"]
    one = next(row["FPS"] for row in rows if row["GPUs"] == 1)
    most = max(row["GPUs"] for row in rows)
    points = [
        {"GPUs": row["GPUs"], "FPS": row["FPS"], "label": f"{number(row['FPS'])} ({row['speedup']:.1%})"}
        for row in rows
    ]
    ideal = [{"GPUs": 0, "FPS": 0}, {"GPUs": most, "FPS": most * one}]
    x = {
        "field": "GPUs",
        "type": "quantitative",
        "scale": {"domain": [0, most * 1.2], "nice": False},
        "axis": {"values": [row["GPUs"] for row in rows], "format": "d", "grid": False, "title": "GPUs"},
    }
    y = {"field": "FPS", "type": "quantitative", "axis": {"title": None, "format": ",d", "tickCount": 6}}
    at = {"x": x, "y": y}
    label = {"type": "text", "align": "left", "dx": 9, "dy": 12, "fontSize": 12.5, "color": colours.ink}
    dashed = {"type": "line", "strokeDash": [5, 4], "color": colours.limit, "strokeWidth": 1.4}
    name = {"type": "text", "align": "right", "dx": -8, "dy": -6, "fontSize": 12, "color": colours.limit}
    layer = [
        {"data": {"values": ideal}, "mark": dashed, "encoding": at},
        {"data": {"values": ideal[1:]}, "mark": name, "encoding": {**at, "text": {"value": "ideal"}}},
        {
            "data": {"values": points},
            "mark": {"type": "line", "color": colours.ours, "strokeWidth": 3, "point": {"size": 60}},
            "encoding": {**at, "color": {"value": colours.ours}},
        },
        {"data": {"values": points}, "mark": label, "encoding": {**at, "text": {"field": "label"}}},
    ]
    machine = document["machine"]
    lines = [
        f"{_work(document)}; {machine['cores']} cores of {machine['cpu']}",
        "Images per second, and in brackets the share of N times one GPU. Dashed: N times one GPU",
    ]
    title = headline("Throughput over GPUs", lines, colours)
    return {"title": title, "width": WIDTH, "height": HEIGHT, "layer": layer}
