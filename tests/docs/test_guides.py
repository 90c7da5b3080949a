"""The code of the README and of the pages for readers runs as it stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import runs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Those with code, but for the reference, which has tests of its own, and the copies of `make docs`.
PAGES = sorted(
    page
    for page in (ROOT / "README.md", *DOCS.rglob("*.md"))
    if not {DOCS / "reference", DOCS / "_build"} & set(page.parents) and runs(page)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_code_of_it_runs(page: Path, run: Callable[[Path], None]) -> None:
    run(page)
