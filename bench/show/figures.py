"""Figures from the document of `python -m bench compare`: medians, spreads, shares of a limit; as text too.

A row is a row of the document. Its `rates` have one number for each turn, and a turn has the same index in
all rows of a section.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from fastload.cache.codecs import CODECS

MODES = tuple(mode for mode, codec in CODECS.items() if not codec.chooses)  # those that keep one form
MAIN = "20 ms"  # the round trip by which first epochs are sorted
BUSY = ", one core busy"  # ends the name of a case that was measured beside other load
EPOCHS = ("first epoch", "later epochs")
ORDER = (
    *("0 ms", "20 ms", "50 ms", "100 ms", *MODES, "float32", "uint8"),
    *(f"{epoch}{load}" for epoch in EPOCHS for load in ("", BUSY)),
)

Document = dict[str, Any]
Row = dict[str, Any]


def is_ours(contender: str) -> bool:
    return contender.startswith("fastload")


def rows_of(document: Document, section: str, case: str | None = None) -> list[Row]:
    """The rows of a section, or of one case of it, the fastest first."""
    found = [row for row in document["rows"] if row["section"] == section and case in (None, row["case"])]
    return sorted(found, key=lambda row: -median(row["rates"]))


def cases(document: Document, section: str) -> list[str]:
    """The cases of a section, in their own order."""
    return sorted({row["case"] for row in rows_of(document, section)}, key=ORDER.index)


def find(rows: Iterable[Row], contender: str) -> Row | None:
    return next((row for row in rows if row["contender"] == contender), None)


def ours_of(rows: Sequence[Row]) -> Row | None:
    """The row to compare others with: fastload itself, or the first of its other forms."""
    return find(rows, "fastload") or next((row for row in rows if is_ours(row["contender"])), None)


def best_other(rows: Sequence[Row]) -> Row | None:
    """The fastest row of the other contenders."""
    others = [row for row in rows if not is_ours(row["contender"])]
    return max(others, key=lambda row: median(row["rates"]), default=None)


def limit_of(document: Document, row: Row) -> Row | None:
    """The entry of `limits` for the row."""
    place = (row["section"], row["case"], row["limit"])
    return next((x for x in document["limits"] if (x["section"], x["case"], x["name"]) == place), None)


def limits_of(document: Document, rows: Sequence[Row]) -> list[Row]:
    """The limits of the rows, each once. What one of the rows surpasses is no limit, and is left out."""
    found = [limit for row in rows if (limit := limit_of(document, row)) is not None]
    highest = max((median(row["rates"]) or 0.0 for row in rows), default=0.0)
    found = [limit for limit in found if median(limit["rates"]) >= highest]
    return [limit for i, limit in enumerate(found) if limit not in found[:i]]


def median(values: Sequence[float] | float | None) -> float | None:
    """The median over the turns; a single value is its own median."""
    if values is None or isinstance(values, int | float):
        return values
    return statistics.median(values)


def number(value: float | None) -> str:
    """Three significant digits, with commas between thousands; a dash for None."""
    if value is None:
        return "–"
    value = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits)}f}"


def short_size(count: int) -> str:
    """A size in bytes as text: 10 KiB, 1 MiB, and KB for other sizes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count % size == 0:
            return f"{count // size} {unit}"
    return f"{number(count / 1000)} KB"


def spread(values: Sequence[float]) -> str:
    """The smallest and the largest."""
    return f"{number(min(values))}–{number(max(values))}"


def table(headings: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table in Markdown; the first `texts` columns are left-aligned, the others, numbers, right-aligned."""
    rule = ["---"] * texts + ["---:"] * (len(headings) - texts)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *lines))
