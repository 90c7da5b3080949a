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


def make_parser(doc: str | None, *, save: bool = False) -> argparse.ArgumentParser:
    """Return the parser of a command, which shows `doc` as it stands; `save` gives it --save."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if save:
        parser.add_argument("--save", action="store_true", help="write bench/results/NAME-DATE.json")
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


def finish(document: dict[str, Any], *, save: bool) -> None:
    """Add the load at the end, and show both; with `save`, write the document into bench/results."""
    document["load_after"] = os.getloadavg()
    print(f"load before and after: {document['load_before'][0]:.1f}, {document['load_after'][0]:.1f}")
    if save:
        print(f"written: {write_result(document)}")


def write_result(document: dict[str, Any], suffix: str = "", folder: Path = RESULTS) -> Path:
    """Write BENCH-DATE.json into the folder, by the document's own "bench" and "date"; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['bench']}-{document['date'][:10]}{suffix}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
