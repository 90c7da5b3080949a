"""The code of the README and of the pages for readers runs as it stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.links import ROOT, pages
from tests.docs.pages import runs

REFERENCE = ROOT / "docs" / "reference"  # has tests of its own
PAGES = [
    page
    for page in pages()
    if (page.name == "README.md" or page.is_relative_to(ROOT / "docs"))
    and not page.is_relative_to(REFERENCE)
    and runs(page)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_code_of_it_runs(page: Path, run: Callable[[Path], None]) -> None:
    run(page)
