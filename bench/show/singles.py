"""The tables of the single subjects, from the documents of their commands (see `bench.measure.parts`).

A command prints its tables. A page shows the one of the whole run, after a mark with its name:

    <!-- measured: start methods -->
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.show.figures import number, table

Document = dict[str, Any]

MARKED = re.compile(r"(<!-- measured: ([\w ]+) -->\n\n)(?:\|.*\n)*")

# Each shape of `bench shapes`: its name on the page, and the loader that its format comes from.
SHAPES = {
    "a folder a class": ("class folders (`ImageFolder`)", "torchvision"),
    "table": ("a CSV table (`TableDataset`)", ""),
    "image and mask": ("a photo and its mask (`TableDataset`)", ""),
    "tar": ("tar (`TarDataset`)", "WebDataset"),
    "Parquet": ("Parquet (`ParquetDataset`)", "HF datasets"),
    "MDS": ("MDS (`MDSDataset`)", "Streaming"),
    "LitData": ("LitData chunks (`LitDataset`)", "LitData"),
    ".beton": ("`.beton` (`BetonDataset`)", "FFCV"),
    "mixture of three": ("a mixture of three (`Mixture`)", ""),
}
STARTED = {
    "fastload": "threads",
    "fastload, processes": "`processes=True`",
    "torch + Pillow": "torch, Pillow",
}
COLUMNS = {
    "arrow": "pyarrow's batches, no tensors, not shuffled",
    "arrow, tensors": "pyarrow's batches as tensors, not shuffled",
    "columns": '`ParquetDataset(batches="columns")`',
    "columns, worker": "the same with one worker, whose start counts",
    "table": '`TableDataset(batches="columns")`',
    "rows": "`ParquetDataset`, as samples",
    "datasets": "Hugging Face's `datasets`, as samples",
    "datasets, batched": "the same, asked for whole batches",
}
PUBLISHED = {
    "alone": "empty",
    "remote": "empty, with `remote=`",
    "pulled": "pulled before the epoch",
    "warm": "full",
}
RANKS = {
    "torch, 2 ahead": "torch's loader, `prefetch_factor=2`",
    "2 ahead": "fastload, `prefetch_factor=2`",
    "8 ahead": "fastload, `prefetch_factor=8`",
    "auto": 'fastload, `num_workers="auto"`',
}
WRAPPERS = {
    "ImageFolder": "`ImageFolder`",
    "ConcatDataset of two halves": "`ConcatDataset` of two halves",
    "StackDataset with labels": "`StackDataset` with labels",
    "fastload.map": "`fastload.map`",
    "wrapper with prefetch": "a wrapper with `prefetch`",
    "wrapper": "the same without it",
    "wrapper, threads=16": "without it, `threads=16`",
    "wrapper, threads=16, seed=1": "the same, `seed=1`",
}
MOXING_2018 = {"bytes": (619.64, 863.76), "images": (375.15, 402.57), "tfrecord": (139.06, 683.51)}  # MB/s
MOXING_MODES = {"bytes": "raw", "images": "decoded", "tfrecord": "decoded"}  # of the cache, as MoXing's was


def _median(rates: Sequence[float]) -> str:
    return number(statistics.median(rates))


def shapes(document: Document) -> str:
    rows = {(row["shape"], row["epoch"]): row["rates"] for row in document["rows"]}
    lines = []
    for shape, (name, loader) in SHAPES.items():
        cells = [name]
        for epoch in ("first", "later"):
            rates = rows.get((shape, epoch), {})
            cells.append(_median(rates["ours"]) if rates else "–")
            cells.append(f"{_median(rates['theirs'])} ({loader})" if "theirs" in rates else "–")
        if (shape, "first") in rows:
            lines.append(cells)
    return table(("layout", "first epoch", "its own loader", "later epochs", "its own loader"), lines)


def first_epochs(document: Document) -> str:
    lines = [
        [
            f"{STARTED[row['side']]}, {row['workers']} workers",
            *(number(row[name]) for name in ("first", "rate", "memory")),
            f"{row['connections']:.0f}",
        ]
        for row in document["rows"]
        if row["connections"]
    ]
    return table(("first epoch", "first batch, s", "images/s", "memory, MB", "connections"), lines)


def start_methods(document: Document) -> str:
    lines = [
        [f"{STARTED[row['side']]}, {row['context']}", number(row["first"]), number(row["memory"])]
        for row in document["rows"]
        if not row["connections"]
    ]
    return table(("start of an epoch", "first batch, s", "memory, MB"), lines)


def columns(document: Document) -> str:
    lines = [
        [COLUMNS[row["side"]], f"{row['batch']:,}", number(row["rows_per_cpu_second"] / 1000)]
        for row in document["results"]
    ]
    return table(("", "batch", "thousands of rows per second of CPU"), lines)


def ranges(document: Document) -> str:
    lines = [
        [name, _median(rates), f"{document['requests'].get(name, document['parts']):,}"]
        for name, rates in document["rates"].items()
    ]
    return table(("", "parts/s", "requests"), lines)


def fuse(document: Document) -> str:
    rows = {
        (row["steps"], row["what"]): (number(row["plain"]), number(row["fused"])) for row in document["rows"]
    }
    lines = [
        [steps, *rows[steps, "images/s"], *rows[steps, "CPU ms an image"]]
        for steps in dict.fromkeys(steps for steps, _ in rows)
    ]
    headings = (
        "steps",
        "plain, images/s",
        "fused, images/s",
        "plain, CPU ms an image",
        "fused, CPU ms an image",
    )
    return table(headings, lines)


def published(document: Document) -> str:
    lines = [
        [
            PUBLISHED.get(name, name),
            *(number(found[key]) for key in ("with_wait", "wait", "rate")),
            f"{found['requests']:,.0f}",
        ]
        for name, found in document["medians"].items()
    ]
    return table(("cache", "images/s", "first batch, s", "images/s after it", "requests"), lines)


def ranks(document: Document) -> str:
    lines = [
        [
            RANKS[row["contender"]],
            number(row["p50_ms"]),
            number(row["p99_ms"]),
            f"{100 * row['not_waiting']:.0f} %",
        ]
        for row in document["rows"]
    ]
    return table(("", "p50, ms", "p99, ms", "the job does not wait"), lines)


def wrappers(document: Document) -> str:
    lines = [[WRAPPERS[name], number(rate)] for name, rate in document["rates"].items()]
    return table(("first epoch", "images/s"), lines)


def moxing(document: Document) -> str:
    megabytes = document["megabytes"]
    lines = [
        [
            kind,
            mode,
            *(number(megabytes[f"{kind}, {which}"]) for which in ("without", mode)),
            *(str(rate) for rate in MOXING_2018[kind]),
        ]
        for kind, mode in MOXING_MODES.items()
    ]
    headings = ("MB/s", "mode", "without cache", "with cache", "MoXing 2018, without", "with")
    return table(headings, lines, texts=2)


def dlio(document: Document) -> str:
    lines = [
        [
            name.removeprefix("s3, "),
            *(number(statistics.median(epochs[field])) for field in ("au", "rate", "cores")),
        ]
        for name, epochs in document["epochs"].items()
    ]
    return table(("loader", "AU", "images/s", "cores"), lines)


# Each table by the name in its mark on a page: the command that measures it, and what makes it.
TABLES: dict[str, tuple[str, Callable[[Document], str]]] = {
    "shapes": ("shapes", shapes),
    "first epochs": ("starts", first_epochs),
    "start methods": ("starts", start_methods),
    "columns": ("columns", columns),
    "ranges": ("ranges", ranges),
    "fuse": ("fuse", fuse),
    "published": ("published", published),
    "ranks": ("ranks", ranks),
    "wrappers": ("wrappers", wrappers),
    "moxing": ("moxing", moxing),
    "dlio": ("dlio", dlio),
}


def filled(page: str, documents: Mapping[str, Document]) -> str:
    """The page with today's tables after its marks; `documents` has those of the commands, by their names."""

    def fill(mark: re.Match[str]) -> str:
        bench, make = TABLES[mark[2]]
        return f"{mark[1]}{make(documents[bench])}\n"

    return MARKED.sub(fill, page)


def tables(document: Document) -> str:
    """All tables of the document of one command, in Markdown."""
    return "\n\n".join(make(document) for bench, make in TABLES.values() if bench == document["bench"])
