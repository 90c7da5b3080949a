"""`python -m bench NAME [options]`: one benchmark, or one view of a result."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOMS = ("dlio", "measure", "show")


def commands() -> dict[str, str]:
    """{NAME: module}: the modules that have a `main`."""
    files = [path for room in ROOMS for path in (Path(__file__).parent / room).glob("*.py")]
    return {
        path.stem: f"bench.{path.parent.name}.{path.stem}"
        for path in sorted(files, key=lambda path: path.stem)
        if "\ndef main()" in path.read_text()
    }


def main() -> None:
    known = commands()
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        raise SystemExit(f"usage: python -m bench NAME [options], NAME one of: {', '.join(known)}")
    name = sys.argv.pop(1)
    sys.argv[0] = f"python -m bench {name}"  # what its help shows
    importlib.import_module(known[name]).main()


if __name__ == "__main__":
    main()
