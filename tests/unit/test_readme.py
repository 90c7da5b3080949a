"""README.md: one screen, and every address in it leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from bench.show.report_readme import RAW, SOURCE
from fastload.errors import DOCS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LINKS = re.findall(r"\]\(([^)\s]+)\)", README)
PICTURES = re.findall(r"(?:src|srcset)=\"([^\"\s]+)\"", README)


def test_the_readme_is_one_screen() -> None:
    assert len(README.splitlines()) <= 90


def test_links_of_the_readme_are_absolute() -> None:
    """PyPI shows it too, where relative addresses lead nowhere."""
    assert [address for address in LINKS + PICTURES if not address.startswith("https://")] == []


def test_addresses_are_those_of_the_project() -> None:
    urls = dict(re.findall(r'^(Documentation|Source) = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M))
    assert urls.get("Documentation", DOCS) == DOCS
    repository = SOURCE.removesuffix("/blob/main/")
    assert urls.get("Source", repository) == repository


def test_pages_and_pictures_of_the_readme_are_there() -> None:
    assert PICTURES, "the README shows a chart"
    missing = [url for url in PICTURES if not (ROOT / url.removeprefix(RAW)).is_file()]
    for address in LINKS:
        if address.startswith(DOCS):
            name = address.removeprefix(DOCS).partition("#")[0].replace(".html", ".md") or "index.md"
            if not (ROOT / "docs" / name).is_file():
                missing.append(address)
        elif address.startswith(SOURCE) and not (ROOT / address.removeprefix(SOURCE)).is_file():
            missing.append(address)
    assert missing == []


def test_pictures_of_the_benchmarks_are_there() -> None:
    page = ROOT / "docs" / "benchmarks.md"
    pictures = re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", page.read_text())
    assert pictures, "the page shows charts"
    assert [path for path in pictures if not (page.parent / path).is_file()] == []
