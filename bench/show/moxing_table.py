"""The table and the chart of `python -m bench moxing`, from its document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.show.charts import Colours, Specification, headline, limit_line, panel, write_both
from bench.show.figures import number, table

Document = dict[str, Any]

MOXING = {"bytes": (619.64, 863.76), "images": (375.15, 402.57), "tfrecord": (139.06, 683.51)}  # MB/s
# Images/s that accelerators take: MoXing's two of 2018, for ResNet-50, and MLPerf Storage's emulated ones.
DEMANDS = {"8xP100": 1500, "8xV100 FP16": 3100, "H100": 1785.7, "B200": 505}
# The rows: (kind, mode of the cache). The first of a kind has MoXing's meaning.
ROWS = (
    ("bytes", "raw"),
    ("images", "decoded"),
    ("images", "raw"),
    ("tfrecord", "decoded"),
    ("tfrecord", "raw"),
)


def headings() -> list[str]:
    demands = [f"{name} takes {rate:,g}/s" for name, rate in DEMANDS.items()]
    return ["", "cache", "without cache", "with cache", "MoXing 2018, without", "with", *demands]


def cells(document: Document) -> list[list[str]]:
    """The table's rows; a repeated figure is left out."""
    lines = []
    for i, (kind, mode) in enumerate(ROWS):
        first = all(kind != other for other, _ in ROWS[:i])
        without, cached = f"{kind}, without", f"{kind}, {mode}"
        theirs = [f"{rate:,.2f} MB/s" for rate in MOXING[kind]] if first else ["", ""]
        met = [_shares(document, (without, cached), rate) for rate in DEMANDS.values()]
        ours = [_rate(document, without) if first else "", _rate(document, cached)]
        lines.append([kind, mode, *ours, *theirs, *met])
    return lines


def _rate(document: Document, name: str) -> str:
    return f"{number(document['megabytes'][name])} MB/s, {number(document['rates'][name])}/s"


def _shares(document: Document, names: Sequence[str], demand: float) -> str:
    """The rates as multiples of a demand, without and with the cache."""
    return " / ".join(f"{document['rates'][name] / demand:.2f}x" for name in names)


def footnotes(document: Document) -> list[str]:
    size, pixels = document["image_bytes"] / 1000, document["pixel_bytes"] / 1000
    machine = document["machine"]
    return [
        f"MB are the encoded bytes of the images, in every row: images/s times {number(size)} KB, the mean "
        f"of the photos. The decoded cache keeps {number(pixels)} KB of pixels for each.",
        "bytes: whole objects, not decoded. images: one JPEG an object; tfrecord: the same JPEGs as records "
        "of tf.train.Example. Both are decoded and cropped (RandomResizedCrop 224, flip) in batches of 64, "
        "with and without a cache. The decoded cache holds whole photos as pixels, as MoXing's did; raw "
        "holds the encoded bytes.",
        "x: this machine's samples/s as a multiple of the demand, without / with the cache of the row.",
        "8xP100 and 8xV100 FP16: ResNet-50, as MoXing's table has them (185.49 and 383.35 MB/s at 124 KB an "
        "image). H100: one, as MLPerf Storage emulates it for ResNet-50 (batches of 400 in 0.224 s). B200: "
        "one, as MLPerf Storage v3 emulates it for RetinaNet (24 in 0.04755 s); its JPEGs have 323 KB.",
        "MoXing 2018: 3,671 photos of 222 MB, 64 processes, a file cache on SSD, a separate server; ours: "
        f"{document['workers']} workers on {machine['cores']} cores, {machine['cpu']}, with the S3 "
        f"server {document['round_trip_ms']:g} ms away on the same cores.",
    ]


def markdown(document: Document) -> str:
    notes = "\n".join(f"* {note}" for note in footnotes(document))
    return table(headings(), cells(document), texts=2) + f"\n\n{caption(document)}\n\n{notes}"


def caption(document: Document) -> str:
    megabytes = document["images"] * document["image_bytes"] / 1e6
    turns = len(next(iter(document["all_rates"].values())))
    quick = " --quick" if document["quick"] else ""
    load = f"load {document['load_before'][0]:.1f} before, {document['load_after'][0]:.1f} after"
    return (
        f"`python -m bench moxing{quick}`, {document['date'][:10]}: {document['images']:,} photos, "
        f"{number(megabytes)} MB, medians of {turns} turns; {load}."
    )


# --- the chart


def draw(document: Document, light: Path) -> list[Path]:
    """Write the chart of decoded images/s, for light and dark pages; the paths."""
    return write_both(lambda colours: _specification(document, colours), light)


def _specification(document: Document, colours: Colours) -> Specification:
    shades = {"without": colours.others, "raw": colours.kin, "decoded": colours.ours}
    bars = [
        {
            "name": f"{kind}, {'no' if mode == 'without' else mode} cache",
            "value": document["rates"][f"{kind}, {mode}"],
            "label": number(document["rates"][f"{kind}, {mode}"]),
            "colour": shade,
        }
        for kind in ("images", "tfrecord")
        for mode, shade in shades.items()
    ]
    top = 1.16 * max([bar["value"] for bar in bars] + list(DEMANDS.values()))
    drawn = panel(bars, "", colours, 560, top, named=True)
    for i, (name, rate) in enumerate(sorted(DEMANDS.items(), key=lambda demand: -demand[1])):
        line = limit_line(f"{name} takes {rate:,.0f}", rate, colours, top, 8 + 17 * i)
        drawn["layer"][1:1] = line  # behind the figures
    machine, size = document["machine"], number(document["image_bytes"] / 1000)
    lines = [
        f"{document['images']:,} photos of {size} KB, decoded, cropped to 224; {machine['cores']} cores of "
        f"{machine['cpu']}, S3 server {document['round_trip_ms']:g} ms away",
        "Images per second, more is better. Dashed: what accelerators take",
    ]
    return {"title": headline("MoXing's table: images and TFRecord, decoded", lines, colours), **drawn}
