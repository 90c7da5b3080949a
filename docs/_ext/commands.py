"""The options and JSON keys of commands, counters and metrics, as Markdown tables in place of comments.

`<!-- options of fastload ... -->`, `<!-- keys of fastload ... -->`, `<!-- counters -->`, `<!-- metrics -->`
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer

from fastload.cli.app import REPORTS, app
from fastload.cli.report import MeasuredReport
from fastload.metrics.exporters import COUNTERS, METRICS

__all__ = ["command", "filled", "keys", "setup"]

PLACE = re.compile(r"^<!-- (options|keys) of fastload ([\w ]+) -->$", re.MULTILINE)


def command(path: str) -> Any:
    """The command with this name, such as "cache info"."""
    found: Any = typer.main.get_command(app)
    for name in path.split():
        found = found.commands[name]
    return found


def filled(text: str) -> str:
    """A page with its tables."""
    text = PLACE.sub(lambda match: (_described if match[1] == "options" else _keys)(match[2]), text)
    return text.replace("<!-- counters -->", _counters()).replace("<!-- metrics -->", _metrics())


def _counters() -> str:
    """Return a row for each counter: what it counts."""
    rows = (f"| `{name}` | {_cell(text)} |" for name, (_, text) in COUNTERS.items())
    return "\n".join(["| counter | counts |", "|---|---|", *rows])


def _metrics() -> str:
    """Return a row for each metric: its names and its unit."""
    heads = ["| counter or rate | Prometheus | OpenTelemetry | unit |", "|---|---|---|---|"]
    rows = (f"| `{x.source}` | `{x.prometheus}` | `{x.opentelemetry}` | `{x.unit}` |" for x in METRICS)
    return "\n".join([*heads, *rows])


def keys(report: type) -> Iterator[tuple[str, str]]:
    """(key, its text) of each key of a report's document. `a[].b`: of the elements of a list; `a.*.b`: of the
    values of an object.
    """
    for name, hint in get_type_hints(report, include_extras=True).items():
        if get_origin(hint) is ClassVar:
            continue
        hint, text = get_args(hint) if get_origin(hint) is Annotated else (hint, "")
        inner = next((one for one in _inside(hint) if is_dataclass(one)), None)
        key = name.removesuffix("_")
        if text or inner is None:
            yield key, text or ("as given, or null" if type(None) in get_args(hint) else "as given")
        if inner is not None:
            mark = {list: "[]", dict: ".*"}.get(_container(hint), "")
            yield from ((f"{key}{mark}.{below}", words) for below, words in keys(inner))


def _inside(hint: Any) -> Iterator[Any]:
    yield hint
    for argument in get_args(hint):
        yield from _inside(argument)


def _container(hint: Any) -> Any:
    return next((get_origin(one) for one in _inside(hint) if get_origin(one) in (list, dict)), None)


def _keys(path: str) -> str:
    if path == "measurements":
        rows = list(keys(MeasuredReport))
    else:
        common = dict(keys(MeasuredReport)) if issubclass(REPORTS[path], MeasuredReport) else {}
        rows = [row for row in keys(REPORTS[path]) if row[0] not in common]
    return "\n".join(
        ["| key | contents |", "|---|---|", *(f"| `{key}` | {_cell(text)} |" for key, text in rows)]
    )


def _described(path: str) -> str:
    found = command(path)
    arguments = [one for one in found.params if not one.opts[0].startswith("-")]
    options = [one for one in found.params if one.opts[0].startswith("-")]
    words = [*(one.metavar for one in arguments), "[OPTIONS]"]
    usage = " ".join(
        ["fastload", path, *(words if found.allow_interspersed_args else words[-1:] + words[:-1])]
    )
    example = re.sub(r"\[/?\w*\]", "", found.epilog).removeprefix("Example:").strip()
    rows = [f"| {_name(one)} | {_default(one)} | {_cell(one.help)} |" for one in (*arguments, *options)]
    return "\n".join(
        [
            "```text",
            usage,
            "```",
            "",
            " ".join(found.help.split()),
            "",
            f"Example: `{example}`",
            "",
            "| | default | |",
            "|---|---|---|",
            *rows,
        ]
    )


def _name(parameter: Any) -> str:
    if not parameter.opts[0].startswith("-"):
        return f"`{parameter.metavar}`"
    kind = parameter.type_descriptor.annotation
    value = parameter.metavar
    if isinstance(kind, type) and issubclass(kind, Enum):
        value = "\\|".join(one.value for one in kind)
    flags = ", ".join(parameter.opts)
    return f"`{flags}`" if parameter.is_flag else f"`{flags} {value}`"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    value = parameter.default
    if isinstance(value, Enum):
        value = value.value
    return "" if value is None or value is False else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _fill(sphinx: Any, page: str, source: list[str]) -> None:
    source[0] = filled(source[0])


def setup(sphinx: Any) -> dict[str, bool]:
    sphinx.connect("source-read", _fill)
    return {"parallel_read_safe": True}
