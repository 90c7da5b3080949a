"""docs/tutorials/fastload.ipynb: its cells run, over a folder and over a bucket, without Jupyter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.links import Link, fault

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "fastload.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
AFTER = """
assert images.shape[1:] == (3, 64, 64) and len(losses) == 24
assert epochs[0]["from the URL"] > 0 and epochs[1] == {"from the URL": 0, "from the cache": 96}, epochs
assert Chart()._repr_html_().count("<polyline") == 1
assert killed[-1].startswith("step 7:") and resumed[0].startswith("step 5:"), (killed, resumed)
assert fastload.prove("broken/log", "unbroken/log").same
"""


def source(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == kind]


def test_the_notebook_has_the_form_of_version_4() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    for cell in CELLS:
        own = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | own
        assert not cell.get("outputs"), "outputs are of one machine: clear them"


@pytest.mark.parametrize("url", ["shapes", pytest.param("s3://bucket/shapes", marks=pytest.mark.stress)])
def test_the_cells_run(url: str, run: Callable[[Path], None], tmp_path: Path) -> None:
    page = tmp_path / "notebook.md"
    cells = [cell.replace('url = "shapes"', f'url = "{url}"') for cell in source("code")]
    assert any(f'url = "{url}"' in cell for cell in cells)
    page.write_text("\n".join(f"```python\n{cell}\n```\n" for cell in [*cells, AFTER]))
    run(page)


def test_links_lead_somewhere() -> None:
    targets = [target for text in source("markdown") for target in re.findall(r"\]\(([^)]+)\)", text)]
    assert targets
    assert [target for target in targets if fault(Link(NOTEBOOK, target))] == []
