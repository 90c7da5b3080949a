"""The code of the README and of the pages for readers runs as it stands."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.links import ROOT, pages
from tests.docs.pages import blocks, runs

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


def test_each_script_of_the_gallery_is_complete() -> None:
    """The test above runs all of them in one namespace."""
    for block in blocks(ROOT / "docs" / "gallery.md"):
        nodes = [] if block.check else list(ast.walk(ast.parse(block.code)))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        made = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
        made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        made |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
        made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert {node.id for node in names} <= made, block.code
