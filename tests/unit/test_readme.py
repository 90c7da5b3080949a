"""README.md: one screen, and every address in it leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from bench.show.report_readme import DOCS, FILES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SOURCE = FILES.replace("raw.githubusercontent.com", "github.com").replace("/main/", "/blob/main/")


def addresses(text: str) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"\s]+)\"", text)
    return [address for pair in found for address in pair if address]


def test_the_readme_is_one_screen() -> None:
    assert len(README.splitlines()) <= 170


def test_addresses_in_the_readme_are_absolute() -> None:
    """PyPI shows it too, where relative addresses lead nowhere."""
    assert [address for address in addresses(README) if not address.startswith("https://")] == []


def test_addresses_are_those_of_the_project() -> None:
    urls = dict(re.findall(r'^(Documentation|Source) = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M))
    assert urls.get("Documentation", DOCS) == DOCS
    repository = FILES.removeprefix("https://raw.githubusercontent.com/").removesuffix("/main/")
    assert urls.get("Source", repository).endswith(repository)


def test_pages_and_pictures_of_the_readme_are_there() -> None:
    missing = []
    for address in addresses(README):
        if address.startswith(DOCS):
            name = address.removeprefix(DOCS).partition("#")[0].replace(".html", ".md") or "index.md"
            if not (ROOT / "docs" / name).is_file():
                missing.append(address)
        elif address.startswith((FILES, SOURCE)):
            name = address.removeprefix(FILES).removeprefix(SOURCE)
            if not (ROOT / name).is_file():
                missing.append(address)
    assert missing == []


def test_pictures_of_the_benchmarks_are_there() -> None:
    page = ROOT / "docs" / "benchmarks.md"
    pictures = re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", page.read_text())
    assert pictures, "the page shows charts"
    assert [path for path in pictures if not (page.parent / path).is_file()] == []
