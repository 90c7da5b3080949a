"""The result of `python -m bench compare` as pages of the documentation and as the README's table and chart.

    python -m bench report                 # of the newest full result in bench/results
    python -m bench report RESULT.json

Writes the charts into bench/results, text between the marks of README.md, docs/benchmarks.md and
docs/coming-from/PEER.md, and the tables of single subjects after theirs, so that a figure of this run has the
same value everywhere.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from bench.command import make_parser
from bench.data import RESULTS, ROOT
from bench.show import charts, report_page, report_readme, singles, tables

# The pages for users of another loader: how the names of its contenders begin.
PEERS = {
    "dali": "DALI",
    "ffcv": "FFCV",
    "litdata": "LitData",
    "streaming": "MosaicML",
    "tfdata": "tf.data",
    "torch": "torch",
    "webdataset": "WebDataset",
}
# The pages with tables of single subjects.
SINGLES = ("docs/explanation/measurements.md", "docs/how-to/data/wrappers.md")
SCHEMA = Path(__file__).with_name("compare.schema.json")
BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"

Document = dict[str, Any]


def check(document: Document) -> None:
    """Raises ValueError with everything that is wrong in the document."""
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    wrong = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
    if not wrong:
        json.dumps(document, allow_nan=False)
        wrong = _contradictions(document)
    if wrong:
        raise ValueError("not a result of bench compare:\n" + "\n".join(wrong))


def _contradictions(document: Document) -> list[str]:
    """Errors that a schema cannot express: unknown names, duplicate rows, different numbers of turns."""
    wrong = []
    names = {contender["name"] for contender in document["contenders"]}
    limits = {(limit["section"], limit["case"], limit["name"]) for limit in document["limits"]}
    turns: dict[str, Counter[int]] = {}
    rows = Counter((row["section"], row["case"], row["contender"]) for row in document["rows"])
    wrong += [f"{count} rows of {place}" for place, count in rows.items() if count > 1]
    for row in document["rows"]:
        place = (row["section"], row["case"])
        if row["contender"] not in names:
            wrong.append(f"{place}: {row['contender']!r} is not among the contenders")
        if row["limit"] is not None and (*place, row["limit"]) not in limits:
            wrong.append(f"{place}: no limit {row['limit']!r}")
        for key in ("rates", "first_batch_seconds", "cpu_seconds_per_1000"):
            if row[key] is not None:
                turns.setdefault(row["section"], Counter())[len(row[key])] += 1
    for limit in document["limits"]:
        turns.setdefault(limit["section"], Counter())[len(limit["rates"])] += 1
    wrong += [f"{section}: {sorted(found)} turns" for section, found in turns.items() if len(found) > 1]
    return wrong


def include(page: str, text: str) -> str:
    """The page with `text` between its marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page needs one {BEGIN} and one {END} after it")
    before, after = page[: page.index(BEGIN)], page[page.index(END) :]
    return f"{before}{BEGIN}\n{text}\n{after}"


def newest(folder: Path = RESULTS) -> Path | None:
    """The newest full result in the folder, if any."""
    found = {path: json.loads(path.read_text()) for path in sorted(folder.glob("compare-*.json"))}
    full = [path for path, document in found.items() if not document["quick"]]
    return max(full, key=lambda path: found[path]["date"], default=None)


def texts(document: Document) -> dict[str, str]:
    """What stands between the marks of each page, by its path in the project."""
    return {
        "README.md": report_readme.markdown(document),
        "docs/benchmarks.md": report_page.markdown(document),
        **{f"docs/coming-from/{page}.md": tables.beside(document, name) for page, name in PEERS.items()},
    }


def pages_with(document: Document, root: Path = ROOT) -> dict[Path, str]:
    """Each page that shows figures of the result, as it should be."""
    # DLIO has a document of its own: it needs an environment that a whole run does not make.
    dlio = max(RESULTS.glob("dlio-*.json"))
    documents = document["parts"] | {"dlio": json.loads(dlio.read_text())}
    pages = {root / name: include((root / name).read_text(), text) for name, text in texts(document).items()}
    return pages | {root / name: singles.filled((root / name).read_text(), documents) for name in SINGLES}


def write(result: Path, root: Path = ROOT, results: Path = RESULTS) -> list[Path]:
    """Write the pages of the project in `root`, and the charts; the paths of the written files."""
    document = json.loads(result.read_text())
    check(document)
    if document["quick"]:
        raise ValueError(f"{result} is a quick result, and lacks what the pages show: name a full one")
    pages = pages_with(document, root)
    pictures = charts.draw(document, results)
    for path, text in pages.items():
        path.write_text(text)
    return [*pages, *pictures]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("result", nargs="?", type=Path, help="default: the newest full one in bench/results")
    result = parser.parse_args().result or newest()
    if result is None:
        raise SystemExit("no full result in bench/results: run python -m bench compare")
    for path in write(result):
        print(path)
