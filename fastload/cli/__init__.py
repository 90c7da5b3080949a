"""The command line: `fastload demo | bench | try | warm | plan | convert | cache | doctor`, or a script."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """Run the command line, or a script.

    Exit codes: 0; 1 an error or a finding; 2 wrong arguments; 130 Ctrl-C.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if not name.endswith(".py"):
        try:
            # Imported here, so that Ctrl-C during this half second prints no traceback.
            from fastload.cli.app import REPORTS, app

            if not Path(name).is_file() or name in {command.split()[0] for command in REPORTS}:
                app(prog_name="fastload")
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    from fastload.cli.script import run

    run(sys.argv[1:])
