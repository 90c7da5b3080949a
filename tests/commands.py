"""The command line, in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from fastload.cli.app import app

__all__ = ["answer", "command"]


def command(*words: object, stdin: str = "") -> Any:
    """What `fastload WORDS` printed, and its exit code."""
    return CliRunner().invoke(app, [*map(str, words)], input=stdin)


def answer(*words: object, code: int = 0) -> dict[str, Any]:
    """The document that `fastload WORDS --json` printed last."""
    done = command(*words, "--json")
    assert done.exit_code == code, (done.output, done.exception)
    document = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(document, dict)
    return document
