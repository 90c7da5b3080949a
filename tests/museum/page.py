"""The table of docs/explanation/museum.md: `python -m tests.museum.page` prints it."""

from __future__ import annotations

from pathlib import Path

from tests.museum.exhibits import EXHIBITS, Exhibit

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "museum.md"
HEAD = "| bug | where it happened |\n|---|---|"


def link(reference: str) -> str:
    """Link an issue, or a pull request, to which GitHub forwards it."""
    repository, number = reference.split("#")
    return f"[{repository}#{number}](https://github.com/{repository}/issues/{number})"


def row(exhibit: Exhibit) -> str:
    """Return the row of an exhibit, with the issue that it was made after."""
    return f"| {exhibit.name} | {link(exhibit.links[0])} |"


def main() -> None:
    print("\n".join([HEAD, *map(row, EXHIBITS)]))  # noqa: T201


if __name__ == "__main__":
    main()
