"""Figures that were measured say in which result they are, and are what it says.

A page names the result, or several, before a table:

    <!-- figures: shapes-2026-11-26.json -->

Each number of the table is one of the result, or the median of a list in it, in thousands or per cent.
What `python -m bench report` writes is compared in tests/unit/test_bench_report.py.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.links import ROOT, pages

RESULTS = ROOT / "bench" / "results"
MARKED = re.compile(r"<!-- figures: (?P<names>[\w., -]+) -->\n+(?P<table>(?:\|.*\n)+)")
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w-])")
MEASURED = "docs/explanation/measurements.md"  # all its tables are marked


def values_in(result: Any) -> Iterator[float]:
    """All numbers, and the medians of lists of them."""
    if isinstance(result, dict):
        for value in result.values():
            yield from values_in(value)
    elif isinstance(result, list):
        numbers = [value for value in result if isinstance(value, int | float)]
        if numbers and len(numbers) == len(result):
            yield statistics.median(numbers)
        for value in result:
            yield from values_in(value)
    elif isinstance(result, int | float):
        yield float(result)


def figures_of(table: str) -> list[str]:
    """The numbers of a table, but for those of its heading and of the first cell of a line."""
    lines = table.splitlines()[2:]
    return [figure for line in lines for cell in line.split("|")[2:] for figure in NUMBER.findall(cell)]


def is_among(figure: str, values: set[float]) -> bool:
    number = float(figure.replace(",", ""))
    digits = len(figure.partition(".")[2])
    half = 0.501 * 10**-digits
    return any(abs(value * scale - number) <= half for value in values for scale in (1, 1e-3, 1e-6, 100))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_figures_are_those_of_their_result(page: Path) -> None:
    text = page.read_text()
    for marked in MARKED.finditer(text):
        names = marked["names"].split(", ")
        values = {value for name in names for value in values_in(json.loads((RESULTS / name).read_text()))}
        wrong = [figure for figure in figures_of(marked["table"]) if not is_among(figure, values)]
        assert not wrong, f"{page.name}: not in {', '.join(names)}"
    assert text.count("<!-- figures:") == len(MARKED.findall(text)), "a table stands behind each mark"


def test_each_table_of_the_measurements_is_marked() -> None:
    text = (ROOT / MEASURED).read_text()
    tables = re.findall(r"(?<!\|\n)(?:^\|.*\n){3,}", text, re.MULTILINE)
    assert len(tables) == len(MARKED.findall(text)) > 0


def test_a_changed_figure_is_found() -> None:
    values = set(values_in({"rows": [{"rates": [500.0, 824.4, 900.0]}], "share": 0.6137}))
    assert all(is_among(figure, values) for figure in ("824", "824.4", "61", "0.61"))
    assert not any(is_among(figure, values) for figure in ("825", "823", "60", "0.62"))
    assert figures_of("| a 9 | b |\n|---|---|\n| 1 photo | 1,077 of `x2` – 5 % |\n") == ["1,077", "5"]
