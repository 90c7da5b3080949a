"""`python -m bench NAME [options]`: one benchmark; each also runs as `python -m bench.NAME`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    names = sorted(
        path.stem for path in Path(__file__).parent.glob("*.py") if "\ndef main()" in path.read_text()
    )
    names.remove("__main__")
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        raise SystemExit(f"usage: python -m bench NAME [options], NAME one of: {', '.join(names)}")
    name = sys.argv.pop(1)
    runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
