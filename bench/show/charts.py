"""The charts of `python -m bench report`: PNGs, each in two sets of colours, for light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.show.figures import MAIN, best_other, cases, is_ours, limits_of, median, number, rows_of

Document = dict[str, Any]
Specification = dict[str, Any]

FONT = "Inter, Helvetica Neue, Helvetica, Arial, Liberation Sans, DejaVu Sans, sans-serif"
BAR = 26  # pixels a bar with the gap to the next
NAMES = 190  # pixels for the names at the left
BEST = (
    "fastload",
    "fastload, tar shards",
    "fastload, default cache",
)  # our rows beside the best of the others
WIDTH, HEIGHT, LINE = 580, 380, 17  # of the chart of lines, and of a line of text in it


@dataclass(frozen=True)
class Colours:
    """`ours` is for fastload itself, `kin` for its other forms."""

    ours: str
    kin: str
    others: str
    limit: str
    ink: str
    faint: str
    grid: str
    page: str


THEMES = {
    "light": Colours("#0d9f58", "#7fcfa6", "#b3bbc5", "#d9480f", "#1f2933", "#66717e", "#e7eaee", "#ffffff"),
    "dark": Colours("#2fd07f", "#23784e", "#59626d", "#ff8a50", "#e6edf3", "#9aa4af", "#262d36", "#0d1117"),
}


@dataclass(frozen=True)
class Chart:
    """A chart: its text for readers who cannot see it, a test for its figures, and its drawing."""

    alt: str
    has_data: Callable[[Document], bool]
    specification: Callable[[Document, Colours], Specification]


def file_name(name: str, theme: str) -> str:
    """The name of the PNG: the same for each result, because the project's pages link to it."""
    return f"compare-{name}{'-dark' * (theme == 'dark')}.png"


def draw(document: Document, folder: Path) -> list[Path]:
    """Write the charts whose figures the document has; their paths."""
    return [
        path
        for name, chart in CHARTS.items()
        if chart.has_data(document)
        for path in write_both(partial(chart.specification, document), folder / file_name(name, "light"))
    ]


def write_both(specification: Callable[[Colours], Specification], light: Path) -> list[Path]:
    """Write a chart for light pages, and beside it, with -dark in its name, for dark ones; both paths."""
    import vl_convert

    paths = {"light": light, "dark": light.with_stem(f"{light.stem}-dark")}
    for theme, path in paths.items():
        colours = THEMES[theme]
        png = vl_convert.vegalite_to_png({**specification(colours), **_page(colours)}, scale=2)
        path.write_bytes(_smaller(png))
    return list(paths.values())


def _smaller(png: bytes) -> bytes:
    """The same picture with a palette: a third of the bytes."""
    from PIL import Image

    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(255).save(out, "PNG", optimize=True)
    return out.getvalue()


