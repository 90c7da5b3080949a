"""The output of a command: text for people, and with --json one document for programs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.table import Table

from fastload.cli.report import Report
from fastload.errors import ArgumentError, FastloadError
from fastload.metrics.console import Console
from fastload.metrics.machine import need_linux
from fastload.printable import printable

JSON_FLAG = "--json"
JsonOption = Annotated[
    bool,
    typer.Option(
        JSON_FLAG, help="Print one line of JSON at the end of stdout; all other text goes to stderr."
    ),
]


class Output:
    """The two outputs of a command.

    `console` is for text, tables and progress bars: stdout, or stderr if stdout is for the JSON document.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json)

    def finish(self, report: Report) -> None:
        """Show the report, with --json write it as the last line of stdout, and leave with its exit code."""
        for line in report.text():
            self.console.print(line, soft_wrap=not isinstance(line, Table))
        if self.as_json:
            write_document(report.document())
        if report.exit_code:
            raise typer.Exit(report.exit_code)


def write_document(document: dict[str, Any]) -> None:
    """One line on stdout."""
    typer.echo(json.dumps(document, allow_nan=False))


def error_document(kind: str, stage: str, message: str, key: str | None, help_address: str) -> dict[str, Any]:
    """The JSON document of a command that failed."""
    return {"error": {"type": kind, "stage": stage, "message": message, "key": key, "help": help_address}}


@contextmanager
def answering(as_json: bool, *, anywhere: bool = False) -> Iterator[Output]:
    """A block that runs a command.

    An error of fastload becomes one line on stderr, the address of its remedies, and an exit code: 2 for a
    wrong argument, else 1. With --json it is also the document: {"error": {"type", "stage", "key", "message",
    "help"}}. A warning is one line on stderr, once.

    Args:
        anywhere: the command works on other systems than Linux too.
    """
    output = Output(as_json)
    try:
        if not anywhere:
            need_linux()
        with _warnings_in_a_line():
            yield output
    except FastloadError as error:
        typer.echo("fastload: " + printable(" ".join(str(error).split())), err=True)
        typer.echo(f"see {error.help}", err=True)
        key = None if error.key is None else str(error.key)
        if as_json:
            write_document(error_document(type(error).__name__, error.stage, error.message, key, error.help))
        raise typer.Exit(2 if isinstance(error, ArgumentError) else 1) from error


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Shows each warning once, workers' warnings too, without Python's line of source."""
    seen = set[str]()

    def show(message: Warning | str, *where: Any, **options: Any) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            typer.echo(f"fastload: warning: {printable(str(message))}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
