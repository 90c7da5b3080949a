"""Options of several commands: the store, the cache, and the work on its images."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fastload.errors import ArgumentError, CacheError
from fastload.metrics.machine import usable_cores

CORES = usable_cores()


class CacheMode(StrEnum):
    """The modes of `fastload.Cache`."""

    auto = "auto"
    raw = "raw"
    dct = "dct"
    shrunk = "shrunk"
    decoded = "decoded"


FolderUrl = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="Images in one folder per class, or tar or TFRecord shards: s3://bucket/prefix, a path, ...",
    ),
]
NumWorkers = Annotated[
    int, typer.Option(metavar="N", min=0, help="Worker processes.", show_default="the cores")
]
CropSize = Annotated[int, typer.Option(metavar="N", min=1, help="Pixels of each side of the crop.")]
ShortSide = Annotated[
    int, typer.Option(metavar="N", min=1, help="Modes shrunk and decoded: pixels of the shorter side.")
]
ListingMaxAge = Annotated[
    str,
    typer.Option(
        metavar="AGE",
        help="Use a listing that the cache keeps if it is no older, such as 30m, 12h or 7d. 0: list again.",
    ),
]
Quality = Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Mode shrunk: JPEG quality.")]

PricesFile = Annotated[
    Path | None,
    typer.Option(
        "--prices", metavar="FILE", help="TOML with currency, get, list (of 1,000) and egress (of a GB)."
    ),
]
EndpointUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="The S3 server, for MinIO, R2, OBS and others.")
]
Anon = Annotated[bool, typer.Option("--anon", help="Send no credentials, for public data.")]
StorageOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of fastload.open_store; repeatable.")
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


def storage_options(pairs: list[str] | None, endpoint_url: str | None, anon: bool) -> dict[str, Any]:
    """The options of the command line in the form of `open_store`."""
    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            # The message omits the value, which may be a secret.
            raise ArgumentError(f"--storage-option {name!r}: give NAME=VALUE")
        options[name] = _TYPED.get(name, str)(value)
    if endpoint_url is not None:
        options["endpoint_url"] = endpoint_url
    if anon:
        options["anon"] = True
    return options


def check_usable(cache: Any) -> None:
    """Check the cache before any listing. Unlike training, this command cannot continue without it."""
    try:
        cache.open_or_raise()
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        raise CacheError(f"cache {cache.path} cannot be used: {error}") from error
    finally:
        cache.close()
