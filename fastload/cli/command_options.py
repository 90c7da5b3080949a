"""Options of several commands, as dataclasses: the store, the cache, and the work on its images."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fastload.cache.codecs import CODECS, Auto
from fastload.cli.report import JsonOption, Report, answering
from fastload.errors import ArgumentError
from fastload.metrics.machine import usable_cores

CORES = usable_cores()


if TYPE_CHECKING:
    CacheMode = str
else:  # for Typer, which knows the choices of an option by its type
    CacheMode = StrEnum("CacheMode", list(CODECS))


NumWorkers = Annotated[
    int, typer.Option(metavar="N", min=0, help="Workers, as of DataLoader.", show_default="the cores")
]
CropSize = Annotated[int, typer.Option(metavar="N", min=1, help="Pixels of each side of the crop.")]
ShortSide = Annotated[
    int, typer.Option(metavar="N", min=1, help="Modes shrunk and decoded: pixels of the shorter side.")
]
Quality = Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Mode shrunk: JPEG quality.")]
SizeLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Largest size of the cache, such as 500GB or 200MiB.",
        show_default="the free disk",
    ),
]
ListingMaxAge = Annotated[
    str,
    typer.Option(
        metavar="AGE",
        help="Use a listing that the cache keeps if it is no older, such as 30m, 12h or 7d. 0: list again.",
    ),
]
PricesFile = Annotated[
    Path | None,
    typer.Option(
        "--prices", metavar="FILE", help="TOML with currency, get, list (of 1,000) and egress (of a GB)."
    ),
]


def _whole_number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _truth(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


# Options of `open_store` that are not text. Other texts pass unchanged, and open_store rejects them.
_TRUTHS = (
    *("hedge", "anon", "requester_pays", "use_ssl", "virtual_hosted_style_request", "skip_signature"),
    *("request_payer", "use_azure_cli", "use_emulator"),
)
_TYPED: dict[str, Callable[[str], Any]] = {
    "max_requests": _whole_number,
    "max_gets": _whole_number,
    **dict.fromkeys(_TRUTHS, _truth),
}


def parse_pairs(pairs: list[str] | None) -> dict[str, Any]:
    """Return NAME=VALUE texts as options of `open_store`."""
    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            # The message omits the value, which may be a secret.
            raise ArgumentError(f"--storage-option {name!r}: give NAME=VALUE")
        options[name] = _TYPED.get(name, str)(value)
    return options


@dataclass(frozen=True)
class StoreOptions:
    """The options of the store of a command's URL."""

    endpoint_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The S3 server, for MinIO, R2, OBS and others.")
    ] = None
    anon: Annotated[bool, typer.Option("--anon", help="Send no credentials, for public data.")] = False
    storage_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of fastload.open_store; repeatable."),
    ] = None

    def parse(self) -> dict[str, Any]:
        """Return them in the form of `open_store`."""
        options = parse_pairs(self.storage_option)
        if self.endpoint_url is not None:
            options["endpoint_url"] = self.endpoint_url
        if self.anon:
            options["anon"] = True
        return options


@dataclass(frozen=True)
class CacheOptions:
    """How a cache keeps samples: as in the script that uses it."""

    mode: Annotated[CacheMode, typer.Option(help="The cache mode of your training script.")] = Auto.mode
    short_side: ShortSide = 256
    quality: Quality = 90
    size_limit: SizeLimit = None

    def open(self, directory: str | Path) -> Any:
        import fastload

        mode: Any = str(self.mode)  # not the member of an enumeration
        return fastload.Cache(
            directory,
            mode,
            size_limit=self.size_limit,
            short_side=self.short_side,
            quality=self.quality,
        )


def report_class(command: Callable[..., Report]) -> type[Report]:
    """Return the class of a command's report."""
    kind: type[Report] = get_type_hints(command)["return"]
    return kind


def as_command(command: Callable[..., Report]) -> Callable[..., None]:
    """Return a command for Typer that shows the report which `command` returns.

    It has an option for each field of the dataclasses that `command` takes, and --json. A parameter `output`
    is where the command shows how far it is.
    """
    hints = get_type_hints(command, include_extras=True) | {"as_json": JsonOption}
    signature = inspect.signature(command).parameters
    groups: dict[str, Any] = {name: hints[name] for name in signature if is_dataclass(hints[name])}
    taken: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.items():
        if name in groups:
            hints |= get_type_hints(groups[name], include_extras=True)
            taken |= inspect.signature(groups[name]).parameters
        elif name != "output":
            taken[name] = parameter
    taken["as_json"] = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False)
    parameters = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in taken.items()
    ]

    @functools.wraps(command)
    def run(as_json: bool, **values: Any) -> None:
        with answering(as_json, report_class(command)) as output:
            for name, group in groups.items():
                options = inspect.signature(group).parameters
                values[name] = group(**{option: values.pop(option) for option in options})
            if "output" in signature:
                values["output"] = output
            output.finish(command(**values))

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def check_usable(cache: Any) -> None:
    """Check the cache before any listing. Unlike training, this command cannot continue without it.

    It waits for an index that is being rebuilt: what that does not have yet would be read again.
    """
    try:
        cache._open_or_raise()
        while cache._is_rebuilding:
            cache.flush()
    finally:
        cache.close()
