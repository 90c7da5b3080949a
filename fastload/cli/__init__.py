"""The command line: `fastload demo | bench | warm | plan | convert | cache | doctor`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line. Exit codes: 0; 1 an error or a finding; 2 wrong arguments; 130 Ctrl-C."""
    try:
        # Imported here, so that Ctrl-C during this half second prints no traceback.
        from fastload.cli.app import app

        app(prog_name="fastload")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
