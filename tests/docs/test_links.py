"""No link of the project's pages, and no address that the code prints, leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fastload
from fastload.errors import DOCS
from tests.docs.links import ROOT, Link, anchors, fault, links, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_page_lead_somewhere(page: Path) -> None:
    faults = [f"{link.target}: {why}" for link in links(page) if (why := fault(link))]
    assert not faults, "\n".join(faults)


def test_addresses_in_the_code_lead_somewhere() -> None:
    found = [
        Link(path, target)
        for path in Path(fastload.__file__).parent.rglob("*.py")
        for target in re.findall(rf"{re.escape(DOCS)}[\w./#-]+", path.read_text())
    ]
    faults = [f"{link.page}: {link.target}: {why}" for link in found if (why := fault(link))]
    assert not faults, "\n".join(faults)


def test_addresses_of_the_documentation_are_of_one_version() -> None:
    """Those in files that no code writes."""
    others = ["CITATION.cff", "pyproject.toml", "docs/tutorials/fastload.ipynb"]
    texts = {path: path.read_text() for path in [*pages(), *(ROOT / name for name in others)]}
    host = DOCS.partition("/en/")[0]
    assert [path for path, text in texts.items() if text.count(f"{host}/") != text.count(DOCS)] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `Name`\n\n[a](page.md#one-name) [b](none.md) [c](#two)\n\n```\n[d](code.md)\n```\n"
    )
    assert [link.target for link in links(page)] == ["page.md#one-name", "none.md", "#two"]
    assert anchors(page) == {"one-name"}
    assert not fault(Link(page, "page.md#one-name"))
    assert "no" in fault(Link(page, "none.md"))
