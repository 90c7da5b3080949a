"""`fastload cache info|check|clear DIR`: look at a cache directory, verify all of it, or empty it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from fastload.cli._output import JsonOption, answering, short_bytes

__all__ = ["app"]

app = typer.Typer(help="Look at, verify or empty a cache directory.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="As it was given to fastload.Cache.")]


@app.command()
def info(directory: Directory, as_json: JsonOption = False) -> None:
    """What the cache holds: entries, bytes, segments, space left."""
    import fastload

    with answering(as_json) as output:
        found = fastload.Cache(directory).info()
        if not found["exists"]:
            output.console.print(f"{directory}: no cache here yet")
        else:
            output.console.print(
                f"{directory}: {found['entries']:,} entries, {short_bytes(found['bytes'])} "
                f"in {found['segments']:,} segments, index {short_bytes(found['index_bytes'])}"
            )
        output.console.print(f"free on its disk: {short_bytes(found['disk_free'])}")
        # What the cache was opened with is ours, not the directory's: a cache of any mode can be looked at.
        output.document({key: value for key, value in found.items() if key not in ("mode", "size_limit")})


@app.command()
def check(
    directory: Directory,
    fix: Annotated[
        bool, typer.Option("--fix", help="Drop bad entries, and delete what dead processes left.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every record and compare it with its checksum. Exit code 1 when a bad entry is left."""
    import fastload

    with answering(as_json) as output:
        with Progress(console=output.console, transient=True) as progress:
            task = progress.add_task("verifying", total=None)
            report = fastload.Cache(directory).check(
                fix, progress=lambda done, total: progress.update(task, completed=done, total=total)
            )
        verdict = "[green]clean[/]" if report.ok else "[red]not clean[/]; to mend it, type --fix"
        output.console.print(f"{directory}: {verdict}")
        for name, value in report.as_dict().items():
            if name != "ok":
                text = f"{value:,}" if isinstance(value, int) else ", ".join(value) or "none"
                output.console.print(f"  {name.replace('_', ' '):<18} {text}", markup=False)
        output.document(report.as_dict())
        if not report.ok:
            raise typer.Exit(1)


@app.command()
def clear(
    directory: Directory,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete every record. Files that fastload did not write stay."""
    import fastload

    with answering(as_json) as output:
        cache = fastload.Cache(directory)
        held = cache.info()
        question = f"Delete {held['entries']:,} entries ({short_bytes(held['bytes'])}) in {directory}?"
        if held["entries"] and not yes and not typer.confirm(question, err=True):
            output.console.print("nothing deleted")
            output.document({"path": str(directory), "bytes_freed": 0})
            raise typer.Exit(1)
        freed = cache.clear()
        output.console.print(f"{directory}: freed {short_bytes(freed)}")
        output.document({"path": str(directory), "bytes_freed": freed})
