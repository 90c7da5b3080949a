"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

import fastload
from fastload.cli import bench, cache, convert, demo, doctor, plan, warm

__all__ = ["app"]

app = typer.Typer(
    help="A drop-in torch DataLoader for object stores, with a first-epoch cache on local SSD.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # A traceback with local variables would print credentials.
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.command("warm")(warm.warm)
app.command("plan")(plan.plan)
app.command("convert")(convert.convert)
app.add_typer(cache.app, name="cache")
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fastload {fastload.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass
