"""The README's table and chart from the result of `python -m bench compare`: the best of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.data import RESULTS, ROOT
from bench.show import charts
from bench.show.figures import BUSY, MAIN, best_other, find, is_ours, median, number, rows_of, table
from fastload.errors import DOCS

# PyPI shows the README too, so its links are absolute. Its pictures are not: every checkout shows them.
SOURCE = "https://github.com/torch-fastload/torch-fastload/blob/main/"
RAW = "https://raw.githubusercontent.com/torch-fastload/torch-fastload/main/"  # PyPI shows the README too
PAGE, PICTURES = f"{DOCS}benchmarks.html", f"{RAW}{RESULTS.relative_to(ROOT)}"
# What most readers use now: the first of these that a section has.
TORCH = ("torch + boto3", "torch + s3fs", "torchvision ImageFolder")
# (section, case, contender, what it does)
ROWS = (
    ("cold", MAIN, "fastload", "first epoch from S3, one photo per object, no cache"),
    ("cold", MAIN, "fastload, default cache", "the same, filling the default cache, with the listing"),
    ("load", f"first epoch{BUSY}", "fastload, default cache", "the same, default cache, one core kept busy"),
    ("cold", MAIN, "fastload, tar shards", "first epoch from S3, tar shards (torch: photos), no cache"),
    ("later", "raw", "fastload, default cache", "later epochs, from the default cache"),
    ("later", "decoded", "fastload", "later epochs, a cache of pixels (`decoded`)"),
)

Document = dict[str, Any]


def markdown(document: Document) -> str:
    """The README's text about the result, between its marks."""
    return "\n\n".join([*_picture(document), _table(document), _caption(document)])


def _picture(document: Document) -> list[str]:
    """The chart, in the colours of the reader's page."""
    chart = charts.CHARTS["best"]
    if not chart.has_data(document):
        return []
    light, dark = (f"{PICTURES}/{charts.file_name('best', theme)}" for theme in ("light", "dark"))
    return [
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'  <img alt="{chart.alt}" src="{light}">\n'
        "</picture>"
    ]


def _lines(document: Document) -> list[tuple[str, Document | None, Document, Document]]:
    """(words, torch's row, the best row of the others, our row) for each kind of epoch."""
    found = []
    for section, case, name, words in ROWS:
        rows = rows_of(document, section, case)
        ours, best = find(rows, name), best_other(rows)
        if ours is not None and best is not None:
            found.append((words, _torch(rows), best, ours))
    return found


def _torch(rows: list[Document]) -> Document | None:
    """The row of what most readers use now."""
    return next((row for name in TORCH if (row := find(rows, name))), None)


def _table(document: Document) -> str:
    """A line for each kind of epoch; the last one is of memory."""
    lines = [[words, *_cells(rows, "rates", max)] for words, *rows in _lines(document)]
    return table(["images/s", "torch", "best other loader", "fastload"], lines + _memory(document))


def _cells(
    rows: Sequence[Document | None], key: str, better: Callable[[Iterable[float]], float], divisor: float = 1
) -> list[str]:
    """Figures of torch, of the best other loader and of ours; the best one is bold."""
    figures = [None if row is None else median(row[key]) for row in rows]
    best = better(figure for figure in figures if figure is not None)
    names = [f" ({row['contender']})" if row else "" for row in rows[:-1]]
    texts = [
        number(figure / divisor if figure else None) + name
        for figure, name in zip(figures, [*names, ""], strict=True)
    ]
    return [f"**{text}**" if figure == best else text for text, figure in zip(texts, figures, strict=True)]


def _memory(document: Document) -> list[list[str]]:
    """The memory of all processes in the first epoch; the smallest of the others."""
    rows = [row for row in rows_of(document, "cold", MAIN) if row["pss_bytes"]]
    ours = find(rows, "fastload")
    others = [row for row in rows if not is_ours(row["contender"])]
    if ours is None or not others:
        return []
    least = min(others, key=lambda row: float(row["pss_bytes"]))
    cells = _cells([_torch(rows), least, ours], "pss_bytes", min, 1e6)
    return [["memory in the first epoch, no cache, MB (less is better)", *cells]]


def _caption(document: Document) -> str:
    """The work, the machine, the command, and the way to the rest."""
    settings, machine = document["settings"], document["machine"]
    photos = f"{settings['images']:,} photos of {number(settings['image_bytes'] / 1000)} KB"
    return (
        f"One run of `make bench`, {document['date'][:10]}, on {machine['cores']} cores of {machine['cpu']} "
        f"that also run the S3 server ({MAIN} away): {photos},\n"
        f"random crops of {settings['size']} pixels, medians of {settings['repeats']} rounds. "
        f"The other loaders do slightly different work: {_differences(document)}.\n"
        f"[All figures]({PAGE}), and [**where others win**]({PAGE}#where-others-win)."
    )


def _differences(document: Document) -> str:
    """The first thing in which the work of each contender in the table is not ours."""
    shown = {best["contender"] for _, _, best, _ in _lines(document)}
    found: dict[str, str] = {}
    for contender in document["contenders"]:
        if contender["name"] in shown and contender["differs"]:
            found.setdefault(contender["name"], contender["differs"].split(";")[0])
    return "; ".join(f"{name} ({differs})" for name, differs in found.items()) or "in nothing"
