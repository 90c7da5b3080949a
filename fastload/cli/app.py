"""The command line: all commands, their help, and errors before a command starts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import fastload
from fastload.cli import bench, cache, convert, demo, doctor, index, plan, prove, replay, trial, warm
from fastload.cli.cluster import RAY_FLAG
from fastload.cli.command_options import as_command, report_class
from fastload.cli.report import JSON_FLAG, Report, write_error
from fastload.errors import DOCS, address, printable

_HELP = address("argumenterror")
# Typer's usage errors. Their module depends on Typer's version, but not their place above BadParameter.
_UsageError: Any = typer.BadParameter.__base__


def _without_flag_values(parameters: Any) -> Any:
    """Return the parameters; flags, which take no value, show none in the help."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    """A command whose usage line shows an argument as URL instead of {url}."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def get_params(self, ctx: Any) -> Any:
        return _without_flag_values(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Take --ray alone as the cluster of this machine: Typer has no options with an optional value."""
        for place, word in reversed(list(enumerate(args if self.allow_interspersed_args else ()))):
            if word == RAY_FLAG and (place + 1 == len(args) or args[place + 1].startswith("-")):
                args[place] = f"{RAY_FLAG}=auto"
        rest = super().parse_args(ctx, args)
        for option in self.get_params(ctx):
            value = ctx.params.get(option.name or "")
            if isinstance(value, float) and not math.isfinite(value):  # `min` lets them pass
                raise typer.BadParameter(f"{value} is no finite number.", ctx, option)
        return rest


class _ScriptCommand(_Command):
    """A command with a script, behind which all is the script's, options too."""

    allow_interspersed_args = False


class _Group(TyperGroup):
    """A group of commands, or the whole command line."""

    def get_params(self, ctx: Any) -> Any:
        return _without_flag_values(super().get_params(ctx))


class _App(_Group):
    """With --json, errors before the start of a command are a JSON document too."""

    _as_json = False

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        self._as_json = JSON_FLAG in (sys.argv[1:] if args is None else args)
        return super().main(args, *rest, **options)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with self._answering():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with self._answering():
            return super().invoke(ctx)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except _UsageError as error:
            error.message = printable(error.message, keep="\n\t")
            if self._as_json:
                write_error("ArgumentError", "argument", error.format_message(), _HELP)
            raise
        except typer.Abort:
            why = "no answer: give --yes"
            if self._as_json:
                write_error("Abort", "argument", why, _HELP)
            typer.echo(f"fastload: {why}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    help="A drop-in torch DataLoader for object stores, with a first-epoch cache on local SSD.",
    epilog=f"Docs: {DOCS}",
    cls=_App,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # A traceback with local variables would print credentials.
    pretty_exceptions_enable=False,
)
# Each command, and an example of it.
_COMMANDS: dict[Callable[..., Report], str] = {
    demo.demo: "fastload demo --images 500 --latency-ms 50",
    bench.bench: "fastload bench s3://bucket/train --cache /ssd/cache",
    trial.try_script: "fastload try --seconds 60 train.py --epochs 1",
    warm.warm: "fastload warm s3://bucket/train --cache /ssd/cache",
    plan.plan: "fastload plan s3://bucket/train --size-limit 500GB --gpus 8 --gpu-rate 2500",
    convert.convert: "fastload convert s3://bucket/train s3://bucket/shards --to tar",
    index.index: "fastload index s3://bucket/shards",
    replay.replay: "fastload replay checkpoint.pt --step 1240 --html step.html",
    prove.prove: "fastload prove /logs/run-1 /logs/run-2",
    doctor.doctor: "fastload doctor",
    cache.info: "fastload cache info /ssd/cache",
    cache.check: "fastload cache check /ssd/cache --fix",
    cache.clear: "fastload cache clear /ssd/cache --yes",
    cache.push: "fastload cache push /ssd/cache s3://bucket/cache",
    cache.pull: "fastload cache pull s3://bucket/cache /ssd/cache",
}
REPORTS = {report_class(command).command: report_class(command) for command in _COMMANDS}
for _command, _line in _COMMANDS.items():
    _parent, _, _name = report_class(_command).command.rpartition(" ")
    _group = cache.app if _parent else app
    _class = _ScriptCommand if _command is trial.try_script else _Command
    _group.command(_name, cls=_class, epilog=f"Example:  [bold]{_line}[/]")(as_command(_command))
app.add_typer(cache.app, name="cache", cls=_Group)


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
