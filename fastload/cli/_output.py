"""Where a command writes: text for people, and with --json one document for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from fastload.errors import ArgumentError, FastloadError

__all__ = ["JsonOption", "Output", "answering", "short_bytes"]

JsonOption = Annotated[
    bool, typer.Option("--json", help="End stdout with one line of JSON; text for people goes to stderr.")
]


class Output:
    """The two ways out of a command.

    `console` takes text, tables and progress bars: stdout, or stderr where stdout belongs to the JSON
    document.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json, highlight=False)

    def document(self, document: dict[str, Any]) -> None:
        """Write the command's JSON document, the last line of stdout, if it was asked for."""
        if self.as_json:
            typer.echo(json.dumps(document, allow_nan=False))


@contextmanager
def answering(as_json: bool) -> Iterator[Output]:
    """The block is the command. An error of fastload becomes one line on stderr and the exit code: 2 for a
    bad argument, else 1. With --json it is the document too: {"error": {"type", "stage", "key", "message"}}.
    """
    output = Output(as_json)
    try:
        yield output
    except FastloadError as error:
        typer.echo("fastload: " + " ".join(str(error).split()), err=True)
        described = {"type": type(error).__name__, "stage": error.stage, "message": error.message}
        key = None if error.key is None else str(error.key)
        output.document({"error": {**described, "key": key}})
        raise typer.Exit(2 if isinstance(error, ArgumentError) else 1) from error


def short_bytes(count: float) -> str:
    """`count` bytes for people: 110 KB, 1.2 GB."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
