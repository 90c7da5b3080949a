"""What the commands of `python -m bench` share: their options, and the document of a result."""

# Only light imports here: processes whose start is measured import this module too.
from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.data import PHOTOS, RESULTS


def make_parser(doc: str | None, *, results: bool = False) -> argparse.ArgumentParser:
    """Return the parser of a command, which shows `doc` as it stands; `results` gives it --results."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if results:
        parser.add_argument("--results", type=Path, metavar="FOLDER", help="write NAME-DATE.json into it")
    return parser


def add_photos(parser: argparse.ArgumentParser) -> None:
    """Give a command the option that chooses its photos."""
    parser.add_argument("--photos", default="dense", choices=PHOTOS, help="see bench/photographs.py")


def describe_machine() -> dict[str, Any]:
    """Return the keys `date`, `machine` and `versions` of a measurement."""
    from fastload.cli.report import MeasuredReport

    return asdict(MeasuredReport())


def begin(name: str) -> dict[str, Any]:
    """Return the head of a document: what measures, where, and the load."""
    return {"bench": name, **describe_machine(), "load_before": os.getloadavg()}


def finish(document: dict[str, Any], results: Path | None = None) -> None:
    """Show the tables of the document and the load before and after it; write it into `results`."""
    from bench.show import singles

    document["load_after"] = os.getloadavg()
    print(singles.tables(document))
    print(f"load before and after: {document['load_before'][0]:.1f}, {document['load_after'][0]:.1f}")
    if results:
        print(f"written: {write_result(document, folder=results)}")


def write_result(document: dict[str, Any], suffix: str = "", folder: Path = RESULTS) -> Path:
    """Write BENCH-DATE.json into the folder, by the document's own "bench" and "date"; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['bench']}-{document['date'][:10]}{suffix}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
