"""The command line: `fastload demo | bench | try | warm | plan | convert | cache | doctor`, or a script."""

from __future__ import annotations

import contextlib
import io
import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or a script.

    Exit codes: 0; 1 an error or a finding; 2 wrong arguments; 130 Ctrl-C.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if not name.endswith(".py"):
        if isinstance(sys.stdout, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # one that cannot seek, opened as if it could
                sys.stdout.reconfigure(errors="backslashreplace")  # its encoding may lack a character
        try:
            # Imported here, so that Ctrl-C during this half second prints no traceback.
            from fastload.cli.app import REPORTS, app

            is_script = os.path.isfile(name)  # noqa: PTH113  a Path raises for a name that is too long
            if not is_script or name in {command.split()[0] for command in REPORTS}:
                app(prog_name="fastload")
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except OSError as error:
            if not _output_fails():
                raise
            raise SystemExit(f"fastload: the output cannot be written: {error.strerror}") from None
    from fastload.cli.script import run

    run(sys.argv[1:])


def _output_fails() -> bool:
    try:  # by writing to it: an error does not say which file it is of
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False
