"""Options that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from fastload.errors import ArgumentError
from fastload.metrics.cores import usable_cores

__all__ = [
    "CORES",
    "Anon",
    "CropSize",
    "EndpointUrl",
    "FolderUrl",
    "NumWorkers",
    "Quality",
    "ShortSide",
    "StorageOption",
    "storage_options",
]

CORES = usable_cores()

FolderUrl = Annotated[
    str, typer.Argument(metavar="URL", help="One folder per class: s3://bucket/prefix, gs://, a path, ...")
]
NumWorkers = Annotated[int, typer.Option(metavar="N", min=0, help="Worker processes.  [default: cores]")]
CropSize = Annotated[int, typer.Option(metavar="N", min=1, help="Pixels of a side after RandomResizedCrop.")]
ShortSide = Annotated[
    int, typer.Option(metavar="N", min=1, help="shrunk, decoded: pixels of the shorter side.")
]
Quality = Annotated[int, typer.Option(metavar="N", min=1, max=100, help="shrunk: JPEG quality.")]

EndpointUrl = Annotated[str | None, typer.Option(metavar="URL", help="Server of MinIO, R2, OBS, ...")]
Anon = Annotated[bool, typer.Option("--anon", help="Public data: send no credentials.")]
StorageOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="For fastload.open_store; repeatable.")
]


def _whole_number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _truth(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


# Options of `open_store` that are no text. What cannot be read goes on as it is, and open_store objects.
_TYPED: dict[str, Callable[[str], Any]] = {"max_requests": _whole_number, "hedge": _truth, "anon": _truth}


def storage_options(pairs: list[str] | None, endpoint_url: str | None, anon: bool) -> dict[str, Any]:
    """The options of the command line as `open_store` takes them."""
    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            # Not the value: it may be a secret.
            raise ArgumentError(f"--storage-option {name!r}: give NAME=VALUE")
        options[name] = _TYPED.get(name, str)(value)
    if endpoint_url is not None:
        options["endpoint_url"] = endpoint_url
    if anon:
        options["anon"] = True
    return options
