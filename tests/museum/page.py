"""The table of docs/explanation/museum.md: `python -m tests.museum.page` prints it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import fastload
from tests.museum.exhibits import EXHIBITS, Exhibit
from tests.museum.training import train

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "museum.md"
HEAD = "| bug | where it happened | the fault here | `prove` says |\n|---|---|---|---|"


def link(reference: str) -> str:
    """Of an issue, or a pull request, to which GitHub forwards it."""
    repository, number = reference.split("#")
    return f"[{repository}#{number}](https://github.com/{repository}/issues/{number})"


def row(exhibit: Exhibit, sentence: str) -> str:
    """The row of an exhibit."""
    links = ", ".join(map(link, exhibit.links))
    return f"| {exhibit.name} | {exhibit.happened} {links} | {exhibit.fault} | {sentence} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(HEAD)  # noqa: T201
        for number, one in enumerate(EXHIBITS):
            healthy = train(one.healthy, folder / f"{number}-healthy")
            faulty = train(one.faulty, folder / f"{number}-faulty")
            print(row(one, str(fastload.prove(healthy.log, faulty.log))))  # noqa: T201


if __name__ == "__main__":
    main()
