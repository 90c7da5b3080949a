"""The README's table and chart from the result of `python -m bench compare`: the best of the others."""

from __future__ import annotations

from typing import Any

from bench.data import RESULTS, ROOT
from bench.show import charts
from bench.show.figures import MAIN, best_other, find, is_ours, median, number, percent, rows_of, share, table
from fastload.errors import DOCS

__all__ = ["DOCS", "RAW", "SOURCE", "markdown"]

# PyPI shows the README too, so its links are absolute. Its pictures are not: every checkout shows them.
SOURCE = "https://github.com/torch-fastload/torch-fastload/blob/main/"
RAW = "https://raw.githubusercontent.com/torch-fastload/torch-fastload/main/"  # PyPI shows the README too
PAGE, PICTURES = f"{DOCS}benchmarks.html", f"{RAW}{RESULTS.relative_to(ROOT)}"
# What the table's last column is a share of.
LIMIT = (
    "The machine's limit is bare GETs in parallel for first epochs,\n"
    "bare decoding in C for later ones, the resize alone for pixels; the share is the median over the turns."
)
# (section, case, contender, what it does)
ROWS = (
    ("cold", MAIN, "fastload", "first epoch, one object a photo"),
    ("cold", MAIN, "fastload, filling raw", "the same, filling the cache"),
    ("cold", MAIN, "fastload, tar shards", "first epoch, tar shards"),
    ("later", "raw", "fastload", "later epochs, files as they are"),
    ("later", "dct", "fastload", "later epochs, JPEGs without Huffman codes"),
    ("later", "shrunk", "fastload", "later epochs, smaller JPEGs"),
    ("later", "decoded", "fastload", "later epochs, pixels"),
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


def _lines(document: Document) -> list[tuple[str, Document, Document]]:
    """(words, our row, the best row of the others) for each kind of epoch."""
    found = []
    for section, case, name, words in ROWS:
        rows = rows_of(document, section, case)
        ours, best = find(rows, name), best_other(rows)
        if ours is not None and best is not None:
            found.append((words, ours, best))
    return found


def _table(document: Document) -> str:
    """A line for each kind of epoch; the last one is of memory."""
    lines = []
    for words, ours, best in _lines(document):
        mine, theirs = median(ours["rates"]), median(best["rates"])
        cells = [f"**{number(mine)}**", f"{number(theirs)} ({best['contender']})"]
        lines.append([words, *cells, f"{number(mine / theirs)}x", percent(share(document, ours))])
    headings = ["images/s", "fastload", "best of the others", "ratio", "of the machine's limit"]
    return table(headings, lines + _memory(document))


def _memory(document: Document) -> list[list[str]]:
    """The memory of all processes in the first epoch; the smallest of the others."""
    rows = [row for row in rows_of(document, "cold", MAIN) if row["pss_bytes"]]
    ours = find(rows, "fastload")
    others = [row for row in rows if not is_ours(row["contender"])]
    if ours is None or not others:
        return []
    least = min(others, key=lambda row: float(row["pss_bytes"]))
    mine, theirs = ours["pss_bytes"] / 1e6, least["pss_bytes"] / 1e6
    verdict = f"{number(mine / theirs)}x, {'worse' if mine > theirs else 'better'}"
    cells = [f"**{number(mine)}**", f"{number(theirs)} ({least['contender']})", verdict, ""]
    return [["memory in the first epoch, MB", *cells]]


def _caption(document: Document) -> str:
    """The work, the machine, the command, and the way to the rest."""
    settings, machine = document["settings"], document["machine"]
    photos = f"{settings['images']:,} photos of {number(settings['image_bytes'] / 1000)} KB"
    return (
        f"{photos}, random crops of {settings['size']} pixels, S3 server {MAIN} away and on the same "
        f"{machine['cores']} cores of\n{machine['cpu']}; medians of {settings['repeats']} turns; "
        f"`make bench`, {document['date'][:10]}. {LIMIT}\n"
        f"The others' work differs: {_differences(document)}.\n"
        f"[All figures]({PAGE}), and the rows [**where others win**]({PAGE}#where-others-win)."
    )


def _differences(document: Document) -> str:
    """The first thing in which the work of each contender in the table is not ours."""
    shown = {best["contender"] for _, _, best in _lines(document)}
    found: dict[str, str] = {}
    for contender in document["contenders"]:
        if contender["name"] in shown and contender["differs"]:
            found.setdefault(contender["name"], contender["differs"].split(";")[0])
    return "; ".join(f"{name}: {differs}" for name, differs in found.items()) or "in nothing"