def _page(colours: Colours) -> Specification:
    """The part that all charts have in common."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "padding": 20,
        "background": colours.page,
        "config": {
            "font": FONT,
            "view": {"stroke": None},
            "axis": {
                "labelColor": colours.faint,
                "titleColor": colours.faint,
                "titleFontWeight": "normal",
                "titleFontSize": 12,
                "labelFontSize": 12,
                "gridColor": colours.grid,
                "domain": False,
                "ticks": False,
            },
            "axisY": {"labelFontSize": 13, "labelColor": colours.ink, "labelPadding": 10},
        },
    }


def _title(document: Document, colours: Colours, text: str, more: str) -> Specification:
    settings, machine = document["settings"], document["machine"]
    work = (
        f"{settings['images']:,} photos of {number(settings['image_bytes'] / 1000)} KB, decoded, cropped to "
    )
    cores = f"{settings['size']}, in batches; {machine['cores']} cores of {machine['cpu']}"
    return headline(text, [f"{work}{cores}, {document['date'][:10]}", more], colours)


def headline(text: str, lines: list[str], colours: Colours) -> Specification:
    """The title of a chart, with `lines` of smaller text below it."""
    return {
        "text": text,
        "subtitle": lines,
        "anchor": "start",
        "frame": "bounds",
        "color": colours.ink,
        "fontSize": 19,
        "subtitleColor": colours.faint,
        "subtitleFontSize": 12.5,
        "subtitlePadding": 7,
        "offset": 26,
    }


def _colour(colours: Colours, contender: str) -> str:
    if not is_ours(contender):
        return colours.others
    return colours.ours if contender == "fastload" else colours.kin


def _bars(
    rows: list[Document], value: Callable[[Document], float | None], colours: Colours
) -> list[Document]:
    """The data of bars: one object a row. A missing figure has no bar, and a dash."""
    return [
        {
            "name": row["contender"],
            "value": value(row) or 0,
            "label": number(value(row)),
            "colour": _colour(colours, row["contender"]),
        }
        for row in rows
    ]


def panel(
    bars: list[Document], heading: str, colours: Colours, width: int, top: float, named: bool
) -> Specification:
    """Bars with their figures under a heading, on a scale that ends at `top`; with or without their names."""
    bold = {
        "condition": {"test": "indexof(datum.value, 'fastload') === 0", "value": "bold"},
        "value": "normal",
    }
    names = {"title": None, "labelLimit": NAMES, "minExtent": NAMES, "labelFontWeight": bold}
    where = {
        "y": {
            "field": "name",
            "type": "nominal",
            "sort": [bar["name"] for bar in bars],
            "scale": {"paddingInner": 0.34, "paddingOuter": 0.2},
            "axis": names if named else None,
        },
        "x": {
            "field": "value",
            "type": "quantitative",
            "scale": {"domain": [0, top], "nice": False},
            "axis": None,
        },
    }
    colour = {"field": "colour", "type": "nominal", "scale": None}
    figure = {"type": "text", "align": "left", "dx": 7, "fontSize": 12.5, "color": colours.ink}
    # An edge in the page's colour keeps a figure readable where the line of a limit runs through it.
    edge = {"stroke": colours.page, "strokeWidth": 4}
    figures = {**where, "text": {"field": "label"}}
    return {
        "width": width,
        "height": {"step": BAR},
        "data": {"values": bars},
        "layer": [
            {"mark": {"type": "bar", "cornerRadiusEnd": 3}, "encoding": {**where, "color": colour}},
            {"mark": {**figure, **edge}, "encoding": figures},
            {"mark": figure, "encoding": figures},
            _heading(heading, colours),
        ],
    }


def _heading(text: str, colours: Colours) -> Specification:
    mark = {"type": "text", "align": "left", "baseline": "bottom", "fontSize": 12, "color": colours.faint}
    return {
        "data": {"values": [{}]},
        "mark": {**mark, "x": 0, "y": -8},
        "encoding": {"text": {"value": text}},
    }


def _rate_panel(
    document: Document, rows: list[Document], heading: str, colours: Colours, width: int
) -> Specification:
    """Images/s as bars, and the limits as dashed lines."""
    limits = limits_of(document, rows)
    highest = max(median(row["rates"]) for row in rows)
    top = max([1.16 * highest, *(1.02 * median(limit["rates"]) for limit in limits)])
    bars = _bars(rows, lambda row: median(row["rates"]), colours)
    drawn = panel(bars, heading, colours, width, top, named=True)
    for i, limit in enumerate(sorted(limits, key=lambda limit: -median(limit["rates"]))):
        name = limit["name"].removesuffix(f", {limit['case']}")
        rate = median(limit["rates"])
        drawn["layer"] += limit_line(f"{name}: {number(rate)}", rate, colours, top, 8 + 17 * i)
    return drawn


def limit_line(label: str, rate: float, colours: Colours, top: float, above: int) -> list[Specification]:
    """A dashed line with its label `above` the bars, on the side of it where there is more room."""
    data = {"values": [{"value": rate, "label": label}]}
    at = {"x": {"field": "value", "type": "quantitative", "axis": None}}
    line = {"type": "rule", "strokeDash": [5, 4], "color": colours.limit, "strokeWidth": 1.4}
    side = {"align": "right", "dx": 4} if rate > top / 2 else {"align": "left", "dx": -4}
    text = {"type": "text", "color": colours.limit, "fontSize": 12, "baseline": "bottom", **side}
    return [
        {"data": data, "mark": line, "encoding": at},
        {"data": data, "mark": {**text, "y": -above}, "encoding": {**at, "text": {"field": "label"}}},
    ]


def _first_epoch(document: Document, colours: Colours) -> Specification:
    """At 20 ms: images/s with the limit, and beside them the costs."""
    rows = rows_of(document, "cold", MAIN)
    panels = [_rate_panel(document, rows, "images per second", colours, 330)]
    costs: dict[str, Callable[[Document], float | None]] = {
        "CPU, s per 1,000 images": lambda row: median(row["cpu_seconds_per_1000"]),
        "memory, MB": lambda row: None if row["pss_bytes"] is None else row["pss_bytes"] / 1e6,
    }
    for heading, value in costs.items():
        bars = _bars(rows, value, colours)
        top = 1.5 * max([bar["value"] for bar in bars] + [1e-9])
        panels.append(panel(bars, heading, colours, 105, top, named=False))
    more = (
        "Images per second: more is better. CPU and memory: less is better. Dashed: the limit of this machine"
    )
    title = _title(document, colours, f"The first epoch, from an S3 server {MAIN} away", more)
    return {"title": title, "hconcat": panels, "spacing": 36}


def _latency(document: Document, colours: Colours) -> Specification:
    """Images/s over the round trip: a line for each contender, with its name at the end."""
    latencies = cases(document, "cold")
    far = rows_of(document, "cold", latencies[-1])
    names = [row["contender"] for row in far]
    points = [
        {
            "name": row["contender"],
            "ms": _milliseconds(row["case"]),
            "rate": median(row["rates"]),
            "colour": _colour(colours, row["contender"]),
            "ours": is_ours(row["contender"]),
        }
        for row in reversed(rows_of(document, "cold"))  # the fastest is drawn last, above the others
        if row["contender"] in names
    ]
    top = 1.06 * max(point["rate"] for point in points)
    ends = [
        (row["contender"], median(row["rates"]), HEIGHT * (1 - median(row["rates"]) / top)) for row in far
    ]
    more = "Images per second of the first epoch; the names with the figures of the longest round trip"
    return {
        "title": _title(document, colours, "The cost of a longer round trip", more),
        "width": WIDTH,
        "height": HEIGHT,
        "layer": [
            *_lines(points, [_milliseconds(case) for case in latencies], top, colours),
            *(_end(name, rate, y, colours) for name, rate, y in _apart(ends)),
        ],
    }


def _milliseconds(case: str) -> int:
    return int(case.removesuffix(" ms"))


def _lines(points: list[Document], ticks: list[int], top: float, colours: Colours) -> list[Specification]:
    x = {
        "field": "ms",
        "type": "quantitative",
        "scale": {"domain": [0, ticks[-1]], "nice": False},
        "axis": {
            "values": ticks,
            "labelFlush": False,
            "grid": False,
            "title": "round trip to the server, ms",
            "titlePadding": 10,
        },
    }
    y = {
        "field": "rate",
        "type": "quantitative",
        "scale": {"domain": [0, top], "nice": False},
        "axis": {
            "title": None,
            "format": ",d",
            "tickCount": 6,
            "labelColor": colours.faint,
            "labelFontSize": 12,
        },
    }
    colour = {"field": "colour", "type": "nominal", "scale": None}
    width = {"condition": {"test": "datum.ours", "value": 3}, "value": 1.6}
    line = {"x": x, "y": y, "color": colour, "detail": {"field": "name"}}
    dot = {"type": "point", "filled": True, "size": 36, "opacity": 1}
    data = {"values": points}
    return [
        {"data": data, "mark": {"type": "line"}, "encoding": {**line, "strokeWidth": width}},
        {"data": data, "mark": dot, "encoding": line},
    ]


def _end(name: str, rate: float, y: float, colours: Colours) -> Specification:
    """The name at the end of a line."""
    ours = {"color": colours.ink, "fontWeight": "bold"} if is_ours(name) else {"color": colours.faint}
    mark = {"type": "text", "align": "left", "fontSize": 12.5, "x": WIDTH + 12, "y": y, **ours}
    text = {"text": {"value": f"{name} {number(rate)}"}}
    return {"data": {"values": [{}]}, "mark": mark, "encoding": text}


def _apart(ends: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """(name, rate, y) with y moved down, or up from the bottom, until no name covers another."""
    ends = sorted(ends, key=lambda end: end[2])
    ys: list[float] = []
    for _, _, y in ends:
        ys.append(max(y, ys[-1] + LINE) if ys else y)
    floor = float(HEIGHT)
    for i in reversed(range(len(ys))):
        ys[i] = min(ys[i], floor)
        floor = ys[i] - LINE
    return [(name, rate, y) for (name, rate, _), y in zip(ends, ys, strict=True)]


def _later(document: Document, colours: Colours) -> Specification:
    """Images/s in each mode, each on a scale of its own."""
    kept = {
        "raw": "the files as they are",
        "dct": "JPEGs without Huffman codes",
        "shrunk": "smaller JPEGs",
        "decoded": "pixels",
    }
    panels = [
        _rate_panel(document, rows_of(document, "later", mode), f"{mode}: {kept[mode]}", colours, 560)
        for mode in cases(document, "later")
    ]
    more = (
        "Images per second, more is better; each group has its own scale. Dashed: the limit of this machine"
    )
    title = _title(document, colours, "Later epochs, from a full cache or the local disk", more)
    return {"title": title, "vconcat": panels, "spacing": 30, "resolve": {"scale": {"x": "independent"}}}


def _best(document: Document, colours: Colours) -> Specification:
    """fastload and the best of the others, a panel for each kind of epoch, each on a scale of its own."""
    panels = []
    for title, section, case in (
        (f"first epoch, from S3 {MAIN} away", "cold", MAIN),
        ("later epochs, cache of the files as they are (raw)", "later", "raw"),
        ("later epochs, cache of JPEGs without Huffman codes (dct)", "later", "dct"),
        ("later epochs, cache of smaller JPEGs (shrunk)", "later", "shrunk"),
        ("later epochs, cache of pixels (decoded)", "later", "decoded"),
    ):
        rows = rows_of(document, section, case)
        best = best_other(rows)
        shown = [row for row in rows if row["contender"] in BEST or row is best]
        if shown:
            panels.append(_rate_panel(document, shown, title, colours, 560))
    more = (
        "Images per second, more is better; each group has its own scale. Dashed: the limit of this machine"
    )
    title = _title(document, colours, "fastload and the best of the others", more)
    return {"title": title, "vconcat": panels, "spacing": 30, "resolve": {"scale": {"x": "independent"}}}


CHARTS = {
    "best": Chart(
        "images per second of fastload and of the best other loader, in first and later epochs",
        lambda document: bool(rows_of(document, "cold", MAIN)),
        _best,
    ),
    "first-epoch": Chart(
        "images per second, CPU and memory of each loader in the first epoch at 20 ms",
        lambda document: bool(rows_of(document, "cold", MAIN)),
        _first_epoch,
    ),
    "latency": Chart(
        "images per second of each loader over the round trip",
        lambda document: len(cases(document, "cold")) > 1,
        _latency,
    ),
    "later-epochs": Chart(
        "images per second of each loader in later epochs",
        lambda document: bool(cases(document, "later")),
        _later,
    ),
}
