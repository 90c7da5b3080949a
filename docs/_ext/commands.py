"""The options of commands, as Markdown tables in place of `<!-- options of fastload ... -->`."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import typer

from fastload.cli.app import app

__all__ = ["command", "filled", "setup"]

PLACE = re.compile(r"^<!-- options of fastload ([\w ]+) -->$", re.MULTILINE)


def command(path: str) -> Any:
    """The command with this name, such as "cache info"."""
    found: Any = typer.main.get_command(app)
    for name in path.split():
        found = found.commands[name]
    return found


def filled(text: str) -> str:
    """A page with its tables."""
    return PLACE.sub(lambda match: _described(match[1]), text)


def _described(path: str) -> str:
    found = command(path)
    arguments = [one for one in found.params if not one.opts[0].startswith("-")]
    options = [one for one in found.params if one.opts[0].startswith("-")]
    usage = " ".join(["fastload", path, *(one.metavar for one in arguments), "[OPTIONS]"])
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
